"""Statistics of shards: sizes, lengths of records, fill of rows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ttrain.data import inspect
from ttrain.data.report import lengths_json
from ttrain.data.shards import COUNTED, ShardSet
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore


def of_directory(path: Path, row_length: int, tokenizer: Path | None, store: ArtifactStore) -> dict[str, Any]:
    """Statistics of every part of a set of shards, and fields of its summary. Raises the errors of `inspect`.

    Without the tokenizer, whose token ends a turn, chats have no rows.
    """
    parts = {}
    for name, directory in inspect.parts_of(path).items():
        shards = ShardSet(directory)
        index, encoder = shards.index, None
        if index["kind"] == "chats" or tokenizer is not None:
            with contextlib.suppress(UsageError):
                encoder = inspect.encoder_of(directory, tokenizer, store)
        has_rows = index["kind"] == "documents" or encoder is not None
        parts[name] = {
            "kind": index["kind"],
            **{count: index[count] for count in COUNTED if count != "rows"},
            "documents": index["rows"],
            "bytes_per_token": index["bytes"] / max(1, index["tokens"]),
            "shards": len(index["shards"]),
            "lengths": lengths_json(shards.lengths, "tokens"),
            "rows": inspect.rows_of(shards, encoder, row_length).counts() if has_rows else None,
        }
        summary = inspect.summary_of(directory)
    return {"path": str(path), "parts": parts, **{name: summary.get(name) for name in ("duplicates", "files")}}
