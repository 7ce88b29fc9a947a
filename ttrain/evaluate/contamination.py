"""Items that stand in the training documents, as the shards' own search found: figures apart, or left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ttrain.data import item_text
from ttrain.data.chat_templates import Message
from ttrain.data.contamination import digest_of_text
from ttrain.data.plain_text import plain
from ttrain.errors import DataError
from ttrain.evaluate import choices, generation, last_word
from ttrain.evaluate.items import IN_TRAINING, Groups, Items, LeftOut

GROUPS = ("overlap=yes", "overlap=no")


def marked(items: Items[Any], known: Collection[str], *, leave_out: bool) -> Items[Any]:
    """The items, of which those with a plain text in `known` (digests) are a group of their own, or left out.

    Raises DataError where none would be left.
    """
    found = {number for number, item in enumerate(items.items) if _digest(item) in known}
    if not found:
        return items
    rest = [number for number in range(len(items.items)) if number not in found]
    if not leave_out:
        groups = {**items.groups, GROUPS[0]: tuple(sorted(found)), GROUPS[1]: tuple(rest)}
        return replace(items, groups=_groups_like(items.groups, groups))
    if not rest:
        raise DataError(
            f"all {len(found)} items of {items.task} stand in the training documents, so that none is left; set "
            "evaluate.overlapping=report, or have shards.decontaminate remove the documents"
        )
    place = {number: new for new, number in enumerate(rest)}
    return replace(
        items,
        items=tuple(items.items[number] for number in rest),
        digests=tuple(items.digests[number] for number in rest),
        left_out=(*items.left_out, *(LeftOut(items.digests[number], IN_TRAINING) for number in sorted(found))),
        groups=_renumbered(items.groups, place),
    )


def _renumbered(groups: Mapping[str, tuple[int, ...]], place: Mapping[int, int]) -> dict[str, tuple[int, ...]]:
    found = {name: tuple(place[number] for number in numbers if number in place) for name, numbers in groups.items()}
    return _groups_like(groups, found)


def _groups_like(old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]) -> Groups:
    """Those that have items, with what the old ones say of keys that group nothing."""
    return Groups({name: numbers for name, numbers in new.items() if numbers}, getattr(old, "unused", {}))


def _digest(item: object) -> str | None:
    """Of the text that `item_text.of_row` makes of the item's row; None for kinds whose items have none."""
    match item:
        case str():
            text = item
        case choices.Asked(choice=choice):
            text = item_text.of_row({"question": choice.question, "answer": choice.choices[choice.answer]}) or ""
        case last_word.Asked(passage=passage):
            text = passage.context + passage.target
        case (generation.Problem() as problem, _):
            text = item_text.of_row({"question": problem.question, "answer": problem.answer}) or ""
        case (Message(), *_):
            text = item_text.of_chat(item)  # type: ignore[arg-type]
        case _:
            return None
    return digest_of_text(plain(text))
