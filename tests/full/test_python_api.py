"""`import ttrain` in a program of the user's: in a thread, quiet, with the environment and the signals left alone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.planned_homes import remember_modules

import ttrain
import ttrain.api

DATA = {"data.pretrain": "docs*.jsonl", "data.sft": "chats.jsonl", "data.lora": "domain.jsonl"}


def settings_of(cli: Any, **overrides: Any) -> Any:
    files = {key: str(cli.data / name) for key, name in DATA.items()}
    return ttrain.api.load_settings(cli.data / "tiny.yaml", overrides=files | overrides)


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def state_of_process() -> tuple[Any, ...]:
    return dict(os.environ), [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]


def test_importing_loads_none_of_the_libraries() -> None:
    script = "import sys, ttrain; print(sorted({'torch', 'pydantic', 'rich', 'mlflow', 'prefect'} & {*sys.modules}), dir(ttrain))"
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith("[]") and all(name in output for name in ttrain.__all__)
    with pytest.raises(AttributeError, match="modell"):
        ttrain.modell  # noqa: B018


def test_a_plan_is_that_of_the_command_and_says_why(finished: Any) -> None:
    plan = ttrain.plan("full", settings_of(finished), home=finished.home)
    assert plan.is_cached and plan["sft"].key == finished.plan()["sft"]["key"]
    changed = ttrain.plan(
        "full", settings_of(finished, **{"sft.optim.lr": 2e-4}), home=finished.home
    )
    assert [stage.name for stage in changed if stage.state == "run"] == ["sft", "lora", "evaluate"]
    assert "sft.optim.lr" in changed["sft"].reasons[0] and changed["lora"].key is None
    assert "sft.optim.lr" in str(changed) and json.dumps(changed.to_json())
    with pytest.raises(ttrain.TTrainError, match=r"sft\.optim\.lr"):
        ttrain.load_settings(overrides={"sft.optim.rl": 1})
    with pytest.raises(ttrain.TTrainError, match="no pipeline"):
        ttrain.plan("ful", home=finished.home)


def test_a_cached_run_has_the_figures_and_artifacts_of_the_one_that_made_them(
    finished: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    before = state_of_process()
    run = in_thread(lambda: ttrain.run("full", settings_of(finished), home=finished.home))
    assert state_of_process() == before and capfd.readouterr() == ("", "")
    first = ttrain.runs(name="tiny-test", home=finished.home)[-1]
    assert run.outcome == "cached" and first.outcome == "completed" and run.name != first.name
    assert run.metrics["eval/bits_per_byte"] == first.metrics["eval/bits_per_byte"] > 0
    paths, earlier = (
        {name: found.path for name, found in one.artifacts.items()} for one in (run, first)
    )
    assert paths == earlier
    assert (run.artifacts["sft"].path / "model" / "model.safetensors").is_file()
    assert not ttrain.runs(name="another", home=finished.home)
    table = ttrain.runs(home=finished.home).to_pandas()
    assert first.name in list(table["name"]) and table["eval/bits_per_byte"].notna().any()


def test_a_stage_is_built_in_a_thread_with_progress_and_nothing_printed(
    finished: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    remember_modules(tmp_path / "home")
    before, events = state_of_process(), list[tuple[str, str]]()
    labels: dict[str, Any] = {"note": "from Python", "tags": {"purpose": "test"}}
    options = {
        "until": "shards-lora",
        "progress": lambda stage, event, data: events.append((stage, event)),
        **labels,
    }
    run = in_thread(
        lambda: ttrain.run("full", settings_of(finished), home=tmp_path / "home", **options)
    )
    assert state_of_process() == before and capfd.readouterr() == ("", "")
    told = run.to_json()
    assert (run.outcome, told["note"], told["tags"]) == (
        "completed",
        "from Python",
        {"purpose": "test"},
    )
    assert (
        [stage for stage, event in events if event == "ended"]
        == ["tokenizer", "shards-lora"]
        == [*run.artifacts]
    )
    assert (
        run.artifacts["shards-lora"].content
        == ttrain.runs(home=finished.home)[-1].artifacts["shards-lora"].content
    )


def test_a_failure_is_an_exception_and_is_recorded(finished: Any, tmp_path: Path) -> None:
    good = (
        (finished.data / "domain.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:30]
    )
    (tmp_path / "domain.jsonl").write_text(
        "".join(good) + '{"messages": 1}\n' * 10, encoding="utf-8"
    )
    settings = settings_of(
        finished, **{"data.lora": str(tmp_path / "domain.jsonl"), "tracking.enabled": False}
    )
    shutil.copytree(finished.home / "store", tmp_path / "home" / "store")
    remember_modules(tmp_path / "home")
    with pytest.raises(ttrain.TTrainError, match=r"domain\.jsonl"):
        ttrain.run("full", settings, home=tmp_path / "home", only=["shards-lora"])
    assert ttrain.runs(home=tmp_path / "home")[0].outcome == "failed"
    for wrong in ({"engine": "airflow"}, {"pipeline": "nightly"}):
        with pytest.raises(ttrain.TTrainError, match=r"engine|nightly"):
            ttrain.run(**wrong, home=tmp_path / "home")


def test_a_model_is_a_plain_object_of_transformers_or_peft(finished: Any) -> None:
    model, tokenizer = ttrain.load("sft", home=finished.home)
    assert type(model).__module__.startswith("transformers.") and not model.training
    ids = tokenizer("春江", return_tensors="pt").input_ids
    assert model(ids).logits.shape[1] == ids.shape[1]
    adapted, _ = ttrain.load("tiny-test@challenger", home=finished.home)
    assert type(adapted).__module__.startswith("peft.")
    with pytest.raises(ttrain.TTrainError, match="sft"):
        ttrain.load("sfd", home=finished.home)


def code_of(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        snippets: list[str] = re.findall(
            r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL
        )
        return snippets
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)] and all(
        cell["outputs"] for cell in cells
    )
    assert not [
        output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"
    ]
    return ["".join(cell["source"]) for cell in cells]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/python.ipynb"])
def test_the_page_and_the_notebook_run(
    page: str, finished: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tiny_settings(*files: str, overrides: Any = (), profile: str = "") -> Any:
        ttrain.api.load_settings(overrides=overrides, profile=profile)  # they exist
        changed = {"sft.optim.lr"} & {*overrides} if overrides.get("lora.rank") else {}
        return settings_of(finished, **{key: overrides[key] for key in changed})

    monkeypatch.setenv("TTRAIN_HOME", str(finished.home))
    monkeypatch.setattr(ttrain, "load_settings", tiny_settings, raising=False)
    names: dict[str, Any] = {}
    for code in code_of(ROOT / page):
        exec(code.replace("quickstart@champion", "tiny-test@challenger"), names)
    assert "same settings" in capsys.readouterr().out
    assert names["run"].outcome == "cached" and not names["model"].training
