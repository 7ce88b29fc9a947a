"""The command line in this process; files, chats and counts for the data commands."""

import contextlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ttrain.cli.main import main
from ttrain.config import Settings
from ttrain.engine import processes
from ttrain.engine.stage_worker import job_of
from ttrain.tasks import Stage

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "東京", "is", "far", "Grüße", "from")
WORDS += ("🙂", "def", "return")
ESCAPES = "\x1b[31mred\x1b[0m \x07bell \x9b1m c1 \u202eright"


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


def in_process(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> Result:
        code: Any = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code or 0
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return Result(code, output.out, output.err)

    return call


def trains_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a task's or a gate's stage in this process, without the seconds its imports take."""

    def run(stage: Stage, settings: Settings, work: Path, *unused: Any) -> Any:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return import_module(stage.module).run(*job_of(work))
        finally:
            import_module("torch").use_deterministic_algorithms(False)

    monkeypatch.setattr(processes, "run", run)


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    said = [[rng.choice(WORDS) for _ in range(rng.randint(3, 40))] for _ in range(count)]
    return [f"{seed}.{number} {' '.join(words)}" for number, words in enumerate(said)]


def chat(question: str, answer: str) -> dict[str, Any]:
    messages = {"user": question, "assistant": answer}
    return {"messages": [{"role": role, "content": text} for role, text in messages.items()]}
