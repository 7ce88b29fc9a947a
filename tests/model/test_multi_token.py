"""A second head for the token after the next: its labels, its loss, where its weights lie, and what goes on with it."""

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
from ttrain.config.model import Moe, MultiToken
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
    """Both cross entropies, summed by a loop over positions; the model sees each row's records apart."""
    first = second = 0.0
    for ids, labels, segments in zip(
        batch.input_ids_BT, batch.labels_BT, batch.segments_BT, strict=True
    ):
        for segment in np.unique(segments):
            places = np.flatnonzero(segments == segment)
            text = torch.from_numpy(ids[places])[None]
            hidden = model.get_decoder()(input_ids=text).last_hidden_state[0].double()
            heads = [
                model.get_output_embeddings().weight.double(),
                model.multi_token.weight.double(),
            ]
            one, two = (torch.log_softmax(hidden @ head.T, -1) for head in heads)
            for at, place in enumerate(places):
                if labels[place] != IGNORE:
                    first -= float(one[at, labels[place]])
                if at + 1 < len(places) and labels[places[at + 1]] != IGNORE:
                    second -= float(two[at, labels[places[at + 1]]])
    return first, second


@pytest.mark.parametrize(
    ("settings", "chunk"),
    [({}, 0), ({}, 5), ({"tie_embeddings": False}, None), ({"kind": "granite"}, None)],
    ids=str,
)
@torch.no_grad()
def test_the_loss_is_that_of_both_heads_by_hand(
    settings: dict[str, Any], chunk: int | None
) -> None:
    model, batch = two_heads(0.4, **settings), NumberedRows(3).batch(range(3))
    if settings.get("kind") == "granite":
        model.config.logits_scaling = 1.0
    task = LanguageModeling(settings_of_training(), model, chunk_tokens=chunk)
    found = task.train_step(task.build_model(), batch, CPU)
    first, second = by_hand(model, batch)
    assert float(found.parts["ce1"]) == pytest.approx(first, rel=1e-5)
    assert float(found.parts["ce2"]) == pytest.approx(second, rel=1e-5)
    assert float(found.total) == pytest.approx(first + 0.4 * second, rel=1e-5)
    assert found.count == batch.live_tokens, "both are divided by the targets of the first head"
    alone = task.validation_step(task.build_model(), batch, CPU)
    assert float(alone.total) == pytest.approx(first, rel=1e-5) and not alone.parts, (
        "validation is of the next tokens alone"
    )


def test_the_head_is_trained_as_the_first_one_is() -> None:
    model = LanguageModeling(settings_of_training(), two_heads(tie_embeddings=False)).build_model()
    groups = optim.build(model, Optim(kind="muon")).optimizers
    by_name = dict(model.named_parameters())
    (adamw,) = [group for o in groups for group in o.param_groups if group["weight_decay"] == 0]
    assert any(p is by_name["model.multi_token.weight"] for p in adamw["params"]), (
        "AdamW, without decay, never Muon"
    )


def test_a_head_with_a_bias_is_loaded_and_trained_and_one_of_another_size_refused_by_name(
    tmp_path: Path,
) -> None:
    model = tiny_model()
    weights = {"weight": torch.randn(VOCAB, 16), "bias": torch.randn(VOCAB)}
    save_file(weights, tmp_path / SECOND_HEAD)
    assert multi_token.attach_from(model, tmp_path)
    assert torch.equal(model.multi_token.bias, weights["bias"])
    task = LanguageModeling(settings_of_training(), model)
    batch = NumberedRows(2).batch([0, 1])
    task.train_step(task.build_model().train(), batch, CPU).total.backward()  # type: ignore[no-untyped-call]
    assert float(model.multi_token.bias.grad.abs().max()) > 0
    save_file({"weight": torch.randn(VOCAB + 1, 16)}, tmp_path / SECOND_HEAD)
    with pytest.raises(ArtifactError, match=r"weight.*\[62, 16\].*\[61, 16\]"):
        multi_token.attach_from(tiny_model(), tmp_path)


SHORT = {"epochs": None, "tokens": 3 * 256}


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
def test_stages_keep_the_head_beside_the_model_or_drop_it(
    keep: bool, stage_home: Home, tmp_path: Path
) -> None:
    settings = stage_settings(steps=2)
    changes: dict[str, Any] = {"multi_token": MultiToken(weight=0.5, keep_head=keep)}
    if keep:
        changes |= {
            "kind": "llama",
            "moe": Moe(experts=4, bias_rate=0.01, balance=0.2),
            "dropout": 0.0,
        }
    stage_home.pretrain(settings.replaced({"model": changes}), tmp_path / "base")
    left = tmp_path / "base" / "model"
    assert (left / SECOND_HEAD).exists() == keep
    assert not [name for name in load_file(left / "model.safetensors") if "multi_token" in name]
    checkpoint = max((tmp_path / "base" / "checkpoints").glob("step-*"))
    assert (checkpoint / SECOND_HEAD).exists(), "a run that is continued needs it"
    loaded, report = AutoModelForCausalLM.from_pretrained(left, output_loading_info=True)
    assert not any(report.values()) and not hasattr(loaded, "multi_token"), (
        "whoever opens it sees one head"
    )

    inputs = {"base": tmp_path / "base", "shards": stage_home.chats.path}
    run_here(sft, settings.replaced({"sft": SHORT}), tmp_path / "tuned", inputs, settings.runtime)
    lines = [line["metrics"] for line in curve(tmp_path / "tuned" / "run" / "metrics.jsonl")]
    assert any("loss_ce2" in line for line in lines) == keep, (
        "fine-tuning goes on with it where it is there"
    )
    if keep:
        for line in lines:
            if "loss_ce2" in line:
                parts = line["loss_ce1"] + 0.5 * line["loss_ce2"] + 0.2 * line["loss_balance"]
                assert line["loss"] == pytest.approx(parts, abs=1e-6)
        base, tuned = (
            load_file(tmp_path / stage / "model" / "model.safetensors")
            for stage in ("base", "tuned")
        )
        biases = [name for name in base if "correction" in name]
        assert len(biases) == 2 and not all(torch.equal(base[name], tuned[name]) for name in biases)
        before, after = (
            load_file(left / SECOND_HEAD),
            load_file(tmp_path / "tuned" / "model" / SECOND_HEAD),
        )
        assert {*before} == {*after} == {"weight"} and not torch.equal(
            before["weight"], after["weight"]
        )
