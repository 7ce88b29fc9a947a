"""What the measurements of training share: sizes, stages of ttrain as a user runs them, the rows for the other sides.

Each side is a process of its own. Ours is the command `ttrain stage run`, changed by settings alone, and its speed is read
from the wall times in its `run/metrics.jsonl`: all that lies between two logging steps counts, data, callbacks and
checkpoints too. The other sides note the wall time at the end of each step. On every side the first steps are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

VOCAB_SIZE = 6400
MATERIAL_MEGABYTES = 4
ROUNDS = 5
CORES = os.cpu_count() or 1
PEERS = str(Path(__file__).with_name("train_peers.py"))
TTRAIN = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()"]
# What would hand one side's surroundings to the others; the sides that are to have them are given them.
NOT_INHERITED = ("GLIBC_TUNABLES", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "TTRAIN_HOME", "TORCH_COMPILE_DISABLE")
POLL_SECONDS = 0.25
Stamps = Sequence[tuple[int, float]]  # (steps done, wall time)


@dataclass(frozen=True)
class Size:
    """A model, the rows of one step, and how many steps are measured after how many that are not."""

    hidden: int
    layers: int
    row_length: int
    rows_per_step: int
    warmup_steps: int
    measured_steps: int
    checkpoint_every_steps: int = 100  # the default
    vocab_size: int = VOCAB_SIZE

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.row_length

    @property
    def model(self) -> list[str]:
        """Settings of the model: heads of 64, as wide inside as ttrain makes it."""
        heads = max(1, self.hidden // 64)
        return [f"model.hidden_size={self.hidden}", f"model.layers={self.layers}", f"model.heads={heads}"]

    @property
    def matmul_parameters(self) -> int:
        """Weights that each token is multiplied with: attention, MLP and head; the embedding is looked up."""
        inner = -(-(self.hidden * 8 // 3) // 32) * 32
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * inner) + self.vocab_size * self.hidden

    @property
    def flops_per_token(self) -> int:
        """Forward and backward; attention as if nothing were masked (arXiv:2204.02311, appendix B)."""
        return 6 * self.matmul_parameters + 12 * self.layers * self.hidden * self.row_length

    @property
    def flops_formula(self) -> str:
        attention = 12 * self.layers * self.hidden * self.row_length
        return (
            f"FLOPs a token = 6 x {self.matmul_parameters / 1e6:.1f} M weights in matmuls + 12 x layers x hidden x sequence "
            f"({attention / 1e6:.1f} M) = {self.flops_per_token / 1e6:.0f} M; with causal attention counted half: "
            f"{(self.flops_per_token - attention / 2) / self.flops_per_token:.2f} of it"
        )


SIZES = {
    "S": Size(512, 8, 512, rows_per_step=8, warmup_steps=2, measured_steps=4),
    "T": Size(256, 4, 256, rows_per_step=16, warmup_steps=10, measured_steps=20, checkpoint_every_steps=20),
    "tiny": Size(64, 2, 64, rows_per_step=8, warmup_steps=2, measured_steps=4),
}


def run(command: Sequence[str], environment: Mapping[str, str], directory: Path | None = None) -> tuple[common.Cost, str]:
    """Run a side to its end; its cost and what it printed. Raises RuntimeError with its last lines where it fails.

    Memory is the largest resident size of its largest process, in MB; `peaks` are those of all its processes, largest first.
    The kernel keeps them (VmHWM), so that looking now and then is enough, and costs the side nothing.
    """
    surroundings = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        began, started = time.perf_counter(), time.time()
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=directory, env={**surroundings, **environment})
        peaks: dict[int, float] = {}
        over = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peaks, over), daemon=True)
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        over.set()
        watcher.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (output, errors):
            file.seek(0)
        printed = output.read().decode("utf-8", "replace")
        if process.returncode:
            tail = "\n".join((printed + errors.read().decode("utf-8", "replace")).splitlines()[-12:])
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}\n{tail}")
    found = {"started": started, "peaks": sorted(peaks.values(), reverse=True)}
    return common.Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / common.MEGABYTE, found), printed


def side(script: str, name: str, *arguments: object, python: str = sys.executable, **environment: str) -> common.Cost:
    """A side of a script, as `common.measure`, in any interpreter."""
    cost, printed = run([python, script, "--side", name, *map(str, arguments)], environment)
    return common.Cost(cost.wall, cost.cpu, cost.memory, {**cost.found, **json.loads(printed.splitlines()[-1])})


def allocator() -> dict[str, str]:
    """What the launcher of a stage sets before its process starts, for a bare loop in the same surroundings."""
    from ttrain.config import Settings
    from ttrain.pipeline.processes import environment_of

    found = environment_of(Settings())
    return {name: found[name] for name in ("GLIBC_TUNABLES", "GOMP_SPINCOUNT") if name in found}


def stage(name: str, directory: Path, settings: Sequence[str], *, keep: bool = False, **environment: str) -> common.Cost:
    """Build a stage by the command; its stamps, validations and result. Its artifact goes again, unless it is to be kept.

    Memory is that of the processes that train, one a rank: not of the command that waits, nor of compilers.
    The model's config.json stays in `directory`/config, for the sides that are to have the same model.
    """
    surroundings = {"TTRAIN_HOME": str(directory / "home"), "COLUMNS": "1000", **environment}
    cost, printed = run([*TTRAIN, "stage", "run", name, *settings], surroundings, directory)
    artifact = Path(printed.rpartition("artifact: ")[2].strip())
    manifest = json.loads((artifact / "manifest.json").read_text())
    found = {**cost.found, "result": manifest["result"], "artifact": str(artifact), "stamps": [], "validations": []}
    curve = artifact / "run" / "metrics.jsonl"
    for line in map(json.loads, curve.read_text().splitlines() if curve.exists() else ()):
        if "step_seconds" in line["metrics"]:
            found["stamps"].append((line["step"], line["time"]))
            found.setdefault("first_step_seconds", line["metrics"]["step_seconds"])
        if "validation_loss" in line["metrics"]:
            found["validations"].append((line["step"], line["time"], line["metrics"]["validation_loss"]))
    if (config := artifact / "model" / "config.json").exists():
        (directory / "config").mkdir(exist_ok=True)
        shutil.copy(config, directory / "config" / "config.json")
    if not keep:
        shutil.rmtree(artifact)
    memory = sum(found["peaks"][: manifest["result"].get("ranks", 1)])
    return common.Cost(cost.wall, cost.cpu, memory, found)


def rate(cost: common.Cost, size: Size) -> float:
    """Tokens a second between the end of the last step that does not count and the end of the last one."""
    stamps: Stamps = cost.found["stamps"]
    counted = [stamp for stamp in stamps if stamp[0] >= size.warmup_steps]
    (first, begun), (last, ended) = counted[0], counted[-1]
    return (last - first) * size.tokens_per_step / (ended - begun)


def median(costs: Sequence[common.Cost], size: Size) -> float:
    """Median tokens a second of a side's rounds."""
    return statistics.median(rate(cost, size) for cost in costs)


def spread(costs: Sequence[common.Cost], size: Size) -> str:
    """Slowest, median and fastest round, for people."""
    rates = sorted(rate(cost, size) for cost in costs)
    return f"{statistics.median(rates):,.0f} tokens/s ({rates[0]:,.0f} to {rates[-1]:,.0f} in {len(rates)} rounds)"


def training(section: str, size: Size, steps: int) -> list[str]:
    """Settings of a training stage of so many steps that every side of a comparison has: AdamW at a constant rate, bf16."""
    settings = {
        "tokens": steps * size.tokens_per_step,
        "tokens_per_step": size.tokens_per_step,
        "row_length": size.row_length,
        "validation_rows": size.rows_per_step,
        "precision": "bf16",
        "optim.kind": "adamw",
        "schedule.kind": "constant",
    }
    logged = [
        f"runtime.log_every_steps={size.warmup_steps}",
        f"runtime.checkpoint_every_steps={size.checkpoint_every_steps}",
    ]
    return [*size.model, *(f"{section}.{key}={value}" for key, value in settings.items()),
            f"runtime.rows_per_device={size.rows_per_step}", *logged]  # fmt: skip


def export(section: str, directory: Path, settings: Sequence[str], shards: str, tokenizer: str) -> Path:
    """The batches that a stage will see, in its order, as arrays for the other sides."""
    rows = directory / "rows"
    side(__file__, "export", section, json.dumps(list(settings)), shards, tokenizer, rows)
    return rows


def parser(description: str) -> Any:
    """The options of all measurements of training."""
    found = common.parser(description)
    found.set_defaults(megabytes=MATERIAL_MEGABYTES, rounds=ROUNDS)
    found.add_argument("--steps", type=int, help="measured steps of each side, for a quick try")
    found.add_argument("--json", help="file for all figures of all rounds")
    return found


def write_json(path: str | None, table: common.Table, costs: Mapping[str, Sequence[common.Cost]]) -> None:
    """Leave the table's lines and every round of every side, where a file is named."""
    if path:
        sides = {name: [vars(cost) for cost in rounds] for name, rounds in costs.items()}
        Path(path).write_text(json.dumps({"lines": table.lines, "sides": sides}, indent=1, default=str))


def _watch(root: int, peaks: dict[int, float], over: threading.Event) -> None:
    """Note the largest resident size, in MB, of a process and of all that it started, until it is over."""
    while not over.wait(POLL_SECONDS):
        for pid in _family(root):
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:
                continue  # it ended
            for line in lines:
                if line.startswith("VmHWM:"):
                    peaks[pid] = max(peaks.get(pid, 0.0), int(line.split()[1]) * 1024 / common.MEGABYTE)


def _family(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, known = {root}, 0
    while len(found) > known:
        known = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def _export(section: str, settings: str, shards: str, tokenizer: str, output: str) -> dict[str, Any]:
    import numpy as np

    from ttrain.config.loading import load
    from ttrain.data.encoder import Encoder
    from ttrain.stages.rows import open_rows, order_of, validation_batches

    config = getattr(load(json.loads(settings)).settings, section)
    encoder = Encoder(Path(tokenizer), fast=False)
    rows = open_rows(Path(shards) / "train", encoder, config)
    order = order_of(config, rows)
    if config.packing == "none":  # each row alone: its width is its own
        batches = [rows.batch([row]) for row in range(len(rows))]
    else:
        batches = [rows.batch(order.step_rows(step)) for step in range(order.steps)]
    Path(output).mkdir(exist_ok=True)
    heldout = open_rows(Path(shards) / "heldout", encoder, config, heldout=True)
    parts = {"train": batches, "heldout": validation_batches(heldout, config.validation_rows, 16)}
    for part, found in parts.items():
        for name in ("input_ids", "labels", "positions", "segments"):
            arrays = [getattr(batch, f"{name}_BT") for batch in found]
            if config.packing == "none":
                arrays = [
                    np.pad(array, ((0, 0), (0, config.row_length - array.shape[1])), constant_values=-100)
                    for array in arrays
                ]
            np.save(Path(output) / f"{part}_{name}.npy", np.concatenate(arrays))
    np.save(Path(output) / "lengths.npy", rows.lengths())
    return {}


if __name__ == "__main__":
    common.requested_side({"export": _export})
