"""Files of TinySeek and MiniMind that cannot be converted: each is refused with what is wrong, and nothing is left."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_weights import OLD, TINYSEEK, Made, minimind, save, tinyseek

from ttrain.errors import ArtifactError, UsageError
from ttrain.model.convert import import_model


@pytest.mark.parametrize(
    ("weights", "name", "shape", "message"),
    [
        (tinyseek, "layers.1.mla.w_uk.bias", None, "missing: layers.1.mla.w_uk.bias [16]"),
        (tinyseek, "layers.1.mla.w_new", [3], "unexpected: layers.1.mla.w_new [3]"),
        (tinyseek, "layers.1.moe_ffn.experts.5.fc2.weight", [2, 2], "fc2.weight is [2, 2] but must be [16, 5]"),
        (minimind, "model.layers.1.mlp.up_proj.weight", None, "missing: model.layers.1.mlp.up_proj.weight [24, 16]"),
        (minimind, "model.layers.1.mlp.bias", [3], "unexpected: model.layers.1.mlp.bias [3]"),
        (minimind, "model.layers.1.self_attn.v_proj.weight", [2, 2], "v_proj.weight is [2, 2] but must be [8, 16]"),
    ],
)  # fmt: skip
def test_every_tensor_that_does_not_fit_is_named_and_nothing_is_left(
    tmp_path: Path, weights: Callable[[], Made], name: str, shape: list[int] | None, message: str
) -> None:
    made = weights()
    made.pop(name, None)
    if shape:
        made.add(name, *shape)
    path = save(tmp_path / "theirs", made, config=TINYSEEK if weights is tinyseek else OLD)
    with pytest.raises(ArtifactError) as error:
        import_model(path, tmp_path / "ours")
    assert message in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["theirs"]


class Malicious:
    def __reduce__(self) -> Any:
        return (print, ("this ran",))


def test_a_pickle_that_would_run_code_is_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"fc1.weight": Malicious()}, protocol=2))
    torch.save({"fc1.weight": Malicious()}, tmp_path / "b.pth")
    for name in ("a.pkl", "b.pth"):
        with pytest.raises(ArtifactError, match="could run its code") as refused:
            import_model(tmp_path / name, tmp_path / "ours")
        assert "weights_only" not in str(refused.value)  # torch's advice to open it all the same
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        ({"a.weight": torch.zeros(2)}, None, "has no known layout"),
        ({"step": 3}, None, "is not a state dict"),
        ({"tok_embeddings.weight": torch.zeros(2, 2)}, None, "layout of 2024"),
        ({name: tensor.to(torch.int8) for name, tensor in minimind().items()}, OLD, "q_proj.weight holds int8"),
        ({name: tensor / 0 for name, tensor in minimind().items()}, OLD, "q_proj.weight holds numbers that are not finite"),
        ({f"model.0.{name}": tensor for name, tensor in tinyseek().items()}, TINYSEEK, "several TinySeek models"),
        ({**tinyseek(), "layers.0.mla.w_o.lora_a": torch.zeros(2)}, TINYSEEK, "holds an adapter"),
        (tinyseek(), None, "n_head of .* is unknown"),
        (tinyseek(), {**TINYSEEK, "d_c": 128}, "d_c is 128, but the weights have 6"),
        (tinyseek(), {**TINYSEEK, "n_layer": 6}, "n_layer is 6, but the weights have 2"),
        (minimind(), {"num_hidden_layers": 16}, "num_hidden_layers is 16, but the weights have 2"),
        (tinyseek(), {**TINYSEEK, "keep": 7}, "num_experts_per_tok is 7 but must be from 1 to 6"),
        (tinyseek(), {**TINYSEEK, "n_head": 3}, "must be a multiple of num_attention_heads 3"),
        (tinyseek(), {**TINYSEEK, "dropout": "much"}, "does not make a model: .*dropout"),
        (minimind(), {"num_attention_heads": 3}, "16 rows of queries and 8 of keys, which 3 heads do not divide"),
        (minimind(), {"inference_rope_scaling": True}, "inference_rope_scaling"),
        (minimind(experts=4), {**OLD, "num_experts_per_tok": 1}, "do not sum to 1"),
        (minimind(experts=4), {**OLD, "norm_topk_prob": False}, "do not sum to 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_converted_says_why(tmp_path: Path, weights: Any, config: Any, message: str) -> None:
    path = save(tmp_path / "theirs", weights, config=config)
    with pytest.raises(ArtifactError, match=message):
        import_model(path, tmp_path / "ours")


def test_a_torn_file_a_missing_one_and_a_directory_in_use_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "theirs", tinyseek(), config=TINYSEEK)
    with pytest.raises(UsageError, match="is not empty"):
        import_model(path, tmp_path / "theirs")
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(ArtifactError, match="cannot read"):
        import_model(path, tmp_path / "ours")
    for source, message in ((tmp_path / "none.pth", "does not exist"), (tmp_path, "holds 0 files with weights")):
        with pytest.raises(UsageError, match=message):
            import_model(source, tmp_path / "ours")


def test_an_empty_working_directory_may_be_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "theirs", tinyseek(), config=TINYSEEK)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    import_model(path, Path())
    assert (tmp_path / "here" / "config.json").is_file()
