"""The hint at the end of a run: commands that work as they are printed."""

import shlex

import typer.main

from ttrain.cli.main import app
from ttrain.cli.pipeline import next_steps, with_settings
from ttrain.config.loading import load

SETTING = "change one thing, rerun what it touches"
MADE = ("source", "tokenizer", "pretrain", "sft", "lora", "evaluate")


def hints(*overrides: str) -> dict[str, str]:
    settings = load(overrides, environment={}).settings
    title, *lines = next_steps("full-1", settings, MADE)
    assert title == "next:"
    return dict(line.strip().split(": ttrain ", 1) for line in lines)


def test_every_command_is_one() -> None:
    shown = hints()
    assert (
        shown["change one thing, rerun what it touches"]
        == "pipeline rerun sft --run full-1 sft.epochs=3"
    )
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
