"""Files of models and adapters, strict when loaded, without code or pickles; prefixes in rows."""

import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from peft import PeftModel, PeftModelForCausalLM
from safetensors.torch import load_file, save_file
from support import tiny_adapters
from support.comparing import copies, same
from support.tiny_adapters import CASE_IDS, CASES, SHAPES, disturb, logits, random_ids, settings
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from ttrain.config import Settings
from ttrain.data.packing import IGNORE, Batch
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import adapters, factory
from ttrain.store.model_files import ADAPTER, BASE, weights_digest
from ttrain.train import checkpoint_format
from ttrain.train.checkpoint_format import tensor_parts
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.losses import token_loss_sum

T = 30


def weight(model: Any) -> Tensor:
    return adapters.state(model)["prompt_embeddings"]


def packed(lengths: tuple[int, ...]) -> Batch:
    ids, sizes = random_ids(7, 1, T).numpy(), [*lengths, T - sum(lengths)]
    segments = np.repeat([*range(len(lengths)), -1], sizes)[None]
    positions = np.concatenate([np.arange(size) for size in sizes])[None]
    is_last = np.diff(segments, append=-1) != 0
    labels = np.where(is_last | (segments < 0), IGNORE, np.roll(ids, -1))
    return Batch(ids, labels, positions, segments)


def alone(model: Any, batch: Batch) -> Tensor:
    total = torch.zeros(())
    for number in range(int(batch.segments_BT.max()) + 1):
        places = batch.segments_BT[0] == number
        ids = torch.from_numpy(batch.input_ids_BT[:, places])
        output = PeftModelForCausalLM.forward(model, input_ids=ids, use_cache=False)
        total += token_loss_sum(output.logits, torch.from_numpy(batch.labels_BT[:, places]))
    return total


@pytest.mark.parametrize(
    ("shape", "chunk_tokens"), [*((shape, None) for shape in SHAPES), ("llama", 0)]
)
def test_records_in_a_row_have_the_loss_of_each_alone(shape: str, chunk_tokens: int | None) -> None:
    config = settings(kind="prefix")
    model = disturb(adapters.attach(tiny_model(**SHAPES[shape]), config))
    batch = packed((11, 4, 12))
    task = LanguageModeling(config, model, chunk_tokens=chunk_tokens)
    loss = task.train_step(task.build_model(), batch, tiny_adapters.CPU).total
    expected = alone(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(total, weight(model))[0] for total in (loss, expected))
    assert float(theirs.abs().max()) > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_masked", [False, True])
def test_token_by_token_is_as_all_at_once(is_masked: bool) -> None:
    model = disturb(adapters.attach(tiny_model(), settings(kind="prefix"))).eval()
    ids, more = random_ids(3, 2, 9), dict[str, Any]()
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        for t in range(9):
            if is_masked:
                more |= {"attention_mask": torch.ones(2, t + 1)}
                more |= {"position_ids": torch.full((2, 1), t)}
            output = model(input_ids=ids[:, t : t + 1], use_cache=True, **more)
            more["cache"] = output.cache
            torch.testing.assert_close(output.logits[:, 0], whole[:, t], rtol=1e-5, atol=1e-5)


def test_settings_leave_room_for_the_prefix_before_rows_that_are_as_long_as_the_model() -> None:
    rows = {name: {"row_length": 32} for name in ("pretrain", "sft", "lora", "evaluate")}
    tree: dict[str, Any] = {"model": {"max_length": 64}, **rows, "lora": {"row_length": 64}}
    tree["evaluate"]["stride"] = 32
    Settings.model_validate(tree)
    tree["lora"]["kind"] = "prefix"
    with pytest.raises(ValueError, match=r"row_length.*lora\.virtual_tokens.*max_length=72"):
        Settings.model_validate(tree)


def test_what_a_prefix_cannot_is_refused() -> None:
    config = settings(kind="prefix")
    with pytest.raises(UsageError, match=r"is prefix, .* mamba .*; set lora.kind=lora"):
        adapters.attach(tiny_model(kind="mamba"), config)
    model = adapters.attach(tiny_model(), config)
    with pytest.raises(UsageError, match=r"runtime\.gradient_checkpointing.*lora\.kind"):
        LanguageModeling(config, model, gradient_checkpointing=True)
    with pytest.raises(UsageError, match="merged"):
        adapters.merge(model)


def load(base: Path, adapter: Path) -> Any:
    return adapters.load(factory.load(base), adapter, weights_digest(base))


def saved(shape: str, kind: str, directory: Path) -> tuple[Path, Path, torch.Tensor]:
    """A base, an adapter of it that moves it, and the logits of both together."""
    base = tiny_adapters.save_base(tiny_model(**SHAPES[shape]), directory / "base")
    config = settings(kind=kind, targets=("all-linear",))
    model = disturb(adapters.attach(factory.load(base), config))
    return base, tiny_adapters.save_adapter(model, directory / "adapter", base), logits(model)


@pytest.mark.parametrize(("shape", "kind"), CASES, ids=CASE_IDS)
def test_an_adapter_gives_the_same_logits_everywhere(tmp_path: Path, shape: str, kind: str) -> None:
    """Up to rounding: products of experts differ in the last bit with where their rows lie."""
    base, adapter, expected = saved(shape, kind, tmp_path)
    of_base = logits(factory.load(base))
    assert not torch.allclose(expected, of_base, atol=1e-3), "it moves nothing"
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert not any(type(module).__module__.startswith("ttrain") for module in plain.modules())
    torch.testing.assert_close(logits(plain), expected, rtol=1e-5, atol=1e-6)
    model = load(base, adapter)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)
    assert not any(p.requires_grad for p in model.parameters())
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), of_base, rtol=0, atol=1e-6)
    if kind == "prefix":
        return
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    merged = adapters.merge(model)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    assert {*factory.state(merged)} == {*factory.state(factory.load(base))}, "a plain model"


def test_a_base_in_shards_has_a_digest_too_and_a_changed_shard_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model().save_pretrained(base, max_shard_size="4KB")
    shards = sorted(base.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (base / "model.safetensors").exists()
    model = disturb(adapters.attach(factory.load(base), settings()))
    adapter = tiny_adapters.save_adapter(model, tmp_path / "adapter", base)
    assert torch.equal(logits(load(base, adapter)), logits(model))
    changed = {name: tensor + 1 for name, tensor in load_file(shards[0]).items()}
    save_file(changed, shards[0], metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="trained on"):
        load(base, adapter)


def test_an_adapter_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    base, adapter, _ = saved("llama", "lora", tmp_path)
    weights = load_file(adapter / ADAPTER)
    missing = min(weights)
    del weights[missing]
    save_file(weights, adapter / ADAPTER)
    with pytest.raises(ArtifactError, match=rf"missing: {missing} \["):
        load(base, adapter)
    for name in ("adapter_config.json", BASE):
        (adapter / name).write_text("{")
        with pytest.raises(ArtifactError, match=name):
            load(base, adapter)


LORA = '{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}'
CODE = "from transformers import LlamaConfig as Theirs, LlamaForCausalLM as Model\n"
AUTO_MAP = {"AutoConfig": "code.Theirs", "AutoModelForCausalLM": "code.Model"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_adapters.save_base(tiny_model(), tmp_path / "model")


def test_no_pickle_next_to_a_model_is_loaded_and_a_torn_file_is_refused(directory: Path) -> None:
    (directory / "adapter_config.json").write_text(LORA)
    (directory / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ArtifactError, match="adapter_config"):
        factory.load(directory)
    (directory / "adapter_config.json").unlink()
    weights = directory / "model.safetensors"
    shutil.copyfile(weights, directory / "pytorch_model.bin")
    for damage in (lambda: os.truncate(weights, 99), weights.unlink):
        damage()
        with pytest.raises(ArtifactError, match="cannot load"):
            factory.load(directory)


def test_every_weight_that_does_not_fit_is_named_and_nothing_is_loaded(directory: Path) -> None:
    model, path = tiny_model(), directory / "model.safetensors"
    weights, embeddings = load_file(path), torch.zeros(VOCAB + 1, 16)
    del weights["model.norm.weight"]
    weights |= {"model.router.weight": torch.zeros(2), "model.embed_tokens.weight": embeddings}
    save_file(weights, path, metadata={"format": "pt"})
    before = copies(factory.state(model))
    for load in (
        lambda: factory.load(directory),
        lambda: factory.overwrite(factory.state(model), weights),
    ):
        with pytest.raises(ArtifactError) as refused:
            load()
        assert str(refused.value).split("\n  ")[1:] == [
            "missing: model.norm.weight [16]",
            "unexpected: model.router.weight",
            f"mis-shaped: model.embed_tokens.weight is [{VOCAB + 1}, 16] but must be [{VOCAB}, 16]",
        ]
    assert same(before, factory.state(model))


def test_a_weight_that_is_not_finite_is_named() -> None:
    weights = {"empty": torch.zeros(0), "integers": torch.tensor([1]), "good": torch.ones(2, 2)}
    factory.need_finite(weights, "here")
    for number in (float("nan"), -float("inf")):
        weights["half"] = torch.tensor([0, number], dtype=torch.bfloat16)
        with pytest.raises(ArtifactError, match=r"1 .*here.*\(half\)"):
            factory.need_finite(weights, "here")


def test_code_next_to_weights_is_never_run_whatever_the_next_line_of_input_is(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ran = json.loads((directory / "config.json").read_bytes()), tmp_path / "ran"
    config |= {"model_type": "theirs", "auto_map": AUTO_MAP}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\n{CODE}")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    with pytest.raises(ArtifactError, match="never runs"):
        factory.load(directory)
    assert not ran.exists()


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
NUMBERS = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) * 100
# Every type, and the shapes that break writers; odd lengths, so that offsets matter.
TENSORS = {str(dtype): NUMBERS.to(dtype) for dtype in (*FLOATS, *INTEGERS)} | {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "transposed": NUMBERS.T,
    "every other": NUMBERS[:, ::2],
    "grad": NUMBERS.clone().requires_grad_(),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    'Größe "|\\ 重量': torch.tensor([True]),
}


def test_the_library_reads_what_is_written_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "t.safetensors", os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:99]))
    entry = checkpoint_format.write(path, tensor_parts(TENSORS, {"format": "pt"}))
    data, loaded = path.read_bytes(), safetensors.torch.load_file(path)
    assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert {*loaded} == {*TENSORS}
    for name, tensor in TENSORS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        bits = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (tensor, loaded[name])]
        assert torch.equal(*bits), name
    of_one_type = {"b.weight": torch.rand(3, 5), "a": torch.rand(7), "b.bias": torch.rand(1)}
    for few, metadata in ((of_one_type, {"format": "pt"}), ({}, None)):
        assert b"".join(tensor_parts(few, metadata)) == safetensors.torch.save(few, metadata)
