"""Two nodes on this machine: the artifacts of one node; a lost node ends the other.

Those of a pipeline meet at an address of their own of the loopback device.
"""

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


class Nodes:
    def __init__(self, root: Path, steps: int, **runtime: Any) -> None:
        self.home = Home.make(root / "home")
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{ROOT}", "OMP_NUM_THREADS": "1"}
        where = {
            "nodes": 2,
            "rendezvous": f"127.0.0.1:{free_port()}",
            "rows_per_device": 3,
            **runtime,
        }
        self.processes = []
        for rank in (0, 1):
            self.settings = stage_settings(
                steps, {"optim": {"kind": "adamw"}}, node_rank=rank, **where
            )
            (root / f"job{rank}").write_bytes(
                pickle.dumps((self.home.store.root, self.home.pretrain_inputs(), self.settings))
            )
            with (root / f"said{rank}").open("w") as said:
                command = [sys.executable, "-c", NODE, str(root / f"job{rank}")]
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=said, stderr=said)
                )
        self.root = root

    def said(self, rank: int) -> str:
        return (self.root / f"said{rank}").read_text()

    def wait(self, text: str, rank: int = 0, seconds: float = 120) -> None:
        wait_until(lambda: text in self.said(rank), seconds, lambda: self.said(0) + self.said(1))

    def end(self, seconds: float = 120) -> list[int]:
        codes = [process.wait(timeout=seconds) for process in self.processes]
        wait_until(lambda: not processes_of(self.root), 10, lambda: str(processes_of(self.root)))
        return codes


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


@pytest.mark.long
def test_a_pipeline_of_two_nodes_trains_as_one_of_one_and_node_0_tracks_it_all(
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path / "data")
    both, alone = (Cli(tmp_path / name, tmp_path / "data") for name in ("both", "alone"))
    arguments = ["pipeline", "run", "full", "--until", "sft", "runtime.rows_per_device=2"]
    rendezvous, nodes = f"127.0.0.2:{free_port('127.0.0.2')}", []
    for node in (0, 1):
        place = ["runtime.nodes=2", f"runtime.node_rank={node}", f"runtime.rendezvous={rendezvous}"]
        with (tmp_path / f"said{node}").open("w") as said:
            options: dict[str, Any] = {
                "env": both.environment,
                "cwd": both.data,
                "stdout": said,
                "stderr": said,
            }
            nodes.append(subprocess.Popen(both.command(*arguments, *place), **options))
    try:
        codes = [node.wait(timeout=600) for node in nodes]
    finally:
        for one in nodes:
            one.kill()
    assert codes == [0, 0], (tmp_path / "said0").read_text() + (tmp_path / "said1").read_text()
    alone(*arguments, "--engine", "none", "runtime.devices=2")
    ours, theirs = (
        {(a.stage, a.key): a.content for a in ArtifactStore(cli.home).artifacts()}
        for cli in (both, alone)
    )
    assert ours == theirs, "as many ranks of one machine leave the same"
    built = {stage for stage, _ in ours}
    assert len(built) == len(ours) and {"pretrain", "sft"} <= built, "each stage once"
    assert {
        ArtifactStore(both.home).latest(stage).result["ranks"]
        for stage in built & {"pretrain", "sft"}
    } == {2}
    first, second = sorted(both.runs(), key=lambda run: "tracking" not in run)
    assert {stage["outcome"] for stage in first["stages"] if stage["name"] in built} == {
        "completed"
    }, "node 0 built all of it"
    assert first["tracking"]["run_id"] and "tracking" not in second
    with contextlib.closing(sqlite3.connect(both.home / "mlflow" / "mlflow.db")) as db:
        query = "SELECT value FROM tags JOIN runs USING (run_uuid) WHERE key = 'ttrain.stage' AND status = 'FINISHED'"
        assert sorted(row[0] for row in db.execute(query)) == sorted(built)


def test_a_node_that_is_not_the_first_waits_for_what_does_not_train(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    home = Cli(tmp_path / "home", tmp_path / "data")
    place = [
        "--engine",
        "none",
        "runtime.nodes=2",
        "runtime.node_rank=1",
        "runtime.rendezvous=127.0.0.2:1",
    ]
    second = home.start("pipeline", "run", "full", *place)
    try:
        assert second.stdout is not None
        assert any("tokenizer: node 0 is building it" in line for line in second.stdout)
        time.sleep(1)
        assert second.poll() is None and not (home.home / "store" / "tokenizer").exists()
        home("stage", "run", "tokenizer")
        wait_until(
            lambda: list((home.home / "runs").glob("full-*")) and "cached" in _outcomes(home), 60
        )
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        second.kill()


def _outcomes(home: Cli) -> list[str]:
    [run] = [run for run in home.runs() if run["pipeline"] == "full"]
    return [stage["outcome"] for stage in run["stages"]]
