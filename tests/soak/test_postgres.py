"""Two machines on one real PostgreSQL: a pipeline each at the same time, through one Prefect and one MLflow server; nothing
is lost."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.outage_proxy import answers, free_port
from support.pipeline_home import Cli, write_corpus
from support.waiting import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.long]
STAGES = [
    "tokenizer",
    "shards-pretrain",
    "shards-sft",
    "shards-lora",
    "pretrain",
    "sft",
    "lora",
    "evaluate",
]
MODELS = ("tokenizer", "base", "sft", "lora")
USER = "ttrain"


def programs() -> Path:
    """Where PostgreSQL's programs lie; Debian keeps them out of PATH. Skips where there are none."""
    places = [
        Path(shutil.which("initdb") or "").resolve().parent,
        *Path("/usr/lib/postgresql").glob("*/bin"),
    ]
    for place in places:
        if (place / "postgres").is_file():
            return place
    pytest.skip("PostgreSQL is not installed; on Debian: apt install postgresql")


@dataclass(frozen=True)
class Postgres:
    bin: Path
    port: int

    def url(self, database: str, driver: str = "postgresql") -> str:
        return f"{driver}://{USER}@127.0.0.1:{self.port}/{database}"

    def ask(self, database: str, query: str) -> list[list[str]]:
        command = [str(self.bin / "psql"), "-XAtF", "\t", "-d", self.url(database), "-c", query]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """In a directory that its own user may enter: it refuses to run as root."""
    pytest.importorskip(
        "psycopg2", reason="MLflow's driver is not installed: pip install 'ttrain[postgres]'"
    )
    place = programs()
    root = Path(tempfile.mkdtemp(prefix="ttrain-postgres-"))
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        shutil.chown(root, "nobody")
        user = {"user": "nobody", "extra_groups": []}
    server = Postgres(place, free_port())
    data, where = root / "data", {"cwd": root, **user}
    try:
        init = [
            str(place / "initdb"),
            "-D",
            str(data),
            "-U",
            USER,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
        ]
        done = subprocess.run(init, capture_output=True, text=True, **where)
        assert done.returncode == 0, done.stdout + done.stderr
        command = [
            str(place / "postgres"),
            "-D",
            str(data),
            "-p",
            str(server.port),
            "-h",
            "127.0.0.1",
            "-k",
            str(root),
        ]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "-c", "fsync=off"], stdout=log, stderr=log, **where
            )
        try:
            for database in ("prefect", "mlflow"):
                create = [
                    str(place / "createdb"),
                    "-h",
                    "127.0.0.1",
                    "-p",
                    str(server.port),
                    "-U",
                    USER,
                    database,
                ]
                made = partial(subprocess.run, create, capture_output=True)
                wait_until(lambda: not made().returncode, 60, (root / "log").read_text)  # noqa: B023
            yield server
        finally:
            process.send_signal(
                signal.SIGINT
            )  # "fast": without waiting for those who are connected
            process.wait(timeout=30)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def servers(
    postgres: Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("servers")
    prefect, mlflow = free_port(), free_port()
    api = f"http://127.0.0.1:{prefect}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres.url("prefect", "postgresql+asyncpg"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_ENABLED": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    store = [
        "--backend-store-uri",
        postgres.url("mlflow"),
        "--artifacts-destination",
        str(root / "artifacts"),
    ]
    commands = {
        f"{api}/health": [
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(prefect),
        ],
        f"http://127.0.0.1:{mlflow}/health": [
            "mlflow",
            "server",
            "--port",
            str(mlflow),
            "--workers",
            "2",
            *store,
        ],
    }
    processes = []
    try:
        for number, command in enumerate(commands.values()):
            with (root / f"log{number}").open("wb") as log:
                words = [sys.executable, "-m", *command]
                options: dict[str, Any] = {
                    "env": environment,
                    "cwd": root,
                    "start_new_session": True,
                }
                processes.append(subprocess.Popen(words, stdout=log, stderr=log, **options))
        for number, url in enumerate(commands):
            wait_until(lambda: answers(url) or processes[number].poll() is not None, 240)  # noqa: B023
            assert processes[number].poll() is None, (root / f"log{number}").read_text()[-4000:]
        yield {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow}"}
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(timeout=30)


def test_two_pipelines_on_two_stores_at_once_lose_nothing(
    tmp_path: Path, postgres: Postgres, servers: dict[str, str]
) -> None:
    write_corpus(tmp_path / "data")
    workers = [Cli(tmp_path / name, tmp_path / "data") for name in ("one", "two")]
    for worker in workers:
        worker.environment.update(servers)
    # Other tokens, so that no stage of the one could come from what the other has put into MLflow meanwhile
    running = [
        worker.start("pipeline", "run", "full", f"tokenizer.vocab_size={400 + n}")
        for n, worker in enumerate(workers)
    ]
    for process in running:
        said, _ = process.communicate(timeout=500)
        assert process.returncode == 0, said
    records = [worker.runs()[0] for worker in workers]
    assert [[stage["outcome"] for stage in record["stages"]] for record in records] == [
        ["completed"] * len(STAGES)
    ] * 2
    _prefect_has(postgres, dict(zip((record["run"] for record in records), workers, strict=True)))
    _mlflow_has(postgres, workers, records)
    for worker in workers:
        assert (
            not (worker.home / "mlflow" / "mlflow.db").exists()
            and not (worker.home / "prefect" / "prefect.db").exists()
        )


def _prefect_has(postgres: Postgres, runs: dict[str, Cli]) -> None:
    """Two completed flow runs of eight completed task runs each, and every line that said how far a training was."""
    found = postgres.ask("prefect", "SELECT id, name, state_type FROM flow_run")
    flow_runs = [
        (identity, name.removeprefix("tiny-test: "), state) for identity, name, state in found
    ]
    assert sorted((name, state) for _, name, state in flow_runs) == sorted(
        (run, "COMPLETED") for run in runs
    )
    for identity, name, _ in flow_runs:
        # what tasks report goes through the events, a moment after the flow has ended
        query = f"SELECT name, state_type FROM task_run WHERE flow_run_id = '{identity}'"
        expected = sorted([stage, "COMPLETED"] for stage in STAGES)
        wait_until(lambda: sorted(postgres.ask("prefect", query)) == expected, 60, lambda: name)  # noqa: B023
        logs = (runs[name].home / "store").glob("*/*/run/log.txt")
        lines = sum(log.read_text().count(" step ") for log in logs)
        count = (
            f"SELECT count(*) FROM log WHERE flow_run_id = '{identity}' AND message LIKE '% step %'"
        )
        assert int(postgres.ask("prefect", count)[0][0]) == lines > 10, name


def _mlflow_has(postgres: Postgres, workers: list[Cli], records: list[dict[str, Any]]) -> None:
    """A parent and a child per stage, every point of the loss, and one version of each model, for each of the two."""
    query = "SELECT status, (SELECT value FROM tags WHERE run_uuid = runs.run_uuid AND key = 'ttrain.key') FROM runs"
    runs = postgres.ask("mlflow", query)
    keys = {stage["key"] for record in records for stage in record["stages"]}
    assert len(runs) == 2 * (1 + len(STAGES)) and {status for status, _ in runs} == {"FINISHED"}
    assert {key for _, key in runs if key} == keys and len(keys) == 2 * len(STAGES)
    for curve in (
        path for worker in workers for path in worker.home.glob("store/*/*/run/metrics.jsonl")
    ):
        losses = sum('"loss"' in line for line in curve.read_text().splitlines())
        query = (
            "SELECT count(*) FROM metrics JOIN tags USING (run_uuid) WHERE metrics.key = 'loss' AND "
            f"tags.key = 'ttrain.key' AND tags.value = '{curve.parents[1].name}'"
        )
        assert int(postgres.ask("mlflow", query)[0][0]) == losses >= 2, curve
    query = "SELECT name, count(*), count(DISTINCT run_id) FROM model_versions GROUP BY name"
    versions = {
        name: (count, from_runs) for name, count, from_runs in postgres.ask("mlflow", query)
    }
    assert {name: versions.get(f"tiny-test-{name}") for name in MODELS} == dict.fromkeys(
        MODELS, ("2", "2")
    )
