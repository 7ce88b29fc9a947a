"""The hint at the end of a run: commands that work as they are printed."""

import shlex

import pytest
import typer.main

from ttrain.cli.main import app
from ttrain.cli.pipeline import next_steps, with_settings
from ttrain.config.loading import load

MADE = ("source", "tokenizer", "pretrain", "sft", "lora", "evaluate")
SETTING = "change one thing, rerun what it touches"


def hints(*overrides: str, made: tuple[str, ...] = MADE, **training: object) -> dict[str, str]:
    settings = load(overrides, environment={}).settings
    title, *lines = next_steps("full-1", settings, made, *training.values())  # type: ignore[arg-type]
    assert title == "next:"
    return dict(line.strip().split(": ttrain ", 1) for line in lines)


@pytest.mark.parametrize(
    ("overrides", "made", "end"),
    [
        ((), MADE, "sft --run full-1 sft.epochs=3"),
        (("sft.epochs=2", "sft.optim.lr=1e-5"), MADE, "sft.epochs=4"),
        (("sft.epochs=null", "sft.tokens=9000"), MADE, "sft.seed=2"),
        ((), ("tokenizer", "pretrain"), "pretrain --run full-1 pretrain.seed=2"),
    ],
)
def test_the_changed_setting_is_one_that_the_run_does_not_have(
    overrides: tuple[str, ...], made: tuple[str, ...], end: str
) -> None:
    assert hints(*overrides, made=made)[SETTING].endswith(end)


@pytest.mark.parametrize(("overfit", "end"), [((), "sft.epochs=6"), (("sft",), "sft.epochs=1.5")])
def test_epochs_by_rule_are_doubled_or_after_overfitting_halved(
    overfit: tuple[str, ...], end: str
) -> None:
    assert hints(epochs={"sft": 3.0}, overfit=[*overfit])[SETTING].endswith(end)


def test_every_command_is_one() -> None:
    shown = hints()
    assert {"export sft --to out/sft", "up latest --open", "chat sft"} <= {*shown.values()}
    for command in shown.values():
        words = shlex.split(command)
        root = typer.main.get_command(app)
        while hasattr(root, "commands") and words[0] in root.commands:
            root = root.commands[words.pop(0)]
        root.make_context("ttrain", words)  # raises where it takes no such words
    untracked = hints("tracking.enabled=false").values()
    assert not any(command.startswith("up ") for command in untracked)


def test_the_command_of_a_url_has_no_password() -> None:
    own = 'data.pretrain=["https://user:secret@host/docs.jsonl?sig=hidden"]'
    command = with_settings(["pipeline", "run", "full", own], "sft.epochs=3")
    assert "https://***@host/docs.jsonl?***" in command
    assert "secret" not in command and "hidden" not in command
