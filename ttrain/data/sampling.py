"""Which documents a tokenizer learns from, where there are more than it may have."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from ttrain.config import Tokenizer


@dataclass(frozen=True)
class Sample:
    """The texts in the order of the input, their UTF-8 bytes, and how many documents there were to choose from."""

    texts: list[str]
    bytes: int
    seen: int


class Reservoir:
    """A uniform sample: the documents with the lowest hash, as many as both limits allow. The order of the input does not
    matter, and memory holds no more than the sample.

    The hash is of the text, keyed by the seed. Where already the lowest document is too large, it is taken alone.
    """

    def __init__(self, max_bytes: int, max_documents: int | None, seed: int) -> None:
        self._max_bytes, self._max_documents = max_bytes, max_documents
        self._key = seed.to_bytes(8, "big")
        self._heap: list[tuple[int, int, int, str]] = []  # (-hash, -number, bytes, text): the highest comes first
        self._cutoff: tuple[int, int] | None = None  # the lowest (-hash, -number) that had to go; what is beyond it must too
        self._lowest: tuple[int, int, int, str] | None = None
        self._bytes = self.seen = 0

    def add(self, text: str) -> None:
        """Offer a document."""
        data = text.encode("utf-8")
        place = int.from_bytes(hashlib.blake2b(data, digest_size=8, key=self._key).digest(), "big")
        entry = (-place, -self.seen, len(data), text)
        self.seen += 1
        if self._lowest is None or entry[:2] > self._lowest[:2]:
            self._lowest = entry
        if self._cutoff is not None and entry[:2] < self._cutoff:
            return
        heapq.heappush(self._heap, entry)
        self._bytes += entry[2]
        while self._is_over():
            gone = heapq.heappop(self._heap)
            self._bytes -= gone[2]
            self._cutoff = gone[:2]

    def _is_over(self) -> bool:
        too_many = self._max_documents is not None and len(self._heap) > self._max_documents
        return too_many or self._bytes > self._max_bytes

    def sample(self) -> Sample:
        """What was kept."""
        kept = self._heap or ([self._lowest] if self._lowest else [])
        in_order = sorted(kept, key=lambda entry: -entry[1])
        return Sample([text for *_, text in in_order], sum(size for _, _, size, _ in kept), self.seen)


def sample(texts: Iterable[str], config: Tokenizer) -> Sample:
    """`tokenizer.sample` of the texts, within `max_bytes` and `max_documents`. "head" reads no further than it takes."""
    if config.sample == "reservoir":
        reservoir = Reservoir(config.max_bytes, config.max_documents, config.seed)
        for text in texts:
            reservoir.add(text)
        return reservoir.sample()
    kept: list[str] = []
    size = seen = 0
    for text in texts:
        seen += 1
        more = len(text.encode("utf-8"))
        if kept and size + more > config.max_bytes:
            break
        kept.append(text)
        size += more
        if len(kept) == config.max_documents:
            break
    return Sample(kept, size, seen)
