"""The hint at the end of a run: commands that work as they are printed."""

import shlex

import pytest
import typer.main

from ttrain.cli.main import app
from ttrain.cli.pipeline import next_steps, with_settings
from ttrain.config.loading import load

MADE = ("source", "tokenizer", "pretrain", "sft", "lora", "evaluate")
RUN = ("pipeline", "run", "full")


def hints(*overrides: str, made: tuple[str, ...] = MADE) -> dict[str, str]:
    settings = load(overrides, environment={}).settings
    lines = next_steps("full-1", settings, made)
    assert lines[0] == "next:"
    return dict(line.strip().split(": ttrain ", 1) for line in lines[1:])


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
    assert hints(*overrides, made=made)["change one thing, rerun what it touches"].endswith(end)


def test_passes_that_a_rule_decided_are_doubled_or_halved_where_they_were_too_many() -> None:
    settings = load((), environment={}).settings
    for overfit, end in (([], "sft.epochs=6"), (["sft"], "sft.epochs=1.5")):
        lines = next_steps("full-1", settings, MADE, {"sft": 3.0}, overfit)
        assert any(line.endswith(end) for line in lines)


def test_every_command_is_one() -> None:
    shown = hints()
    assert shown["its files, for transformers"] == "export sft --to out/sft"
    assert "up latest --open" in shown.values() and "chat sft" in shown.values()
    for command in shown.values():
        words = shlex.split(command)
        root = typer.main.get_command(app)
        while hasattr(root, "commands") and words[0] in root.commands:
            root = root.commands[words.pop(0)]
        root.make_context("ttrain", words)  # raises where it takes no such words
    assert not any(
        command.startswith("up ") for command in hints("tracking.enabled=false").values()
    )


def test_the_command_of_a_url_has_no_password() -> None:
    own = 'data.pretrain=["https://user:secret@host/docs.jsonl?sig=hidden"]'
    command = with_settings([*RUN, own], "sft.epochs=3")
    assert (
        "https://***@host/docs.jsonl?***" in command
        and "secret" not in command
        and "hidden" not in command
    )
