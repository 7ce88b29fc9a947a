"""What stages see, read, leave as it is and keep: settings, callbacks of packages, a plateau."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.comparing import copies, distance, same
from support.shard_sets import write_lines
from support.tiny_data import NumberedRows, make_tokenizer
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import ALONE, settings_of_training, tiny_model

from ttrain.config import Reading, Runtime, Settings, Tokenizer, flatten
from ttrain.core.files import ProgressWriter
from ttrain.data.order import ShuffledOrder
from ttrain.data.pool import Processes
from ttrain.data.shards import ShardSet
from ttrain.engine.planner import plan_stage
from ttrain.errors import TTrainError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.model_files import PLATEAU
from ttrain.tasks import PRETRAIN, STAGES, Stage, shards, tokenizer
from ttrain.tasks.common import training
from ttrain.tasks.common.job import StageContext
from ttrain.train import checkpoint_format, micro_batches
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import Precision

SPY = """
from ttrain.train.callbacks import Callback

seen, reasons = [], []
HOOKS = "start epoch_start step_start step_end log validated saved epoch_end end failed"

class Spy(Callback):
    def stop_reason(self):
        return reasons[-1] if reasons else None

def recorder(hook):
    return lambda self, argument, *_: seen.append(f"{hook} {getattr(argument, 'step', argument)}")

for hook in HOOKS.split():
    setattr(Spy, hook, recorder(hook))
"""
STEPS = 8
DECAY_BEGINS = 5
SCHEDULE = {"kind": "infinite", "decay_fraction": 0.375}  # the decay has the steps 5 to 7
NIGHT = {"schedule": {**SCHEDULE, "warmup_steps": 0}, "seed": 2}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_process_gets_the_settings_that_its_stage_sees_and_no_others(stage: Stage) -> None:
    settings = Settings.model_validate({"model": {"moe": {"experts": 4}, "fields": {"sizes": [1]}}})
    job = json.loads(json.dumps(stage.part_of(settings)))
    rebuilt, every = Settings.rebuilt(job), dict(flatten(settings.model_dump()))
    for name in every.keys() & dict(flatten(job)).keys():
        section: object = rebuilt
        for part in name.split("."):
            section = section[part] if isinstance(section, dict) else getattr(section, part)
        assert section == every[name], name
    for prefix in stage.sees:
        assert any(f"{name}.".startswith(f"{prefix}.") for name in every), prefix
    with pytest.raises(AttributeError):
        _ = rebuilt.runtime


def test_the_tokenizer_learns_from_the_rows_that_the_model_learns_from(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    rows = [{"text": f"{number}: a text of a few words"} for number in range(200)]
    path = str(write_lines(tmp_path / "train.jsonl", rows))
    inputs, files = {"tokenizer": tmp_path / "tokenizer"}, {"train": [path]}
    arguments = {"kind": "documents", "dataset": "pretrain"}
    options = (arguments, tmp_path / "out", Runtime(device="cpu"), ProgressWriter(None))
    job = StageContext(inputs, files, *options, lambda: False, groups={"train": [0]})
    shards.build(Settings(), job, Processes(1))
    made = tokenizer.train_directory([path], tmp_path / "tok", Tokenizer(vocab_size=300), Reading())
    assert made["documents_seen"] == len(ShardSet(tmp_path / "out" / "train")) < 200


def test_measuring_leaves_weights_gradients_and_random_numbers_as_they_are() -> None:
    module = tiny_model()
    task = LanguageModeling(settings_of_training(), module)
    order = ShuffledOrder(40, 6, 120, seed=1)
    before, state = copies(module.state_dict()), torch.get_rng_state()
    precision = Precision("fp32", torch.device("cpu"))
    assert micro_batches.step_seconds(task, NumberedRows(40), order, precision, ALONE, 2) > 0
    assert same(before, module.state_dict())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())


def install(site: Path, monkeypatch: Any) -> Any:
    """Install a package with a callback; returns its module."""
    info = site / "spies-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ttrain.callbacks]\nspy = spies:Spy\n")
    (site / "spies.py").write_text(SPY)
    monkeypatch.delitem(sys.modules, "spies", raising=False)
    monkeypatch.syspath_prepend(site)
    return importlib.import_module("spies")


def test_a_callback_of_a_package_sees_every_hook(tmp_path: Path, monkeypatch: Any) -> None:
    home = Home.make(tmp_path / "home")
    settings = stage_settings(2, {"validate_every_steps": 2}, quick_validations=0)
    key = plan_stage(PRETRAIN, settings, home.store, home.pretrain_inputs()).key
    spies = install(tmp_path / "site", monkeypatch)
    home.pretrain(settings, tmp_path / "out")
    first = "start 0, epoch_start 0, step_start 1, step_end 1, log 1"
    second = "step_start 2, step_end 2, log 2, validated 2, log 2, saved 2, epoch_end 0, end 2"
    assert ", ".join(spies.seen) == f"{first}, {second}"
    store = ArtifactStore(home.store.root)
    assert plan_stage(PRETRAIN, settings, store, home.pretrain_inputs()).key == key


def test_in_a_stage_a_callback_of_a_package_may_not_stop(tmp_path: Path, monkeypatch: Any) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(2)
    install(tmp_path / "site", monkeypatch).reasons.append("enough")
    with pytest.raises(TTrainError, match=r"Spy\.stop_reason .*'enough'.*early_stopping"):
        home.pretrain(settings, tmp_path / "out")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Home]:
    """The champion's artifact, and the home of any pretraining."""
    root = tmp_path_factory.mktemp("plateau")
    home = Home.make(root / "home")
    settings = stage_settings(STEPS, {"schedule": {**SCHEDULE, "warmup_steps": 2}})
    home.pretrain(settings, root / "champion")
    return root / "champion", home


def test_the_artifact_keeps_the_state_before_the_decay(first: Any, tmp_path: Path) -> None:
    champion, home = first
    files = {path.name for path in (champion / PLATEAU).iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors"}
    saved = checkpoint_format.read(champion / "checkpoints" / f"step-{DECAY_BEGINS:08d}")
    kept = training.read_plateau(champion, "model.safetensors")
    assert same(saved.weights, kept.weights) and same(saved.optimizer, kept.optimizer)
    assert kept.step == 0
    assert not same(dict(kept.weights), load_file(champion / "model" / "model.safetensors"))
    home.pretrain(stage_settings(2), tmp_path)
    assert not (tmp_path / PLATEAU).exists(), "of another schedule"


def test_a_night_continues_the_plateau(first: Any, tmp_path: Path) -> None:
    def steps(checkpoint: Any) -> set[int]:
        optimizer = checkpoint.optimizer.items()
        return {int(value) for name, value in optimizer if name.startswith("step|")}

    champion, home = first
    settings = stage_settings(STEPS, NIGHT, checkpoint_every_steps=1, keep_checkpoints=100)
    home.pretrain(settings, tmp_path / "night", {"base": champion, "plateau": champion})
    short = stage_settings(2, NIGHT, checkpoint_every_steps=1)
    home.pretrain(short, tmp_path / "warm", {"base": champion})
    step = Path("checkpoints") / "step-00000001"
    night, warm = (checkpoint_format.read(tmp_path / name / step) for name in ("night", "warm"))
    kept = training.read_plateau(champion, "model.safetensors")
    assert steps(night) == {DECAY_BEGINS + 1} and steps(warm) == {1}
    assert distance(kept.weights, night.weights) < distance(kept.weights, warm.weights)
    assert (tmp_path / "night" / PLATEAU).is_dir()
