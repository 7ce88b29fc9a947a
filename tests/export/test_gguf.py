"""GGUF files: read by transformers' own reader, scored, refused where llama.cpp differs."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.tiny_models import fresh
from transformers import AutoModelForCausalLM, AutoTokenizer

from ttrain.errors import TTrainError, UsageError
from ttrain.export import gguf_export, gguf_file
from ttrain.export.export import Request, export
from ttrain.export.gguf_file import Entry
from ttrain.export.gguf_tokenizer import LLAMA3, QWEN2, fields, pre_tokenizer
from ttrain.lineage.lookup import resolve
from ttrain.model import factory
from ttrain.store.model_files import ADAPTER_CONFIG

pytestmark = pytest.mark.usefixtures("use_trained_home")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_embeddings": False, "kv_heads": 2}),
        ("qwen3", {}),
        ("qwen3", {"moe": {"experts": 4, "shared_experts": 0}}),
    ],
)
def test_the_reader_of_transformers_gets_the_same_model(
    tmp_path: Path, kind: str, fields: dict[str, object]
) -> None:
    source = fresh(tmp_path / "model", max_length=128, kind=kind, **fields)
    export(resolve(str(source)), tmp_path / "out", Request(gguf="f32"))
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        gguf_file="out-f32.gguf",
        config=factory.load(source).config,  # that reader leaves some of its fields out
    )
    ids = torch.arange(5, 60)[None]
    with torch.no_grad():
        difference = read(ids).logits - factory.load(source)(ids).logits
    assert difference.abs().max() < 1e-5


def test_experts_of_a_llama_are_stacked_in_their_order(tmp_path: Path) -> None:
    moe = {"experts": 12, "shared_experts": 0}
    source = fresh(tmp_path / "model", max_length=128, kind="llama", moe=moe)
    export(resolve(str(source)), tmp_path / "out", Request(gguf="f32"))
    config = factory.load(source).config
    names = [f"model.layers.0.block_sparse_moe.experts.{number}.w2.weight" for number in range(12)]
    experts = gguf_file.read(tmp_path / "out" / "out-f32.gguf", config, names)
    weights = factory.load(source).state_dict()["model.layers.0.mlp.experts.down_proj"]
    for number, name in enumerate(names):
        assert np.array_equal(experts[name], weights[number].numpy())


def test_a_file_has_the_tokens_the_template_and_the_ends(tmp_path: Path) -> None:
    import gguf

    export(resolve("sft"), tmp_path / "out", Request(gguf="f16"))
    fields = gguf.GGUFReader(tmp_path / "out" / "out-f16.gguf").fields
    values = {name: field.contents() for name, field in fields.items()}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = values["tokenizer.ggml.tokens"]
    ids = {name: tokens[values[f"tokenizer.ggml.{name}_token_id"]] for name in ("eos", "eot")}
    assert ids == {"eos": "<|eos|>", "eot": "<|end|>"}
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert values["tokenizer.ggml.add_bos_token"] is True
    assert values["tokenizer.ggml.pre"] == "gpt-2"
    assert values["tokenizer.chat_template"] == tokenizer.chat_template
    assert (
        values["qwen3.context_length"]
        == factory.load(tmp_path / "out").config.max_position_embeddings
    )
    types = values["tokenizer.ggml.token_type"]
    special = {number for number, kind in enumerate(types) if kind == gguf.TokenType.CONTROL}
    assert special == set(tokenizer.all_special_ids)


@pytest.mark.parametrize("name", ["sft", "lora"])
def test_each_file_is_scored_beside_the_model(tmp_path: Path, name: str) -> None:
    exported = export(resolve(name), tmp_path / "out", Request(gguf="f16,bf16"))
    assert [each.file for each in exported.scores] == ["out-f16.gguf", "out-bf16.gguf"]
    for scored in exported.scores:
        assert scored.bits_per_byte == pytest.approx(scored.original, rel=1e-3)
        assert scored.bytes > 1000
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| out-f16.gguf | {exported.scores[0].bits_per_byte:.4f} |" in card
    assert (tmp_path / "out" / "Modelfile").exists() == (name == "sft")


def test_a_file_that_scores_above_its_bound_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A wrong order of the rows of one matrix: what such a check is for.
    monkeypatch.setattr(
        Entry, "unpack", lambda entry, values: [(entry.names[0], values[::-1].copy())]
    )
    with pytest.raises(TTrainError, match=r"q8_0.*above the"):
        export(resolve("pretrain"), tmp_path / "out", Request(gguf="q8_0"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "shape", "kind", "stored"),
    [
        ("token_embd.weight", (512, 64), "q4_0", "q8_0"),
        ("output.weight", (512, 64), "f16", "f16"),
        ("blk.0.ffn_up.weight", (64, 64), "q4_0", "q4_0"),
        ("blk.0.ffn_up.weight", (64, 48), "q4_0", "f16"),
        ("blk.0.ffn_up.weight", (64, 48), "bf16", "bf16"),
        ("blk.0.ffn_norm.weight", (64,), "q4_0", "f32"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "q4_0", "f32"),
    ],
)
def test_vectors_routers_and_short_rows_are_not_quantized(
    name: str, shape: tuple[int, ...], kind: str, stored: str
) -> None:
    assert gguf_file.stored_type(name, shape, kind) == stored


def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path: Path) -> None:
    own = fresh(tmp_path / "own", max_length=128, kind="moyun")
    with pytest.raises(UsageError, match="moyun"):
        export(resolve(str(own)), tmp_path / "out", Request(gguf="f16"))
    yarn = fresh(tmp_path / "yarn", max_length=128, rope_type="yarn", rope_factor=2.0)
    with pytest.raises(UsageError, match="yarn"):
        export(resolve(str(yarn)), tmp_path / "out", Request(gguf="f16"))
    for types, part in (("q4_k_m", "rows of 256"), ("f16,q9", "q9"), ("", "q8_0")):
        with pytest.raises(UsageError, match=part):
            gguf_file.check_types(types)
    with pytest.raises(UsageError, match="--merge"):
        export(resolve("lora"), tmp_path / "out", Request(gguf="q8_0"))
    adapter = resolve("lora").adapter
    assert adapter
    copy = tmp_path / "dora"
    copy.mkdir()
    settings = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
    (copy / ADAPTER_CONFIG).write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(UsageError, match="use_dora"):
        gguf_export.gguf_adapter.check(copy, ("f16",))
    assert not (tmp_path / "out").exists()


def test_known_ways_to_split_text_have_llama_cpp_names(tmp_path: Path) -> None:
    tokenizer = json.loads((resolve("sft").model / "tokenizer.json").read_bytes())

    def split_by(pattern: str) -> dict[str, object]:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}

    assert pre_tokenizer(tokenizer) == "gpt-2"
    assert pre_tokenizer(tokenizer | split_by(QWEN2) | {"normalizer": {"type": "NFC"}}) == "qwen2"
    assert pre_tokenizer(tokenizer | split_by(LLAMA3)) == "llama-bpe"
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0]]}}
    for other in (split_by("x+"), {"normalizer": {"type": "Lowercase"}}, unigram):
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | other))
        with pytest.raises(UsageError, match="pre-tokenizer"):
            fields(Mock(), tmp_path)
