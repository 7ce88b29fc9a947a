"""A home with trained models, which all exports read."""

from collections.abc import Mapping
from types import ModuleType

import pytest
from support.tiny_models import TALKATIVE
from support.tiny_stages import Home, run_here, stage_settings

from ttrain.config import Settings
from ttrain.engine.planner import plan_stage
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tasks import LORA, PRETRAIN, SFT, Stage, lora, pretrain, sft


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    home = Home.make(tmp_path_factory.mktemp("home"))
    tree = stage_settings(3, checkpoint_every_steps=100).model_dump()
    few_steps = {stage: {**tree[stage], "tokens_per_step": 1024} for stage in ("sft", "lora")}
    settings = Settings.model_validate(
        {**tree, **few_steps, "model": {**tree["model"], **TALKATIVE}}
    )

    def build(stage: Stage, module: ModuleType, inputs: Mapping[str, Artifact]) -> Artifact:
        planned = plan_stage(stage, settings, home.store, inputs)
        assert planned.key
        output = home.store.work(stage.name, planned.key)
        paths = {name: artifact.path for name, artifact in inputs.items()}
        result = run_here(module, settings, output, paths, settings.runtime)
        used = {
            name: {"stage": each.stage, "key": each.key, "content": each.content}
            for name, each in inputs.items()
        }
        manifest = {"result": result, "ingredients": planned.ingredients, "inputs": used}
        return home.store.publish(stage.name, planned.key, output, manifest)

    base = build(PRETRAIN, pretrain, home.pretrain_inputs())
    chat = build(SFT, sft, {"base": base, "shards": home.chats})
    build(LORA, lora, {"base": chat, "shards": home.chats})
    return home.store


@pytest.fixture
def use_trained_home(trained: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(trained.root))
