"""Keys and values that a conversation keeps between its turns, so that a turn costs what is new in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttrain.inference.loading import Speaker


class Kept:
    """What a model computed for some ids, for the next prompt that begins with them.

    Empty for models without a cache, and for caches that cannot lose their last entries without a trace: of layers that
    look at a window or carry a state.
    """

    def __init__(self, speaker: Speaker) -> None:
        self._uses_cache = speaker.uses_cache and speaker.model is speaker.causal  # a prefix has a cache of its own
        self._config = speaker.causal.config
        self._ids: list[int] = []
        self._cache: Any = None

    def take(self, prompt: Sequence[int]) -> Any:
        """A cache that holds the beginning of the prompt, at least without its last token; None where none can be had.

        It is gone from here until it is put back: an answer that was interrupted leaves nothing that is half done.
        """
        if not self._uses_cache:
            return None
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        cache, self._cache = self._cache, None
        same = _common(self._ids, prompt[:-1])
        if cache is None or not same:
            cache, same = DynamicCache(config=self._config), 0
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            return None
        if same < len(self._ids) and same:
            cache.crop(same - len(self._ids))
        return cache

    def put(self, ids: Sequence[int], cache: Any) -> None:
        """Keep the cache after an answer; `ids` are those of prompt and answer, of which the cache may lack the last."""
        self._cache = cache
        self._ids = list(ids[: cache.get_seq_length()]) if cache is not None else []


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two rows have in common at their beginning."""
    length = min(len(first), len(second))
    return next((at for at in range(length) if first[at] != second[at]), length)
