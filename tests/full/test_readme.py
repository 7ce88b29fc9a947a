"""The pages' commands and snippets, run on a finished pipeline; test_documents.py parses all."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_home import Cli
from support.snippets import PAGES, ROOT, commands, snippets

from ttrain.tracking.client import open_client, own_uri

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [f"ttrain {command.text}" for command in commands("README.md")]
# Run by test_interruptions, test_nightly_cron, soak/test_nights_kills
SERVERS = {
    "ttrain up",
    "ttrain up --open",
    "ttrain down",
    "ttrain pipeline serve",
    "ttrain pipeline schedule nightly --cron '0 2 * * *' --timezone Europe/Berlin -c my.yaml",
}
# Run by test_doctor, test_cli_train and test_init
ALONE = {"ttrain doctor", "ttrain train regression", "ttrain init docs.jsonl chats.jsonl"}
# Run by inference/test_serve, test_gate, test_ui, test_compare, test_sweep, test_lineage_pipeline
OTHERS = tuple(
    f"ttrain {word} " for word in ("serve", "gate train", "compare", "sweep", "reproduce")
)
# Commands of the other pages that a finished pipeline can run...
RUN_HERE = (
    *("pipeline plan ", "pipeline run full", "artifacts ", "lineage sft", "report"),
    *("export sft --to out/chat", "export lora --"),
)
# ...unless they name what only a reader has
ONLY_THERE = (
    *("start_from=", "llama.cpp", "runtime.node_rank", "nightly", "english", "adopt"),
    *("--run baseline", "data.dpo=artifacts", "report sweep-"),
)
OTHER_PAGES = {
    command.text for command in commands(*PAGES[1:]) if command.text.startswith(RUN_HERE)
}
OTHER_PAGES = {text for text in OTHER_PAGES if not any(word in text for word in ONLY_THERE)}
DATA = [
    f"ttrain {command.text}"
    for command in commands("docs/data.md")
    if command.text.startswith(("init", "data ", "stage run ")) and "NESTED" not in command.words
]
OF_README = {
    name.removeprefix("ttrain ")
    for name in {*COMMANDS} - {*DATA} - SERVERS - ALONE
    if not name.startswith(OTHERS)
}
EXAM = '{"question": "Which colour has the sky?", "choices": ["blue", "loud"], "answer": 0}\n' * 2
PAIR = '{"prompt": "Is N even?", "chosen": "N it is.", "rejected": "Perhaps."}\n'
SUITE = "tasks:\n  exam: {kind: choices, file: exam.jsonl}\n"
FILES = {
    "my.yaml": "name: mine\n",
    "exam.jsonl": EXAM,
    "poems.jsonl": EXAM,
    "pairs.jsonl": "".join(PAIR.replace("N", str(number)) for number in range(40)),
    "suite.yaml": SUITE,
    "mine.yaml": SUITE,
    "questions.txt": "Hello?\nWho are you?\n",
    "model_config.json": '{"d_model": 64, "n_head": 2, "n_layer": 2}',
}


def files_of_a_reader(finished: Cli, directory: Path) -> None:
    for name, source in (("docs", "docs-1"), ("chats", "chats"), ("domain", "domain")):
        shutil.copyfile(finished.data / f"{source}.jsonl", directory / f"{name}.jsonl")
    for name, text in FILES.items():
        (directory / name).write_text(text, encoding="utf-8")


def artifact_path(finished: Cli, stage: str) -> str:
    return finished.here("artifacts", "path", stage, settings=False).strip()


def test_the_readme_opens_with_the_two_commands_and_the_makefile_has_them() -> None:
    opening = re.findall(r"^\$ (make \w+)", README, flags=re.MULTILINE)[:2]
    assert opening == ["make run", "make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, flags=re.MULTILINE))
    assert {*re.findall(r"make (\w+)`", README)} <= targets
    assert len(COMMANDS) > 15 and len(OTHER_PAGES) > 12


@pytest.mark.soak
@pytest.mark.parametrize("command", sorted(OF_README | OTHER_PAGES))
def test_a_command_of_a_page_works(command: str, finished: Any, tmp_path: Path) -> None:
    if "NESTED" in command:
        command = command.replace("NESTED", artifact_path(finished, "shards-pretrain"))
    words = shlex.split(command)
    files_of_a_reader(finished, tmp_path)
    is_alone = words[0] == "train" or "run" in words[:2]
    cli = Cli(tmp_path / "home" if is_alone else finished.home, tmp_path)
    code = 0
    if words[:2] == ["pipeline", "run"]:
        words[1] = "plan"  # what it would do; that runs do what plans say is shown elsewhere
        for option in ("--note", "--tag"):  # of a run, which a plan does not label
            if option in words:
                del words[words.index(option) : words.index(option) + 2]
    elif words[:2] == ["pipeline", "rerun"]:
        words[1:3] = ["plan", "full"]
    elif words[:2] == ["stage", "run"]:
        code = 2  # in an empty home its inputs are missing, and it says so
    said = cli.here(*words, settings=False, code=code)
    assert said and "Traceback" not in said
    assert code == 0 or "waits for" in said


def test_the_commands_of_the_page_of_data_work_in_turn(finished: Any, tmp_path: Path) -> None:
    files_of_a_reader(finished, tmp_path)
    (tmp_path / "my.yaml").unlink()  # which `init` writes
    cli = Cli(tmp_path / "home", tmp_path)
    assert len(DATA) >= 4
    for command in DATA:
        assert cli.in_process(*shlex.split(command)[1:], settings=False)


def assert_runs(code: str, cli: Cli) -> None:
    database = f"sqlite:///{cli.home / 'mlflow' / 'mlflow.db'}"
    environment = {**cli.environment, "MLFLOW_TRACKING_URI": database}
    command = [sys.executable, "-P", "-c", code]
    process = subprocess.run(
        command, env=environment, cwd=cli.home, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.soak
def test_the_page_of_tracking_opens_registered_models(finished: Any, tmp_path: Path) -> None:
    (snippet,) = [snippet for snippet in snippets("python") if snippet.page == "docs/tracking.md"]
    # A copy, since MLflow notes what was opened
    moved = Cli(tmp_path / "home", finished.data)
    shutil.copytree(finished.home / "mlflow", moved.home / "mlflow")
    open_client(own_uri(moved.home), moved.home)  # which points a copied home's places at itself
    assert_runs(snippet.text.replace("quickstart", "tiny-test").replace("-sft/3", "-sft/1"), moved)


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["tokenizer", "pretrain", "lora", "evaluate"])
def test_an_artifact_opens_as_its_page_says(stage: str, finished: Any) -> None:
    page = (ROOT / "artifacts/README.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| [^|]*`{stage}`[^|]* \| (.*) \|$", page, flags=re.MULTILINE)
    place = artifact_path(finished, stage)
    if stage == "evaluate":
        names = re.findall(r"`([\w.]+\.json)`", cell)
        assert len(names) == 2 and all((Path(place) / name).is_file() for name in names)
        return
    (call,) = re.findall(r"`([\w.]+\(.*?\))`", cell)
    model = f"AutoModelForCausalLM.from_pretrained('{artifact_path(finished, 'sft')}/model')"
    call = call.replace("<model of sft>", model)
    call = re.sub(r"<artifact>([/\w]*)", lambda match: repr(f"{place}{match[1]}"), call)
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    assert_runs(f"from peft import PeftModel\n{imports}\n{call}", finished)
