"""`import ttrain` in a user's program: in a thread, quiet, environment and signals left alone."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.pipeline_home import DATA

import ttrain
import ttrain.api


def settings_of(cli: Any, **overrides: Any) -> Any:
    files = {f"data.{name}": str(cli.data / file) for name, file in DATA.items()}
    return ttrain.api.load_settings(cli.data / "tiny.yaml", overrides=files | overrides)


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def state_of_process() -> tuple[Any, ...]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return dict(os.environ), [signal.getsignal(number) for number in signals]


def test_a_plan_is_that_of_the_command_and_says_why(finished: Any) -> None:
    plan = ttrain.plan("full", settings_of(finished), home=finished.home)
    assert plan.is_cached and plan["sft"].key == finished.plan()["sft"]["key"]
    settings = settings_of(finished, **{"sft.optim.lr": 2e-4})
    changed = ttrain.plan("full", settings, home=finished.home)
    assert [stage.name for stage in changed if stage.state == "run"] == ["sft", "lora", "evaluate"]
    assert "sft.optim.lr" in changed["sft"].reasons[0] and changed["lora"].key is None
    with pytest.raises(ttrain.TTrainError, match=r"sft\.optim\.lr"):
        ttrain.load_settings(overrides={"sft.optim.rl": 1})
    with pytest.raises(ttrain.TTrainError, match="no pipeline"):
        ttrain.plan("ful", home=finished.home)


def test_a_cached_run_has_what_was_made(finished: Any, capfd: pytest.CaptureFixture[str]) -> None:
    before = state_of_process()
    run = in_thread(lambda: ttrain.run("full", settings_of(finished), home=finished.home))
    assert state_of_process() == before and capfd.readouterr() == ("", "")
    first = ttrain.runs(name="tiny-test", home=finished.home)[-1]
    assert run.outcome == "cached" and first.outcome == "completed" and run.name != first.name
    assert run.metrics["eval/bits_per_byte"] == first.metrics["eval/bits_per_byte"] > 0
    assert run.artifacts.keys() == first.artifacts.keys()
    assert all(run.artifacts[name].path == first.artifacts[name].path for name in run.artifacts)
    assert (run.artifacts["sft"].path / "model" / "model.safetensors").is_file()
    table = ttrain.runs(home=finished.home).to_pandas()
    assert first.name in list(table["name"]) and table["eval/bits_per_byte"].notna().any()


def test_a_failure_is_an_exception_and_is_recorded(fresh: Any) -> None:
    (fresh.data / "docs-1.jsonl").write_text('{"text": 1}\n' * 30, encoding="utf-8")
    settings = settings_of(fresh, **{"tracking.enabled": False})
    with pytest.raises(ttrain.TTrainError, match=r"docs-1\.jsonl"):
        ttrain.run("full", settings, home=fresh.home, only=["tokenizer"])
    assert ttrain.runs(home=fresh.home)[0].outcome == "failed"
    with pytest.raises(ttrain.TTrainError, match="airflow"):
        ttrain.run(engine="airflow", home=fresh.home)


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
        return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    cells = json.loads(text)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


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
