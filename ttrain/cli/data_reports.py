"""Format figures about data and tokenizers as rows of tables; pure functions."""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.core.text import format_size, format_value
from ttrain.errors import DataError, UsageError

if TYPE_CHECKING:
    from ttrain.config import Reading, Tokenizer
    from ttrain.data.assembly import DataFile, ShardSetResult
    from ttrain.data.sharding import Pool


BAR_WIDTH = 40

SMALLEST_SHARE = 0.001  # of a script that is named

Table = tuple[tuple[str, ...], Sequence[Sequence[object]]]


def counts(count_by_name: Mapping[str, int]) -> str:
    """The total and each count: "3: duplicate 2, empty text 1"."""
    if not count_by_name:
        return "0"
    return f"{sum(count_by_name.values()):,}: " + ", ".join(f"{name} {count:,}" for name, count in count_by_name.items())


def validated_row(value: Mapping[str, Any]) -> tuple[object, ...]:
    """(file, kind, rows, kept, skipped, rejected) of a report on a file."""
    figures = (f"{value['rows']:,}", f"{value['kept']:,}", counts(value["skipped"]), counts(value["rejected"]))
    return value["file"], value["kind"], *figures


def sharded_rows(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(property, value) of the shards that `data shard` made."""
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
        ("shards", f"{value['encoded_blocks']:,} made, {reused:,} reused; by {value['encoder'] or 'nothing'}"),
        ("written to", value["out"]),
        ("bad rows in", value["quarantine"]),
    ]


def tokenizer_rows(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(property, value) of a tokenizer that was trained or taken over."""
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
        ("memory", f"{format_size(value['peak_memory_bytes'])} at most"),
        ("written to", value["out"]),
    ]


def statistics_tables(value: Mapping[str, Any]) -> Iterator[Table]:
    """(header, rows) of each table about a set of shards or a raw file."""
    if "parts" not in value:
        yield (value["file"], ""), [(name, format_value(item)) for name, item in _flat_file(value)]
        if "lengths" in value:
            yield from _lengths(value["lengths"], "documents" if value["kind"] == "documents" else "chats")
            yield ("letters, by their script", ""), list(_scripts(value["scripts"]))
        return
    for name, statistics in value["parts"].items():
        yield (f"{value['path']}, {name}", ""), [(key, format_value(item)) for key, item in _flat_part(statistics)]
        yield from _lengths(statistics["lengths"], statistics["kind"])
    if value["duplicates"] is not None:
        yield ("rows that repeat an earlier one", ""), [(f"{value['duplicates']:,}", "")]
    if value["files"]:
        names = ("name", "role", "rows", "kept", "tokens", "bytes")
        yield names, [[format_value(file.get(name, "")) for name in names] for file in value["files"]]


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


def _flat_part(statistics: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name in ("kind", "documents", "tokens", "live_tokens", "bytes", "bytes_per_token", "shards"):
        yield name.replace("_", " "), statistics[name]
    if statistics["rows"] is None:
        yield "rows", "unknown without the tokenizer; name it with --tokenizer"
        return
    rows = statistics["rows"]
    yield f"rows of {rows['row_length']} tokens", rows["rows"]
    yield "  fill", f"{rows['fill']:.1%}"
    yield "  dropped tokens", rows["dropped_tokens"]


def _lengths(value: Mapping[str, Any], kind: str) -> Iterator[Table]:
    if not value["records"]:
        return
    most = max(count for _, _, count in value["histogram"])
    bars = [
        (f"{low:,} to {high:,}", f"{count:,}", "#" * -(-BAR_WIDTH * count // most))
        for low, high, count in value["histogram"]
    ]
    yield (f"length in {value['unit']}", kind, ""), bars
    shares = {"mean": f"{value['mean']:,.1f}", "min": f"{value['min']:,}"}
    shares |= {f"{share} %": f"{length:,}" for share, length in value["percentiles"].items()} | {"max": f"{value['max']:,}"}
    yield tuple(shares), [tuple(shares.values())]


LOCK = Path("run", "lock")


def shard(
    sources: Sequence[str],
    tokenizer: Path,
    output: Path,
    reading: Reading,
    *,
    kind: str,
    block_bytes: int,
    pool: Pool,
    progress: Callable[[int], None] = lambda rows: None,
    waiting: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Make the shards of the files (which `locations.expand` found) in `output`, which `check_output` allowed.

    Returns the figures, also in `run/summary.json`. If too many rows are bad, they have an "error", and `output` is
    not a set of shards, although the blocks stay there for the next run. `waiting` is called if another run is writing.
    """
    from ttrain.core.files import exclusive, write_json
    from ttrain.data import sharding
    from ttrain.data.assembly import REJECTED
    from ttrain.data.blocks import BLOCKS, PARTS
    from ttrain.data.inspect import SUMMARY, tokenizer_at
    from ttrain.data.shards import INDEX
    from ttrain.stages.shards import check, recipe_of

    recipe = recipe_of(reading, tokenizer_at(tokenizer), kind)
    (output / BLOCKS).mkdir(parents=True, exist_ok=True)
    with exclusive(output / LOCK, waiting):
        built = sharding.build(
            output,
            {"train": _data_files(sources)},
            recipe,
            reading,
            block_bytes=block_bytes,
            pool=pool,
            progress=lambda rows, blocks: progress(rows),
        )
        summary = {
            "out": str(output),
            "kind": kind,
            **_figures(built),
            "quarantine": str(output / REJECTED),
            "tokenizer": recipe.tokenizer,
            "tokenizer_digest": recipe.tokenizer_digest,
            "reading": reading.model_dump(mode="json"),
        }
        try:
            check(built, reading, _sources_label(sources), kind)
        except DataError as error:
            summary["error"] = f"{error}. There are no shards in {output} now; {output / REJECTED} lists the bad rows"
            for part_name in PARTS:
                (output / part_name / INDEX).unlink()
        write_json(output / SUMMARY, summary)
    return summary


def check_output(output: Path, patterns: Sequence[str], sources: Sequence[str]) -> None:
    """Raise UsageError where shards must not be written: over other files, or into an input folder."""
    from ttrain.data import locations
    from ttrain.data.blocks import BLOCKS
    from ttrain.store.layout import MANIFEST

    if any((above / MANIFEST).exists() for above in (output, *output.absolute().parents)):
        raise UsageError(f"--out is {output}, which holds an artifact of a pipeline; name another directory")
    if output.exists() and not (output / BLOCKS).is_dir() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--out is {output}, which holds files that are not shards; name an empty directory or a new one")
    real = output.resolve()
    local = [locations.local_path(name).resolve() for name in patterns if not locations.is_remote(name)]
    inside = [path for path in local if path.is_dir() and real.is_relative_to(path)]
    inside += [
        path for name in sources if not locations.is_remote(name) and (path := Path(name).resolve()).is_relative_to(real)
    ]
    if inside:
        raise UsageError(
            f"--out is {output} but {inside[0]} is an input, so that the shards would be read too; name another"
        )


def _data_files(sources: Sequence[str]) -> list[DataFile]:
    """The files with a stamp of their bytes: inode, size and times of a local file, as in the store's cache of digests."""
    from ttrain.core.hashing import stamp
    from ttrain.data import locations
    from ttrain.data.assembly import DataFile

    return [DataFile(path, locations.name(path), locations.version(path) or stamp(Path(path))) for path in sources]


def _figures(built: ShardSetResult) -> dict[str, Any]:
    """The figures of a pipeline's shards manifest, and the sums over both parts."""
    from ttrain.data.shards import COUNTED

    totals = {name: sum(part_counts[name] for part_counts in built.parts.values()) for name in COUNTED}
    return {
        **built.to_json(),
        "rows": built.tallies["train"].to_json(),
        "documents": totals["rows"],
        **{name: totals[name] for name in COUNTED[1:]},
        "bytes_per_token": totals["bytes"] / max(1, totals["tokens"]),
    }


def train_tokenizer(
    sources: Sequence[str], output: Path, config: Tokenizer, reading: Reading, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Train a tokenizer on the files (or take `config.existing`) and leave it in `output`, all of it or nothing.

    Returns the figures, which are also in `run/summary.json`, and the peak memory of this process. Raises UsageError where
    `output` holds something: a tokenizer is never trained over another, whose shards would then be of no use.
    """
    from ttrain.core.files import write_json
    from ttrain.data.encoder import Encoder
    from ttrain.data.inspect import SUMMARY
    from ttrain.stages.tokenizer import train_directory

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--out is {output}, which is not empty; name an empty directory or a new one")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as temporary:
        work = Path(temporary) / "tokenizer"
        figures = train_directory(sources, work, config, reading, progress=progress, setting=_sources_label(sources))
        summary = {
            "out": str(output),
            **figures,
            "template": config.template,
            "tokenizer_digest": Encoder(work, fast=False).digest,
            "peak_memory_bytes": _peak_memory_bytes(),
        }
        (work / "run").mkdir()
        write_json(work / SUMMARY, summary)
        work.rename(output)
    return summary


def _sources_label(sources: Sequence[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{len(sources)} files"


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
