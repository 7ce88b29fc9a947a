"""Keys and values of a token sequence, reused for the next one that begins alike."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from ttrain.inference.loading import LoadedModel


class KVCache:
    """The cache of the last sequence, cut to what the next one has in common with it."""

    def __init__(self, loaded_model: LoadedModel) -> None:
        self._config = loaded_model.causal.config
        self._is_used = loaded_model.uses_cache and not loaded_model.has_prefix  # a prefix has a cache of its own
        self._ids: Sequence[int] = ()
        self._cache: Any = None

    def take(self, ids: Sequence[int]) -> Any:
        """The cache of what `ids` begin with; None for a model without one, or with layers whose cache cannot be cut: with a
        sliding window, or a recurrent state.

        The caller owns it until `put`: an interrupted pass leaves no half-filled cache behind.
        """
        cache, self._cache = self._cache, None
        same = common(self._ids, ids)
        if cache is None or not same:
            cache = DynamicCache(config=self._config) if self._is_used else None
            return cache if cache and all(type(layer) is DynamicLayer for layer in cache.layers) else None
        if same < len(self._ids):
            cache.crop(same - len(self._ids))
        return cache

    def put(self, ids: Sequence[int], cache: Any) -> None:
        """Store the cache of a sequence, the last of which may be missing in it."""
        self._cache = cache
        self._ids = ids[: cache.get_seq_length()] if cache is not None else ()


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    return sum(takewhile(bool, map(operator.eq, first, second)))
