"""The chat template of an existing tokenizer, rendered within a budget; contents of turns cannot inject special tokens.

The template is rendered with random marks in place of the contents. The text between the marks is the skeleton, in which
special tokens count; contents are always encoded as plain text. Live is the text within the template's own
`{% generation %}`, or else an answer up to the first special token after it. Every conversation is also rendered as it
is: if the result is not the skeleton with the contents in it, the template changes contents and is refused.
"""

from __future__ import annotations

import itertools
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ttrain.core.sandbox import BudgetExceeded
from ttrain.data import jinja_templates
from ttrain.data.chat_templates import Message, Messages, Segment, Template, is_live
from ttrain.data.encoder import Encoder
from ttrain.data.jinja_templates import Rendered
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
SKELETON_TURNS = 1 << 18  # in all that are kept: each turn takes some 300 bytes
MARK_BYTES = 12  # random ones, of a mark that stands for a content
MARK_CHARACTERS = 2 + 2 * MARK_BYTES
MARK = re.compile(rf"(?=(x[0-9a-f]{{{2 * MARK_BYTES}}}x))")  # also one whose first letter ends another's form
FIX = "set tokenizer.template=ttrain for the template of ttrain"


class SkeletonPart(NamedTuple):
    """A turn's content, or ids that the template writes; live if the turn `answer` is live."""

    turn: int | None
    ids: tuple[int, ...]
    answer: int | None


class Skeleton(NamedTuple):
    """A template's output for a sequence of roles: parts in order, and the texts around the non-empty contents."""

    parts: list[SkeletonPart]
    turns: list[int]
    texts: list[str]


class JinjaTemplate(Template):
    """`own`. Skeletons are cached by the roles of a conversation and by which contents are empty."""

    def __init__(self, encoder: Encoder) -> None:
        """Raises DataError if the template cannot render a question and answer, or writes no end of the answer."""
        self._encoder = encoder
        self._specials = encoder.special_ids()
        self._jinja = FIXED_DATE_MACRO + encoder.jinja
        self._has_generation = GENERATION.search(encoder.jinja) is not None
        self._skeletons: dict[tuple[object, ...], Skeleton] = {}
        self._skeleton_turns = 0  # of all of them
        self._exceeded: DataError | None = None  # a template that exceeded its budget is not rendered again
        segments = self.segments((Message("user", "Q"), Message("assistant", "A")))
        from_answer = itertools.dropwhile(lambda segment: segment != Segment("A", True), segments)
        live = [number for ids, alive in from_answer if alive and not isinstance(ids, str) for number in ids]
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
        filled = []
        rendered = self._render([(messages, {}) for messages in conversations], prompt=prompt)
        for messages, (text, _) in zip(conversations, rendered, strict=True):
            skeleton = self._skeleton(messages, prompt=prompt)
            contents = self._contents(messages, text, skeleton)
            filled.append([
                Segment(ids if turn is None else contents[turn], answer is not None and is_live(messages[answer]))
                for turn, ids, answer in skeleton.parts
            ])  # fmt: skip
        return filled

    def _contents(self, messages: Messages, rendered: str, skeleton: Skeleton) -> dict[int, str]:
        """The contents as the template writes them: as they are, or without white space around them."""
        contents: dict[int, str] = {}
        position = len(skeleton.texts[0])
        if not rendered.startswith(skeleton.texts[0]):
            raise self._refused(DEPENDS_ON_CONTENTS)
        for turn, text in zip(skeleton.turns, skeleton.texts[1:], strict=True):
            content = messages[turn].content
            if not rendered.startswith(content + text, position):
                content = content.strip()
            if not rendered.startswith(content, position):
                raise self._refused(f"it changes the content {content[:60]!r} of a turn of role '{messages[turn].role}'")
            if not rendered.startswith(text, position + len(content)):
                raise self._refused(DEPENDS_ON_CONTENTS)
            contents[turn] = content
            position += len(content) + len(text)
        if position != len(rendered):
            raise self._refused(DEPENDS_ON_CONTENTS)
        return contents

    def _skeleton(self, messages: Messages, *, prompt: bool) -> Skeleton:
        key = (prompt, *((turn.role, turn.content == "") for turn in messages))
        if key not in self._skeletons:
            if len(self._skeletons) >= SKELETONS or self._skeleton_turns + len(messages) > SKELETON_TURNS:
                self._skeletons.clear()
                self._skeleton_turns = 0
            self._skeleton_turns += len(messages)
            self._skeletons[key] = self._marked(messages, prompt=prompt)
        return self._skeletons[key]

    def _marked(self, messages: Messages, *, prompt: bool) -> Skeleton:
        """Make a skeleton by rendering marks. Raises DataError if a content is not written exactly once, in order."""
        marks = {number: f"x{secrets.token_hex(MARK_BYTES)}x" for number, turn in enumerate(messages) if turn.content}
        ((rendered, spans),) = self._render([(messages, marks)], prompt=prompt, spans=self._has_generation and bool(marks))
        starts = _starts_of(marks, rendered)
        in_order = sorted((start, turn) for turn in marks for start in starts[turn])
        spans_within = _Spans(spans)
        skeleton = Skeleton([], list(marks), [])
        at = 0  # where the text after the last content begins
        previous_turn: int | None = None  # that of the last content

        def add_text(end: int) -> None:
            """Encode the text up to the next content, or up to the end."""
            skeleton.texts.append(rendered[at:end])
            if not self._has_generation:
                is_after_answer = previous_turn is not None and messages[previous_turn].role == "assistant"
                skeleton.parts.extend(self._encoded(rendered[at:end], previous_turn if is_after_answer else None))
                return
            near = spans_within(at, end)
            borders = sorted({at, end, *(border for span in near for border in span if at < border < end)})
            for lower, upper in itertools.pairwise(borders):
                turns = [_first_turn(in_order, a, b) for a, b in near if a <= lower and upper <= b]
                answer = min((turn for turn in turns if turn is not None), default=None)
                skeleton.parts.append(SkeletonPart(None, tuple(self._encoder.encode_markup(rendered[lower:upper])), answer))

        for turn in marks:
            role = messages[turn].role
            if len(starts[turn]) != 1:
                raise self._refused(f"it writes the content of a turn of role '{role}' {len(starts[turn])} times")
            start, end = starts[turn][0], starts[turn][0] + MARK_CHARACTERS
            if start < at:
                raise self._refused(f"it puts the content of a turn of role '{role}' before that of the previous turn")
            inside = spans_within(start, end)
            if any(a > start or b < end for a, b in inside):
                raise self._refused("its {% generation %} begins or ends within a content")
            add_text(start)
            is_answer = bool(inside) if self._has_generation else role == "assistant"
            skeleton.parts.append(SkeletonPart(turn, (), turn if is_answer else None))
            at, previous_turn = end, turn
        add_text(len(rendered))
        return skeleton

    def _encoded(self, text: str, answer: int | None) -> list[SkeletonPart]:
        """Encode the text after a content; up to its first special token it belongs to the `answer`, if that was one."""
        ids = tuple(self._encoder.encode_markup(text))
        if answer is None:
            return [SkeletonPart(None, ids, None)]
        ends = next((number for number, token in enumerate(ids, start=1) if token in self._specials), None)
        if ends is None:
            raise self._refused(NO_END)
        return [SkeletonPart(None, ids[:ends], answer), SkeletonPart(None, ids[ends:], None)]

    def _render(
        self, conversations: Sequence[tuple[Messages, Mapping[int, str]]], *, prompt: bool, spans: bool = False
    ) -> list[Rendered]:
        """(text, spans of `{% generation %}` in it) of each conversation, with its marks in place of contents."""
        if self._exceeded:
            raise self._exceeded
        turns = [
            [{"role": turn.role, "content": marks.get(number, turn.content)} for number, turn in enumerate(messages)]
            for messages, marks in conversations
        ]
        try:
            renderings = jinja_templates.render(self._jinja, self._encoder.tokens, turns, prompt=prompt, spans=spans)
        except BudgetExceeded as error:
            # No chat is left out for it: which one that is depends on the speed of the machine, and so would the shards.
            longest = max((messages for messages, _ in conversations), key=len)
            self._exceeded = self._refused(
                f"it asks for too much: {error}; the longest of {len(conversations):,} chats has {len(longest):,} turns and "
                f"begins {longest[0].content[:60]!r}: shorten it or leave it out, if others render"
            )
            raise self._exceeded from None
        texts: list[Rendered] = []
        for (messages, _), rendering in zip(conversations, renderings, strict=True):
            if isinstance(rendering, str):
                raise self._refused(f"it does not render the turns {', '.join(turn.role for turn in messages)}: {rendering}")
            texts.append(rendering)
        return texts

    def _refused(self, reason: str) -> DataError:
        return DataError(
            f"tokenizer.template is 'own', but the tokenizer's own chat template cannot be used: {reason}; {FIX}"
        )


class _Spans:
    """Spans of a text, to find the few that a part of it touches: a chat may have a hundred thousand."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = sorted(spans)
        self._starts = [start for start, _ in self._spans]
        self._farthest = list(itertools.accumulate((end for _, end in self._spans), max))  # end of any span up to this one

    def __call__(self, start: int, end: int) -> list[tuple[int, int]]:
        """The spans that begin before the end and end behind the start."""
        candidates = self._spans[bisect_right(self._farthest, start) : bisect_left(self._starts, end)]
        return [(a, b) for a, b in candidates if start < b]


def _starts_of(marks: Mapping[int, str], text: str) -> dict[int, list[int]]:
    """Where the mark of each turn stands in the text, in one pass over it."""
    turns = {mark: turn for turn, mark in marks.items()}
    starts: dict[int, list[int]] = {turn: [] for turn in marks}
    for match in MARK.finditer(text):
        if (turn := turns.get(match[1])) is not None:
            starts[turn].append(match.start())
    return starts


def _first_turn(in_order: Sequence[tuple[int, int]], start: int, end: int) -> int | None:
    """The lowest turn of the (start, turn) of marks that stand within this part of the text."""
    first, last = bisect_left(in_order, (start, -1)), bisect_left(in_order, (end - MARK_CHARACTERS + 1, -1))
    return min((turn for _, turn in in_order[first:last]), default=None)
