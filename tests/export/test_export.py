"""Exports: exact bits or an error that names the tensor, a target that is complete or untouched."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from support.tiny_models import fresh

from ttrain.core.files import temporary_path
from ttrain.data.encoder import Encoder
from ttrain.errors import ArtifactError, TTrainError, UsageError
from ttrain.export import export as exporting
from ttrain.export.export import Export, Request
from ttrain.lineage.lookup import resolve
from ttrain.model import adapters, factory
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.model_files import ADAPTER, MODEL, SECOND_HEAD, weight_files, weights_digest

pytestmark = pytest.mark.usefixtures("use_trained_home")
DOWN = "model.layers.1.mlp.down_proj.weight"


def export(name: str | Path, out: Path, **request: Any) -> Export:
    return exporting.export(resolve(str(name)), out, Request(**request))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in weight_files(directory):
        tensors |= load_file(file)
    return tensors


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_shards_have_every_tensor_once_and_stay_below_their_size(tmp_path: Path) -> None:
    exported = export("sft", tmp_path, dtype="fp32", shard_size="40KB")
    files = weight_files(tmp_path)
    index = json.loads((tmp_path / f"{MODEL}.index.json").read_bytes())["weight_map"]
    assert len(files) > 2
    for file in files:
        listed = {name for name, shard in index.items() if shard == file.name}
        with safe_open(file, "pt") as shard:
            assert set(shard.keys()) == listed
        assert exported.files[file.name] == file.stat().st_size < 45_000
    source = tensors_of(resolve("sft").model)
    written = tensors_of(tmp_path)
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in source.items())
    assert exported.parameters == sum(tensor.numel() for tensor in source.values())


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_shorter_type_is_the_nearest_number_of_every_weight(
    tmp_path: Path, dtype: str, name: str
) -> None:
    export("sft", tmp_path, dtype=dtype)
    written = tensors_of(tmp_path)
    for tensor_name, tensor in tensors_of(resolve("sft").model).items():
        assert torch.equal(written[tensor_name], tensor.to(getattr(torch, name)))
    assert json.loads((tmp_path / "config.json").read_bytes())["dtype"] == name


@pytest.mark.parametrize(
    ("value", "dtype", "error", "message"),
    [
        (70_000.0, "fp16", UsageError, f"--dtype is fp16.* 65504.* {DOWN} reaches 70000"),
        (float("nan"), "bf16", ArtifactError, rf"not finite \({DOWN}\)"),
        (float("-inf"), "fp32", ArtifactError, rf"not finite \({DOWN}\)"),
    ],
)
def test_a_number_that_the_type_does_not_have_is_an_error_that_names_the_tensor(
    tmp_path: Path, value: float, dtype: str, error: type[TTrainError], message: str
) -> None:
    model = fresh(tmp_path)
    tensors = load_file(model / MODEL)
    tensors[DOWN][3, 5] = value
    save_file(tensors, model / MODEL, metadata={"format": "pt"})
    with pytest.raises(error, match=message):
        export(model, tmp_path / "out", dtype=dtype)
    assert names_in(tmp_path) == ["model", "tokenizer"]
    if value == 70_000:
        export(model, tmp_path / "out", dtype="bf16")


@pytest.mark.parametrize("kind", ["llama", "qwen3"], ids=["a parameter", "a buffer"])
def test_experts_get_the_names_that_other_programs_know_and_the_routers_bias_stays_fp32(
    tmp_path: Path, kind: str
) -> None:
    model = fresh(tmp_path, kind=kind, moe={"experts": 4, "shared_experts": 1, "bias_rate": 0.01})
    export(model, tmp_path / "out", dtype="bf16")
    written = tensors_of(tmp_path / "out")
    name = "model.layers.1.mlp.experts."
    gate, up = tensors_of(model)[f"{name}gate_up_proj"][2].bfloat16().chunk(2)
    assert torch.equal(written[f"{name}2.gate_proj.weight"], gate)
    assert torch.equal(written[f"{name}2.up_proj.weight"], up)
    kinds = {tensor.dtype for name, tensor in written.items() if "correction_bias" in name}
    assert kinds == {torch.float32}
    assert written["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_merged_export_computes_what_base_and_adapter_compute(tmp_path: Path) -> None:
    export("lora", tmp_path, dtype="fp32", merge=True)
    reference = resolve("lora")
    assert reference.adapter

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=torch.arange(9, 49)[None]).logits  # type: ignore[no-any-return]

    base = factory.load(reference.model)
    plain = logits(base)
    adapted = logits(adapters.load(base, reference.adapter, reference.base_digest))
    merged = logits(factory.load(tmp_path))
    scale = adapted.abs().max()  # fp32 rounds relative to it: 1.4e-5 at 4.7 on a CPU with AMX
    assert (merged - adapted).abs().max() / scale < 1e-5 < (plain - adapted).abs().max() / scale


def test_an_adapter_alone_is_its_weights_its_settings_and_the_digest_of_its_base(
    tmp_path: Path,
) -> None:
    reference = resolve("lora")
    assert reference.adapter
    exported = export("lora", tmp_path, dtype="bf16")
    source = load_file(reference.adapter / ADAPTER)
    written = load_file(tmp_path / ADAPTER)
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], source[name].bfloat16()) for name in source)
    count = sum(tensor.numel() for tensor in source.values())
    assert (exported.kind, exported.parameters) == ("adapter", count)
    assert not list(tmp_path.glob("model*"))
    reopened = resolve(str(tmp_path))
    expected = (reference.model, weights_digest(reference.model))
    assert (reopened.model, reopened.base_digest) == expected


def test_the_tokenizer_the_template_and_the_tokens_that_end_an_answer_come_along(
    tmp_path: Path,
) -> None:
    source = resolve("sft").model
    export("sft", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()
    encoder = Encoder(source)
    generation = json.loads((tmp_path / "generation_config.json").read_bytes())
    assert generation["eos_token_id"] == [encoder.eos_id, encoder.end_id]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in tmp_path.iterdir())


def test_the_second_head_is_left_out_unless_it_is_requested(tmp_path: Path) -> None:
    model = fresh(tmp_path)
    with pytest.raises(UsageError, match=f"{SECOND_HEAD}.*--keep-head"):
        export(model, tmp_path / "out", keep_head=True)
    weight = torch.randn(8, 4)
    save_file({"weight": weight}, model / SECOND_HEAD)
    exported = export(model, tmp_path / "without")
    assert SECOND_HEAD not in exported.files
    assert "second head" in exported.remarks[0]
    export(model, tmp_path / "with", keep_head=True)
    head = tmp_path / "with" / SECOND_HEAD
    assert torch.equal(load_file(head)["weight"], weight.bfloat16())
    assert resolve(str(tmp_path / "with")).second_head == head


def test_a_target_is_replaced_only_on_request_and_only_if_it_is_a_model(
    tmp_path: Path, trained: ArtifactStore
) -> None:
    out = tmp_path / "out"
    export("lora", out)
    with pytest.raises(UsageError, match="--force"):
        export("lora", out)
    with pytest.raises(UsageError, match=r"'sft' .*--merge"):
        export("sft", out, force=True, merge=True)
    export("sft", out, force=True)
    assert not (out / ADAPTER).exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    precious = foreign / "train.py"
    precious.touch()
    source = resolve("lora").model
    for directory in (foreign, precious, source / "x", trained.root / "store" / "x", source):
        with pytest.raises(UsageError):
            export("lora", directory, force=True)
    (foreign / "config.json").touch()  # a model, and something else
    with pytest.raises(UsageError, match=r": train\.py;"):
        export("lora", foreign, force=True)
    assert names_in(foreign) == ["config.json", "train.py"]
    (tmp_path / "empty").mkdir()
    export("lora", tmp_path / "empty")
    assert names_in(tmp_path) == ["empty", "foreign", "out"]


def test_a_target_is_complete_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    export("lora", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full_disk(*args: object, **options: object) -> int:
        (temporary_path(out) / ADAPTER).write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    with monkeypatch.context() as patch, pytest.raises(SafetensorError):
        patch.setattr(exporting, "write_tensors", full_disk)
        export("lora", out, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    export("lora", out, force=True)
    assert names_in(tmp_path) == ["out"]
