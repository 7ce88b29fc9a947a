"""The chat template of an existing tokenizer: rendered within a budget, and not fooled by what turns contain.

The template is rendered with random marks in the place of the contents. What lies between the marks is the skeleton, in
which special tokens count; contents are encoded as plain text, whatever they contain. Live is what the template's own
`{% generation %}` holds, or else an answer up to the first special token after it. Every conversation is also rendered as it
is: where that is not the skeleton with the contents in it, the template changes contents and is refused.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ttrain.core.sandbox import BudgetExceeded
from ttrain.data import template_rendering
from ttrain.data.chat_templates import Segment, Template, is_live
from ttrain.data.template_rendering import Rendered
from ttrain.errors import DataError

if TYPE_CHECKING:
    from ttrain.data.chat_templates import Messages
    from ttrain.data.encoder import Encoder

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Some templates write the day, by calling `strftime_now`. Rows must not depend on it, so it is the same day for ever. The
# empty expression keeps a newline with which a template may begin.
DAY = {"%Y": "2025", "%y": "25", "%m": "01", "%d": "01", "%B": "January", "%b": "Jan", "%A": "Wednesday", "%a": "Wed",
       "%H": "00", "%M": "00", "%S": "00"}  # fmt: skip
ONE_DAY = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace({directive!r}, {value!r})" for directive, value in DAY.items())
    + " }}{% endmacro %}{{ '' }}"
)
NO_END = "no special token ends the answers that are learnt, so that a model would not learn to stop"
DEPENDS = "what it writes around the turns depends on their contents"
SKELETONS = 4096  # kept; a data set has a few dozen
CURE = "set tokenizer.template=ttrain for the template of ttrain"


class Part(NamedTuple):
    """A turn's content, or ids that the template writes; live where the turn `answer` is."""

    turn: int | None
    ids: tuple[int, ...]
    answer: int | None


class Skeleton(NamedTuple):
    """What a template makes of roles: parts in order, and the texts around the contents that are not empty."""

    parts: list[Part]
    turns: list[int]
    texts: list[str]


class ForeignTemplate(Template):
    """`own`. Skeletons are kept by the roles of a conversation, together with which contents are empty."""

    def __init__(self, encoder: Encoder) -> None:
        """Raises DataError where the template cannot render a question with its answer, or nothing ends the answer."""
        from ttrain.data.chat_templates import Message

        self._encoder = encoder
        self._specials = encoder.special_ids()
        self._jinja = ONE_DAY + encoder.jinja
        self._has_generation = GENERATION.search(encoder.jinja) is not None
        self._skeletons: dict[tuple[object, ...], Skeleton] = {}
        self._exceeded: DataError | None = None  # what goes beyond its budget once is not asked again
        found = self.segments((Message("user", "Q"), Message("assistant", "A")))
        after = itertools.dropwhile(lambda segment: segment != Segment("A", True), found)
        live = [number for ids, alive in after if alive and not isinstance(ids, str) for number in ids]
        ends = [number for number in live if number in self._specials]
        if not ends:
            raise self._refused(NO_END)
        self.end_id = ends[0]

    def segments(self, messages: Messages) -> list[Segment]:
        return self._filled([messages], prompt=False)[0]

    def segments_of_all(self, conversations: Sequence[Messages]) -> list[list[Segment]]:
        return self._filled(conversations, prompt=False)

    def prompt(self, messages: Messages) -> list[Segment]:
        return self._filled([messages], prompt=True)[0]

    def _filled(self, conversations: Sequence[Messages], *, prompt: bool) -> list[list[Segment]]:
        rendered = self._render([(messages, {}) for messages in conversations], prompt=prompt)
        return [
            self._segments(messages, text, self._skeleton(messages, prompt=prompt))
            for messages, (text, _) in zip(conversations, rendered, strict=True)
        ]

    def _segments(self, messages: Messages, rendered: str, skeleton: Skeleton) -> list[Segment]:
        contents = self._contents(messages, rendered, skeleton)
        live = [is_live(turn) for turn in messages]
        return [
            Segment(ids if turn is None else contents[turn], answer is not None and live[answer])
            for turn, ids, answer in skeleton.parts
        ]

    def _contents(self, messages: Messages, rendered: str, skeleton: Skeleton) -> dict[int, str]:
        """The contents as the template writes them: as they are, or without white space around them."""
        found: dict[int, str] = {}
        place = len(skeleton.texts[0])
        if not rendered.startswith(skeleton.texts[0]):
            raise self._refused(DEPENDS)
        for turn, text in zip(skeleton.turns, skeleton.texts[1:], strict=True):
            content = messages[turn].content
            if not rendered.startswith(content + text, place):
                content = content.strip()
            if not rendered.startswith(content, place):
                raise self._refused(f"it changes the content {content[:60]!r} of a turn of role '{messages[turn].role}'")
            if not rendered.startswith(text, place + len(content)):
                raise self._refused(DEPENDS)
            found[turn] = content
            place += len(content) + len(text)
        if place != len(rendered):
            raise self._refused(DEPENDS)
        return found

    def _skeleton(self, messages: Messages, *, prompt: bool) -> Skeleton:
        key = (prompt, *((turn.role, turn.content == "") for turn in messages))
        if key not in self._skeletons:
            if len(self._skeletons) >= SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = self._marked(messages, prompt=prompt)
        return self._skeletons[key]

    def _marked(self, messages: Messages, *, prompt: bool) -> Skeleton:
        """Raises DataError where a content is not written once, in its place."""
        marks = {number: f"x{secrets.token_hex(12)}x" for number, turn in enumerate(messages) if turn.content}
        ((rendered, spans),) = self._render([(messages, marks)], prompt=prompt, spans=self._has_generation and bool(marks))
        skeleton = Skeleton([], list(marks), [])
        at, before = 0, None  # where the text after the last content begins; the turn of that content
        for turn, mark in marks.items():
            role = messages[turn].role
            if rendered.count(mark) != 1:
                raise self._refused(f"it writes the content of a turn of role '{role}' {rendered.count(mark)} times")
            start, end = rendered.index(mark), rendered.index(mark) + len(mark)
            if start < at:
                raise self._refused(f"it moves the content of a turn of role '{role}' before that of the turn before it")
            inside = [(a, b) for a, b in spans if a < end and start < b]
            if any(a > start or b < end for a, b in inside):
                raise self._refused("its {% generation %} begins or ends within a content")
            skeleton.parts.extend(self._between(rendered, (at, start), before, messages, marks, spans))
            is_answer = bool(inside) if self._has_generation else role == "assistant"
            skeleton.parts.append(Part(turn, (), turn if is_answer else None))
            skeleton.texts.append(rendered[at:start])
            at, before = end, turn
        skeleton.parts.extend(self._between(rendered, (at, len(rendered)), before, messages, marks, spans))
        skeleton.texts.append(rendered[at:])
        return skeleton

    def _between(
        self,
        rendered: str,
        place: tuple[int, int],
        before: int | None,
        messages: Messages,
        marks: Mapping[int, str],
        spans: list[tuple[int, int]],
    ) -> list[Part]:
        """The ids of the text at `place`, which stands after the content of the turn `before`."""
        start, end = place
        if self._has_generation:
            borders = sorted({start, end, *(border for span in spans for border in span if start < border < end)})
            found = []
            for left, right in itertools.pairwise(borders):
                around = [rendered[a:b] for a, b in spans if a <= left and right <= b]
                answer = next((turn for turn, mark in marks.items() if any(mark in text for text in around)), None)
                found.append(Part(None, tuple(self._encoder.encode_markup(rendered[left:right])), answer))
            return found
        ids = tuple(self._encoder.encode_markup(rendered[start:end]))
        if before is None or messages[before].role != "assistant":
            return [Part(None, ids, None)]
        ends = next((number for number, token in enumerate(ids, start=1) if token in self._specials), None)
        if ends is None:
            raise self._refused(NO_END)
        return [Part(None, ids[:ends], before), Part(None, ids[ends:], None)]

    def _render(
        self, conversations: Sequence[tuple[Messages, Mapping[int, str]]], *, prompt: bool, spans: bool = False
    ) -> list[Rendered]:
        """(text, spans of `{% generation %}` in it) of each conversation, with its marks in the place of contents."""
        if self._exceeded:
            raise self._exceeded
        turns = [
            [{"role": turn.role, "content": marks.get(number, turn.content)} for number, turn in enumerate(messages)]
            for messages, marks in conversations
        ]
        try:
            found = template_rendering.render(self._jinja, self._encoder.tokens, turns, prompt=prompt, spans=spans)
        except BudgetExceeded as error:
            self._exceeded = self._refused(f"it asks for too much: {error}")
            raise self._exceeded from None
        texts: list[Rendered] = []
        for (messages, _), one in zip(conversations, found, strict=True):
            if isinstance(one, str):
                roles = ", ".join(turn.role for turn in messages)
                raise self._refused(f"it does not render the turns {roles}: {one}")
            texts.append(one)
        return texts

    def _refused(self, reason: str) -> DataError:
        return DataError(
            f"tokenizer.template is 'own', but the tokenizer's own chat template cannot be used: {reason}; {CURE}"
        )
