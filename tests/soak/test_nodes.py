"""Two nodes on this machine: the artifacts of one node."""

import contextlib
import sqlite3
import subprocess
from pathlib import Path

import pytest
from support.outage_proxy import free_port
from support.pipeline_home import Cli, write_corpus

from ttrain.store.artifacts import ArtifactStore

pytestmark = [pytest.mark.soak, pytest.mark.long]
ADDRESS = "127.0.0.2"  # of the loopback device, for the nodes of a pipeline
FINISHED = """
SELECT value FROM tags JOIN runs USING (run_uuid) WHERE key = 'ttrain.stage' AND status = 'FINISHED'
"""


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
            options = {"env": both.environment, "cwd": both.data, "stdout": file, "stderr": file}
            nodes.append(subprocess.Popen(command, **options))
    try:
        codes = [node.wait(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    output = [(tmp_path / f"output{rank}").read_text() for rank in (0, 1)]
    assert codes == [0, 0], "\n".join(output)
    alone(*arguments, "--engine", "none", "runtime.devices=2")
    made, expected = (ArtifactStore(cli.home).artifacts() for cli in (both, alone))
    contents = {(artifact.stage, artifact.key): artifact.content for artifact in made}
    assert contents == {(each.stage, each.key): each.content for each in expected}
    built = {stage for stage, _ in contents}
    assert len(built) == len(contents) and {"pretrain", "sft"} <= built, "each stage once"
    for stage in ("pretrain", "sft"):
        assert ArtifactStore(both.home).latest(stage).result["ranks"] == 2
    first, second = sorted(both.runs(), key=lambda run: "tracking" not in run)
    outcomes = {stage["outcome"] for stage in first["stages"] if stage["name"] in built}
    assert outcomes == {"completed"}, "node 0 built all of it"
    assert first["tracking"]["run_id"] and "tracking" not in second
    with contextlib.closing(sqlite3.connect(both.home / "mlflow" / "mlflow.db")) as db:
        assert sorted(stage for (stage,) in db.execute(FINISHED)) == sorted(built)
