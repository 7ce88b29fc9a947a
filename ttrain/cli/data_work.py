"""What stages make of files, outside of a pipeline and its store: shards that follow a list of files, and a tokenizer."""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ttrain.config import Reading, Tokenizer
from ttrain.core.files import exclusive, write_json
from ttrain.core.hashing import stamp
from ttrain.data import locations, sharding
from ttrain.data.assembly import REJECTED, Built, DataFile
from ttrain.data.blocks import BLOCKS, PARTS
from ttrain.data.encoder import Encoder
from ttrain.data.inspect import SUMMARY, tokenizer_at
from ttrain.data.sharding import Pool
from ttrain.data.shards import COUNTED, INDEX
from ttrain.errors import DataError, UsageError
from ttrain.stages.shards import check, recipe_of
from ttrain.stages.tokenizer import train_directory
from ttrain.store.layout import MANIFEST

LOCK = Path("run", "lock")


def shard(
    found: Sequence[str],
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

    Returns the figures, which `run/summary.json` has too. Where too many rows are bad, they have an "error", and `output` is
    no set of shards, although what was made stays there for the next run. `waiting` is called where another run is writing.
    """
    recipe = recipe_of(reading, tokenizer_at(tokenizer), kind)
    (output / BLOCKS).mkdir(parents=True, exist_ok=True)
    with exclusive(output / LOCK, waiting):
        built = sharding.build(
            output,
            {"train": _data_files(found)},
            recipe,
            reading,
            block_bytes=block_bytes,
            pool=pool,
            progress=lambda rows, made: progress(rows),
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
            check(built, reading, _called(found), kind)
        except DataError as error:
            summary["error"] = f"{error}. There are no shards in {output} now; {output / REJECTED} lists the bad rows"
            for part in PARTS:
                (output / part / INDEX).unlink()
        write_json(output / SUMMARY, summary)
    return summary


def check_output(output: Path, patterns: Sequence[str], found: Sequence[str]) -> None:
    """Raise UsageError where shards must not be written: over what is not ours, or into a folder that is read."""
    if any((above / MANIFEST).exists() for above in (output, *output.absolute().parents)):
        raise UsageError(f"--out is {output}, which holds an artifact of a pipeline; name another directory")
    if output.exists() and not (output / BLOCKS).is_dir() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--out is {output}, which holds something else than shards; name an empty directory or a new one")
    real = output.resolve()
    local = [locations.local_path(name).resolve() for name in patterns if not locations.is_remote(name)]
    inside = [path for path in local if path.is_dir() and real.is_relative_to(path)]
    inside += [
        path for name in found if not locations.is_remote(name) and (path := Path(name).resolve()).is_relative_to(real)
    ]
    if inside:
        raise UsageError(f"--out is {output} but {inside[0]} is read, so that the shards would be read too; name another")


def _data_files(found: Sequence[str]) -> list[DataFile]:
    """With what identifies their bytes: of a local file inode, size and times, as in the store's cache of digests."""
    return [DataFile(path, locations.name(path), locations.version(path) or stamp(Path(path))) for path in found]


def _figures(built: Built) -> dict[str, Any]:
    """What the manifest of a pipeline's shards says too, and the sums over both parts."""
    totals = {name: sum(part[name] for part in built.parts.values()) for name in COUNTED}
    return {
        **built.to_json(),
        "rows": built.tallies["train"].to_json(),
        "documents": totals["rows"],
        **{name: totals[name] for name in COUNTED[1:]},
        "bytes_per_token": totals["bytes"] / max(1, totals["tokens"]),
    }


def train_tokenizer(
    found: Sequence[str], output: Path, config: Tokenizer, reading: Reading, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Train a tokenizer on the files (or take `config.existing`) and leave it in `output`, all of it or nothing.

    Returns the figures, which `run/summary.json` has too, and the highest memory of this process. Raises UsageError where
    `output` holds something: a tokenizer is never trained over another, whose shards would then be of no use.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--out is {output}, which is not empty; name an empty directory or a new one")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as temporary:
        work = Path(temporary) / "tokenizer"
        figures = train_directory(found, work, config, reading, progress=progress, setting=_called(found))
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


def _called(found: Sequence[str]) -> str:
    return found[0] if len(found) == 1 else f"{len(found)} files"


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
