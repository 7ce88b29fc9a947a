"""Pipelines whose server is killed, that are stopped early, and processes that do not listen."""

import json
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import psutil
import pytest
from support.served import processes_of
from support.waiting import wait_until

PRETRAIN_ONLY = ("pipeline", "run", "full", "pretrain.tokens=245760", "evaluate.new_tokens=0")


@pytest.mark.soak
def test_a_run_whose_server_is_killed_ends_with_another_one_that_knows_its_end(fresh: Any) -> None:
    process = fresh.start(*PRETRAIN_ONLY)
    wait_until(fresh.checkpoints, 600)
    children = psutil.Process(process.pid).children(recursive=True)
    servers = [child for child in children if "uvicorn" in " ".join(child.cmdline())]
    for server in servers:
        words = server.cmdline()
        port = words[words.index("--port") + 1]
        with pytest.raises(urllib.error.HTTPError, match="401"):  # without its token
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version")
        server.kill()
    output, _ = process.communicate(timeout=300)
    assert servers and process.returncode == 0, output
    assert " ".join(output.split()).count("it is started again") == 1, output
    assert fresh.rows("prefect", "SELECT state_type FROM flow_run") == [("COMPLETED",)]
    assert set(fresh.rows("prefect", "SELECT state_type FROM task_run")) == {("COMPLETED",)}
    assert not processes_of(fresh.home)


@pytest.mark.soak
def test_servers_of_up_are_used_by_a_run(copy_of: Any) -> None:
    fresh = copy_of()
    said = fresh("up", settings=False)
    try:
        fresh("pipeline", "run", "full", "evaluate.new_tokens=1")
        assert "127.0.0.1" in said
        assert fresh.rows("prefect", "select state_name from flow_run") == [("Completed",)] * 2
        query = "select key, data from artifact where key like 'mlflow%'"
        links = dict(fresh.rows("prefect", query))
        assert set(links) == {"mlflow", "mlflow-evaluate"}
        address = said.split("MLflow")[1].split()[0].partition("/?token=")[0]
        assert all(f"({address}/#/experiments/" in link for link in links.values()), links
    finally:
        fresh("down", settings=False)
    wait_until(lambda: not processes_of(fresh.home), 20)
    assert fresh("down", settings=False) == "no servers were running\n"


@pytest.mark.soak
def test_a_signal_before_the_first_stage_ends_the_run_with_its_code(fresh: Any) -> None:
    process = fresh.start(*PRETRAIN_ONLY)
    wait_until(lambda: (fresh.home / "servers").exists(), 600)  # its servers are starting
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in said, said
    wait_until(lambda: not processes_of(fresh.home), 20)


@pytest.mark.soak
def test_a_process_that_does_not_listen_is_ended_when_its_time_is_up(fresh: Any) -> None:
    """One BPE training is a single native call, which no signal handler of Python interrupts."""
    rng = random.Random(3)
    with (fresh.data / "docs-1.jsonl").open("w") as file:
        for _ in range(8):
            text = " ".join(str(rng.random()) for _ in range(100_000))
            file.write(json.dumps({"text": text}) + "\n")
    began = time.monotonic()
    slow = ("tokenizer.vocab_size=60000", "reading.heldout_fraction=0", "runtime.threads=1")
    said = fresh("stage", "run", "tokenizer", *slow, "runtime.timeout_seconds=2", code=1)
    assert "runtime.timeout_seconds=2" in said and time.monotonic() - began < 60
    wait_until(lambda: not processes_of(fresh.home), 20)


def test_a_worker_whose_parent_is_gone_before_it_looks_ends_at_once(fresh: Any) -> None:
    command = [sys.executable, "-P", "-m", "ttrain.engine.stage_worker", "nowhere"]
    environment = {**fresh.environment, "TTRAIN_PARENT": "1"}
    assert subprocess.run(command, env=environment).returncode == 1
