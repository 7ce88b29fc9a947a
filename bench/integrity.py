"""What it costs to compare a stage's inputs with their digests before they are read: 2 GB of weights, and a whole pipeline.

    .venv/bin/python bench/integrity.py                        2 GB in one file, as weights are, and in 200, as shards are
    .venv/bin/python bench/integrity.py --home HOME            also all inputs of the stages in a finished home

The first reading after a start of the machine is measured; where a file was published or verified since then, it is a stat.
The files are in the page cache, so that the disk does not count. Which processor it is decides most: with the instructions
for SHA-256 a core hashes four times as much as without. One large file is compared by the digests of its pieces, small ones
by their sha256; both on all cores. Publishing the file, which makes all of these in one pass, is timed, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.stages import STAGES
from ttrain.store import integrity
from ttrain.store.artifacts import ArtifactStore

LIMIT_SECONDS = 3.0  # of 2 GB
LIMIT_SHARE = 0.02  # of the wall time of a pipeline
MEGABYTE = 10**6
Files = Sequence[tuple[Path, Mapping[str, Any]]]


def processor() -> str:
    """Its name, cores, and whether it has the instructions for SHA-256."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if sys.platform == "linux" else ""
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "unknown")
    return f"{name}, {os.cpu_count()} cores, SHA instructions: {'yes' if 'sha_ni' in text else 'no'}"


def write(directory: Path, megabytes: int, files: int) -> Files:
    """Files of random bytes, in the page cache, with their manifest entries."""
    chunk = os.urandom(MEGABYTE)
    paths = [directory / f"{files}-{number}" for number in range(files)]
    for path in paths:
        with path.open("wb") as file:
            for _ in range(megabytes // files):
                file.write(chunk)
        os.utime(path, (1, 1))
    return [(path, {"bytes": path.stat().st_size, **integrity.measure(path)}) for path in paths]


def seconds_of(files: Files, home: Path) -> tuple[float, float]:
    """Wall and CPU seconds to verify files of which this home remembers what it does."""
    began, used = time.perf_counter(), time.process_time()
    integrity.verify_entries(files, home)
    return time.perf_counter() - began, time.process_time() - used


def time_bytes(directory: Path, megabytes: int) -> bool:
    """One file, many files, and again; whether the limit was passed."""
    failed = False
    for count in (1, 200):
        began = time.perf_counter()
        files = write(directory, megabytes, count)
        written = time.perf_counter() - began
        time.sleep(2.1)  # a file that changed a moment ago is not remembered
        home = directory / f"home-{count}"
        (first, cpu), (again, _) = seconds_of(files, home), seconds_of(files, home)
        failed |= first * 2000 / megabytes > LIMIT_SECONDS
        times = f"first {first:5.2f} s, {cpu:5.2f} CPU s   again {again:.5f} s   written and measured {written:5.2f} s"
        print(f"{megabytes} MB in {count:>3} files   {times}")
        for path, _ in files:
            path.unlink()
    return failed


def time_pipeline(home: Path, directory: Path) -> bool:
    """All inputs of each stage that is in a finished home; whether the share of what the stages took passed the limit."""
    store, verified, cpu, wall, size = ArtifactStore(home), 0.0, 0.0, 0.0, 0
    for artifact in store.everything():
        wall += float(artifact.manifest["seconds"])
        for name, used in artifact.manifest["inputs"].items():
            source = store.find(used["stage"], used["key"])
            if source is None:
                continue
            names = source.files_of(STAGES[artifact.stage].inputs[name])
            files = [(source.path / file, source.manifest["files"][file]) for file in names]
            size += sum(path.stat().st_size for path, _ in files)
            seconds, used_cpu = seconds_of(files, directory / f"{artifact.stage}-{name}")  # as after a start of the machine
            verified, cpu = verified + seconds, cpu + used_cpu
    share = verified / wall
    print(
        f"inputs of all stages, {size / MEGABYTE:.0f} MB   {verified:.3f} s, {cpu:.3f} CPU s, of {wall:.1f} s: {share:.2%}"
    )
    return share > LIMIT_SHARE


def main() -> int:
    """Print the tables; 1 where a limit was passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--home", type=Path)
    asked = parser.parse_args()
    print(f"{processor()}; load {os.getloadavg()[0]:.1f}")
    print(f"limits: {LIMIT_SECONDS} s for 2 GB, {LIMIT_SHARE:.0%} of a pipeline")
    with tempfile.TemporaryDirectory() as name:
        failed = time_bytes(Path(name), asked.megabytes)
        if asked.home:
            failed |= time_pipeline(asked.home, Path(name))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
