"""What stages see and read, and what they leave as it is."""

import json
from pathlib import Path

import pytest
import torch
from support.comparing import copies, same
from support.shard_sets import write_lines
from support.tiny_data import NumberedRows, make_tokenizer
from support.tiny_trainers import ALONE, settings_of_training, tiny_model

from ttrain.config import Reading, Runtime, Settings, Tokenizer, flatten
from ttrain.core.files import ProgressWriter
from ttrain.data.order import ShuffledOrder
from ttrain.data.pool import Processes
from ttrain.data.shards import ShardSet
from ttrain.tasks import STAGES, Stage, shards, tokenizer
from ttrain.tasks.common import tuning
from ttrain.tasks.common.job import StageContext
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import Precision


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
    assert tuning.step_seconds(task, NumberedRows(40), order, precision, ALONE, 2) > 0
    assert same(before, module.state_dict())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())
