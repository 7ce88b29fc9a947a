"""What data commands need of memory: a bounded amount, whatever the size of the files, and what they say of it."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_data import make_tokenizer

MEGABYTE = 1_000_000
# The peak of the process itself, in KiB: `ru_maxrss` of a child begins at that of the process that started it
MEASURED = """
import sys
from pathlib import Path
from ttrain.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], file=sys.stderr)
"""


def words(seed: int = 1) -> Iterator[str]:
    """Endless words of a vocabulary of 2,000."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvw", k=rng.randint(2, 9))) for _ in range(2000)]
    while True:
        yield from rng.choices(vocabulary, k=1000)


def command(*arguments: str | Path) -> tuple[Any, int]:
    """(what a command prints as JSON, its peak in bytes)."""
    call = [sys.executable, "-P", "-c", MEASURED, *map(str, arguments), "--json"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), 1024 * int(done.stderr.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_shards_of_four_times_the_text_take_the_same_memory_below_300_mb(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    text, peaks = [" ".join(itertools.islice(words(), 400)) for _ in range(100)], []
    for megabytes in (5, 20):
        path = tmp_path / f"{megabytes}.jsonl"
        with path.open("w") as file:
            size = 0
            for number in itertools.count():
                size += file.write(f'{{"text": "{number} {text[number % 100]}"}}\n')
                if size > megabytes * MEGABYTE:
                    break
        arguments = ("--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / f"out-{megabytes}", "runtime.workers=1")
        made, peak = command("data", "shard", path, *arguments, "shards.block_bytes=1000000")
        assert made["documents"] == number + 1 and made["blocks"] >= megabytes
        peaks.append(peak)
    small, large = peaks
    assert large < small + 8 * MEGABYTE, f"15 MB of text and {made['tokens'] * 3 // 4:,} tokens more"
    assert large < 300 * MEGABYTE


@pytest.mark.soak
def test_a_tokenizer_of_half_a_million_of_600_000_lines_says_how_many_and_takes_less_than_2_gb(tmp_path: Path) -> None:
    """Drawn from all of the file: the last tenth has a word of its own, which becomes a token."""
    path, stream = tmp_path / "lines.jsonl", words()
    with path.open("w") as file:
        for number in range(600_000):
            own = "xyzxyz " * (number >= 540_000)
            file.write(f'{{"text": "{own}{number} {" ".join(itertools.islice(stream, 4))}"}}\n')
    limits = ("tokenizer.max_documents=500000", "tokenizer.seed=1")
    made, peak = command("tokenizer", "train", path, "--out", tmp_path / "out", "tokenizer.vocab_size=3000", *limits)
    assert (made["documents"], made["documents_seen"]) == (500_000, 600_000)
    manifest = json.loads((tmp_path / "out" / "run" / "summary.json").read_text())
    assert (manifest["documents"], manifest["documents_seen"]) == (500_000, 600_000)
    assert 50 * MEGABYTE < made["peak_memory_bytes"] == manifest["peak_memory_bytes"] < 2000 * MEGABYTE
    assert peak < made["peak_memory_bytes"] + 100 * MEGABYTE
    assert "xyzxyz" in json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
