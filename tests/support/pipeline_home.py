"""A real pipeline on a tiny corpus: the installed command, a real Prefect server, a real MLflow."""

import contextlib
import io
import json
import os
import random
import sqlite3
import subprocess
import sys
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

WORDS = "the a of to and in that it was for on with his they at from what"
ENGLISH = WORDS.split()
CHINESE = "天地人山水日月风花雪夜春江明年大中国学生看见小红白马东西南北"
DATA = {"pretrain": "docs*.jsonl", "sft": "chats.jsonl", "lora": "domain.jsonl"}

# So small that a training stage is mostly its imports; 40 steps leave a middle to be killed in.
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
    """Start this process's fork server and wait until it has loaded the stages' libraries.

    A stage without torch does not wait, and would spend 1.5 s of CPU on loading them itself.
    """
    server = processes.fork_server_for(processes.environment_of(Settings()))
    wait_until(lambda: server.is_loaded, 120)


class Cli:
    """The command line in a home: as a process (a call, `start`) or in this process (`here`)."""

    def __init__(self, home: Path, data: Path) -> None:
        self.home = home
        self.data = data
        self.first_output = ""
        self.environment = {**os.environ, "TTRAIN_HOME": str(home), "OMP_NUM_THREADS": "1"}
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            self.environment.pop(name, None)

    @property
    def settings(self) -> list[str]:
        data = [f"data.{name}={self.data / file}" for name, file in DATA.items()]
        return ["-c", str(self.data / "tiny.yaml"), *data]

    def command(self, *arguments: str, settings: bool = True) -> list[str]:
        """Put the tests' own settings first, so that overrides among the arguments win."""
        words = [word for word in arguments if "=" not in word]
        words += self.settings if settings else []
        words += [word for word in arguments if "=" in word]
        return [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()", *words]

    def start(self, *arguments: str, settings: bool = True) -> subprocess.Popen[str]:
        options: dict[str, Any] = {"env": self.environment, "cwd": self.data, "text": True}
        options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        command = self.command(*arguments, settings=settings)
        return subprocess.Popen(command, stderr=subprocess.STDOUT, **options)

    def __call__(self, *arguments: str, code: int = 0, settings: bool = True) -> str:
        with self.start(*arguments, settings=settings) as process:
            try:
                output, _ = process.communicate(timeout=600)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == code, f"code {process.returncode}, not {code}:\n{output}"
        return output

    def here(
        self, *arguments: str, code: int = 0, settings: bool = True, errors: bool = True
    ) -> str:
        """Run in this process, which has the libraries loaded, unless `PYTHONPATH` differs.

        Returns standard output, with standard error where `errors`.
        """
        if self.environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
            return self(*arguments, code=code, settings=settings)
        output = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        error = output if errors else io.TextIOWrapper(io.BytesIO(), "utf-8")
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            contextlib.chdir(self.data),
            mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO())),
            mock.patch("sys.stdout", output),
            mock.patch("sys.stderr", error),
            pytest.raises(SystemExit) as end,
        ):
            main(self.command(*arguments, settings=settings)[4:])
        output.seek(0)
        text = output.read()
        assert (end.value.code or 0) == code, text
        return text

    def in_process(self, *arguments: str, settings: bool = True) -> str:
        return self.here(*arguments, settings=settings, errors=False)

    def plan(self, *overrides: str) -> dict[str, dict[str, Any]]:
        plan = json.loads(self.in_process("pipeline", "plan", "full", "--json", *overrides))
        return {stage["name"]: stage for stage in plan["stages"]}

    def to_run(self, *overrides: str) -> list[str]:
        return [name for name, stage in self.plan(*overrides).items() if stage["state"] == "run"]

    def runs(self) -> Any:
        return json.loads(self.in_process("pipeline", "status", "--json", settings=False))

    def outcomes(self) -> dict[str, str]:
        """The outcome of each stage of the newest run."""
        return {stage["name"]: stage["outcome"] for stage in self.runs()[0]["stages"]}

    def rows(self, database: str, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Query the home's `mlflow` or `prefect` database, once the last run's server has ended."""
        wait_until(lambda: not self._own_servers(), 30)
        path = self.home / database / f"{database}.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()

    def _own_servers(self) -> list[psutil.Process]:
        own = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                is_prefect = any(word.endswith(":prefect_app") for word in process.cmdline())
                is_of_home = variables.get("TTRAIN_HOME") == str(self.home)
                if is_prefect and is_of_home and servers.OWNER in variables:
                    own.append(process)
        return own

    def checkpoints(self) -> list[Path]:
        return list(self.home.glob("work/pretrain/*/output/checkpoints/step-*"))

    def newest_step(self) -> int:
        return max((int(path.name.removeprefix("step-")) for path in self.checkpoints()), default=0)

    def manifest(self, stage: str, *overrides: str) -> Any:
        path = Path(self.plan(*overrides)[stage]["path"])
        return json.loads((path / "manifest.json").read_bytes())


def write_corpus(directory: Path) -> None:
    rng = random.Random(5)
    directory.mkdir(parents=True)

    def text(words: int) -> str:
        if rng.random() < 0.5:
            return " ".join(rng.choice(ENGLISH) for _ in range(words)) + "."
        return "".join(rng.choice(CHINESE) for _ in range(words)) + "。"

    def chat(question: str, answer: str, key: str = "messages") -> dict[str, Any]:
        messages = {"user": question, "assistant": answer}
        return {key: [{"role": role, "content": content} for role, content in messages.items()]}

    documents = [{"text": text(rng.randint(5, 80))} for _ in range(300)]
    keys = ["conversations", "messages"] * 75
    sums = [(a, b) for a in range(12) for b in range(10)]
    files: dict[str, Any] = {
        "docs-1": documents[:150],
        "docs-2": documents[150:],
        "chats": [chat(f"Say {text(3)}", text(8), key) for key in keys],
        "domain": [chat(f"{a} + {b}?", f"{a} plus {b} makes {a + b}") for a, b in sums],
    }
    for name, rows in files.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (directory / "tiny.yaml").write_text(TINY, encoding="utf-8")
