"""Write files and read them back through `streams`."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

from ttrain.data import locations, streams

TEXT = b"".join(b'{"text":"%d"}\n' % (n * n) for n in range(110_000))  # 2.4 MB, three pieces
SMALL = b"".join(b'{"text":"%d"}\n' % n for n in range(12))
TABLE = pa.table({"text": [f"row {n}" for n in range(2500)], "n": list(range(2500))})
ROW = b'{"text":"a"}\n'
OLD = "0" * 39 + "1"
NEW = "0" * 39 + "2"
CONVERTED = "c" * 40


def written(directory: Path, data: bytes, name: str = "rows.jsonl") -> Path:
    path = directory / name
    path.write_bytes(data)
    return path


def read(location: str | Path) -> bytes:
    return b"".join(streams.chunks(str(location)))


def table_bytes(table: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


def expand(*patterns: str) -> list[str]:
    return locations.expand(patterns, "data.pretrain")
