"""Two nodes on this machine: the artifacts of one node; a lost node ends the other."""

import contextlib
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.outage_proxy import free_port
from support.paths import ROOT, TESTS
from support.pipeline_home import Cli, write_corpus
from support.served import processes_of
from support.tiny_stages import Home, stage_settings
from support.waiting import wait_until

from ttrain.store.artifacts import ArtifactStore

pytestmark = pytest.mark.soak
ADDRESS = "127.0.0.2"  # of the loopback device, for the nodes of a pipeline
NODE = """
import pickle, signal, sys
from pathlib import Path
from support.tiny_stages import Watcher, build_stage
from ttrain.tasks import PRETRAIN
from ttrain.store.artifacts import ArtifactStore
root, inputs, settings = pickle.loads(Path(sys.argv[1]).read_bytes())
watcher = Watcher(lambda line: print(line, flush=True))
signal.signal(signal.SIGTERM, lambda *_: watcher.stop())
outcome = build_stage(PRETRAIN, settings, ArtifactStore(root), inputs, watcher)
print("outcome", outcome.state, outcome.artifact.path, flush=True)
"""
FINISHED = """
SELECT value FROM tags JOIN runs USING (run_uuid) WHERE key = 'ttrain.stage' AND status = 'FINISHED'
"""


class Nodes:
    """Two nodes that pretrain, each in a process of its own; both are working already."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes = []
        home = Home.make(root / "home")
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{ROOT}", "OMP_NUM_THREADS": "1"}
        runtime: dict[str, Any] = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
        runtime["rows_per_device"] = 3
        for rank in (0, 1):
            optim = {"optim": {"kind": "adamw"}}
            settings = stage_settings(2000, optim, node_rank=rank, **runtime)
            job = root / f"job{rank}"
            job.write_bytes(pickle.dumps((home.store.root, home.pretrain_inputs(), settings)))
            command = [sys.executable, "-c", NODE, str(job)]
            with (root / f"output{rank}").open("w") as file:
                process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            self.processes.append(process)
        wait_until(lambda: "checkpoint of" in self.output(0), 120, self.output)

    def output(self, rank: int = 0) -> str:
        return (self.root / f"output{rank}").read_text()

    def end(self) -> list[int]:
        codes = [process.wait(timeout=120) for process in self.processes]
        wait_until(lambda: not processes_of(self.root), 10, lambda: str(processes_of(self.root)))
        return codes


def test_a_killed_node_ends_the_other(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    began = time.monotonic()
    nodes.processes[1].kill()
    assert nodes.end() == [1, -signal.SIGKILL]
    assert time.monotonic() - began < 30
    assert "another rank" in nodes.output(0) or "Connection" in nodes.output(0)


@pytest.mark.long
def test_two_nodes_train_as_one_and_node_0_tracks_it_all(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    both = Cli(tmp_path / "both", tmp_path / "data")
    alone = Cli(tmp_path / "alone", tmp_path / "data")
    arguments = ["pipeline", "run", "full", "--until", "sft", "runtime.rows_per_device=2"]
    place = ["runtime.nodes=2", f"runtime.rendezvous={ADDRESS}:{free_port(ADDRESS)}"]
    nodes = []
    for rank in (0, 1):
        command = both.command(*arguments, *place, f"runtime.node_rank={rank}")
        with (tmp_path / f"output{rank}").open("w") as file:
            nodes.append(
                subprocess.Popen(
                    command, env=both.environment, cwd=both.data, stdout=file, stderr=file
                )
            )
    try:
        codes = [node.wait(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    output = [(tmp_path / f"output{rank}").read_text() for rank in (0, 1)]
    assert codes == [0, 0], "\n".join(output)
    alone(*arguments, "--engine", "none", "runtime.devices=2")
    contents = [
        {(a.stage, a.key): a.content for a in ArtifactStore(cli.home).artifacts()}
        for cli in (both, alone)
    ]
    assert contents[0] == contents[1], "as many ranks of one machine leave the same"
    built = {stage for stage, _ in contents[0]}
    assert len(built) == len(contents[0]) and {"pretrain", "sft"} <= built, "each stage once"
    for stage in ("pretrain", "sft"):
        assert ArtifactStore(both.home).latest(stage).result["ranks"] == 2
    first, second = sorted(both.runs(), key=lambda run: "tracking" not in run)
    outcomes = {stage["outcome"] for stage in first["stages"] if stage["name"] in built}
    assert outcomes == {"completed"}, "node 0 built all of it"
    assert first["tracking"]["run_id"] and "tracking" not in second
    with contextlib.closing(sqlite3.connect(both.home / "mlflow" / "mlflow.db")) as db:
        assert sorted(stage for (stage,) in db.execute(FINISHED)) == sorted(built)
