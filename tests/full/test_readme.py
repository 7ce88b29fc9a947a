"""Commands and snippets of the pages, run on a finished pipeline. That all others parse is shown by test_documents.py."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_home import Cli
from support.snippets import PAGES, ROOT, commands, snippets

from ttrain.tracking.mlflow_mirror import prepare

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [f"ttrain {command.text}" for command in commands("README.md")]
SERVERS = {  # run by test_interruptions, test_schedules_pipeline and soak/test_nights_kills; what `--open` opens: test_ui
    "ttrain up",
    "ttrain up --open",
    "ttrain down",
    "ttrain pipeline serve",
    "ttrain pipeline schedule nightly --cron '0 2 * * *' --timezone Europe/Berlin -c my.yaml",
}
ALONE = {  # run by test_doctor, test_cli_train and test_init
    "ttrain doctor",
    "ttrain train regression",
    "ttrain init docs.jsonl chats.jsonl",
}
OTHERS = (  # run by inference/test_serve, test_gate; test_ui, test_compare, test_sweep, test_lineage_pipeline
    "ttrain serve ",
    "ttrain gate train ",
    "ttrain compare ",
    "ttrain sweep ",
    "ttrain reproduce ",
)
# Commands of the other pages that a finished pipeline can run, but those that name what only a reader has.
RUN_HERE = (
    "pipeline plan ",
    "pipeline run full",
    "artifacts ",
    "export sft --to out/chat",
    "export lora --",
    "lineage sft",
    "report",
)
ONLY_THERE = (
    "start_from=",
    "llama.cpp",
    "runtime.node_rank",
    "nightly",
    "english",
    "adopt",
    "--run baseline",
    "data.dpo=artifacts",
    "report sweep-",
)
OTHER_PAGES = sorted(
    {
        command.text
        for command in commands(*PAGES[1:])
        if command.text.startswith(RUN_HERE)
        and not any(word in command.text for word in ONLY_THERE)
    }
)
DATA = [
    f"ttrain {command.text}"
    for command in commands("docs/data.md")
    if command.text.startswith(("init", "data ", "stage run ")) and "NESTED" not in command.words
]
EXAM = '{"question": "Which colour has the sky?", "choices": ["blue", "loud"], "answer": 0}\n' * 2
PAIRS = "".join(
    f'{{"prompt": "Is {n} even?", "chosen": "{n} it is.", "rejected": "Perhaps."}}\n'
    for n in range(40)
)
SUITE = "tasks:\n  exam: {kind: choices, file: exam.jsonl}\n"


def test_the_readme_opens_with_the_two_commands_and_the_makefile_has_them() -> None:
    assert re.findall(r"^\$ (make \w+)", README, flags=re.MULTILINE)[:2] == [
        "make run",
        "make test",
    ]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(
        re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
        for target in re.findall(r"make (\w+)`", README)
    )
    assert len(COMMANDS) > 15 and len(OTHER_PAGES) > 12


OF_README = {
    name.removeprefix("ttrain ")
    for name in {*COMMANDS} - {*DATA} - SERVERS - ALONE
    if not name.startswith(OTHERS)
}


@pytest.mark.soak
@pytest.mark.parametrize("command", sorted({*OF_README, *OTHER_PAGES}))
def test_a_command_of_a_page_works(command: str, finished: Any, tmp_path: Path) -> None:
    shards = (
        finished.here("artifacts", "path", "shards-pretrain", settings=False).strip()
        if "NESTED" in command
        else ""
    )
    said = run_on(
        finished, [word.replace("NESTED", shards) for word in shlex.split(command)], tmp_path
    )
    assert said and "Traceback" not in said


def run_on(finished: Cli, words: list[str], tmp_path: Path) -> str:
    for name, source in (("docs", "docs-1"), ("chats", "chats"), ("domain", "domain")):
        (tmp_path / f"{name}.jsonl").write_bytes((finished.data / f"{source}.jsonl").read_bytes())
    (tmp_path / "my.yaml").write_text("name: mine\n", encoding="utf-8")
    (tmp_path / "exam.jsonl").write_text(EXAM, encoding="utf-8")
    (tmp_path / "pairs.jsonl").write_text(PAIRS, encoding="utf-8")
    for name in ("suite", "mine"):
        (tmp_path / f"{name}.yaml").write_text(SUITE, encoding="utf-8")
    (tmp_path / "poems.jsonl").write_text(EXAM, encoding="utf-8")
    (tmp_path / "questions.txt").write_text("Hello?\nWho are you?\n", encoding="utf-8")
    (tmp_path / "model_config.json").write_text(
        '{"d_model": 64, "n_head": 2, "n_layer": 2}', encoding="utf-8"
    )
    alone = words[0] == "train" or "run" in words[:2]
    cli = type(finished)(tmp_path / "home" if alone else finished.home, tmp_path)
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
    said: str = cli.here(*words, settings=False, code=code)
    assert code == 0 or "waits for" in said
    return said


def test_the_commands_of_the_page_of_data_work_one_after_the_other(
    finished: Any, tmp_path: Path
) -> None:
    for name, source in (("docs", "docs-1"), ("chats", "chats")):
        (tmp_path / f"{name}.jsonl").write_bytes((finished.data / f"{source}.jsonl").read_bytes())
    (tmp_path / "exam.jsonl").write_text(EXAM, encoding="utf-8")
    cli = type(finished)(tmp_path / "home", tmp_path)
    assert len(DATA) >= 4
    for command in DATA:
        assert cli.in_process(*shlex.split(command)[1:], settings=False)


def assert_runs(code: str, cli: Cli, *arguments: str) -> None:
    database = f"sqlite:///{cli.home / 'mlflow' / 'mlflow.db'}"
    environment = {**cli.environment, "MLFLOW_TRACKING_URI": database}
    command: Sequence[str] = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(
        command, env=environment, cwd=cli.home, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.soak
def test_the_page_of_tracking_opens_registered_models(finished: Any, tmp_path: Path) -> None:
    (snippet,) = [snippet for snippet in snippets("python") if snippet.page == "docs/tracking.md"]
    shutil.copytree(
        finished.home / "mlflow", tmp_path / "home" / "mlflow"
    )  # MLflow notes what was opened
    moved = Cli(tmp_path / "home", finished.data)
    prepare(moved.home)  # which points a copied home's places at itself
    assert_runs(snippet.text.replace("quickstart", "tiny-test").replace("-sft/3", "-sft/1"), moved)


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["tokenizer", "pretrain", "lora", "evaluate"])
def test_an_artifact_opens_as_its_page_says(stage: str, finished: Any) -> None:

    page = (ROOT / "artifacts/README.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| [^|]*`{stage}`[^|]* \| (.*) \|$", page, flags=re.MULTILINE)
    place = finished.here("artifacts", "path", stage, settings=False).strip()
    if stage == "evaluate":
        names = re.findall(r"`([\w.]+\.json)`", cell)
        assert len(names) == 2 and all((Path(place) / name).is_file() for name in names)
        return
    (call,) = re.findall(r"`([\w.]+\(.*?\))`", cell)
    model = f"{finished.here('artifacts', 'path', 'sft', settings=False).strip()}/model"
    call = call.replace("<model of sft>", f"AutoModelForCausalLM.from_pretrained({model!r})")
    call = re.sub(r"<artifact>([/\w]*)", lambda match: repr(f"{place}{match[1]}"), call)
    assert_runs(
        f"from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n{call}",
        finished,
    )
