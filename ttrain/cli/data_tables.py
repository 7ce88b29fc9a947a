"""Figures about data and tokenizers as rows of tables; summaries in, text out; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BAR_WIDTH = 40
SMALLEST_SHARE = 0.001  # of a script that is named
Table = tuple[tuple[str, ...], Sequence[Sequence[object]]]


def counts(found: Mapping[str, int]) -> str:
    """How many, and of what: "3: duplicate 2, empty text 1"."""
    if not found:
        return "0"
    return f"{sum(found.values()):,}: " + ", ".join(f"{name} {count:,}" for name, count in found.items())


def validated_row(value: Mapping[str, Any]) -> tuple[object, ...]:
    """(file, kind, rows, kept, skipped, rejected) of a report on a file."""
    figures = (f"{value['rows']:,}", f"{value['kept']:,}", counts(value["skipped"]), counts(value["rejected"]))
    return value["file"], value["kind"], *figures


def sharded_rows(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of what `data shard` made."""
    rows = value["rows"]
    reused = value["blocks"] - value["encoded_blocks"]
    return [
        ("rows", f"{rows['rows']:,}"),
        ("  kept", f"{rows['kept']:,}"),
        ("  skipped", counts(rows["skipped"])),
        ("  rejected", counts(rows["rejected"])),
        (value["kind"], f"{value['documents']:,}, of which {value['heldout']['rows']:,} held out"),
        ("tokens", f"{value['tokens']:,}, of which {value['live_tokens']:,} count in the loss"),
        ("bytes", f"{value['bytes']:,}"),
        ("bytes per token", f"{value['bytes_per_token']:.3f}"),
        ("shards", f"{value['encoded_blocks']:,} made, {reused:,} as they were; by {value['encoder'] or 'nothing'}"),
        ("written to", value["out"]),
        ("bad rows in", value["quarantine"]),
    ]


def tokenizer_rows(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of a tokenizer that was trained, or taken."""
    rows = value["rows"]
    learnt = [("documents", f"{value['documents']:,} of {value['documents_seen']:,}")] if "documents" in value else []
    return [
        ("vocabulary", f"{value['vocab_size']:,}"),
        *learnt,
        ("bytes per token", f"{value['bytes_per_token']:.3f}"),
        ("rows", f"{rows['rows']:,}"),
        ("  skipped", counts(rows["skipped"])),
        ("  rejected", counts(rows["rejected"])),
        *(("  first", line) for line in rows.get("first_rejected", ())),
        ("memory", f"{value['peak_memory_bytes'] / 2**20:,.0f} MiB at most"),
        ("written to", value["out"]),
    ]


def statistics_tables(value: Mapping[str, Any]) -> Iterator[Table]:
    """(header, rows) of each table about a set of shards or a raw file."""
    if "parts" not in value:
        yield (value["file"], ""), [(name, _shown(item)) for name, item in _flat_file(value)]
        if "lengths" in value:
            yield from _lengths(value["lengths"], "documents" if value["kind"] == "documents" else "chats")
            yield ("letters, by their script", ""), list(_scripts(value["scripts"]))
        return
    for name, part in value["parts"].items():
        yield (f"{value['path']}, {name}", ""), [(key, _shown(item)) for key, item in _flat_part(part)]
        yield from _lengths(part["lengths"], part["kind"])
    if value["duplicates"] is not None:
        yield ("rows that repeat an earlier one", ""), [(f"{value['duplicates']:,}", "")]
    if value["files"]:
        names = ("name", "role", "rows", "kept", "tokens", "bytes")
        yield names, [[_shown(file.get(name, "")) for name in names] for file in value["files"]]


def _scripts(shares: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    shown = {script: share for script, share in shares.items() if share >= SMALLEST_SHARE}
    yield from ((script, f"{share:.1%}") for script, share in shown.items())
    if len(shown) < len(shares):
        yield f"{len(shares) - len(shown)} others", f"{1 - sum(shown.values()):.1%}"


def _flat_file(value: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name in ("kind", "rows", "documents", "bytes", "duplicates"):
        if name in value:
            yield name, value[name]
    yield "rejected", counts(value["rejected"])
    yield "skipped", counts(value["skipped"])


def _flat_part(part: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name in ("kind", "documents", "tokens", "live_tokens", "bytes", "bytes_per_token", "shards"):
        yield name.replace("_", " "), part[name]
    if part["rows"] is None:
        yield "rows", "not known without the tokenizer; name it with --tokenizer"
        return
    rows = part["rows"]
    yield f"rows of {rows['row_length']} tokens", rows["rows"]
    yield "  fill", f"{rows['fill']:.1%}"
    yield "  dropped tokens", rows["dropped_tokens"]


def _lengths(value: Mapping[str, Any], what: str) -> Iterator[Table]:
    if not value["records"]:
        return
    most = max(count for _, _, count in value["histogram"])
    bars = [
        (f"{low:,} to {high:,}", f"{count:,}", "#" * -(-BAR_WIDTH * count // most))
        for low, high, count in value["histogram"]
    ]
    yield (f"length in {value['unit']}", what, ""), bars
    shares = {"mean": f"{value['mean']:,.1f}", "min": f"{value['min']:,}"}
    shares |= {f"{share} %": f"{length:,}" for share, length in value["percentiles"].items()} | {"max": f"{value['max']:,}"}
    yield tuple(shares), [tuple(shares.values())]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
