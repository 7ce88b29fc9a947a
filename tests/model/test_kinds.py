"""Architectures by name, also those that transformers does not have, and a second head."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.comparing import curve
from support.tiny_adapters import random_ids
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import ALONE, settings_of_training, tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ttrain.config import Lora, Model, Optim
from ttrain.config.model import MultiToken
from ttrain.data.packing import IGNORE, Batch
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import factory, kinds, multi_token
from ttrain.model.architecture import LLAMA3, build_config
from ttrain.model.factory import residual_weights
from ttrain.store.model_files import SECOND_HEAD
from ttrain.tasks import sft
from ttrain.train import optim
from ttrain.train.language_modeling import LanguageModeling, NextTokenLoss

IDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
WINDOW = {"sliding_window": 5}
ARCHITECTURES: tuple[dict[str, Any], ...] = (
    {"kind": "llama"},
    {"kind": "gpt2"},
    {"kind": "gemma3_text", "layers": 6, "fields": WINDOW},
    {"kind": "mistral", "fields": WINDOW},
    {"kind": "gpt_oss", "fields": {**WINDOW, "num_local_experts": 4}},
    {"kind": "llama4_text", "fields": {"attention_chunk_size": 5}},
    {"kind": "moyun"},
)


def model_of(options: dict[str, Any]) -> Any:
    return tiny_model(**{"hidden_size": 32, **options}).eval()


LENGTHS = (9, 8, 7)
T = sum(LENGTHS)


def packed() -> tuple[torch.Tensor, ...]:
    ids = torch.randint(9, VOCAB, (1, T), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    segments = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    labels = ids.roll(-1, 1)
    labels[0, torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    return ids, positions, segments, labels


@pytest.mark.parametrize("options", ARCHITECTURES, ids=lambda options: options["kind"])
def test_a_packed_row_costs_what_its_records_cost_alone(options: dict[str, Any]) -> None:
    """The masks are ours, and those of a record alone are transformers'."""
    model = model_of(options)
    ids, positions, segments, labels = packed()
    with torch.no_grad():
        together = NextTokenLoss(model)(ids, positions, segments, labels, next_only=True)[0]
        alone = 0.0
        for record in ids.split(LENGTHS, 1):
            logits = model(record, use_cache=False).logits[0, :-1]
            alone += float(F.cross_entropy(logits, record[0, 1:], reduction="sum"))
    assert float(together) == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("options", ARCHITECTURES, ids=lambda options: options["kind"])
def test_a_step_reaches_every_parameter(options: dict[str, Any]) -> None:
    """In bf16, too, since masks of eager attention are scores, which autocast must not spoil."""
    model = model_of(options).train()
    loss_module = LanguageModeling(settings_of_training(), model).build_model()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_module(*packed())[0]
    loss.backward()
    with torch.no_grad():
        exact = loss_module(*packed())[0]
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name


SIZES = {"hidden_size": 96, "layers": 3, "heads": 4, "max_length": 77, "init_std": 0.01}
USUAL = "hidden_size num_hidden_layers num_attention_heads max_position_embeddings "
OWN_NAMES = {
    "llama": f"{USUAL} initializer_range intermediate_size",
    "gpt2": "n_embd n_layer n_head n_positions initializer_range n_inner",
    "opt": f"{USUAL} init_std ffn_dim",
}


@pytest.mark.parametrize("kind", OWN_NAMES)
def test_sizes_have_the_architectures_own_names(kind: str) -> None:
    settings = Model(kind=kind, intermediate_size=160, **SIZES)
    config = build_config(settings, vocab_size=VOCAB, ids=IDS).to_dict()
    assert [config[name] for name in OWN_NAMES[kind].split()] == [*SIZES.values(), 160]
    assert {"vocab_size": VOCAB, **IDS}.items() <= config.items()


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"kind": "lama"}, ["'lama'", "llama"]),
        ({"kind": "bart"}, ["encoder", "llama"]),
        ({"kind": "gpt2", "kv_heads": 1}, ["model.kv_heads is 1", "gpt2"]),
        ({"fields": {"hiden_act": "silu"}}, ["model.fields.hiden_act", "hidden_act"]),
        ({"fields": {"num_hidden_layers": 3}}, ["model.fields.num_hidden_layers", "model.layers"]),
        ({"kind": "dots1"}, ["model.kind is dots1", "model.fields"]),
        ({"kind": "tinyseek", "fields": {"rope_head_dim": 3}}, ["rope_head_dim is 3"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_no_architecture_has_is_refused(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        factory.build(Model(**settings), vocab_size=VOCAB, ids=IDS, stop_ids=[3], seed=1)
    assert [part for part in parts if part not in str(raised.value)] == [], raised.value


def test_building_a_config_leaves_the_settings_as_they_are() -> None:
    """transformers completes mappings in place, which would change the next key."""
    model = Model(fields={"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    before = model.model_dump(mode="json")
    build_config(model, vocab_size=VOCAB, ids=IDS)
    assert model.model_dump(mode="json") == before


def test_targets_are_compared_with_the_layers_of_the_usual_kinds() -> None:
    tied = Model(tie_embeddings=True)
    for model, targets in ((Model(), ("no_such_layer", "q_proj")), (tied, ("lm_head",))):
        with pytest.raises(UsageError, match=targets[0]):
            kinds.check_targets("lora", Lora(targets=targets), model)
    kinds.check_targets("lora", Lora(targets=("attention", "mlp.down_proj")), Model())


def test_rope_follows_its_base_type_and_factor() -> None:
    settings = Model(rope_theta=100.0, rope_type="llama3", rope_factor=4.0, max_length=64)
    rope = build_config(settings, vocab_size=VOCAB, ids=IDS).rope_parameters
    expected = {"rope_theta": 100.0, "rope_type": "llama3", "factor": 4.0, **LLAMA3}
    assert rope == expected | {"original_max_position_embeddings": 16}


EXPERTS = {"kind": "tinyseek", "moe": {"experts": 6, "expert_size": 8}}


@pytest.mark.parametrize("options", [{"kind": "llama"}, {"kind": "gpt2"}, EXPERTS], ids=str)
def test_scaled_residuals_are_smaller_by_the_root_of_twice_the_layers(options: Any) -> None:
    sizes = {**options, "hidden_size": 64, "layers": 8, "init_std": 0.05}
    scaled, plain = tiny_model(**sizes, scaled_residuals=True), tiny_model(**sizes)
    writers, unscaled = residual_weights(scaled), dict(plain.named_parameters())
    assert len(writers) == 16, "attention's and the feed-forward layer's, of every layer"
    for name, parameter in scaled.named_parameters():
        if name in writers:
            assert float(parameter.detach().std()) == pytest.approx(0.05 / 4, rel=0.1), name
        else:
            assert torch.equal(parameter, unscaled[name]), name


TINYSEEK = {"experts": 6, "top_k": 2, "shared_experts": 1, "expert_size": 8}
ONE_LAYER = {"share_layers": True, "rope_head_dim": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "moyun": {"kind": "moyun"},
    "tinyseek": {"kind": "tinyseek", "moe": TINYSEEK, "init_std": 0.2},
    "tinyseek, one layer": {"kind": "tinyseek", "moe": TINYSEEK, "fields": ONE_LAYER},
}
# Recorded while references by loops gave the same: torch's own encoder for moyun, and for tinyseek
# attention, rotation, routing and experts of one position at a time.
LOGITS = {
    "moyun": [-0.226082, 2.520066, 3.098167, 0.38469, -1.52202],
    "tinyseek": [2.286817, 0.275719, -0.886027, 0.817441, 2.901219],
    "tinyseek, one layer": [2.45264, 0.780938, -0.447101, 0.912252, 2.746416],
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_computes_what_it_did_when_it_was_proved(shape: str, implementation: str) -> None:
    model = tiny_model(**SHAPES[shape]).eval()
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            waves = torch.sin(0.7 * torch.arange(parameter.numel()) + number)
            parameter.copy_(0.3 * waves.view_as(parameter) + float(parameter.ndim == 1))
        logits = model(torch.arange(9, 29)[None]).logits[0, -1, :5]
    assert logits.tolist() == pytest.approx(LOGITS[shape], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_and_left_padding_change_neither_logits_nor_text(shape: str) -> None:
    model, ids = tiny_model(**SHAPES[shape]).eval(), random_ids(3, 1, 20)
    with torch.no_grad():
        whole = model(ids).logits
        start = model(ids[:, :13], use_cache=True)
        rest = model(ids[:, 13:], cache=start.cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat((start.logits, rest), 1), whole, rtol=1e-5, atol=1e-6)
    ids = random_ids(3, 2, 6)
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    plain = model.generate(ids, use_cache=True, **how)
    mask = torch.tensor([[0] * 3 + [1] * 6] * 2)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), 1)
    assert torch.equal(model.generate(padded, attention_mask=mask, **how)[:, 3:], plain)


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
    loss = task.train_step(task.build_model(), batch, ALONE.device)
    first, second = by_hand(model, batch)
    assert float(loss.parts["ce1"]) == pytest.approx(first, rel=1e-5)
    assert float(loss.parts["ce2"]) == pytest.approx(second, rel=1e-5)
    assert float(loss.total) == pytest.approx(first + 0.4 * second, rel=1e-5)
    assert loss.count == batch.live_tokens, "both are divided by the targets of the first head"
    validation = task.validation_step(task.build_model(), batch, ALONE.device)
    assert float(validation.total) == pytest.approx(first, rel=1e-5)
    assert not validation.parts, "validation is of the next tokens alone"


def test_the_head_is_trained_by_adamw_without_decay() -> None:
    model = LanguageModeling(settings_of_training(), two_heads(tie_embeddings=False)).build_model()
    _, adamw = optim.build(model, Optim(kind="muon")).optimizers
    (group,) = (group for group in adamw.param_groups if group["weight_decay"] == 0)
    head = dict(model.named_parameters())["model.multi_token.weight"]
    assert any(parameter is head for parameter in group["params"])


def test_a_head_with_a_bias_is_loaded_and_one_of_another_size_refused(tmp_path: Path) -> None:
    model, weights = tiny_model(), {"weight": torch.randn(VOCAB, 16), "bias": torch.randn(VOCAB)}
    save_file(weights, tmp_path / SECOND_HEAD)
    assert multi_token.attach_from(model, tmp_path)
    assert torch.equal(model.multi_token.bias, weights["bias"])
    save_file({**weights, "weight": torch.randn(VOCAB + 1, 16)}, tmp_path / SECOND_HEAD)
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
