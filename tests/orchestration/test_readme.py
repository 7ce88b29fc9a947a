"""Every `ttrain` command of the README is one that exists and does what the page says, as far as a plan can tell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (ttrain .*?)\s*(?:#.*)?$", README, flags=re.MULTILINE)
SERVERS = {  # run by test_interruptions, test_schedules and faults/test_nights_soak
    "ttrain up",
    "ttrain ui",
    "ttrain down",
    "ttrain pipeline serve",
    'ttrain pipeline schedule nightly --cron "0 2 * * *" --timezone Europe/Berlin -c my.yaml',
}
ALONE = {"ttrain doctor", "ttrain train --task regression"}  # run by test_doctor and test_cli_train
OTHERS = (  # run by faults/test_serve, test_gate, test_import; test_ui, test_compare, test_sweep, test_lineage_pipeline
    "ttrain serve ", "ttrain gate train ", "ttrain model import ",
    "ttrain ui ", "ttrain compare ", "ttrain sweep ", "ttrain reproduce ",
)  # fmt: skip
DATA = [command for command in COMMANDS if command.startswith(("ttrain data ", "ttrain tokenizer "))]
EXAM = '{"question": "Which colour has the sky?", "choices": ["blue", "loud"], "answer": 0}\n' * 2
SUITE = "tasks:\n  exam: {kind: choices, file: exam.jsonl}\n"


def test_the_readme_opens_with_the_two_commands_and_the_makefile_has_them() -> None:
    assert re.findall(r"^\$ (make \w+)", README, flags=re.MULTILINE)[:2] == ["make run", "make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in re.findall(r"make (\w+)`", README))
    assert len(COMMANDS) > 10


@pytest.mark.soak
@pytest.mark.parametrize(
    "command", sorted(name for name in {*COMMANDS} - {*DATA} - SERVERS - ALONE if not name.startswith(OTHERS))
)
def test_a_readme_command_works(command: str, finished: Any, tmp_path: Path) -> None:
    _, *words = shlex.split(command)
    for name, source in (("docs", "docs-1"), ("chats", "chats"), ("domain", "domain")):
        (tmp_path / f"{name}.jsonl").write_bytes((finished.data / f"{source}.jsonl").read_bytes())
    (tmp_path / "my.yaml").write_text("name: mine\n", encoding="utf-8")
    (tmp_path / "exam.jsonl").write_text(EXAM, encoding="utf-8")
    (tmp_path / "suite.yaml").write_text(SUITE, encoding="utf-8")
    (tmp_path / "questions.txt").write_text("Hello?\nWho are you?\n", encoding="utf-8")
    alone = words[0] == "train" or "run" in words[:2]
    cli = type(finished)(tmp_path / "home" if alone else finished.home, tmp_path)
    code = 0
    if words[:2] == ["pipeline", "run"]:
        words[1] = "plan"  # what it would do; that runs do what plans say is shown elsewhere
    elif words[:2] == ["pipeline", "rerun"]:
        words[1:3] = ["plan", "full"]
    elif words[:2] in (["stage", "run"], ["train", "sft"]):
        code = 2  # in an empty home its inputs are missing, and it says so
    said = cli(*words, settings=False, code=code)
    assert said and "Traceback" not in said
    assert code == 0 or "waits for" in said


def test_the_data_commands_of_the_readme_work_one_after_the_other(finished: Any, tmp_path: Path) -> None:
    for name, source in (("docs", "docs-1"), ("chats", "chats")):
        (tmp_path / f"{name}.jsonl").write_bytes((finished.data / f"{source}.jsonl").read_bytes())
    (tmp_path / "exam.jsonl").write_text(EXAM, encoding="utf-8")
    cli = type(finished)(tmp_path / "home", tmp_path)
    assert len(DATA) >= 7
    for command in DATA:
        said = cli(*shlex.split(command)[1:], settings=False)
        assert said and "Traceback" not in said
