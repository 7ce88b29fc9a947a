"""Two pipelines at once through one Prefect and one MLflow server on a PostgreSQL lose nothing."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def running(
    name: str, command: list[Any], root: Path, **options: Any
) -> Iterator[Callable[[], str]]:
    """A process until the end of the block, as what returns its log."""
    path = root / f"{name}.log"
    with path.open("wb") as log:
        options |= {"cwd": root, "stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(command, **options)
    try:
        yield path.read_text
    finally:
        # PostgreSQL does not wait for those who are connected
        os.killpg(process.pid, signal.SIGINT if name == "postgres" else signal.SIGTERM)
        process.wait(timeout=30)


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """In a directory that its own user may enter: it refuses to run as root."""
    pytest.importorskip("psycopg2", reason="MLflow's driver: pip install 'ttrain[postgres]'")
    server = Postgres(programs(), free_port())
    root = Path(tempfile.mkdtemp(prefix="ttrain-postgres-"))
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        shutil.chown(root, "nobody")
        user = {"user": "nobody", "extra_groups": []}
    address = ["-h", HOST, "-p", str(server.port)]
    data = ["-D", str(root / "data")]
    init = [server.bin / "initdb", *data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C"]
    command = [server.bin / "postgres", *data, *address, "-k", str(root), "-c", "fsync=off"]
    try:
        subprocess.run([*init, "--no-sync"], check=True, cwd=root, **user)
        with running("postgres", command, root, **user) as log:
            for database in ("prefect", "mlflow"):
                create = [server.bin / "createdb", *address, "-U", USER, database]
                wait_until(lambda: not subprocess.call(create), 60, log)  # noqa: B023
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def servers(postgres: Postgres, tmp_path: Path) -> Iterator[dict[str, str]]:
    prefect, mlflow = (str(free_port()) for _ in range(2))
    api = f"http://{HOST}:{prefect}/api"
    url = f"http://{HOST}:{mlflow}"
    python = [sys.executable, "-m"]
    server = [*python, "prefect", "server", "start", "--host", HOST, "--port", prefect]
    tracker = [*python, "mlflow", "server", "--port", mlflow, "--workers", "2"]
    tracker += ["--backend-store-uri", postgres.url("mlflow", "postgresql+psycopg2")]
    tracker += ["--artifacts-destination", str(tmp_path / "artifacts")]
    environment = {**os.environ, **QUIET, **dict.fromkeys(OFF, "false"), "PREFECT_API_URL": api}
    environment["PREFECT_HOME"] = str(tmp_path / "prefect")
    database = postgres.url("prefect", "postgresql+asyncpg")
    environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
    with (
        running("prefect", server, tmp_path, env=environment) as prefect_log,
        running("mlflow", tracker, tmp_path, env=environment) as mlflow_log,
    ):
        wait_until(lambda: answers(f"{api}/health"), 240, prefect_log)
        wait_until(lambda: answers(f"{url}/health"), 240, mlflow_log)
        yield {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": url}


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
    """Of each run: a parent, a child for each stage, each point of the loss."""
    runs = postgres.ask("mlflow", TRACKED)
    keys = {stage["key"] for record in records for stage in record["stages"]}
    assert len(runs) == 2 * (1 + len(STAGES)) and {status for status, _ in runs} == {"FINISHED"}
    assert {key for _, key in runs if key} == keys and len(keys) == 2 * len(STAGES)
    curves = [path for cli in workers for path in cli.home.glob("store/*/*/run/metrics.jsonl")]
    for curve in curves:
        losses = sum('"loss"' in line for line in curve.read_text().splitlines())
        [[count]] = postgres.ask("mlflow", LOSSES.format(curve.parents[1].name))
        assert int(count) == losses >= 2, curve
