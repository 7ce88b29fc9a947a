"""`make gpu` without a GPU: one line and exit code 1; and its code path on tiny models on a CPU."""

from __future__ import annotations

import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]


def gpu(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/gpu.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--markdown", str(tmp_path / "gpu.md")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "bench" / "gpu.py"), run_name="__main__")
    assert ended.value.code == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no CUDA device: nothing is measured")
    assert not (tmp_path / "gpu.md").exists()


@pytest.mark.soak
def test_its_packed_rows_are_measured_on_a_cpu_too_and_written_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: each side of the command is one of its own, which takes its seconds to start."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import common
    import gpu as bench  # type: ignore[import-not-found]

    def measure(side: Any, *arguments: Any) -> Any:
        return common.Cost(1.0, 1.0, 0.0, side(*map(str, arguments)))

    monkeypatch.setattr(common, "measure", measure)
    options, table = Namespace(device="cpu", small=True, rounds=1, steps=None), common.Table("a machine")
    bench.compare_packed(options, tmp_path, table)
    rows = bench.rows_of(20, 64, 512, seed=1)
    assert all(len(set(row)) == 20 for row in rows.segments_BT.tolist())
    assert all((np.diff(row)[np.diff(row) != 1] <= 0).all() for row in rows.positions_BT), "each document begins at 0"
    text = common.markdown(table, ["gpu.py", "--small"])
    assert text.startswith("# gpu.py --small\n\na machine, ")
    assert "| small: tokens/s, rows of 20 documents, of 1 |" in text


@pytest.mark.soak
def test_all_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    ended = gpu("--device", "cpu", "--small", "--rounds", 1, "--markdown", tmp_path / "gpu.md")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (tmp_path / "gpu.md").read_text()
    assert "| small: GFLOP/s, peak in bf16 |" in text and "| save and resume, to the bit | yes |" in text
