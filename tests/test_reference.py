"""docs/reference.md is what the code says; TTRAIN_WRITE_REFERENCE=1 rewrites it."""

import os

from support import reference

from ttrain.config import Settings


def test_the_reference_is_that_of_the_code() -> None:
    text = reference.page()
    if os.environ.get("TTRAIN_WRITE_REFERENCE"):
        reference.PAGE.write_text(text, encoding="utf-8")
    assert reference.PAGE.read_text(encoding="utf-8") == text, (
        "docs/reference.md is out of date: TTRAIN_WRITE_REFERENCE=1 python -m pytest -n 0 tests/test_reference.py"
    )


def test_it_has_every_section_and_commands_of_groups_that_are_made_when_they_are_used() -> None:
    lines = reference.page().splitlines()
    for name in Settings.model_fields:
        assert f"### {name}" in lines
    for beginning in ("epochs=auto", "optim.muon_lr=0.02", "early_stopping.patience=3", "night.start=22:00", "moe.top_k=2"):
        assert any(line.startswith(beginning) for line in lines), beginning
    for command in (
        "chat [MODEL]",
        "train [TASK]",
        "compare RUN...",
        "pipeline schedule nightly",
        "models promote [VERSION|RUN]",
    ):
        assert any(line.startswith(f"- `ttrain {command}") for line in lines), command
