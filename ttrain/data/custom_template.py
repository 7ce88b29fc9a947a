"""Chat templates as Jinja, of existing tokenizers too; no content can inject a special token.

The template is rendered with marks in place of the contents, once for each sequence of roles. A
conversation has to be what stands around the marks with its contents in it: a template that changes
contents is refused.

Live is an answer with all that the template writes before it behind the generation prompt, since
the model has to say that itself, up to the end of the template's own `{% generation %}`, or else to
the first special token after the answer.
"""

from __future__ import annotations

import bisect
import math
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from ttrain.core.files import JsonDict
from ttrain.data.chat_templates import (
    Message,
    Messages,
    Rendering,
    Span,
    TemplateRefused,
    is_live,
)
from ttrain.data.encoder import Encoder

# The texts of a turn, in the order in which a template writes them.
KEYS = ("reasoning_content", "content")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write the date, by calling `strftime_now`. Rows must not depend on it, so the date
# is fixed. The empty expression keeps a newline at the beginning of a template.
FIXED_DATE = {
    "%Y": "2025", "%y": "25", "%m": "01", "%d": "01", "%B": "January", "%b": "Jan",
    "%A": "Wednesday", "%a": "Wed", "%H": "00", "%M": "00", "%S": "00",
}  # fmt: skip
FIXED_DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace({name!r}, {value!r})" for name, value in FIXED_DATE.items())
    + " }}{% endmacro %}{{ '' }}"
)
NO_END = "no special token ends the answers that are learnt, so that a model would not learn to stop"
DEPENDS_ON_CONTENTS = "what it writes around the turns depends on their contents"
FRAMES = 4096  # kept; a data set has a few dozen
ERROR_CHARACTERS = 200
FIX = "set tokenizer.template=ttrain for the template of ttrain"

# Of each turn: its role, whether it has a reasoning apart, and whether it has a content.
Shape = tuple[tuple[str, bool, bool], ...]


# What a template writes around the contents, for a shape: the pieces, each 2 * turn for the reasoning
# of a turn or 2 * turn + 1 for its content; and the texts before, between and behind these pieces.
Frame = tuple[list[int], list[str]]


class JinjaTemplate:
    """Renders conversations by the template of a tokenizer.

    Frames are cached by the roles of a conversation and by which contents are empty.

    end_id      the special token that ends an answer
    lead        what the template writes between a generation prompt and an answer
    """

    def __init__(self, encoder: Encoder) -> None:
        """Raises DataError if the template cannot render a question with its answer and end."""
        self._tokens = encoder.tokens
        self._jinja = FIXED_DATE_MACRO + encoder.jinja
        self._reads_reasoning = KEYS[0] in encoder.jinja
        self._has_generation = GENERATION.search(encoder.jinja) is not None
        secret = secrets.token_hex(12)  # so that no text holds a mark
        self._mark, self._marks = f"x{secret}:{{}}y", re.compile(rf"x{secret}:(\d+)y")
        self._special = encoder.special_pattern
        self._frame = lru_cache(FRAMES)(self._new_frame)
        self._prompt_end = self.lead = ""
        question, answer = Message("user", "Q"), Message("assistant", "A")
        self.render((question, answer))
        self._prompt_end = self._frame((("user", False, True),), prompt=True)[1][-1]
        rendering = self.render((question, answer))
        answer_start, answer_end = rendering.contents[-1]
        start, end = rendering.live[0] if rendering.live else (answer_end, answer_end)
        token = self._special.search(rendering.text, answer_end, end)
        if token is None:
            raise self._refused(NO_END)
        self.end_id = encoder.special(token.group())
        self.lead = rendering.text[start:answer_start]

    def render(self, messages: Messages, *, prompt: bool = False) -> Rendering:
        """Render a conversation; `prompt`: up to the beginning of the assistant's next answer.

        Raises DataError if the template refuses it.
        """
        turns = [self._turn(message) for message in messages]
        text, blocks = self._render(turns, prompt=prompt)
        shape = tuple((turn["role"], KEYS[0] in turn, turn["content"] != "") for turn in turns)
        pieces, texts = frame = self._frame(shape, prompt=prompt)
        spans = self._spans(turns, text, frame)
        places = {piece: place for place, piece in enumerate(pieces)}
        live: list[Span] = []
        for number, message in enumerate(messages):
            place = places.get(2 * number + 1)
            if prompt or place is None or not is_live(message):
                continue
            end = self._end(spans[place], texts[place + 1], blocks)
            first = places.get(2 * number, place)
            start = spans[first][0] - self._lead_length(texts[first])
            if message.masked:
                start = spans[place][0] + (0 if self._reads_reasoning else message.masked)
            if end is not None:
                live.append((start, end))
        return Rendering(text, spans, live)

    def _turn(self, message: Message) -> JsonDict:
        """A turn as the template gets it."""
        if not (self._reads_reasoning and message.thought):
            return {"role": message.role, "content": message.content}
        content = message.content[message.thought :]
        return {"role": message.role, "content": content, KEYS[0]: message.reasoning}

    def _spans(self, turns: Sequence[JsonDict], rendered: str, frame: Frame) -> list[Span]:
        """Where the template writes each piece: as it is, or without white space around it."""
        pieces, texts = frame
        spans: list[Span] = []
        at = 0
        for piece, before, behind in zip(pieces, texts, texts[1:], strict=False):
            if not rendered.startswith(before, at):
                raise self._refused(DEPENDS_ON_CONTENTS)
            at += len(before)
            turn = turns[piece // 2]
            content = turn[KEYS[piece % 2]]
            if not rendered.startswith(content + behind, at):
                content = content.strip()
            if not rendered.startswith(content, at):
                whose = f"of a turn of role '{turn['role']}'"
                shown = f"it changes the content {content[:60]!r} {whose}"
                raise self._refused(f"it changes the content {whose}", shown)
            spans.append((at, at + len(content)))
            at += len(content)
        if rendered[at:] != texts[-1]:
            raise self._refused(DEPENDS_ON_CONTENTS)
        return spans

    def _new_frame(self, shape: Shape, *, prompt: bool) -> Frame:
        """Render marks in place of the contents. Raises DataError unless each is written once."""
        turns: list[JsonDict] = []
        for number, (role, *is_there) in enumerate(shape):
            marks = {KEYS[at]: self._mark.format(2 * number + at) for at in (0, 1) if is_there[at]}
            turns.append({"role": role, "content": "", **marks})
        parts = self._marks.split(self._render(turns, prompt=prompt)[0])
        pieces = [int(number) for number in parts[1::2]]
        times = Counter(pieces)
        for number, (role, _, has_content) in enumerate(shape):
            if (count := times[2 * number + 1]) != has_content:
                raise self._refused(f"it writes the content of a turn of role '{role}' {count} times")
        if pieces != sorted(times):
            raise self._refused("it does not write each content behind that of the previous turn")
        return pieces, parts[::2]

    def _end(self, content: Span, behind: str, blocks: Sequence[Span]) -> int | None:
        """Where the live part of an answer ends; None where `{% generation %}` leaves it out."""
        start, end = content
        if self._has_generation:
            block = bisect.bisect_right(blocks, (start, math.inf)) - 1
            return blocks[block][1] if block >= 0 and blocks[block][1] >= end else None
        token = self._special.search(behind)
        if token is None:
            raise self._refused(NO_END)
        return end + token.end()

    def _lead_length(self, before: str) -> int:
        """Characters of the text before an answer that stand behind its generation prompt.

        Where the prompt does not end as that of a first question, as after some results of calls,
        or where the last question gets an instruction, the lead of a first answer is looked for.
        """
        if before.startswith(self._prompt_end):
            return len(before) - len(self._prompt_end)
        if self._prompt_end.strip() and self._prompt_end in before:
            return len(before.rpartition(self._prompt_end)[2])
        return len(self.lead) if before.endswith(self.lead) else 0

    def _render(self, turns: list[JsonDict], *, prompt: bool) -> tuple[str, list[Span]]:
        """The text of a conversation, and what of it is within `{% generation %}`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), blocks = render_jinja_template(
                [turns],
                chat_template=self._jinja,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self._has_generation,
                **self._tokens,
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(turn["role"] for turn in turns)
            reason = str(error)[:ERROR_CHARACTERS]
            raise self._refused(f"it does not render the turns {roles}: {reason}") from None
        return str(text), blocks[0] if blocks else []

    def _refused(self, reason: str, shown: str = "") -> TemplateRefused:
        """The error; `shown` is the reason with a part of the conversation in it."""
        refused = "the tokenizer's own chat template cannot be used"
        message = f"tokenizer.template is 'own', but {refused}: {shown or reason}; {FIX}"
        return TemplateRefused(message, f"{refused}: {reason}")
