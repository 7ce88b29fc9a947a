"""Takes copies out, and holds out whole modules and topics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

from ttrain.data.python_items import Item, order
from ttrain.errors import UsageError

HELDOUT_FLOOR_BYTES = 100_000
NGRAM_WORDS = 8
MOST_SHARED = 0.5  # of the 8-grams; a docstring above it counts as a copy


def drop_exact(items: list[Item]) -> tuple[list[Item], int]:
    """Each documentation once, blanks aside; the first in the order of topics, then of hashed modules, stays."""
    items = sorted(items, key=lambda item: b"" if item.origin == "reference" else order(item.group))
    first: dict[str, Item] = {}
    for item in items:
        first.setdefault(" ".join(item.doc.split()), item)
    return list(first.values()), len(items) - len(first)


def shingles(text: str) -> set[str]:
    """Word 8-grams, without case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[start : start + NGRAM_WORDS]) for start in range(len(words) - NGRAM_WORDS + 1)}


def is_copy(grams: set[str], known: Collection[str]) -> bool:
    """Whether more than half of the 8-grams are known."""
    return sum(gram in known for gram in grams) > MOST_SHARED * len(grams)


def split(items: list[Item], heldout_fraction: float) -> tuple[list[Item], list[Item], int]:
    """Training items, held-out items, and how many near duplicates were removed on either side.

    A held-out item goes if more than half of it stands in other modules; what is left of a module decides whether the
    module is held out, so the floor holds after removal. A training item goes if more than half of it is held out.
    """
    grams = {item: shingles(item.doc) for item in items}
    owners: dict[str, str] = {}
    for item, found in grams.items():
        for gram in found:
            if owners.setdefault(gram, item.group) != item.group:
                owners[gram] = ""
    shared = {gram for gram, owner in owners.items() if not owner}
    own = [item for item in items if not is_copy(grams[item], shared)]
    groups = choose_groups(own, heldout_fraction)
    heldout = [item for item in own if item.group in groups]
    known = {gram for item in heldout for gram in grams[item]}
    candidates = [item for item in items if item.group not in groups]
    train = [item for item in candidates if not is_copy(grams[item], known)]
    return train, heldout, len(items) - len(train) - len(heldout)


def choose_groups(items: list[Item], heldout_fraction: float) -> set[str]:
    """Whole groups in hashed order until fraction and floor are reached; none larger than a quarter of the aim."""
    group_bytes: Counter[str] = Counter()
    for item in items:
        group_bytes[item.group] += len(item.doc.encode())
    aim = max(1.05 * HELDOUT_FLOOR_BYTES, heldout_fraction * group_bytes.total())  # cuts lose a few blank lines
    chosen: set[str] = set()
    total = 0
    for group in sorted(group_bytes, key=order):
        if total < aim and group_bytes[group] <= aim / 4:
            chosen.add(group)
            total += group_bytes[group]
    if total < HELDOUT_FLOOR_BYTES:
        raise UsageError(
            f"only {total} bytes of this Python's documentation can be held out, but {HELDOUT_FLOOR_BYTES} are needed; "
            "use a complete Python, or set data.pretrain to files of your own"
        )
    return chosen
