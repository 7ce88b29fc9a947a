"""Two nodes on this machine, through torchrun: the losses of one rank, one artifact; a lost node ends the other."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from doubles import Home, curve, run_here, stage_settings

from ttrain.config import PretrainConfig
from ttrain.stages import pretrain

pytestmark = pytest.mark.soak
NODE = """
import pickle, signal, sys
from pathlib import Path
from doubles import Watcher
from ttrain import launch
from ttrain.stages import PRETRAIN
home, settings = pickle.loads(Path(sys.argv[1]).read_bytes())
watcher = Watcher(lambda line: print(line, flush=True))
signal.signal(signal.SIGTERM, lambda *_: watcher.stop())
outcome = launch.build(PRETRAIN, settings, home.store, home.pretrain_inputs(), watcher)
print("outcome", outcome.state, outcome.artifact.path, flush=True)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nodes:
    """Launching processes of two nodes that share a home."""

    def __init__(self, root: Path, steps: int, **runtime: Any) -> None:
        self.home = Home.make(root / "home")
        here = Path(__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}", "OMP_NUM_THREADS": "1"}
        where = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}", "rows_per_device": 3, **runtime}
        self.processes = []
        for rank in (0, 1):
            self.settings = stage_settings(steps, {"optim": {"kind": "adamw"}}, node_rank=rank, **where)
            (root / f"job{rank}").write_bytes(pickle.dumps((self.home, self.settings)))
            with (root / f"said{rank}").open("w") as said:
                command = [sys.executable, "-c", NODE, str(root / f"job{rank}")]
                self.processes.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        self.root = root

    def said(self, rank: int) -> str:
        return (self.root / f"said{rank}").read_text()

    def wait(self, text: str, rank: int = 0, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.said(rank):
            assert time.monotonic() < deadline, self.said(0) + self.said(1)
            time.sleep(0.05)

    def end(self, seconds: float = 120) -> list[int]:
        """Exit codes; nothing may be left of either node."""
        codes = [process.wait(timeout=seconds) for process in self.processes]
        deadline = time.monotonic() + 10
        while left := [p.pid for p in psutil.process_iter() if str(self.root) in " ".join(_command(p))]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        return codes


def _command(process: psutil.Process) -> list[str]:
    try:
        return [*process.cmdline()]
    except psutil.Error:
        return []


def test_two_nodes_give_the_losses_of_one_rank_and_one_artifact(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 20)
    assert nodes.end() == [0, 0], nodes.said(0) + nodes.said(1)
    home, settings = nodes.home, nodes.settings
    paths = {name: artifact.path for name, artifact in home.pretrain_inputs().items()}
    config = PretrainConfig(model=settings.model, pretrain=settings.pretrain)
    run_here(pretrain, config, tmp_path / "alone", paths, settings.runtime)
    [artifact] = home.store.artifacts("pretrain")
    assert artifact.result["ranks"] == 2
    ours, theirs = curve(artifact.path / "run" / "metrics.jsonl"), curve(tmp_path / "alone" / "run" / "metrics.jsonl")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for first, second in zip(ours, theirs, strict=True):
        for name in {"loss", "validation_loss"} & {*second["metrics"]}:
            assert first["metrics"][name] == pytest.approx(second["metrics"][name], rel=1e-5)
    for rank in (0, 1):
        assert f"outcome completed {artifact.path}" in nodes.said(rank)
    assert "step 20/20" in nodes.said(0) and "step 20/20" not in nodes.said(1), "rank 0 alone logs"
    assert not [path for path in (home.store.root / "work" / "pretrain").iterdir() if path.suffix != ".lock"]


def test_a_signal_to_one_node_stops_both_after_one_save(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2000)
    nodes.wait("checkpoint of step")
    nodes.processes[1].send_signal(signal.SIGTERM)
    assert nodes.end() == [1, 1]
    for rank in (0, 1):
        assert "Interrupted: stage pretrain: stopped after step" in nodes.said(rank)


def test_a_killed_node_ends_the_other(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2000)
    nodes.wait("checkpoint of step")
    began = time.monotonic()
    nodes.processes[1].kill()
    assert nodes.end() == [1, -signal.SIGKILL]
    assert time.monotonic() - began < 30
    assert "another rank ended" in nodes.said(0) or "Connection" in nodes.said(0)
