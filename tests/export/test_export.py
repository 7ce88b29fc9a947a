"""Exports: exact bits or an error that names the tensor, a target that is whole or untouched."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from support.loadable_models import fresh

from ttrain.core.files import temporary_path
from ttrain.data.encoder import Encoder
from ttrain.errors import ArtifactError, TTrainError, UsageError
from ttrain.export import export as exporting
from ttrain.export.export import Request, export
from ttrain.lineage.lookup import resolve
from ttrain.model import adapters, factory
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.model_files import ADAPTER, MODEL, SECOND_HEAD, weight_files, weights_digest

pytestmark = pytest.mark.usefixtures("use_trained_home")


def everything(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in weight_files(directory) for name, tensor in load_file(file).items()
    }


def test_shards_hold_every_tensor_once_and_stay_below_their_size(tmp_path: Path) -> None:
    done = export(resolve("sft"), tmp_path / "out", Request(dtype="fp32", shard_size="40KB"))
    files = weight_files(tmp_path / "out")
    index = json.loads((tmp_path / "out" / f"{MODEL}.index.json").read_bytes())["weight_map"]
    assert len(files) > 2
    for file in files:
        with safe_open(file, "pt") as shard:
            assert sorted(shard.keys()) == sorted(
                name for name, place in index.items() if place == file.name
            )
        assert done.files[file.name] == file.stat().st_size < 45_000
    source = everything(resolve("sft").model)
    written = everything(tmp_path / "out")
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in source.items()), (
        "fp32 is as it was trained"
    )
    assert done.parameters == sum(tensor.numel() for tensor in source.values())


@pytest.mark.parametrize(("word", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_shorter_type_is_the_nearest_number_of_every_weight(
    tmp_path: Path, word: str, kind: torch.dtype
) -> None:
    export(resolve("sft"), tmp_path / "out", Request(dtype=word))
    written = everything(tmp_path / "out")
    assert all(
        torch.equal(written[name], tensor.to(kind))
        for name, tensor in everything(resolve("sft").model).items()
    )
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["dtype"] == str(
        kind
    ).removeprefix("torch.")


@pytest.mark.parametrize(
    ("value", "word", "error", "message"),
    [
        (
            70_000.0,
            "fp16",
            UsageError,
            "--dtype is fp16, which holds numbers up to 65504, but the tensor {} reaches 70000",
        ),
        (float("nan"), "bf16", ArtifactError, r"hold numbers that are not finite \({}\)"),
        (float("-inf"), "fp32", ArtifactError, r"hold numbers that are not finite \({}\)"),
    ],
)
def test_what_the_type_cannot_hold_is_an_error_that_names_the_tensor(
    tmp_path: Path, value: float, word: str, error: type[TTrainError], message: str
) -> None:
    model = fresh(tmp_path)
    tensors = load_file(model / MODEL)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, model / MODEL, metadata={"format": "pt"})
    with pytest.raises(error, match=message.format(name)):
        export(resolve(str(model)), tmp_path / "out", Request(dtype=word))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer"], (
        "nothing is left"
    )
    if value == 70_000:
        export(resolve(str(model)), tmp_path / "out", Request(dtype="bf16"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_of_an_adapter_that_is_not_finite_is_not_called_too_large(
    tmp_path: Path, value: float
) -> None:
    save_file({"lora_A": torch.tensor([1.0, value])}, tmp_path / ADAPTER)
    with pytest.raises(
        ArtifactError, match="the tensor lora_A holds a value that is NaN or infinite"
    ):
        exporting.write_tensors(tmp_path / ADAPTER, tmp_path / "out", dtype="bf16")


@pytest.mark.parametrize("kind", ["llama", "qwen3"], ids=["a parameter", "a buffer"])
def test_experts_get_the_names_that_other_programs_know_and_the_routers_bias_stays_fp32(
    tmp_path: Path, kind: str
) -> None:
    model = fresh(tmp_path, kind=kind, moe={"experts": 4, "shared_experts": 1, "bias_rate": 0.01})
    export(resolve(str(model)), tmp_path / "out", Request(dtype="bf16"))
    source, written = everything(model), everything(tmp_path / "out")
    fused = [name for name in source if name.endswith("experts.gate_up_proj")]
    assert fused
    for name in fused:
        for part, tensor in zip(
            ("gate", "up"), source[name][2].to(torch.bfloat16).chunk(2), strict=True
        ):
            assert torch.equal(
                written[name.replace("gate_up_proj", f"2.{part}_proj.weight")], tensor
            )
    kinds = {name: tensor.dtype for name, tensor in written.items() if "correction_bias" in name}
    assert set(kinds.values()) == {torch.float32}
    assert written["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_merged_export_computes_what_base_and_adapter_compute(tmp_path: Path) -> None:
    reference = resolve("lora")
    assert reference.adapter
    export(reference, tmp_path / "out", Request(dtype="fp32", merge=True))
    ids = torch.arange(9, 49)[None]
    with torch.no_grad():
        base = factory.load(reference.model).eval()
        plain = base(input_ids=ids).logits
        adapted = (
            adapters.load(base, reference.adapter, reference.base_digest)
            .eval()(input_ids=ids)
            .logits
        )
        merged = factory.load(tmp_path / "out").eval()(input_ids=ids).logits
    scale = adapted.abs().max()  # fp32 rounds relative to it: 1.4e-5 at 4.7 on a CPU with AMX
    assert (merged - adapted).abs().max() / scale < 1e-5 < (plain - adapted).abs().max() / scale


def test_an_adapter_alone_is_its_weights_its_settings_and_the_digest_of_its_base(
    tmp_path: Path,
) -> None:
    reference = resolve("lora")
    assert reference.adapter
    done = export(reference, tmp_path / "out", Request(dtype="bf16"))
    source = load_file(reference.adapter / ADAPTER)
    written = load_file(tmp_path / "out" / ADAPTER)
    assert {name: tensor.to(torch.bfloat16).tolist() for name, tensor in source.items()} == {
        name: tensor.tolist() for name, tensor in written.items()
    }
    assert (done.kind, done.parameters) == (
        "adapter",
        sum(map(torch.Tensor.numel, source.values())),
    )
    assert not list((tmp_path / "out").glob("model*"))
    found = resolve(str(tmp_path / "out"))
    assert (found.model, found.base_digest) == (reference.model, weights_digest(reference.model))


def test_the_tokenizer_the_template_and_the_tokens_that_end_an_answer_come_along(
    tmp_path: Path,
) -> None:
    reference = resolve("sft")
    export(reference, tmp_path / "out", Request())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (reference.model / name).read_bytes()
    encoder = Encoder(reference.model)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_bytes())
    assert generation["eos_token_id"] == [encoder.eos_id, encoder.end_id]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "out").iterdir()), (
        "others may read it"
    )


def test_the_second_head_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    model = fresh(tmp_path)
    with pytest.raises(UsageError, match=f"holds no {SECOND_HEAD}; leave --keep-head out"):
        export(resolve(str(model)), tmp_path / "out", Request(keep_head=True))
    weight = torch.randn(8, 4)
    save_file({"weight": weight}, model / SECOND_HEAD)
    done = export(resolve(str(model)), tmp_path / "without", Request())
    assert SECOND_HEAD not in done.files
    assert "second head" in done.remarks[0]
    export(resolve(str(model)), tmp_path / "with", Request(keep_head=True))
    assert torch.equal(
        load_file(tmp_path / "with" / SECOND_HEAD)["weight"], weight.to(torch.bfloat16)
    )
    assert resolve(str(tmp_path / "with")).second_head == tmp_path / "with" / SECOND_HEAD


def test_a_target_is_replaced_only_when_asked_and_only_if_it_is_a_model(
    tmp_path: Path, trained: ArtifactStore
) -> None:
    reference, out = resolve("lora"), tmp_path / "out"
    export(reference, out, Request())
    with pytest.raises(UsageError, match="--force"):
        export(reference, out, Request())
    export(resolve("sft"), out, Request(force=True))
    assert not (out / ADAPTER).exists()
    other = tmp_path / "other"
    (other / ".git").mkdir(parents=True)
    (other / "train.py").write_text("precious")
    with pytest.raises(UsageError, match=r"no model.*--force"):
        export(reference, other, Request(force=True))
    with pytest.raises(UsageError, match="a file"):
        export(reference, other / "train.py", Request())
    (other / "config.json").touch()
    with pytest.raises(
        UsageError, match=r"holds more than a model: \.git/, train\.py; .* move the rest away"
    ):
        export(reference, other, Request(force=True))
    assert (other / "train.py").read_text() == "precious"
    for place in (reference.model / "x", trained.root / "store" / "x", reference.model):
        with pytest.raises(UsageError, match="directory of its own"):
            export(reference, place, Request(force=True))
    empty = tmp_path / "empty"
    empty.mkdir()
    export(reference, empty, Request())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "other", "out"], (
        "nothing is left beside"
    )


def test_merging_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'sft' .*--merge"):
        export(resolve("sft"), tmp_path / "out", Request(merge=True))


def test_a_target_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, out = resolve("lora"), tmp_path / "out"
    export(reference, out, Request())
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full_disk(*_: object, **__: object) -> int:
        (temporary_path(out) / ADAPTER).write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    with monkeypatch.context() as patch, pytest.raises(SafetensorError, match="No space"):
        patch.setattr(exporting, "write_tensors", full_disk)
        export(reference, out, Request(force=True))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    export(reference, out, Request(force=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
