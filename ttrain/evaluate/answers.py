"""What a model says in the place of an assistant's turns: does it stop, does it keep to the template, does it repeat itself,
are its calls of functions right?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ttrain.data import chat
from ttrain.data.chat_templates import Messages, is_live
from ttrain.data.tools import has_calls
from ttrain.errors import DataError
from ttrain.evaluate import fluency, markers, tool_calls
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.json_schemas import Budget
from ttrain.evaluate.task_result import Figure
from ttrain.evaluate.tool_calls import Judged

log = logging.getLogger("ttrain")
AT_ONCE = 64  # prompts of like length that are handed on together, so that progress can be told


@dataclass(frozen=True)
class Turn:
    """An answer of the model beside the one that the chat has at this place.

    number     of the turn, from 0
    reference  what the chat has there
    text       what the model said
    ended      by itself, before `new_tokens`
    markers    what it holds that begins or ends turns
    calls      its calls beside those of the reference; None where the chat offers no functions and the reference calls none
    cut        tokens of the beginning of the chat that the model did not see
    """

    number: int
    reference: str
    text: str
    ended: bool
    markers: tuple[str, ...]
    calls: Judged | None
    cut: int

    def to_json(self) -> dict[str, Any]:
        """What a reader of the items wants to see."""
        found: dict[str, Any] = {"turn": self.number, "answer": self.text, "reference": self.reference, "ended": self.ended}
        found |= {"markers": list(self.markers)} if self.markers else {}
        found |= {"cut": self.cut} if self.cut else {}
        calls = self.calls
        if calls is not None and (calls.called or has_calls(self.reference)):
            found |= {"calls_valid": calls.valid, "calls_right": calls.right, "calls_wrong": list(calls.wrong)}
            found |= {"calls_unchecked": list(calls.unchecked)} if calls.unchecked else {}
        return found


Chats = Sequence[Sequence[Turn]]


def ask(chats: Sequence[Messages], subject: Subject, most: int, new_tokens: int, progress: Progress) -> list[list[Turn]]:
    """The model's greedy answers in each chat, at `most` so many places of `turns_of`; what was said before each is the
    chat's own. A model with a short context gives answers of at most half of it, and is given the end of what was said
    before. A place where its template refuses the turns before is passed over, and told."""
    room = new_tokens if subject.max_length is None else min(new_tokens, subject.max_length // 2)
    longest = None if subject.max_length is None else subject.max_length - room
    places: list[tuple[int, int]] = []
    prompts: list[tuple[list[int], int]] = []
    refused: list[DataError] = []
    for number, messages in enumerate(chats):
        for turn in turns_of(messages, most):
            try:
                prompts.append(_prompt(subject, messages[:turn], longest))
                places.append((number, turn))
            except DataError as error:
                refused.append(error)
    if refused:
        log.warning("%d answers of %s are not asked for: %s", len(refused), subject.name, refused[0])
    offered = [tool_calls.given(messages) for messages in chats]
    budget = Budget()
    order = sorted(range(len(places)), key=lambda at: -len(prompts[at][0]))
    found: list[list[Turn]] = [[] for _ in chats]
    for start in range(0, len(order), AT_ONCE):
        some = order[start : start + AT_ONCE]
        for at, (ids, ended) in zip(some, subject.generate([prompts[at][0] for at in some], room), strict=True):
            (number, turn), text = places[at], subject.encoder.decode(ids)
            reference = chats[number][turn].content
            has_functions = offered[number] or has_calls(reference)
            judged = tool_calls.judge(text, reference, offered[number], budget) if has_functions else None
            marks = tuple(markers.found(subject.encoder, ids, text))
            found[number].append(Turn(turn, reference, text, ended, marks, judged, prompts[at][1]))
        progress(min(start + AT_ONCE, len(order)), len(order))
    unchecked = [reason for turns in found for turn in turns if turn.calls for reason in turn.calls.unchecked]
    if unchecked:
        log.warning(
            "%d calls of %s are not compared with a schema; the first: %s", len(unchecked), subject.name, unchecked[0]
        )
    if budget.refused:
        log.warning("%d of these calls of %s are not compared because %s", budget.refused, subject.name, budget.reason)
    return [sorted(turns, key=lambda turn: turn.number) for turns in found]


def turns_of(messages: Messages, most: int) -> list[int]:
    """Numbers of at most so many of the assistant's turns that answer something: those that call functions first, then the
    last ones."""
    found = [number for number, turn in enumerate(messages) if number and is_live(turn)]
    first = sorted(found, key=lambda number: (not has_calls(messages[number].content), -number))
    return sorted(first[:most])


def figures(chats: Chats) -> list[Figure]:
    """Of all answers, those of a chat together, since they are not independent:

    ended             share that the model ended by itself
    clean             share without a token or a name that begins or ends a turn
    empty             share in which nothing is said
    repeated          share of runs of four words that the answer has had before
    loops             share that ends in a loop
    distinct_1, 2, 3  different words, pairs and triples, by all of them
    length            characters

    and where chats offer functions or call some:

    calls             of the answers whose reference calls functions, those that call one
    valid_calls       ... in which every call can be made: it is JSON, names a function that is there, fits its schema
    right_functions   ... that call the functions of the reference
    right_calls       ... with its arguments
    needless_calls    of the other answers, those that call one
    """
    said = [[fluency.words(turn.text) for turn in turns] for turns in chats]
    found = [
        _share("ended", chats, lambda turn: turn.ended),
        _share("clean", chats, lambda turn: not turn.markers),
        _share("empty", chats, lambda turn: not turn.text.strip(), higher=False),
        _quotient("repeated", [[fluency.repeated(words) for words in one] for one in said], False),
        _share("loops", chats, lambda turn: fluency.loops(turn.text), higher=False),
    ]
    for length in (1, 2, 3):
        runs = iter(fluency.distinct([words for one in said for words in one], length))
        found.append(_quotient(f"distinct_{length}", [[next(runs) for _ in one] for one in said], True))
    found.append(_quotient("length", [[(len(turn.text), 1) for turn in turns] for turns in chats], False, "characters"))
    if any(turn.cut for turns in chats for turn in turns):
        found.append(_share("cut", chats, lambda turn: turn.cut > 0, higher=False))
    return found + _of_calls(chats)


def _of_calls(chats: Chats) -> list[Figure]:
    judged = [[(turn.calls, has_calls(turn.reference)) for turn in turns if turn.calls is not None] for turns in chats]
    wanted = [[calls for calls, is_wanted in one if is_wanted] for one in judged]
    others = [[calls for calls, is_wanted in one if not is_wanted] for one in judged]
    found: list[Figure] = []
    if any(wanted):
        found += [
            _share("calls", wanted, lambda calls: calls.called),
            _share("valid_calls", wanted, lambda calls: calls.valid),
            _share("right_functions", wanted, lambda calls: calls.right_names),
            _share("right_calls", wanted, lambda calls: calls.right),
        ]
    if any(others):
        found.append(_share("needless_calls", others, lambda calls: calls.called, higher=False))
    return found


def _share(name: str, items: Sequence[Sequence[Any]], holds: Callable[[Any], bool], *, higher: bool = True) -> Figure:
    return _quotient(name, [[(holds(one), 1) for one in parts] for parts in items], higher)


def _quotient(name: str, items: Sequence[Sequence[tuple[float, float]]], higher: bool, unit: str = "share") -> Figure:
    """Sums and sizes of the parts of each item."""
    sums = tuple(float(sum(part for part, _ in parts)) for parts in items)
    sizes = tuple(float(sum(size for _, size in parts)) for parts in items)
    return Figure(name, sums, sizes, higher_is_better=higher, unit=unit)


def _prompt(subject: Subject, before: Messages, longest: int | None) -> tuple[list[int], int]:
    """(ids after which the answer begins, how many tokens before them were cut)."""
    ids = chat.prompt_ids(subject.encoder, before)
    cut = 0 if longest is None else max(0, len(ids) - longest)
    return ids[cut:], cut
