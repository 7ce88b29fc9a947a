"""Every architecture: masks, packed rows, what it learns, its files."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import ARCHITECTURES, IDS, advised, builds, config_of, model_of, verdict
from support.tiny_adapters import save_base
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model

from ttrain.config import Model
from ttrain.errors import ArtifactError
from ttrain.model import factory, registry, shape_check
from ttrain.model.architecture import build_config, suitable_kinds
from ttrain.model.factory import residual_weights

TINYSEEK: dict[str, Any] = {
    "kind": "tinyseek", "moe": {"experts": 6, "top_k": 2, "shared_experts": 1, "expert_size": 8},
    "fields": {"share_layers": True},
}  # fmt: skip


def test_every_size_that_is_advised_is_accepted_and_can_be_built() -> None:
    grid = product(range(1, 13), range(9, 140, 4), (None, 1, 2, 3, 4, 5, 8))
    refused_sizes = {
        (heads, width, kv_heads): advised(message)
        for heads, width, kv_heads in grid
        if (message := verdict({"heads": heads, "hidden_size": width, "kv_heads": kv_heads}))
    }
    assert len(refused_sizes) > 1200 and refused_sizes[3, 129, 2] == ["model.hidden_size=132", "model.kv_heads=1"]
    unplanned = []
    for (heads, width, kv_heads), advice in refused_sizes.items():
        changes = {name.removeprefix("model."): int(value) for name, _, value in (word.partition("=") for word in advice)}
        if verdict({"heads": heads, "hidden_size": width, "kv_heads": kv_heads, **changes}):
            unplanned.append((heads, width, kv_heads))
    assert unplanned == []
    assert builds({"heads": 3, "hidden_size": 132, "kv_heads": 1, "layers": 1})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "phi3", "heads": 3, "hidden_size": 129}, "model.kind is phi3, which cannot compute in these sizes"),
        ({"kind": "phi3", "heads": 3, "hidden_size": 132}, ""),
        ({"kind": "moyun", "heads": 3, "hidden_size": 129}, ""),
        ({"kind": "tinyseek", "heads": 4}, ""),
        ({"kind": "gpt2", "kv_heads": 1}, "model.kv_heads is 1"),
        ({"fields": {"head_dim": 43}, "heads": 3, "hidden_size": 129}, "model.kind is qwen3"),
        ({"fields": {"head_dim": 44}, "heads": 3, "hidden_size": 129}, ""),
        ({"moe": {}}, ""),
        ({"moe": {"dense_layers": 4}}, "model.moe.dense_layers is 4"),
        ({"kind": "qwen3", "moe": {"bias_rate": 0.1}}, "set model.moe.shared_experts=1"),
    ],
    ids=str,
)
def test_a_model_without_rules_of_its_own_is_built_to_see(settings: dict[str, Any], problem: str) -> None:
    model = Model.model_validate(settings)
    assert not registry.has_all_rules(model)
    answer = shape_check.problem_of(model)
    assert answer.startswith(problem) if problem.startswith("model") else problem in answer
    assert bool(answer) == bool(problem)


@pytest.mark.soak
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "gpt2", "mistral", "mixtral", "olmoe", "mamba", "opt", "gpt_neox", "falcon"]
)
def test_no_kind_of_default_sizes_is_refused(kind: str) -> None:
    assert shape_check.problem_of(Model(kind=kind)) == ""


def test_numbers_in_fields_may_be_written_as_people_write_them() -> None:
    """PyYAML reads 1e-4 as a word, and 1 as no float."""
    found = config_of(fields={"rms_norm_eps": "1e-4"})
    assert found["rms_norm_eps"] == 1e-4
    assert isinstance(config_of(fields={"rms_norm_eps": 1})["rms_norm_eps"], float)


def test_building_a_config_leaves_the_settings_as_they_are() -> None:
    """transformers completes mappings in place; what enters a key would change with the first build."""
    model = Model(fields={"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    before = model.model_dump(mode="json")
    build_config(model, vocab_size=VOCAB, ids=IDS)
    assert model.model_dump(mode="json") == before


def test_kinds_are_those_of_transformers_own_table_and_ours_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TABLE

    own = set(registry.OWN_KINDS)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers.models.auto", None)  # an import of it would end in an ImportError
        registry.names.cache_clear()
        assert registry.names() == {*TABLE, *own}
    monkeypatch.setattr(registry, "TABLE", "MODEL_FOR_MASKED_LM_MAPPING_NAMES")
    registry.names.cache_clear()
    assert "modernbert" in registry.names() and "llama" not in registry.names()
    monkeypatch.setattr(registry, "read_table", lambda: {}["moved"])
    registry.names.cache_clear()
    assert "modernbert" in registry.names(), "where the file is written otherwise, the table is imported"
    monkeypatch.undo()
    registry.names.cache_clear()


def test_every_suitable_kind_is_one_and_the_usual_ones_are_among_them() -> None:
    found = suitable_kinds()
    assert set(found) < registry.names()
    assert {"llama", "qwen3", "gpt2", "moyun", "tinyseek", "gemma3_text"} <= set(found)
    assert not {"bart", "gemma3", "roberta", "whisper"} & set(found)


# --- positions ----------------------------------------------------------------------------------------------------------


def frequencies(**settings: Any) -> torch.Tensor:
    found: torch.Tensor = tiny_model(**settings).model.rotary_emb.inv_freq
    return found


def test_rope_follows_its_base_type_and_factor() -> None:
    plain = frequencies()
    expected = torch.tensor([10_000.0 ** (-2 * i / 8) for i in range(4)])
    torch.testing.assert_close(plain, expected)
    torch.testing.assert_close(frequencies(rope_theta=100.0), torch.tensor([100.0 ** (-2 * i / 8) for i in range(4)]))
    torch.testing.assert_close(frequencies(rope_type="linear", rope_factor=4.0), plain / 4)
    for kind in ("yarn", "llama3"):
        scaled = frequencies(rope_type=kind, rope_factor=4.0) / plain
        assert float(scaled[0]) == pytest.approx(1.0), "what turns fast within the trained length stays"
        assert float(scaled[-1]) == pytest.approx(0.25), "what never turned there is stretched"
        assert (
            config_of(rope_type=kind, rope_factor=4.0, max_length=128)["rope_parameters"]["original_max_position_embeddings"]
            == 32
        )


def test_an_architectures_own_share_of_turning_dimensions_stays() -> None:
    found = config_of(kind="gpt_neox", rope_theta=500.0)["rope_parameters"]
    assert found == {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}


# --- initialisation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt_neox", "bert", "modernbert-decoder"])
def test_scaled_residuals_are_smaller_by_the_root_of_twice_the_layers_and_all_else_is_the_same(kind: str) -> None:
    sizes = {"kind": kind, "hidden_size": 64, "layers": 8, "init_std": 0.05}
    scaled, plain = tiny_model(**sizes, scaled_residuals=True), tiny_model(**sizes)
    writers = residual_weights(scaled)
    assert len(writers) == 16, "attention's and the feed-forward layer's, of every layer"
    for name, parameter in scaled.named_parameters():
        if name in writers:
            assert float(parameter.detach().std()) == pytest.approx(0.05 / 4, rel=0.1), name
        else:
            assert torch.equal(parameter, dict(plain.named_parameters())[name]), name


def test_init_std_is_that_of_the_weights() -> None:
    model = tiny_model(hidden_size=64, init_std=0.07)
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(0.07, rel=0.05)
    assert float(model.model.embed_tokens.weight.detach().std()) == pytest.approx(0.07, rel=0.05)


# --- files --------------------------------------------------------------------------------------------------------------


def test_every_architecture_opens_again(tmp_path: Path) -> None:
    """Checkpoints of all of them in a process without ttrain: tests/doctor/test_doctor_models."""
    own_heads = {"kind": "qwen3", "kv_heads": 1, "tie_embeddings": False}
    for options in (*ARCHITECTURES, TINYSEEK, own_heads):
        model, name = model_of(options), options["kind"]
        loaded = factory.load(save_base(model, tmp_path / name)).eval()
        with torch.no_grad():
            ids = torch.arange(9, 25)[None]
            assert torch.equal(model(ids).logits, loaded(ids).logits), name
        assert loaded.generation_config.eos_token_id == [3, 8]


def test_a_model_in_several_files_of_weights_loads_and_every_wrong_tensor_is_listed(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    files = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(files) > 2
    loaded = factory.load(tmp_path / "sharded")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))
    wrong = {}
    for file in files:
        weights = load_file(file)
        for name in [name for name in weights if "k_proj" in name]:
            wrong[name] = "mis-shaped"
            weights[name] = torch.zeros(3, 16)
        for name in [name for name in weights if "q_proj" in name]:
            wrong[name] = "missing"
            del weights[name]
        save_file(weights, file, metadata={"format": "pt"})
    assert len(wrong) == 4
    with pytest.raises(ArtifactError) as raised:
        factory.load(tmp_path / "sharded")
    for name, what in wrong.items():
        assert f"{what}: {name} " in str(raised.value)
    assert "[3, 16] but must be [16, 16]" in str(raised.value)
    with pytest.raises(ArtifactError, match=r"missing: .*q_proj\.weight \[16, 16\]"):
        factory.load_state(model, {})
