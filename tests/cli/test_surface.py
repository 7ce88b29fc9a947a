"""The surface of the commands: help in panels, completion, one style of error, versions, logs of runs."""

import json
import re
import threading
from pathlib import Path
from typing import get_args

import pytest
from support.data_commands import Run
from typer.main import get_command

from ttrain.cli.main import app
from ttrain.cli.options import ORDER, Panel
from ttrain.store import runs
from ttrain.store.runs import RunRecord


@pytest.fixture
def home(tmp_path: Path, run: Run) -> Path:
    return tmp_path / "home"


def test_the_help_has_the_panels_in_order_each_command_once_and_examples(run: Run) -> None:
    done = run("--help")
    shown = done.out
    assert done.code == 0
    assert re.findall(r"─ (\w+) ─", shown) == ["Options", *get_args(Panel)]
    commands = get_command(app).commands  # type: ignore[attr-defined]
    listed = re.findall(r"^│ ([a-z]+) ", shown, flags=re.MULTILINE)
    assert listed == ORDER.split() and sorted(listed) == sorted(commands)
    for words in (("train",), ("stage", "run")):
        done = run(*words, "--help")
        assert done.code == 0 and f"ttrain {' '.join(words)}" in done.out.partition("Example")[2]


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("logs",),
        ("report",),
        ("lineage", "latest"),
        ("lineage", "sft"),
        ("chat",),
        ("models", "history"),
        ("models", "promote", "3"),
        ("artifacts", "show", "sft"),
        ("pipeline", "rerun", "sft"),
        ("sweep", "show"),
    ],
)
def test_where_nothing_has_run_yet_each_command_ends_with_two(
    run: Run, words: tuple[str, ...]
) -> None:
    done = run(*words)
    assert (
        done.code == 2
        and done.err.startswith("error: ")
        and re.search(r"\byet\b|`ttrain pipeline run", done.err)
    )


def test_the_version_names_the_libraries_and_the_home(run: Run) -> None:
    done = run("--version")
    words = [line.split(" ", 1)[0] for line in done.out.splitlines()]
    assert done.code == 0 and words == ["ttrain", "Python", "torch", "prefect", "mlflow", "home"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("pipeline", "run", "full", "--untill", "sft"),
            "no such option: --untill (Possible options: --until)",
        ),
        (("pipeline", "rerun"), "missing argument 'STAGE'"),
        (("stage", "run", "sfd"), "there is no stage 'sfd'; did you mean sft?"),
        (
            ("pipeline", "run", "full", "--until"),
            "option '--until' requires an argument; `ttrain pipeline run full --help`",
        ),
        (
            ("pipeline", "run", "full", "--engine", "dask"),
            "invalid value for '--engine': 'dask' is not one of",
        ),
        (("pipeline", "plan", "ful"), "there is no pipeline 'ful'; did you mean full?"),
        (
            ("eval", "sft", "--limit", "0"),
            "--limit is '0' but must be at least 1; `ttrain eval --help` shows",
        ),
        (("chat", "sft", "--versus", ""), "an empty word follows '--versus'"),
    ],
)
def test_a_mistake_is_one_line_without_a_box(
    run: Run, words: tuple[str, ...], message: str
) -> None:
    done = run(*words)
    assert done.code == 2 and done.err.startswith(f"error: {message}")
    assert done.err.count("\n") == 1 and "─" not in done.err


def test_the_short_commands_are_those_of_pipelines(run: Run) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    pipeline = commands["pipeline"].commands
    for name in ("run", "plan", "status", "logs"):
        short, long = commands[name], pipeline[name]
        assert (short.help, short.epilog) == (long.help, long.epilog), name
        assert [each.name for each in short.params] == [each.name for each in long.params], name
    assert run("status").out == run("pipeline", "status").out


@pytest.mark.parametrize("words", [(), ("full",), ("sft.epochs=3",), ("sft.epochs=3", "full")])
def test_a_plan_is_of_the_full_pipeline_unless_another_is_named(
    run: Run, words: tuple[str, ...]
) -> None:
    planned = json.loads(run("plan", *words, "--json").out)
    assert planned["pipeline"] == "full" and len(planned["stages"]) == 9


def test_a_device_that_is_not_there_is_refused_before_any_stage(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = run("pipeline", "run", "full", "--engine", "none", "runtime.device=cuda")
    assert done.code == 2 and "error: runtime.device is cuda, but torch" in done.err
    assert not (home / "runs").exists()


def test_the_log_of_a_run_is_printed_and_followed_to_its_end(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LOG_POLL_SECONDS", 0.01)
    record = RunRecord(home, "full", ["tokenizer", "sft"], {})
    record.log("tokenizer", "first")
    record.log("sft", "second \x1b[2J")
    lines = run("pipeline", "logs", record.run).out.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["tokenizer: first", "sft: second \\x1b[2J"]
    assert run("pipeline", "logs", "latest", "tokenizer").out.count("\n") == 1
    first_seen = threading.Event()
    collected: list[str] = []

    def follow() -> None:
        for line in runs.log_lines(home, record.run, follow=True):
            collected.append(line)
            first_seen.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert first_seen.wait(30)
    record.log("sft", "third")
    record.finish("completed", {})
    thread.join(30)
    assert [line.rpartition(" ")[2] for line in collected] == ["first", "\\x1b[2J", "third"]
    record.path.with_suffix(".log").unlink()
    done = run("pipeline", "logs", "latest")
    assert done.code == 2 and f"the run {record.run} has no log" in done.err


def test_json_has_null_where_a_figure_is_no_number(home: Path, run: Run) -> None:
    record = RunRecord(home, "full", ["sft"], {})
    record.finish(
        "completed", {"sft/loss": float("nan"), "eval/perplexity": float("inf"), "eval/chats": 2.0}
    )
    shown = run("pipeline", "status", "--json").out
    assert "NaN" not in shown and "Infinity" not in shown
    assert json.loads(shown)[0]["metrics"] == {
        "sft/loss": None,
        "eval/perplexity": None,
        "eval/chats": 2.0,
    }
