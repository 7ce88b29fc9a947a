"""What the measurements of the data share: text to work on, sides in processes of their own, a table with limits.

A side is a function of a script, run as `python SCRIPT --side NAME ARGUMENT...`: its CPU seconds and its peak memory are
then its own, with those of all processes that it started. What it returns comes back as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEGABYTE = 1_000_000
DEFAULT_MEGABYTES = 100
VOCAB_SIZE = 6400
TRAINING_BYTES = 10 * MEGABYTE
ROUNDS = 3


@dataclass(frozen=True)
class Cost:
    """What a side took: seconds, CPU seconds of all its processes, MB of its largest process, and what it returned."""

    wall: float
    cpu: float
    memory: float
    found: Mapping[str, Any]


@dataclass
class Table:
    """Lines of measurement, ours, theirs, ratio, limit; printed as they come, and kept for `--json`."""

    failed: bool = field(default=False, init=False)
    lines: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
        print(f"{os.cpu_count()} cores; load before the start {loads} (1, 5, 15 minutes)")
        print(f"{'':<54}{'ours':>12}{'theirs':>12}{'ratio':>9}   limit")

    def add(
        self, what: str, ours: str, theirs: str, ratio: float, *, least: float | None = None, most: float | None = None
    ) -> None:
        """One line; the run fails where the ratio is below `least` or above `most`."""
        missed = (least is not None and ratio < least) or (most is not None and ratio > most)
        limit = f"at least {least:g}" if least is not None else f"at most {most:g}" if most is not None else ""
        print(f"{what:<54}{ours:>12}{theirs:>12}{ratio:>8.3g}x   {limit}{'  MISSED' if missed else ''}", flush=True)
        self.lines.append({"what": what, "ours": ours, "theirs": theirs, "ratio": ratio, "limit": limit, "missed": missed})
        self.failed |= missed

    def claim(self, what: str, holds: bool) -> None:
        """A line that is true or not."""
        print(f"{what:<54}{'yes' if holds else 'NO, MISSED':>12}", flush=True)
        self.lines.append({"what": what, "holds": holds, "missed": not holds})
        self.failed |= not holds


def measure(script: str, side: str, *arguments: object, **environment: str) -> Cost:
    """Run a side of a script to its end. Raises RuntimeError where it fails."""
    command = [sys.executable, script, "--side", side, *map(str, arguments)]
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, env={**os.environ, **environment})
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / MEGABYTE, json.loads(lines[-1]))


def interleave(sides: Mapping[str, Callable[[], Cost]], rounds: int) -> dict[str, list[Cost]]:
    """Every side once a round, so that what disturbs the machine disturbs all of them."""
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            costs[name].append(side())
    return costs


def median(costs: Sequence[Cost], figure: str) -> float:
    """Median of `wall`, `cpu`, `memory`, or of a figure that the sides returned."""
    return statistics.median(getattr(cost, figure) if hasattr(cost, figure) else cost.found[figure] for cost in costs)


def requested_side(sides: Mapping[str, Callable[..., Mapping[str, Any] | None]]) -> bool:
    """Run the side that the command line asks for, if it does."""
    if sys.argv[1:2] != ["--side"]:
        return False
    print(json.dumps(sides[sys.argv[2]](*sys.argv[3:]) or {}))
    return True


def has(module: str) -> bool:
    """Whether a peer is installed; says how to install it where it is not."""
    if importlib.util.find_spec(module):
        return True
    print(f"SKIPPED: the comparison with {module}, which is not installed: pip install {module}", flush=True)
    return False


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all scripts take."""
    found = argparse.ArgumentParser(description=description.splitlines()[0])
    found.add_argument("--path", help="JSON lines with documents, also .gz or .zst; default: Python's own source")
    found.add_argument("--repeat", type=int, help="passes over it; default: one, or as many as make up --megabytes")
    found.add_argument("--megabytes", type=int, default=DEFAULT_MEGABYTES, help="of text, where --path is not given")
    found.add_argument("--rounds", type=int, default=ROUNDS)
    return found


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A directory for one run of a script, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ttrain-bench-") as directory:
        yield Path(directory)


def material(options: argparse.Namespace, directory: Path, megabytes: int | None = None) -> Path:
    """A plain file of JSON lines as the options say, or of so many megabytes."""
    path = directory / f"material-{megabytes or ''}.jsonl"
    size = megabytes or (None if options.path else options.megabytes)
    repeat = 0 if megabytes else options.repeat or 0
    found = measure(__file__, "material", path, options.path or "", repeat, size or 0).found
    print(f"text: {found['bytes'] / MEGABYTE:.0f} MB, {found['documents']} documents in {found['passes']} passes over "
          f"{options.path or 'the Python standard library'}")  # fmt: skip
    return path


def tokenizer(path: Path, directory: Path) -> Path:
    """A tokenizer directory of VOCAB_SIZE entries, trained on the file's beginning."""
    measure(__file__, "tokenizer", path, directory / "tokenizer")
    return directory / "tokenizer"


def texts_of(path: str, limit: int = sys.maxsize) -> list[str]:
    """The documents of a file of JSON lines, up to so many bytes."""
    import orjson

    with Path(path).open("rb") as file:
        return [orjson.loads(line)["text"] for line in file.readlines(limit)]


def directory_bytes(directory: Path) -> int:
    """Size of all files below."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _write_material(output: str, path: str, repeat: str, megabytes: str) -> dict[str, int]:
    """Each text once a pass, none twice: the pass's number stands before it."""
    import orjson

    documents = size = passes = 0
    wanted = int(megabytes) * MEGABYTE
    with Path(output).open("wb") as file:
        while size < wanted if not int(repeat) and wanted else passes < max(1, int(repeat)):
            passes += 1
            seen: set[int] = set()
            for text in _texts(path):
                if hash(text) not in seen:
                    seen.add(hash(text))
                    size += file.write(orjson.dumps({"text": f"{passes}. {text}"}) + b"\n")
                    documents += 1
                if not int(repeat) and wanted and size >= wanted:
                    break
    return {"bytes": size, "documents": documents, "passes": passes}


def _texts(path: str) -> Iterator[str]:
    if path:
        from ttrain.data import records
        from ttrain.data.records import Tally

        for record in records.read([path], records.document_parser("text"), Tally(), 32 << 20):
            assert isinstance(record, records.TextDocument), "the parser is that of documents"
            yield record.text
        return
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in file.parts:
            with contextlib.suppress(UnicodeDecodeError):
                if (text := file.read_text("utf-8")).strip():
                    yield text


def _train_tokenizer(path: str, output: str) -> None:
    from ttrain.data import tokenizer

    tokenizer.save(tokenizer.train(texts_of(path, TRAINING_BYTES), VOCAB_SIZE), Path(output))


if __name__ == "__main__":
    requested_side({"material": _write_material, "tokenizer": _train_tokenizer})
