"""`make gpu` without a GPU: one line and exit code 1; and its code path on tiny models on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def gpu(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/gpu.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.soak
def test_all_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    ended = gpu("--device", "cpu", "--small", "--rounds", 1, "--markdown", tmp_path / "gpu.md")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    table = dict(line.strip("| ").split(" | ", 1) for line in lines if line.startswith("| "))
    assert {"small: GFLOP/s, peak in bf16", "small: tokens/s, rows of 20 documents, of 1"} <= {
        *table
    }
    assert table["save and resume, to the bit"].startswith("yes ")
