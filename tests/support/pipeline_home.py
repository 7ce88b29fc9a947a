"""A real pipeline on a tiny corpus: the installed command, a real Prefect server, a real MLflow store."""

import contextlib
import io
import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from support.waiting import wait_until

from ttrain.cli.main import main
from ttrain.config import Settings
from ttrain.engine import processes
from ttrain.flows import servers

ENGLISH = (
    "the",
    "a",
    "of",
    "to",
    "and",
    "in",
    "that",
    "it",
    "was",
    "for",
    "on",
    "with",
    "his",
    "they",
    "at",
    "from",
    "what",
)
CHINESE = "天地人山水日月风花雪夜春江明年大中国学生看见小红白马东西南北"

# Small enough that a training stage is mostly its imports; 40 steps, so that there is a middle to be killed in.
TINY = """
name: tiny-test
tokenizer: {vocab_size: 400}
model: {hidden_size: 32, layers: 2, heads: 2, max_length: 128}
pretrain: {tokens: 20480, tokens_per_step: 512, row_length: 64, validation_rows: 16}
sft: {epochs: 1, tokens_per_step: 512, row_length: 64, validation_rows: 16}
lora: {epochs: 1, tokens_per_step: 256, row_length: 64, validation_rows: 16, rank: 4, alpha: 8}
evaluate: {row_length: 64, stride: 32, new_tokens: 4}
promotion: {baseline: null}
runtime: {rows_per_device: 4, threads: 1, workers: 1, checkpoint_every_steps: 5, log_every_steps: 5}
"""


def load_stages() -> None:
    """Start what forks the stages of this process, and wait until it has loaded: those without torch do not wait for it, and
    would load their libraries themselves, 1.5 s of CPU for each."""
    server = processes.fork_server_for(processes.environment_of(Settings()))
    wait_until(lambda: server.is_loaded, 120)


class Cli:
    def __init__(self, home: Path, data: Path) -> None:
        self.home, self.data, self.first_output = home, data, ""
        self.environment = {**os.environ, "TTRAIN_HOME": str(home), "OMP_NUM_THREADS": "1"}
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            self.environment.pop(name, None)

    @property
    def _where(self) -> dict[str, Any]:
        return {"env": self.environment, "cwd": self.data, "text": True}

    @property
    def settings(self) -> list[str]:
        names = {"pretrain": "docs*.jsonl", "sft": "chats.jsonl", "lora": "domain.jsonl"}
        return [
            "-c",
            str(self.data / "tiny.yaml"),
            *(f"data.{name}={self.data / file}" for name, file in names.items()),
        ]

    def command(self, *arguments: str, settings: bool = True) -> list[str]:
        """The tests' own settings first, so that the overrides among the arguments win."""
        words = [word for word in arguments if "=" not in word]
        overrides = [word for word in arguments if "=" in word]
        own = self.settings if settings else []
        return [
            sys.executable,
            "-P",
            "-c",
            "from ttrain.cli.main import main; main()",
            *words,
            *own,
            *overrides,
        ]

    def __call__(self, *arguments: str, code: int = 0, settings: bool = True) -> str:
        command = self.command(*arguments, settings=settings)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
            **self._where,
        )
        assert done.returncode == code, f"exit code {done.returncode}, not {code}:\n{done.stdout}"
        return done.stdout

    def here(
        self, *arguments: str, code: int = 0, settings: bool = True, errors: bool = True
    ) -> str:
        """The same in this process, which has the libraries loaded, or in one of its own where other code is chosen.
        Returns standard output, and error where `errors`."""
        if self.environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
            return self(*arguments, code=code, settings=settings)
        output = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        error = output if errors else io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            contextlib.chdir(self.data),
            mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO())),
            mock.patch("sys.stdout", output),
            mock.patch("sys.stderr", error),
            pytest.raises(SystemExit) as ended,
        ):
            main(self.command(*arguments, settings=settings)[4:])
        output.seek(0)
        said = output.read()
        assert (ended.value.code or 0) == code, said
        return said

    def through_prefect_here(self, *arguments: str) -> str:
        """The same through a Prefect server of its own, which gets the last logs and events and ends, as with a process."""
        from ttrain.flows import engine

        load_stages()
        at_exit: list[Any] = threading._threading_atexits  # type: ignore[attr-defined]
        earlier, loggers = list(at_exit), [logging.getLogger(), logging.getLogger("ttrain")]
        handlers = [
            (logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers
        ]
        try:
            with mock.patch.object(servers, "RESTARTS", 0):
                return self.here(*arguments)
        finally:
            from prefect.events.worker import EventsWorker
            from prefect.logging.handlers import APILogWorker

            for worker in (EventsWorker, APILogWorker):
                worker.drain_all()
            at_exit[:] = (
                earlier  # else each fork of this process would drain them too, and fail, as it ends
            )
            for (
                logger,
                own,
                level,
                propagates,
            ) in handlers:  # Prefect's send what is said outside a flow, too
                logger.handlers[:], logger.propagate = own, propagates
                logger.setLevel(level)
            while servers._own:
                _, (_, process) = servers._own.popitem()
                process.send_signal(signal.SIGINT)
                process.wait()
            engine.reread_environment()

    def in_process(self, *arguments: str, settings: bool = True) -> str:
        return self.here(*arguments, settings=settings, errors=False)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(
            self.command(*arguments), env=self.environment, text=True, cwd=self.data, **streams
        )

    def plan(self, *overrides: str) -> dict[str, dict[str, Any]]:
        stages = json.loads(self.in_process("pipeline", "plan", "full", "--json", *overrides))[
            "stages"
        ]
        return {stage["name"]: stage for stage in stages}

    def to_run(self, *overrides: str) -> list[str]:
        return [name for name, stage in self.plan(*overrides).items() if stage["state"] == "run"]

    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            self.in_process("pipeline", "status", "--json", settings=False)
        )
        return found

    def rows(self, database: str, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What a query of the home's database gives, `mlflow` or `prefect`, once the server of the last run has ended."""
        wait_until(lambda: not self._own_servers(), 30)
        path = self.home / database / f"{database}.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()

    def _own_servers(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                is_own = any(word.endswith(":prefect_app") for word in process.cmdline())
                if (
                    is_own
                    and servers.OWNER in variables
                    and variables.get("TTRAIN_HOME") == str(self.home)
                ):
                    found.append(process)
        return found

    def checkpoints(self) -> list[Path]:
        return list(self.home.glob("work/pretrain/*/output/checkpoints/step-*"))

    def newest_step(self) -> int:
        return max((int(path.name.removeprefix("step-")) for path in self.checkpoints()), default=0)

    def manifest(self, stage: str, *overrides: str) -> dict[str, Any]:
        path = self.plan(*overrides)[stage]["path"]
        found: dict[str, Any] = json.loads((Path(path) / "manifest.json").read_bytes())
        return found


def write_corpus(directory: Path) -> None:
    rng = random.Random(5)
    directory.mkdir(parents=True)

    def text(words: int) -> str:
        if rng.random() < 0.5:
            return " ".join(rng.choice(ENGLISH) for _ in range(words)) + "."
        return "".join(rng.choice(CHINESE) for _ in range(words)) + "。"

    def chat(question: str, answer: str, key: str) -> dict[str, Any]:
        return {
            key: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        }

    documents = [{"text": text(rng.randint(5, 80))} for _ in range(300)]
    chats = [
        chat(f"Say {text(3)}", text(8), "messages" if i % 2 else "conversations")
        for i in range(150)
    ]
    domain = [
        chat(f"{a} + {b}?", f"{a} plus {b} makes {a + b}", "messages")
        for a in range(12)
        for b in range(10)
    ]
    for name, rows in {
        "docs-1": documents[:150],
        "docs-2": documents[150:],
        "chats": chats,
        "domain": domain,
    }.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (directory / "tiny.yaml").write_text(TINY, encoding="utf-8")
