"""A second head for the token after the next: its loss, and where its weights lie."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.comparing import curve
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import CPU, settings_of_training, tiny_model
from transformers import AutoModelForCausalLM

from ttrain.config import Optim
from ttrain.config.model import MultiToken
from ttrain.data.packing import IGNORE, Batch
from ttrain.errors import ArtifactError
from ttrain.model import multi_token
from ttrain.store.model_files import SECOND_HEAD
from ttrain.tasks import sft
from ttrain.train import optim
from ttrain.train.language_modeling import LanguageModeling


def two_heads(weight: float = 0.3, **settings: Any) -> Any:
    model = tiny_model(**settings)
    multi_token.attach(model, MultiToken(weight=weight), seed=1)
    return model


def by_hand(model: Any, batch: Batch) -> tuple[float, float]:
    """Both cross entropies, summed by a loop over positions; the model sees each record alone."""
    sums = [0.0, 0.0]
    heads = [head.weight.double() for head in (model.get_output_embeddings(), model.multi_token)]
    arrays = (batch.input_ids_BT, batch.labels_BT, batch.segments_BT)
    for ids, labels, segments in zip(*arrays, strict=True):
        for segment in np.unique(segments):
            places = np.flatnonzero(segments == segment)
            text = torch.from_numpy(ids[places])[None]
            hidden = model.get_decoder()(input_ids=text).last_hidden_state[0].double()
            for shift, head in enumerate(heads):
                log_probs = torch.log_softmax(hidden @ head.T, -1)
                for at, place in enumerate(places[shift:]):
                    if labels[place] != IGNORE:
                        sums[shift] -= float(log_probs[at, labels[place]])
    return sums[0], sums[1]


@pytest.mark.parametrize(
    ("settings", "chunk"), [({}, 0), ({}, 5), ({"tie_embeddings": False}, None)], ids=str
)
@torch.no_grad()
def test_the_loss_is_that_of_both_heads(settings: dict[str, Any], chunk: int | None) -> None:
    model, batch = two_heads(0.4, **settings), NumberedRows(3).batch(range(3))
    task = LanguageModeling(settings_of_training(), model, chunk_tokens=chunk)
    loss = task.train_step(task.build_model(), batch, CPU)
    first, second = by_hand(model, batch)
    assert float(loss.parts["ce1"]) == pytest.approx(first, rel=1e-5)
    assert float(loss.parts["ce2"]) == pytest.approx(second, rel=1e-5)
    assert float(loss.total) == pytest.approx(first + 0.4 * second, rel=1e-5)
    assert loss.count == batch.live_tokens, "both are divided by the targets of the first head"
    validation = task.validation_step(task.build_model(), batch, CPU)
    assert float(validation.total) == pytest.approx(first, rel=1e-5)
    assert not validation.parts, "validation is of the next tokens alone"


def test_the_head_is_trained_by_adamw_without_decay() -> None:
    model = LanguageModeling(settings_of_training(), two_heads(tie_embeddings=False)).build_model()
    _, adamw = optim.build(model, Optim(kind="muon")).optimizers
    (group,) = (group for group in adamw.param_groups if group["weight_decay"] == 0)
    head = dict(model.named_parameters())["model.multi_token.weight"]
    assert any(parameter is head for parameter in group["params"])


def test_a_head_with_a_bias_is_loaded_and_one_of_another_size_refused(tmp_path: Path) -> None:
    model = tiny_model()
    weights = {"weight": torch.randn(VOCAB, 16), "bias": torch.randn(VOCAB)}
    save_file(weights, tmp_path / SECOND_HEAD)
    assert multi_token.attach_from(model, tmp_path)
    assert torch.equal(model.multi_token.bias, weights["bias"])
    save_file({"weight": torch.randn(VOCAB + 1, 16)}, tmp_path / SECOND_HEAD)
    with pytest.raises(ArtifactError, match=r"weight.*62.*61"):
        multi_token.attach_from(tiny_model(), tmp_path)


SHORT = {"epochs": None, "tokens": 3 * 256}


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
def test_stages_keep_the_head_or_drop_it(keep: bool, stage_home: Home, tmp_path: Path) -> None:
    multi_token_settings = MultiToken(weight=0.5, keep_head=keep)
    settings = stage_settings(2).replaced({"model": {"multi_token": multi_token_settings}})
    stage_home.pretrain(settings, tmp_path / "base")
    base, tuned = tmp_path / "base" / "model", tmp_path / "tuned" / "model"
    assert (base / SECOND_HEAD).exists() == keep
    checkpoint = max((tmp_path / "base" / "checkpoints").glob("step-*"))
    assert (checkpoint / SECOND_HEAD).exists(), "a run that is continued needs it"
    loaded, report = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True)
    # Whoever opens it sees one head.
    assert not any(report.values()) and not hasattr(loaded, "multi_token")

    inputs = {"base": tmp_path / "base", "shards": stage_home.chats.path}
    run_here(sft, settings.replaced({"sft": SHORT}), tuned.parent, inputs, settings.runtime)
    lines = [line["metrics"] for line in curve(tuned.parent / "run" / "metrics.jsonl")]
    two_headed = [line for line in lines if "loss_ce2" in line]
    assert bool(two_headed) == keep, "fine-tuning continues with the head if there is one"
    for line in two_headed:
        assert line["loss"] == pytest.approx(line["loss_ce1"] + 0.5 * line["loss_ce2"], abs=1e-6)
    if keep:
        before, after = (load_file(path / SECOND_HEAD)["weight"] for path in (base, tuned))
        assert not torch.equal(before, after)
