"""Models registered on a server that keeps artifacts itself: they open from there, and no base is uploaded twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.loadable_models import adapted, fresh, said_without_ttrain

from ttrain import tracking
from ttrain.pipeline.run_models import Registered
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tracking import Member

pytestmark = [pytest.mark.soak, pytest.mark.long]
DIRECTORIES = {"pretrain": "model", "sft": "model", "lora": "adapter"}
PLAIN = """
import json, sys
import mlflow
said = {}
for name in ("mine@challenger", "mine-sft/1", "mine-base/1"):
    pipe = mlflow.transformers.load_model(f"models:/{name}")
    said[name] = [type(pipe.model).__name__, pipe("The man", max_new_tokens=8, do_sample=False)[0]["generated_text"]]
print("SAID", json.dumps(said))
"""


def published(home: Path, stage: str, inputs: dict[str, Any] | None = None, **settings: Any) -> Artifact:
    store = ArtifactStore(home)
    output = store.work(stage, "k" * 64) / "output"
    if stage == "lora":
        base = store.path("sft", "k" * 64) / "model"
        adapted(output, base)
    else:
        fresh(output, **settings)
    told = {"inputs": inputs or {}, "ingredients": {"code": {}, "settings": {}}, "result": {}, "provenance": {}}
    return store.publish(stage, "k" * 64, output, told)


def test_a_set_on_a_server_opens_as_its_full_model_since_no_base_is_uploaded_again(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    home = tmp_path / "home"
    made = {"pretrain": published(home, "pretrain"), "sft": published(home, "sft", init_std=0.2)}
    made["lora"] = published(home, "lora", {"base": {"stage": "sft", "key": "k" * 64, "content": made["sft"].content}})
    opened = tracking.open_store(home, "ttrain")
    assert isinstance(opened, tracking.MlflowStore)
    parent = opened.start_run("full-1", tags={"ttrain.pipeline": "full"}, params={})
    members = []
    for stage, artifact in made.items():
        run = opened.start_run(stage, parent=parent, tags={"ttrain.stage": stage}, params={})
        assert isinstance(run, tracking.TrackedRun)
        model = Registered(artifact, "mine", ArtifactStore(home))
        directory, name = model.directory, model.name
        run.log_directory(artifact.path, stage)
        found = model.extra_files(run, ("The man",))
        assert found.is_whole is (stage != "lora")
        for file, text in found.texts.items():
            run.log_text(text, f"{stage}/{directory}/{file}")
        for file, source in found.files.items():
            run.log_file(source, f"{stage}/{directory}/{file}".rpartition("/")[0])
        opened.register_model(name, run=run, artifact_path=f"{stage}/{directory}", tags={**model.tags, **found.tags})
        opened.finish_uploads()
        [version] = opened.client.search_model_versions(f"name = '{name}'")
        members.append(Member(name, str(version.version), stage, artifact.key))
        run.finish("FINISHED")
    contents = {stage: artifact.content for stage, artifact in made.items()}
    tags = tracking.model_sets.tags_of("full-1", members, contents, {stage: one.key for stage, one in made.items()}, {})
    assert isinstance(parent, tracking.TrackedRun)
    assert tracking.model_sets.register_set(opened.client, "mine", parent, tags) == "1"
    assert opened.client.get_model_version("mine", "1").source == "models:/mine-sft/1"
    opened.close()
    said = said_without_ttrain(PLAIN, directory=tmp_path)
    assert said["mine@challenger"] == said["mine-sft/1"] != said["mine-base/1"]
