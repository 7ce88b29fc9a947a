"""The chat template of an existing tokenizer; contents of turns cannot inject special tokens.

The template is rendered with random marks in place of the contents: what stands around the marks is the skeleton. Every
conversation is also rendered as it is: if the result is not the skeleton with the contents in it, the template changes
contents, and the conversation is refused.

Live is an answer with all that the template writes before it behind the generation prompt, since the model has to say that
itself, up to the end of the template's own `{% generation %}`, or else to the first special token after the answer.
"""

from __future__ import annotations

import itertools
import re
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ttrain.core.files import JsonDict
from ttrain.data.chat_templates import Message, Messages, Rendering, Span, Template, TemplateRefused, is_live
from ttrain.data.encoder import Encoder
from ttrain.errors import DataError

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
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
MARK_BYTES = 12  # random ones, of a mark in place of a content
MARK_CHARACTERS = 2 + 2 * MARK_BYTES
MARK = re.compile(rf"x[0-9a-f]{{{2 * MARK_BYTES}}}y")
ERROR_CHARACTERS = 200
FIX = "set tokenizer.template=ttrain for the template of ttrain"


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
        self._skeletons: dict[tuple[object, ...], Skeleton] = {}
        rendering = self.render((Message("user", "Q"), Message("assistant", "A")))
        ((start, end),) = rendering.live or [(0, 0)]
        answer_start, answer_end = rendering.contents[-1]
        ends = self._encoder.specials_behind("A", rendering.text[answer_end:end])
        if not ends:
            raise self._refused(NO_END)
        self.end_id = ends[0][0]
        self.lead = rendering.text[start:answer_start]

    def render(self, messages: Messages, *, prompt: bool = False) -> Rendering:
        text, _ = self._render(messages, {}, prompt=prompt)
        skeleton = self._skeleton(messages, prompt=prompt)
        contents = self._contents(messages, text, skeleton)
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

    def _pieces(self, messages: Messages) -> dict[int, str]:
        """The texts of the conversation, in order, by the number of the turn; by ~number those of its reasoning."""
        pieces: dict[int, str] = {}
        for number, turn in enumerate(messages):
            if self._split_at(turn):
                pieces[~number] = turn.reasoning
            if content := turn.content[self._split_at(turn) :]:
                pieces[number] = content
        return pieces

    def _contents(self, messages: Messages, rendered: str, skeleton: Skeleton) -> dict[int, Span]:
        """Where the template writes the contents: as they are, or without white space around them."""
        contents: dict[int, Span] = {}
        pieces = self._pieces(messages)
        position = len(skeleton.texts[0])
        if not rendered.startswith(skeleton.texts[0]):
            raise self._refused(DEPENDS_ON_CONTENTS)
        for turn, text in zip(skeleton.pieces, skeleton.texts[1:], strict=True):
            content = pieces[turn]
            if not rendered.startswith(content + text, position):
                content = content.strip()
            if not rendered.startswith(content, position):
                whose = f"of a turn of role '{_role(messages, turn)}'"
                raise self._refused(f"it changes the content {whose}", f"it changes the content {content[:60]!r} {whose}")
            if not rendered.startswith(text, position + len(content)):
                raise self._refused(DEPENDS_ON_CONTENTS)
            contents[turn] = (position, position + len(content))
            position += len(content) + len(text)
        if position != len(rendered):
            raise self._refused(DEPENDS_ON_CONTENTS)
        return contents

    def _skeleton(self, messages: Messages, *, prompt: bool) -> Skeleton:
        key = (prompt, *((turn.role, turn.content == "", self._split_at(turn) > 0) for turn in messages))
        if key not in self._skeletons:
            if len(self._skeletons) >= SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = self._marked(messages, prompt=prompt)
        return self._skeletons[key]

    def _marked(self, messages: Messages, *, prompt: bool) -> Skeleton:
        """Make a skeleton by rendering marks. Raises DataError if a content is not written exactly once, in order."""
        marks = {piece: f"x{secrets.token_hex(MARK_BYTES)}y" for piece in self._pieces(messages)}
        rendered, spans = self._render(messages, marks, prompt=prompt, spans=self._has_generation and bool(marks))
        turns = {mark: turn for turn, mark in marks.items()}
        places = [(turns[match[0]], match.start()) for match in MARK.finditer(rendered) if match[0] in turns]
        self._check_order(messages, list(marks), [turn for turn, _ in places])
        texts: list[str] = []
        at = 0  # where the text after the last content begins
        for _, start in places:
            texts.append(rendered[at:start])
            at = start + MARK_CHARACTERS
        skeleton = Skeleton([piece for piece, _ in places], [*texts, rendered[at:]], {})
        if not prompt:
            ends = (
                self._ends_by_tag(dict(places), spans) if self._has_generation else self._ends_by_token(messages, skeleton)
            )
            before = dict(zip(skeleton.pieces, texts, strict=True))
            before |= {~piece: text for piece, text in before.items() if piece < 0}  # of a turn with its reasoning
            leads = self._leads(messages, before, list(ends))
            skeleton.answers.update({turn: (leads[turn], end) for turn, end in ends.items()})
        return skeleton

    def _check_order(self, messages: Messages, turns: Sequence[int], written: Sequence[int]) -> None:
        """Raise DataError unless the template wrote the content of each of these turns once, in order."""
        times = Counter(written)
        for turn in turns:
            if times[turn] != 1 and not (turn < 0 and not times[turn]):  # many leave out what was thought before
                role = _role(messages, turn)
                raise self._refused(f"it writes the content of a turn of role '{role}' {times[turn]} times")
        for turn, expected in zip(written, [piece for piece in turns if times[piece]], strict=True):
            if turn != expected:
                role = _role(messages, turn)
                raise self._refused(f"it puts the content of a turn of role '{role}' before that of the previous turn")

    def _ends_by_tag(self, places: Mapping[int, int], spans: Sequence[Span]) -> dict[int, int]:
        """Characters behind each content that is within `{% generation %}`, up to its end or the next content."""
        beginnings = [start for start, _ in spans]
        next_places = itertools.chain(itertools.islice(places.values(), 1, None), [None])
        ends: dict[int, int] = {}
        for (turn, place), next_place in zip(places.items(), next_places, strict=True):
            end = place + MARK_CHARACTERS
            number = bisect_right(beginnings, place) - 1
            if turn >= 0 and number >= 0 and spans[number][1] >= end:
                span_end = spans[number][1]
                ends[turn] = (span_end if next_place is None else min(span_end, next_place)) - end
        return ends

    def _ends_by_token(self, messages: Messages, skeleton: Skeleton) -> dict[int, int]:
        """Characters behind each answer up to the first special token, with it."""
        ends: dict[int, int] = {}
        for turn, text in zip(skeleton.pieces, skeleton.texts[1:], strict=True):
            if turn >= 0 and messages[turn].role == "assistant":
                specials = self._encoder.specials_behind("A", text)
                if not specials:
                    raise self._refused(NO_END)
                ends[turn] = specials[0][1]
        return ends

    def _leads(self, messages: Messages, before: Mapping[int, str], turns: Sequence[int]) -> dict[int, int]:
        """Characters before each of these answers, of the text `before` it, that stand behind its generation prompt.

        The prompt's end depends on the turns next to it. A chat of 32,000 turns has 16,000 answers, so a prompt is rendered
        for the first one after each two roles. Where it ends otherwise than the text before the answer, as when the last
        question gets an instruction that the others lack, the lead of a first answer is looked for.
        """
        prompts: dict[tuple[object, ...], str | None] = {}
        leads: dict[int, int] = {}
        for turn in turns:
            key = (turn < 2, *((message.role, message.content == "") for message in messages[max(0, turn - 2) : turn]))
            if key not in prompts:
                prompts[key] = self._prompt_end(messages[:turn])
            prompt, text = prompts[key], before[turn]
            if prompt is not None and text.startswith(prompt):
                leads[turn] = len(text) - len(prompt)
            else:
                leads[turn] = len(self.lead) if text.endswith(self.lead) else 0
        return leads

    def _prompt_end(self, messages: Messages) -> str | None:
        """What a generation prompt writes behind the last content; None where the template refuses these turns."""
        try:
            return self._skeleton(messages, prompt=True).texts[-1]
        except DataError:
            return None

    def _render(
        self, messages: Messages, marks: Mapping[int, str], *, prompt: bool, spans: bool = False
    ) -> tuple[str, list[Span]]:
        """(text, spans of `{% generation %}`) of a conversation with its marks in place of contents."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), found_spans = render_jinja_template(
                [[self._turn(turn, number, marks) for number, turn in enumerate(messages)]],
                chat_template=self._jinja,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=spans,
                **self._encoder.tokens,
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(turn.role for turn in messages)
            reason = str(error)[:ERROR_CHARACTERS]
            raise self._refused(f"it does not render the turns {roles}: {reason}") from None
        return text, found_spans[0] if spans else []

    def _turn(self, message: Message, number: int, marks: Mapping[int, str]) -> JsonDict:
        """A turn as the template gets it, with marks in place of its texts."""
        size = self._split_at(message)
        turn = {"role": message.role, "content": marks.get(number, message.content[size:])}
        if size:
            turn["reasoning_content"] = marks.get(~number, message.reasoning)
        return turn

    def _refused(self, reason: str, shown: str = "") -> TemplateRefused:
        """The error; `shown` is the reason with a part of the conversation in it."""
        refused = "the tokenizer's own chat template cannot be used"
        return TemplateRefused(
            f"tokenizer.template is 'own', but {refused}: {shown or reason}; {FIX}", f"{refused}: {reason}"
        )


def _role(messages: Messages, piece: int) -> str:
    """The role of the turn that a piece is of."""
    return messages[piece if piece >= 0 else ~piece].role
