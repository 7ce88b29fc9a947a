"""Shards made on a Dask cluster, through Prefect, are the shards that one process makes."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.pipeline_home import Cli
from support.tiny_data import documents, make_tokenizer

from ttrain.config import Reading, Runtime, Shards, ShardsConfig
from ttrain.core.files import write_json
from ttrain.core.hashing import sha256_file
from ttrain.pipeline.stage_worker import JOB, job_of
from ttrain.stages import SHARDS_PRETRAIN, shards
from ttrain.store.artifacts import ArtifactStore

ONLY = "tokenizer,shards-pretrain,shards-sft"
ON_DASK = """
import sys
from pathlib import Path
from ttrain.flows import prefect_run

if __name__ == "__main__":
    wait = prefect_run.begin(Path(sys.argv[1]))
    from ttrain.config import Runtime
    from ttrain.stages import SHARDS_PRETRAIN
    from ttrain.tasks.stage import make_on_dask

    wait()
    make_on_dask(SHARDS_PRETRAIN, Path(sys.argv[2]), Runtime(workers=2, sharding="dask"))
"""


def lay_out(work: Path, tokenizer: Path, data: Path) -> Path:
    """A work directory of the stage, as the launcher makes it."""
    (work / "output").mkdir(parents=True)
    config = ShardsConfig(reading=Reading(heldout_fraction=0.1), shards=Shards(block_bytes=4096))
    job = {
        "stage": SHARDS_PRETRAIN.name,
        "config": config.model_dump(mode="json"),
        "inputs": {"tokenizer": str(tokenizer)},
        "files": {"train": [str(data)]},
        "versions": {"train": [sha256_file(data)]},
        "groups": {"train": [0]},
        "weights": [],
        "reuse": [],
        "output": "output",
        "runtime": Runtime().model_dump(mode="json"),
        "start_from": None,
    }
    write_json(work / JOB, job)
    return work


def files_of(work: Path) -> dict[str, str]:
    output = work / "output"
    return {
        path.relative_to(output).as_posix(): sha256_file(path)
        for part in ("train", "heldout")
        for path in sorted((output / part).iterdir())
    }


def test_nobody_without_the_keys_of_the_cluster_reaches_its_scheduler() -> None:
    """It runs the code of whoever connects, and all accounts of a machine reach 127.0.0.1."""
    from distributed import LocalCluster

    from ttrain.tasks.stage import task_runner

    runner, _ = task_runner(Runtime(workers=2))
    with LocalCluster(**{**runner.cluster_kwargs, "n_workers": 0}) as cluster:
        address = urlsplit(cluster.scheduler_address)
        assert (address.scheme, address.hostname) == ("tls", "127.0.0.1")
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((address.hostname, address.port or 0), timeout=10) as connection:
            with pytest.raises(ssl.SSLError, match="certificate required"):
                stranger.wrap_socket(connection).recv(1)


@pytest.mark.soak
def test_two_dask_workers_make_the_blocks_and_the_stage_puts_the_same_shards_together(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n, text in enumerate(documents(400))))
    here, dask = (lay_out(tmp_path / name, tmp_path / "tokenizer", data) for name in ("here", "dask"))
    result = shards.run(*job_of(here))
    script = tmp_path / "on_dask.py"
    script.write_text(ON_DASK)
    environment = {**os.environ, "PYTHONPATH": str(Path(shards.__file__).parents[2])}
    environment.pop("PREFECT_API_URL", None)
    command = [sys.executable, str(script), str(tmp_path / "home"), str(dask)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["encoded_blocks"] == result["blocks"] == len(list((dask / "output" / "run" / "blocks").glob("*.rows")))
    assert shards.run(*job_of(dask)) == {**result, "encoded_blocks": 0}
    assert files_of(dask) == files_of(here)
    assert len(files_of(here)) > 40


@pytest.mark.long
@pytest.mark.soak
def test_a_pipeline_that_makes_its_shards_on_dask_has_those_of_one_that_does_not(fresh: Cli, finished: Cli) -> None:
    said = fresh("pipeline", "run", "full", "--only", ONLY, "runtime.sharding=dask", "runtime.workers=2")
    outcomes = {stage["name"]: stage["outcome"] for stage in fresh.runs()[0]["stages"]}
    assert {outcomes[name] for name in ONLY.split(",")} == {"completed"}, said
    for name in ("shards-pretrain", "shards-sft"):
        here, there = (ArtifactStore(home).latest(name) for home in (fresh.home, finished.home))
        assert (here.key, here.content) == (there.key, there.content)
        assert here.result["encoded_blocks"] == 0, "the stage found all of them made"
