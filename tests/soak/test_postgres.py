"""Two pipelines at once through one Prefect and one MLflow server on a PostgreSQL lose nothing."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.outage_proxy import QUIET, answers, free_port
from support.pipeline_home import Cli, write_corpus
from support.waiting import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.long]
SHARDS = ["shards-pretrain", "shards-sft", "shards-lora"]
STAGES = ["tokenizer", *SHARDS, "pretrain", "sft", "lora", "evaluate"]
MODELS = ("tokenizer", "base", "sft", "lora")
USER = "ttrain"
HOST = "127.0.0.1"
OFF = ("PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_SERVER_UI_ENABLED")
OFF += ("MLFLOW_SERVER_ENABLE_JOB_EXECUTION",)
LOGGED = "SELECT count(*) FROM log WHERE flow_run_id = '{}' AND message LIKE '% step %'"
TASKS = "SELECT name, state_type FROM task_run WHERE flow_run_id = '{}'"
TRACKED = """
SELECT status, (SELECT value FROM tags WHERE run_uuid = runs.run_uuid AND key = 'ttrain.key')
FROM runs
"""
LOSSES = """
SELECT count(*) FROM metrics JOIN tags USING (run_uuid)
WHERE metrics.key = 'loss' AND tags.key = 'ttrain.key' AND tags.value = '{}'
"""
VERSIONS = "SELECT name, count(*), count(DISTINCT run_id) FROM model_versions GROUP BY name"


def programs() -> Path:
    """Where PostgreSQL's programs are; Debian keeps them out of PATH. Skips where there is none."""
    in_path = Path(shutil.which("initdb") or "").resolve().parent
    for place in (in_path, *Path("/usr/lib/postgresql").glob("*/bin")):
        if (place / "postgres").is_file():
            return place
    pytest.skip("PostgreSQL is not installed; on Debian: apt install postgresql")


@dataclass(frozen=True)
class Postgres:
    bin: Path
    port: int

    def url(self, database: str, driver: str = "postgresql") -> str:
        return f"{driver}://{USER}@{HOST}:{self.port}/{database}"

    def ask(self, database: str, query: str) -> list[list[str]]:
        command = [str(self.bin / "psql"), "-XAtF", "\t", "-d", self.url(database), "-c", query]
        output = subprocess.check_output(command, text=True)
        return [line.split("\t") for line in output.splitlines()]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """In a directory that its own user may enter: it refuses to run as root."""
    pytest.importorskip("psycopg2", reason="MLflow's driver: pip install 'ttrain[postgres]'")
    place = programs()
    root = Path(tempfile.mkdtemp(prefix="ttrain-postgres-"))
    options: dict[str, Any] = {"cwd": root}
    if os.getuid() == 0:
        shutil.chown(root, "nobody")
        options |= {"user": "nobody", "extra_groups": []}
    server = Postgres(place, free_port())
    data = str(root / "data")
    address = ["-h", HOST, "-p", str(server.port)]
    try:
        init = [place / "initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8"]
        subprocess.run([*init, "--locale=C", "--no-sync"], check=True, **options)
        command = [place / "postgres", "-D", data, *address, "-k", str(root), "-c", "fsync=off"]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **options)
        try:
            for database in ("prefect", "mlflow"):
                create = [place / "createdb", *address, "-U", USER, database]
                wait_until(lambda: not subprocess.call(create), 60, (root / "log").read_text)  # noqa: B023
            yield server
        finally:
            process.send_signal(signal.SIGINT)  # without waiting for those who are connected
            process.wait(timeout=30)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def servers(
    postgres: Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("servers")
    ports = {name: str(free_port()) for name in ("prefect", "mlflow")}
    urls = {name: f"http://{HOST}:{port}" for name, port in ports.items()}
    api = f"{urls['prefect']}/api"
    store = ("--backend-store-uri", postgres.url("mlflow"))
    files = ("--artifacts-destination", str(root / "artifacts"))
    commands = {
        "prefect": ("prefect", "server", "start", "--host", HOST, "--port", ports["prefect"]),
        "mlflow": ("mlflow", "server", "--port", ports["mlflow"], "--workers", "2", *store, *files),
    }
    health = {"prefect": f"{api}/health", "mlflow": f"{urls['mlflow']}/health"}
    environment = {
        **os.environ,
        **QUIET,
        **dict.fromkeys(OFF, "false"),
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres.url("prefect", "postgresql+asyncpg"),
    }
    processes = {}
    try:
        for name, words in commands.items():
            with (root / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", *words]
                options: dict[str, Any] = {"env": environment, "cwd": root, "stdout": log}
                options |= {"stderr": log, "start_new_session": True}
                processes[name] = subprocess.Popen(command, **options)
        for name, process in processes.items():
            wait_until(lambda: answers(health[name]) or process.poll() is not None, 240)  # noqa: B023
            assert process.poll() is None, (root / f"{name}.log").read_text()[-4000:]
        yield {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": urls["mlflow"]}
    finally:
        for process in processes.values():
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes.values():
            process.wait(timeout=30)


def test_two_pipelines_at_once(tmp_path: Path, postgres: Postgres, servers: dict[str, str]) -> None:
    write_corpus(tmp_path / "data")
    workers = [Cli(tmp_path / name, tmp_path / "data") for name in ("one", "two")]
    running = []
    for number, worker in enumerate(workers):
        worker.environment.update(servers)
        # Other tokens, so that no stage of one could come from what the other has put into MLflow
        size = f"tokenizer.vocab_size={400 + number}"
        running.append(worker.start("pipeline", "run", "full", size))
    for process in running:
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output
    records = [worker.runs()[0] for worker in workers]
    for worker in workers:
        assert worker.outcomes() == dict.fromkeys(STAGES, "completed")
        for name in ("mlflow", "prefect"):
            assert not (worker.home / name / f"{name}.db").exists()
    names = [record["run"] for record in records]
    assert_prefect_has(postgres, dict(zip(names, workers, strict=True)))
    assert_mlflow_has(postgres, workers, records)


def assert_prefect_has(postgres: Postgres, runs: dict[str, Cli]) -> None:
    """Two completed flow runs of eight completed task runs, and every line of progress."""
    flow_runs = postgres.ask("prefect", "SELECT id, name, state_type FROM flow_run")
    expected = [[f"tiny-test: {run}", "COMPLETED"] for run in runs]
    assert sorted(flow_run[1:] for flow_run in flow_runs) == sorted(expected)
    tasks = sorted([stage, "COMPLETED"] for stage in STAGES)
    for identity, name, _ in flow_runs:
        # What tasks report goes through the events, a moment after the flow has ended
        query = TASKS.format(identity)
        wait_until(lambda: sorted(postgres.ask("prefect", query)) == tasks, 60)  # noqa: B023
        logs = runs[name.removeprefix("tiny-test: ")].home.glob("store/*/*/run/log.txt")
        lines = sum(log.read_text().count(" step ") for log in logs)
        [[count]] = postgres.ask("prefect", LOGGED.format(identity))
        assert int(count) == lines > 10, name


def assert_mlflow_has(postgres: Postgres, workers: list[Cli], records: list[Any]) -> None:
    """Of each run: a parent, a child for each stage, each point of the loss, a model's version."""
    runs = postgres.ask("mlflow", TRACKED)
    keys = {stage["key"] for record in records for stage in record["stages"]}
    assert len(runs) == 2 * (1 + len(STAGES)) and {status for status, _ in runs} == {"FINISHED"}
    assert {key for _, key in runs if key} == keys and len(keys) == 2 * len(STAGES)
    curves = [path for cli in workers for path in cli.home.glob("store/*/*/run/metrics.jsonl")]
    for curve in curves:
        losses = sum('"loss"' in line for line in curve.read_text().splitlines())
        [[count]] = postgres.ask("mlflow", LOSSES.format(curve.parents[1].name))
        assert int(count) == losses >= 2, curve
    versions = {name: counts for name, *counts in postgres.ask("mlflow", VERSIONS)}
    for name in MODELS:
        assert versions.get(f"tiny-test-{name}") == ["2", "2"]
