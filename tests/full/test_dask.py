"""Shards made on a Dask cluster, through Prefect, are the shards that one process makes."""

import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.pipeline_home import Cli

from ttrain.config import Runtime
from ttrain.store.artifacts import ArtifactStore

STAGES = "tokenizer,shards-pretrain,shards-sft"
SHARDS = ("pipeline", "run", "full", "--only", STAGES, "shards.block_bytes=1024")


def test_nobody_without_the_keys_of_the_cluster_reaches_its_scheduler() -> None:
    """It runs the code of whoever connects, and all accounts of a machine reach 127.0.0.1."""
    from distributed import LocalCluster

    from ttrain.flows.prefect_run import task_runner

    runner, _ = task_runner(Runtime(workers=2))
    with LocalCluster(**{**runner.cluster_kwargs, "n_workers": 0}) as cluster:
        address = urlsplit(cluster.scheduler_address)
        assert (address.scheme, address.hostname) == ("tls", "127.0.0.1")
        stranger = ssl.create_default_context()
        stranger.check_hostname = False
        stranger.verify_mode = ssl.CERT_NONE
        place = (address.hostname, address.port or 0)
        with socket.create_connection(place, timeout=10) as connection:
            with pytest.raises(ssl.SSLError, match="certificate required"):
                stranger.wrap_socket(connection).recv(1)


@pytest.mark.soak
def test_dask_makes_the_shards_that_one_process_makes(fresh: Cli, tmp_path: Path) -> None:
    alone = Cli(tmp_path / "alone", fresh.data)
    alone.here(*SHARDS, "--engine", "none")
    output = fresh(*SHARDS, "runtime.sharding=dask", "runtime.workers=2")
    assert [*fresh.outcomes().values()] == ["completed"] * 3, output
    for name in ("shards-pretrain", "shards-sft"):
        made = ArtifactStore(fresh.home).latest(name)
        expected = ArtifactStore(alone.home).latest(name)
        assert (made.key, made.content) == (expected.key, expected.content)
        assert made.result["blocks"] == expected.result["encoded_blocks"] > 5
        assert made.result["encoded_blocks"] == 0, "the stage reads what Dask made"
