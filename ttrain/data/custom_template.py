"""The chat template of an existing tokenizer; contents of turns cannot inject special tokens.

The template is rendered with random marks in place of the contents: what stands around the marks is the skeleton. Every
conversation is also rendered as it is: if the result is not the skeleton with the contents in it, the template changes
contents, and the conversation is refused.

Live is an answer with all that the template writes before it behind the generation prompt, since the model has to say that
itself, up to the end of the template's own `{% generation %}`, or else to the first special token after the answer.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ttrain.core.files import JsonDict
from ttrain.data.chat_templates import Message, Messages, Rendering, Span, Template, TemplateRefused, is_live
from ttrain.data.encoder import Encoder
from ttrain.errors import DataError

GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# Some templates write the date, by calling `strftime_now`. Rows must not depend on it, so the date is fixed. The empty
# expression keeps a newline at the beginning of a template.
FIXED_DATE = {"%Y": "2025", "%y": "25", "%m": "01", "%d": "01", "%B": "January", "%b": "Jan", "%A": "Wednesday", "%a": "Wed",
              "%H": "00", "%M": "00", "%S": "00"}  # fmt: skip
FIXED_DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace({directive!r}, {value!r})" for directive, value in FIXED_DATE.items())
    + " }}{% endmacro %}{{ '' }}"
)
NO_END = "no special token ends the answers that are learnt, so that a model would not learn to stop"
DEPENDS_ON_CONTENTS = "what it writes around the turns depends on their contents"
SKELETONS = 4096  # kept; a data set has a few dozen
ERROR_CHARACTERS = 200
FIX = "set tokenizer.template=ttrain for the template of ttrain"

Shape = tuple[tuple[str, bool, bool], ...]  # of each turn: its role, whether it has a content, and a reasoning apart


class Skeleton(NamedTuple):
    """What a template writes around the contents, for a sequence of roles.

    pieces      numbers of the turns with a content, and ~number for the reasoning of a turn
    texts       before, between and behind these pieces
    answers     by turn, the characters before its first piece and behind its content that are live with it
    """

    pieces: list[int]
    texts: list[str]
    answers: dict[int, tuple[int, int]]


class JinjaTemplate(Template):
    """`own`. Skeletons are cached by the roles of a conversation and by which contents are empty."""

    def __init__(self, encoder: Encoder) -> None:
        """Raises DataError if the template cannot render a question and answer, or writes no end of the answer."""
        self._encoder = encoder
        self._jinja = FIXED_DATE_MACRO + encoder.jinja
        self._reads_reasoning = "reasoning_content" in encoder.jinja
        self._has_generation = GENERATION.search(encoder.jinja) is not None
        # Random, so that no text holds a mark: of a content, and of the two ends of a `{% generation %}`.
        secret = secrets.token_hex(12)
        self._mark = f"x{secret}:{{}}y"
        self._marks = re.compile(rf"x{secret}:(-?\d+)y")
        self._begin, self._end = f"x{secret}(", f"){secret}y"
        self._marked_jinja = GENERATION.sub(self._marked_tag, self._jinja)
        self._skeleton = lru_cache(SKELETONS)(self._new_skeleton)
        rendering = self.render((Message("user", "Q"), Message("assistant", "A")))
        ((start, end),) = rendering.live or [(0, 0)]
        answer_start, answer_end = rendering.contents[-1]
        ends = self._encoder.specials_behind("A", rendering.text[answer_end:end])
        if not ends:
            raise self._refused(NO_END)
        self.end_id = ends[0][0]
        self.lead = rendering.text[start:answer_start]

    def _marked_tag(self, tag: re.Match[str]) -> str:
        """A tag that writes a mark, with the white space of the one in the template."""
        before, is_end, behind = tag.groups()
        return f"{{%{before} if true %}}{self._end if is_end else self._begin}{{% endif {behind}%}}"

    def render(self, messages: Messages, *, prompt: bool = False) -> Rendering:
        turns = [self._turn(message) for message in messages]
        text = self._render(self._jinja, turns, prompt=prompt)
        shape = tuple((turn["role"], turn["content"] != "", "reasoning_content" in turn) for turn in turns)
        skeleton = self._skeleton(shape, prompt=prompt)
        contents = self._contents(turns, text, skeleton)
        live: list[Span] = []
        for turn, (before, behind) in skeleton.answers.items():
            start, end = contents[turn]
            if not is_live(messages[turn]):
                continue
            if not messages[turn].masked:
                start = contents.get(~turn, contents[turn])[0] - before
            elif ~turn not in contents:
                start += messages[turn].masked - self._split_at(messages[turn])
            live.append((start, end + behind))
        return Rendering(text, list(contents.values()), live)

    def _split_at(self, message: Message) -> int:
        """Characters of the content that the template gets as `reasoning_content`."""
        return message.thought if self._reads_reasoning else 0

    def _turn(self, message: Message) -> JsonDict:
        """A turn as the template gets it."""
        size = self._split_at(message)
        turn = {"role": message.role, "content": message.content[size:]}
        if size:
            turn["reasoning_content"] = message.reasoning
        return turn

    def _contents(self, turns: Sequence[JsonDict], rendered: str, skeleton: Skeleton) -> dict[int, Span]:
        """Where the template writes the contents: as they are, or without white space around them."""
        contents: dict[int, Span] = {}
        position = len(skeleton.texts[0])
        if not rendered.startswith(skeleton.texts[0]):
            raise self._refused(DEPENDS_ON_CONTENTS)
        for piece, text in zip(skeleton.pieces, skeleton.texts[1:], strict=True):
            content = turns[piece]["content"] if piece >= 0 else turns[~piece]["reasoning_content"]
            if not rendered.startswith(content + text, position):
                content = content.strip()
            if not rendered.startswith(content, position):
                whose = f"of a turn of role '{turns[max(piece, ~piece)]['role']}'"
                raise self._refused(f"it changes the content {whose}", f"it changes the content {content[:60]!r} {whose}")
            contents[piece] = (position, position + len(content))
            position += len(content) + len(text)
            if not rendered.endswith(text, 0, position):
                raise self._refused(DEPENDS_ON_CONTENTS)
        if position != len(rendered):
            raise self._refused(DEPENDS_ON_CONTENTS)
        return contents

    def _new_skeleton(self, shape: Shape, *, prompt: bool) -> Skeleton:
        """Render marks in place of contents. Raises DataError if a content is not written exactly once, in order."""
        turns: list[JsonDict] = []
        expected: list[int] = []
        for number, (role, has_content, has_reasoning) in enumerate(shape):
            turn = {"role": role, "content": self._mark.format(number) if has_content else ""}
            if has_reasoning:
                turn["reasoning_content"] = self._mark.format(~number)
            expected += [~number] * has_reasoning + [number] * has_content
            turns.append(turn)
        parts = self._marks.split(self._render(self._marked_jinja, turns, prompt=prompt))
        pieces, marked_texts = list(map(int, parts[1::2])), parts[::2]
        self._check_order(shape, expected, pieces)
        texts = [text.replace(self._begin, "").replace(self._end, "") for text in marked_texts]
        if prompt:
            return Skeleton(pieces, texts, {})
        ends = self._ends_by_tag(pieces, marked_texts) if self._has_generation else self._ends_by_token(shape, pieces, texts)
        before = dict(zip(pieces, texts, strict=False))
        before |= {~piece: text for piece, text in before.items() if piece < 0}  # of a turn with its reasoning
        leads = self._leads(shape, before, list(ends))
        return Skeleton(pieces, texts, {turn: (leads[turn], end) for turn, end in ends.items()})

    def _check_order(self, shape: Shape, expected: Sequence[int], pieces: Sequence[int]) -> None:
        """Raise DataError unless the template wrote each expected piece once, in order."""
        times = Counter(pieces)
        for piece in expected:
            if times[piece] != 1 and not (piece < 0 and not times[piece]):  # many leave out what was thought before
                role = shape[max(piece, ~piece)][0]
                raise self._refused(f"it writes the content of a turn of role '{role}' {times[piece]} times")
        for piece, wanted in zip(pieces, [piece for piece in expected if times[piece]], strict=True):
            if piece != wanted:
                role = shape[max(piece, ~piece)][0]
                raise self._refused(f"it puts the content of a turn of role '{role}' before that of the previous turn")

    def _ends_by_tag(self, pieces: Sequence[int], marked_texts: Sequence[str]) -> dict[int, int]:
        """Characters behind each content that is within `{% generation %}`, up to its end or the next content."""
        ends: dict[int, int] = {}
        is_inside = False
        for piece, before, behind in zip(pieces, marked_texts, marked_texts[1:], strict=False):
            is_inside = before.rfind(self._begin) > before.rfind(self._end) or (is_inside and self._end not in before)
            if is_inside and piece >= 0:
                ends[piece] = len(behind.partition(self._end)[0].replace(self._begin, ""))
        return ends

    def _ends_by_token(self, shape: Shape, pieces: Sequence[int], texts: Sequence[str]) -> dict[int, int]:
        """Characters behind each answer up to the first special token, with it."""
        ends: dict[int, int] = {}
        for piece, text in zip(pieces, texts[1:], strict=True):
            if piece >= 0 and shape[piece][0] == "assistant":
                specials = self._encoder.specials_behind("A", text)
                if not specials:
                    raise self._refused(NO_END)
                ends[piece] = specials[0][1]
        return ends

    def _leads(self, shape: Shape, before: Mapping[int, str], turns: Sequence[int]) -> dict[int, int]:
        """Characters before each of these answers, of the text `before` it, that stand behind its generation prompt.

        The prompt's end depends on the turns next to it. A chat of 32,000 turns has 16,000 answers, so a prompt is rendered
        for the first one after each two roles. Where it ends otherwise than the text before the answer, as when the last
        question gets an instruction that the others lack, the lead of a first answer is looked for.
        """
        prompts: dict[tuple[object, ...], str | None] = {}
        leads: dict[int, int] = {}
        for turn in turns:
            key = (turn < 2, shape[max(0, turn - 2) : turn])
            if key not in prompts:
                prompts[key] = self._prompt_end(shape[:turn])
            prompt, text = prompts[key], before[turn]
            if prompt is not None and text.startswith(prompt):
                leads[turn] = len(text) - len(prompt)
            else:
                leads[turn] = len(self.lead) if text.endswith(self.lead) else 0
        return leads

    def _prompt_end(self, shape: Shape) -> str | None:
        """What a generation prompt writes behind the last content; None where the template refuses these turns."""
        try:
            return self._skeleton(shape, prompt=True).texts[-1]
        except DataError:
            return None

    def _render(self, jinja: str, turns: list[JsonDict], *, prompt: bool) -> str:
        """The text of a conversation."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), _ = render_jinja_template(
                [turns], chat_template=jinja, add_generation_prompt=prompt, **self._encoder.tokens
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(turn["role"] for turn in turns)
            raise self._refused(f"it does not render the turns {roles}: {str(error)[:ERROR_CHARACTERS]}") from None
        return str(text)

    def _refused(self, reason: str, shown: str = "") -> TemplateRefused:
        """The error; `shown` is the reason with a part of the conversation in it."""
        refused = "the tokenizer's own chat template cannot be used"
        return TemplateRefused(
            f"tokenizer.template is 'own', but {refused}: {shown or reason}; {FIX}", f"{refused}: {reason}"
        )
