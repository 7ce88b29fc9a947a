"""Keys and values of a token sequence, reused for the next one that begins alike."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class PrefixCache:
    """The cache of the last sequence, cut to what the next one has in common with it."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._ids: Sequence[int] = ()
        self._cache: Any = None

    def take(self, ids: Sequence[int]) -> Any:
        """The cache of what `ids` begin with; None for layers whose cache cannot be cut: with a sliding window, or a
        recurrent state.

        The caller owns it until `put`: an interrupted pass leaves no half-filled cache behind.
        """
        cache, self._cache = self._cache, None
        same = common(self._ids, ids)
        if cache is None or not same:
            return new_cache(self._config)
        if same < len(self._ids):
            cache.crop(same - len(self._ids))
        return cache

    def put(self, ids: Sequence[int], cache: Any) -> None:
        """Store the cache of a sequence, the last of which may be missing in it."""
        self._cache = cache
        self._ids = ids[: cache.get_seq_length()] if cache is not None else ()


def new_cache(config: Any) -> Any:
    """An empty cache, or None for a model with layers whose cache cannot be cut."""
    cache = DynamicCache(config=config)
    return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    return sum(takewhile(bool, map(operator.eq, first, second)))
