"""Starting from a model that exists: which stages run, what enters the keys, and what becomes of the model's weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chat_templates import CHATML, make
from support.doubles import Home, make_tokenizer, run_here, same, stage_settings, tiny_model
from support.hub import COMMIT, Hub, cache
from support.paths import ROOT
from support.planned_homes import SHARDS, House, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from ttrain.config import EvaluateConfig, LoraConfig, Moe, MultiToken, PretrainConfig, Settings, SftConfig
from ttrain.config.loading import load
from ttrain.data import existing
from ttrain.data.encoder import Encoder
from ttrain.errors import ArtifactError, UsageError
from ttrain.flows.full import full
from ttrain.model import factory, multi_token
from ttrain.pipeline.plan import plan
from ttrain.stages import evaluate, lora, new_model, pretrain, sft
from ttrain.stages.existing_model import prepare_base_model

OTHERS = {"base-model", "sft", "lora", "evaluate"}


# --- which stages run, and their keys


def folder(house: House, name: str = "mine", positions: int = 1024) -> Path:
    """A folder like a model's, to those who only look at its files."""
    house.write(f"{name}/config.json", json.dumps({"max_position_embeddings": positions}))
    house.write(f"{name}/model.safetensors", "weights")
    return house.write(f"{name}/tokenizer.json", "{}").parent


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        (["pretrain.start_from=HERE"], {"tokenizer", *SHARDS, "base-model", "pretrain", "sft", "lora", "evaluate"}),
        (["sft.start_from=HERE"], {"tokenizer", "shards-sft", "shards-lora", "base-model", "sft", "lora", "evaluate"}),
        (["lora.start_from=HERE"], {"tokenizer", "shards-lora", "base-model", "lora", "evaluate"}),
        (["sft.start_from=none"], {"tokenizer", "shards-sft", "shards-lora", "new-model", "sft", "lora", "evaluate"}),
        (["lora.start_from=none"], {"tokenizer", "shards-lora", "new-model", "lora", "evaluate"}),
        (["lora.start_from=pretrain"], {"tokenizer", "shards-pretrain", "shards-lora", "pretrain", "lora", "evaluate"}),
        (["data.sft=python-docs", "lora.start_from=HERE"], {"tokenizer", "shards-lora", "base-model", "lora", "evaluate"}),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_no_stage_needs_is_not_run(house: House, overrides: list[str], stages: set[str]) -> None:
    here = folder(house)
    overrides = [text.replace("HERE", str(here)) for text in overrides]
    assert set(house.plan(*overrides)) == stages
    house.build(house.settings(*overrides))
    assert running(house.plan(*overrides)) == set()


def inputs_of(stages: Mapping[str, Any], stage: str) -> dict[str, str]:
    return {name: artifact.stage for name, artifact in stages[stage].inputs.items()}


def test_each_result_feeds_the_stage_that_starts_from_it(house: House) -> None:
    here = folder(house)
    wanted = {
        f"pretrain.start_from={here}": {"pretrain": "base-model", "sft": "pretrain", "lora": "sft", "evaluate": "pretrain"},
        f"sft.start_from={here}": {"sft": "base-model", "lora": "sft", "evaluate": "base-model"},
        f"lora.start_from={here}": {"lora": "base-model", "evaluate": "base-model"},
        "lora.start_from=pretrain": {"lora": "pretrain", "evaluate": "pretrain"},
    }
    for override, bases in wanted.items():
        house.build(house.settings(override))
        stages = house.plan(override)
        assert {stage: inputs_of(stages, stage)["base"] for stage in bases} == bases
    last = inputs_of(stages, "evaluate")
    assert last == {"base": "pretrain", "lora": "lora", "documents": "shards-pretrain", "domain": "shards-lora"}


def test_an_existing_model_counts_by_the_bytes_that_are_read(house: House) -> None:
    here = folder(house)
    house.build(house.settings(f"sft.start_from={here}"))
    moved = shutil.copytree(here, house.data / "moved" / "elsewhere")
    house.write("moved/elsewhere/README.md", "not read")
    house.write("moved/elsewhere/model-00001-of-00002.safetensors", "not read either")
    assert running(house.plan(f"sft.start_from={moved}")) == set()
    house.write("moved/elsewhere/model.safetensors", "weightS")
    stages = house.plan(f"sft.start_from={moved}")
    assert running(stages) == OTHERS
    assert stages["base-model"].why == ("weights file model.safetensors changed",)
    house.write("moved/elsewhere/model.safetensors", "weights")
    house.write("moved/elsewhere/generation_config.json", "{}")
    assert running(house.plan(f"sft.start_from={moved}")) == OTHERS


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_settings_of_a_new_model_do_not_touch_one_that_exists(house: House, stage: str) -> None:
    start = f"{stage}.start_from={folder(house)}"
    house.build(house.settings(start))
    sizes = house.write("sizes.yaml", "model: {layers: 2, max_length: 64}")
    assert running(house.plan(start, files=[sizes])) == set()


def test_only_the_second_head_that_pretraining_gives_it_is_in_the_key_of_a_model_that_exists(house: House) -> None:
    start = f"pretrain.start_from={folder(house)}"
    house.build(house.settings(start))
    stages = house.plan(start, "model.multi_token.weight=0.5")
    assert running(stages) == OTHERS - {"base-model"} | {"pretrain"}
    assert [name for name in stages["pretrain"].ingredients["settings"] if name.startswith("model.")] == [
        "model.multi_token.weight",
        "model.multi_token.keep_head",
    ]


def test_a_new_model_depends_on_its_sizes_and_its_seed_alone(house: House) -> None:
    house.build(house.settings("sft.start_from=none"))
    assert running(house.plan("sft.start_from=none", "pretrain.tokens=99", "pretrain.optim.lr=1")) == set()
    for change in ("model.layers=2", "pretrain.seed=3"):
        stages = house.plan("sft.start_from=none", change)
        assert running(stages) == {"new-model", "sft", "lora", "evaluate"}
        assert stages["new-model"].why[0].startswith(change.partition("=")[0])


def test_the_quickstart_s_text_is_made_only_where_it_is_read(house: House, tmp_path: Path) -> None:
    here, chats = folder(house), house.data / "chats.jsonl"

    def stages(*overrides: str) -> set[str]:
        return {planned.stage.name for planned in plan(full, load(overrides, environment={}).settings, house.store)}

    assert "source" in stages(f"sft.start_from={here}")
    assert "source" not in stages(f"sft.start_from={here}", f"data.sft={chats}", f"data.lora={chats}")


# --- the tokenizer, and what is refused


def test_the_tokenizer_follows_the_model_unless_another_is_named() -> None:
    loaded = load(["sft.start_from=some/where"], environment={})
    assert (loaded.settings.tokenizer.existing, loaded.settings.tokenizer.template) == ("some/where", "auto")
    assert loaded.sources["tokenizer.existing"] == "sft.start_from is set"
    other = load(["sft.start_from=some/where", "tokenizer.existing=x", "tokenizer.template=own"], environment={}).settings
    assert (other.tokenizer.existing, other.tokenizer.template) == ("x", "own")
    assert load(["sft.start_from=some/where", "lora.start_from=none"], environment={}).settings.tokenizer.existing is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sft.start_from=a", "lora.start_from=b"], "sft.start_from is a, lora.start_from is b: a pipeline starts from one"),
        (["pretrain.start_from=sft"], "pretrain.start_from: start_from is sft, a stage that does not come before"),
        (["sft.start_from=sft"], r"it takes pretrain, none, a directory \(\./sft for one of that name\)"),
        (["lora.start_from=a", "tokenizer.existing=null", "tokenizer.template=ttrain"], "lora.start_from is a, whose emb"),
        (["tokenizer.template=auto"], "tokenizer.template is 'auto' but tokenizer.existing names no tokenizer"),
        (["sft.start_from="], "sft.start_from"),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(overrides, environment={})


def test_an_unknown_kind_is_told_when_the_plan_is_made_where_a_model_of_it_would_be(house: House) -> None:
    for start in ("pretrain.start_from=none", "sft.start_from=none"):
        with pytest.raises(UsageError, match=r"model.kind is 'lama', which is not a causal .*; did you mean llama"):
            house.plan(start, "model.kind=lama")
    file = house.write("sizes.yaml", "model: {kind: lama}")
    assert "base-model" in house.plan(f"sft.start_from={folder(house)}", files=[file])


@pytest.mark.parametrize(
    ("in_file", "environment", "overrides", "refused"),
    [
        ("", {}, ["sft.start_from=a", "model.layers=2"], "model.layers (from command line)"),
        ("", {}, ["lora.start_from=a", "model.preset=1m"], "model.preset (from command line)"),
        ("sft: {start_from: a}", {"TTRAIN__MODEL__LAYERS": "2"}, [], "model.layers (from TTRAIN__MODEL__LAYERS)"),
        ("{sft: {start_from: a}, model: {fields: {rms_norm_eps: 1}}}", {}, [], "model.fields.rms_norm_eps (from "),
        ("", {}, ["sft.start_from=a", "model.multi_token.weight=1"], "model.multi_token.weight (from command line)"),
        ("model: {layers: 2}", {}, ["sft.start_from=a"], None),
        ("", {}, ["pretrain.start_from=a", "model.multi_token.weight=1"], None),
        ("", {}, ["sft.start_from=none", "model.layers=2"], None),
    ],
)
def test_sizes_given_beside_a_model_that_exists_are_refused_by_name(
    tmp_path: Path, in_file: str, environment: Mapping[str, str], overrides: Sequence[str], refused: str | None
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(in_file)
    if refused is None:
        load(overrides, files=[path], environment=environment)
        return
    with pytest.raises(UsageError, match=rf"^{re.escape(refused)}.* describes a new model, but \w+.start_from is a, which"):
        load(overrides, files=[path], environment=environment)


def test_a_folder_without_a_model_is_refused_with_what_it_lacks(house: House) -> None:
    mine = folder(house)
    (mine / "tokenizer.json").unlink()
    house.write("adapter/adapter_config.json", "{}")
    house.write("artifact/adapter/adapter_config.json", "{}")
    house.write("empty/README.md", "")
    house.write("pickled/config.json", "{}")
    house.write("pickled/pytorch_model.bin", "")
    house.write("half/config.json", "{}")
    house.write("half/model.safetensors.index.json", json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    house.write("list/config.json", "[]")
    house.write("list/model.safetensors", "")
    for name, message in {
        "mine": r"which has no tokenizer.json; set tokenizer.existing",
        "adapter": r"is an adapter; merge it into a model first: `ttrain export .*adapter --merge --to FOLDER`",
        "artifact": r"is an adapter; merge it into a model first: `ttrain export .*artifact --merge --to FOLDER`",
        "empty": r"which has no config.json",
        "pickled": r"holds neither model.safetensors .*; pytorch_model.bin is a pickle",
        "half": r"lists model-1.safetensors, but .* holds no such file",
        "list": r"it is not a JSON object",
        "nowhere": r"'.*nowhere' but there is no such folder",
    }.items():
        with pytest.raises(UsageError, match=message):
            house.plan(f"sft.start_from={house.data / name}")
    for path in ("./nowhere", "../nowhere"):
        with pytest.raises(UsageError, match=rf"sft.start_from is '{path}' but there is no such folder"):
            house.plan(f"sft.start_from={path}")
    with pytest.raises(UsageError, match=r"sft.start_from is 'pretrian' but .*; did you mean 'pretrain'"):
        house.plan("sft.start_from=pretrian")


def test_rows_that_are_longer_than_the_model_takes_are_refused_before_anything_runs(house: House) -> None:
    here = folder(house, positions=128)
    with pytest.raises(UsageError, match=r"lora.row_length is 256 but sft.start_from is .*mine, a model of 128 positions"):
        house.plan(f"sft.start_from={here}", "sft.row_length=128")
    short = ["sft.row_length=128", "lora.row_length=128", "evaluate.row_length=128"]
    sizes = house.write("sizes.yaml", "model: {max_length: 16}")
    assert "sft" in house.plan(f"sft.start_from={here}", *short, files=[sizes]), "model.max_length is of new models"
    with pytest.raises(UsageError, match=r"lora.row_length is 128, after lora.virtual_tokens 8, .*set lora.row_length=64"):
        house.plan(f"sft.start_from={here}", *short, "lora.kind=prefix")


def test_a_stage_that_is_not_needed_is_not_called_unknown(house: House) -> None:
    start = f"sft.start_from={folder(house)}"
    with pytest.raises(UsageError, match=r"stage pretrain is not needed here, since sft.start_from is .*; the stages"):
        house.plan(start, force=frozenset({"pretrain"}))


def test_an_artifact_of_ours_is_taken_for_the_model_in_it(house: House) -> None:
    inner = folder(house, "artifact/model")
    assert existing.model_files(str(inner.parent), "x") == existing.model_files(str(inner), "x")


# --- the Hub

ASK = """
import json, sys
from ttrain.data import existing
from ttrain.errors import UsageError
try:
    found = existing.model_files(sys.argv[1], "sft.start_from")
    print(json.dumps({role: [path.name for path in paths] for role, paths in found.items()}))
except UsageError as error:
    print(json.dumps(str(error)))
"""
WHOLE = {"config": ["config.json"], "weights": ["model.safetensors"], "tokenizer": ["tokenizer.json"]}


def ask(name: str, home: Path, endpoint: str) -> Any:
    """The names of the files, in a process of its own, since the Hub's library reads its environment once."""
    variables = {"PYTHONPATH": str(ROOT), "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": endpoint}
    command = [sys.executable, "-P", "-c", ASK, name]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("is_known", [False, True], ids=["nothing of it is known", "its tokenizer is"])
def test_a_model_of_the_hub_is_fetched_once_and_only_what_counts(tmp_path: Path, hub: str, is_known: bool) -> None:
    Hub.files |= {"config.json": b"{}", "README.md": b"", "pytorch_model.bin": b""}
    if is_known:
        cache(tmp_path / "home", {"tokenizer.json": Hub.files["tokenizer.json"], "config.json": b"{}"})
    assert ask("someone/small", tmp_path / "home", hub) == WHOLE
    assert not [path for path in Hub.asked if "resolve" in path and path.endswith((".md", ".bin"))]
    Hub.asked.clear()
    assert ask(f"someone/small@{COMMIT}", tmp_path / "home", hub) == WHOLE
    assert Hub.asked == []


def test_a_model_that_cannot_be_fetched_is_told_with_the_setting(tmp_path: Path) -> None:
    said = ask("someone/small", tmp_path / "home", "http://127.0.0.1:9")
    assert "sft.start_from is 'someone/small', which is neither a folder nor in the Hub's cache" in said


# --- the weights


def llama(vocab: int, **settings: Any) -> Any:
    return tiny_model(vocab=vocab, hidden_size=16, init_std=0.3, **settings)


def save(model: Any, directory: Path, template: str | None = None, **options: Any) -> Path:
    """A folder as `save_pretrained` leaves it, with a foreign tokenizer of 320 tokens at most."""
    make(directory, template)
    model.save_pretrained(directory, **options)
    return directory


def taken(directory: Path, output: Path, template: str = "auto") -> tuple[Encoder, dict[str, Any]]:
    """The tokenizer and the figures, as the two stages make them."""
    existing.install(existing.tokenizer_files(str(directory)), output / "tokenizer", template)
    figures = prepare_base_model(
        existing.model_files(str(directory), "sft.start_from"), output / "tokenizer", output / "model"
    )
    return Encoder(output / "tokenizer"), figures


def size_of(directory: Path) -> int:
    make(directory, None)
    return len(json.loads((directory / "tokenizer.json").read_bytes())["model"]["vocab"])


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_begin_as_the_mean_of_their_words_and_all_else_stays(tmp_path: Path, tied: bool) -> None:
    size = size_of(tmp_path / "x")
    model = llama(size, tie_embeddings=tied)
    encoder, figures = taken(save(model, tmp_path / "source"), tmp_path)
    grown = factory.load(tmp_path / "model")
    added = ["<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
    assert figures["added_tokens"] == sorted(added)
    assert (figures["vocab_size_before"], figures["vocab_size"], len(encoder)) == (size, size + 6, size + 6)
    before, after = factory.state(model), factory.state(grown)
    tables = {"model.embed_tokens.weight"} if tied else {"model.embed_tokens.weight", "lm_head.weight"}
    assert same({n: t for n, t in before.items() if n not in tables}, {n: t for n, t in after.items() if n not in tables})
    for name in tables:
        assert torch.equal(after[name][:size], before[name])
        for token in added:
            pieces = encoder.encode([token.strip("<|>")])[0]
            torch.testing.assert_close(after[name][encoder.special(token)], before[name][pieces].mean(dim=0))
    distinct = torch.unique(after["model.embed_tokens.weight"][size:], dim=0)
    assert len(distinct) == 6, "an adapter could not tell equal ones apart"
    ids = torch.randint(0, size, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(grown(ids).logits[..., :size], model.eval()(ids).logits)


def test_a_padded_vocabulary_is_not_grown_but_its_unused_rows_are_given_a_beginning(tmp_path: Path) -> None:
    size = size_of(tmp_path / "x")
    model = llama(size + 20)
    encoder, figures = taken(save(model, tmp_path / "source"), tmp_path)
    before, after = model.get_input_embeddings().weight, factory.load(tmp_path / "model").get_input_embeddings().weight
    assert figures["vocab_size"] == figures["vocab_size_before"] == size + 20 and len(encoder) == size + 6
    changed = (after != before).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == list(range(size, size + 6))


def test_gpt2_s_and_other_architectures_are_taken_as_well(tmp_path: Path) -> None:
    """Conv1D layers, biases in the head, and names that llama does not have."""
    from transformers import GPT2Config, GPT2LMHeadModel, PhiConfig, PhiForCausalLM

    size = size_of(tmp_path / "x")
    small: dict[str, Any] = {"vocab_size": size, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **small))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    phi = PhiForCausalLM(PhiConfig(**sizes, max_position_embeddings=64, **small))
    phi.lm_head.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    for model in (gpt2, phi):
        source = save(model, tmp_path / model.config.model_type)
        encoder, _ = taken(source, tmp_path / f"{model.config.model_type}-taken")
        grown = factory.load(tmp_path / f"{model.config.model_type}-taken" / "model")
        ids = torch.arange(12)[None]
        torch.testing.assert_close(grown(ids).logits[..., :size], model.eval()(ids).logits)
        assert existing.max_length(existing.model_files(str(source), "x")) == 64
    pieces = encoder.encode(["user"])[0]
    torch.testing.assert_close(grown.lm_head.bias[encoder.special("<|user|>")], phi.lm_head.bias[pieces].mean())


@pytest.mark.parametrize(
    "settings",
    [{"kind": "moyun"}, {"kind": "qwen3", "moe": Moe(experts=4)}, {"kind": "gemma3_text"}],
    ids=lambda settings: settings["kind"],
)
def test_what_ttrain_made_is_taken_again_whatever_its_architecture(tmp_path: Path, settings: dict[str, Any]) -> None:
    size = size_of(tmp_path / "x")
    model = tiny_model(vocab=size, hidden_size=32, **settings)
    source = tmp_path / "source"
    new_model.write(model, make_tokenizer(tmp_path / "words").directory, source)
    (make(source, None) / "chat_template.jinja").unlink()
    taken(source, tmp_path)
    grown = factory.load(tmp_path / "model")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(grown(ids, use_cache=False).logits[..., :size], model.eval()(ids, use_cache=False).logits)
    assert type(grown) is type(model) and grown.config.vocab_size == size + 6


def test_a_second_head_comes_along_and_grows_as_the_first_does(tmp_path: Path) -> None:
    size = size_of(tmp_path / "x")
    model = llama(size)
    multi_token.attach(model, MultiToken(weight=0.7), seed=3)
    source = tmp_path / "source"
    new_model.write(model, make_tokenizer(tmp_path / "words").directory, source)
    make(source, None)
    (source / "chat_template.jinja").unlink()
    before = load_file(source / "multi_token.safetensors")["weight"]
    encoder, _ = taken(source, tmp_path)
    after = load_file(tmp_path / "model" / "multi_token.safetensors")["weight"]
    assert torch.equal(after[:size], before) and len(after) == len(encoder) > size
    pieces = encoder.encode(["user"])[0]
    torch.testing.assert_close(after[encoder.special("<|user|>")], before[pieces].mean(dim=0))
    again: Any = new_model.load(tmp_path / "model")
    assert (again.multi_token.loss_weight, again.multi_token.out_features) == (0.7, len(encoder))


def test_its_chat_template_is_kept_and_given_where_it_has_none(tmp_path: Path) -> None:
    model = llama(size_of(tmp_path / "x"))
    for template, kept in ((CHATML, "own"), (None, "ttrain")):
        encoder, figures = taken(save(model, tmp_path / kept / "source", template), tmp_path / kept)
        assert encoder.template == kept
        opened = AutoTokenizer.from_pretrained(tmp_path / kept / "model", local_files_only=True)
        assert opened.chat_template == encoder.jinja
        assert ("<|end|>" in figures["added_tokens"]) == (kept == "ttrain")
        config = factory.load(tmp_path / kept / "model").generation_config
        assert (config.pad_token_id, config.bos_token_id) == (encoder.pad_id, encoder.bos_id)
        assert config.eos_token_id[:1] == [encoder.eos_id] and encoder.end_id in config.eos_token_id


def test_shards_in_half_precision_are_the_same_model_in_one_file_in_fp32(tmp_path: Path) -> None:
    model = llama(size_of(tmp_path / "x")).to(torch.bfloat16)
    source = save(model, tmp_path / "source", max_shard_size="10KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2
    taken(source, tmp_path)
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    for name, tensor in factory.state(model).items():
        assert torch.equal(after[name][: len(tensor)], tensor.float())
    opened, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()) and opened.config.vocab_size == len(Encoder(tmp_path / "model"))


def test_weights_that_do_not_fit_their_config_are_all_listed(tmp_path: Path) -> None:
    source = save(llama(size_of(tmp_path / "x")), tmp_path / "source")
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["extra.weight"] = torch.zeros(3)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(5)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError) as refused:
        taken(source, tmp_path)
    for words in ("missing: model.layers.0.mlp.up_proj.weight", "unexpected: extra.weight", "mis-shaped: model.norm.weight"):
        assert words in str(refused.value)
    assert f"in {source} do not fit" in str(refused.value), "not the folder of links from which it was read"
    assert not (tmp_path / "model").exists()


def test_what_else_lies_in_the_folder_has_no_say(tmp_path: Path) -> None:
    """An adapter's config beside a model makes `from_pretrained` load that adapter, and its base from anywhere."""
    source = save(llama(size_of(tmp_path / "x")), tmp_path / "source")
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "no/where", "r": 1}')
    (source / "model.safetensors.index.json").write_text("{")
    taken(source, tmp_path)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_tokenizer_with_other_ids_than_the_model_s_own_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = save(llama(size_of(tmp_path / "x")), tmp_path / "source")
    found = existing.model_files(str(source), "x")
    taken(source, tmp_path / "same")
    assert "other ids" not in caplog.text
    prepare_base_model(found, make_tokenizer(tmp_path / "other").directory, tmp_path / "model")
    assert "tokens that the model knows have other ids in the tokenizer" in caplog.text


# --- the stages that start from it


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, Settings, Path]:
    """A home with shards, settings, and a base model as `base-model` leaves it, with the tokenizer of the shards."""
    root = tmp_path_factory.mktemp("ready")
    home, settings = Home.make(root / "home"), stage_settings(steps=4)
    encoder = Encoder(home.tokenizer.path)
    model = new_model.new(settings.model.model_copy(update={"layers": 1}), encoder, seed=9)
    new_model.write(model, home.tokenizer.path, root / "base" / "model")
    return home, settings, root / "base"


def test_pretraining_from_a_base_begins_with_its_weights_and_leaves_its_shape(ready: Any, tmp_path: Path) -> None:
    home, settings, base = ready
    config = PretrainConfig(model=settings.model, pretrain=settings.pretrain)
    inputs = {"tokenizer": home.tokenizer.path, "shards": home.documents.path, "base": base}
    trained = pretrain.prepare(config, inputs, Encoder(home.tokenizer.path))
    assert same(trained.state(), load_file(base / "model" / "model.safetensors"))
    result = run_here(pretrain, config, tmp_path, inputs, settings.runtime)
    after = factory.load(tmp_path / "model")
    assert result["steps"] == 4 and after.config.num_hidden_layers == 1, "settings.model has 2 layers"
    assert not same(factory.state(after), load_file(base / "model" / "model.safetensors"))


def test_the_evaluation_scores_what_there_is_under_the_same_names(ready: Any, tmp_path: Path) -> None:
    home, settings, base = ready
    chats, runtime = home.chats.path, settings.runtime
    run_here(lora, LoraConfig(lora=settings.lora), tmp_path / "lora", {"base": base, "shards": chats}, runtime)
    paths = {"base": base, "lora": tmp_path / "lora", "domain": chats}
    (tmp_path / "out").mkdir()
    result = run_here(evaluate, EvaluateConfig(evaluate=settings.evaluate), tmp_path / "out", paths, runtime)
    assert set(result["metrics"]) == {"domain_loss_base", "domain_loss_lora"}
    assert result["metrics"]["domain_loss_lora"] < result["metrics"]["domain_loss_base"]
    assert set(result["samples"]) == {"base", "lora"}
    assert result["counts"]["chats"] == result["counts"]["documents"] == 0 < result["counts"]["domain"]


def test_an_adapter_is_not_put_on_a_base_it_was_not_trained_on(ready: Any, tmp_path: Path) -> None:
    home, settings, base = ready
    inputs = {"base": base, "shards": home.chats.path}
    run_here(lora, LoraConfig(lora=settings.lora), tmp_path / "lora", inputs, settings.runtime)
    run_here(sft, SftConfig(sft=settings.sft), tmp_path / "sft", inputs, settings.runtime)
    paths = {"base": base, "sft": tmp_path / "sft", "lora": tmp_path / "lora", "domain": home.chats.path}
    (tmp_path / "out").mkdir()
    with pytest.raises(ArtifactError, match="was trained on"):
        run_here(evaluate, EvaluateConfig(evaluate=settings.evaluate), tmp_path / "out", paths, settings.runtime)


def test_resuming_with_another_number_of_layers_is_refused_with_the_difference(ready: Any, tmp_path: Path) -> None:
    home, settings, _ = ready
    inputs = {"tokenizer": home.tokenizer.path, "shards": home.documents.path}

    def run(layers: int, tokens: int, **more: Any) -> Any:
        model = settings.model.model_copy(update={"layers": layers})
        config = PretrainConfig(model=model, pretrain=settings.pretrain.model_copy(update={"tokens": tokens, **more}))
        return run_here(pretrain, config, tmp_path, inputs, settings.runtime)

    run(2, 4 * 256)
    with pytest.raises(UsageError, match=r"made under other settings \(model.layers: 2 → 3\)"):
        run(3, 8 * 256)
    assert run(2, 8 * 256)["resumed_from_step"] == 4


def test_a_base_that_lies_elsewhere_now_does_not_keep_a_run_from_resuming(ready: Any, tmp_path: Path) -> None:
    home, settings, base = ready

    def run(start: str) -> Any:
        config = SftConfig(sft=settings.sft.model_copy(update={"start_from": start}))
        inputs = {"base": base, "shards": home.chats.path}
        return run_here(sft, config, tmp_path, inputs, settings.runtime)

    steps = run("/here")["steps"]
    assert run("/there")["resumed_from_step"] == steps > 0


# --- the doctor


def with_files(directory: Path, base: Path, texts: Sequence[Any] = ()) -> Settings:
    """Settings of an SFT from the model `base`, on chats in a file."""
    from support.doubles import chats

    rows = [{"messages": [vars(message) for message in messages]} for messages in chats(60)]
    path = directory / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = stage_settings(rows_per_device=2).model_dump(mode="json")
    tree |= {"data": {"sft": str(path), "lora": str(path)}, "tokenizer": {"existing": str(base), "template": "auto"}}
    tree["sft"]["start_from"] = str(base)
    return Settings.model_validate(tree)


def test_the_doctor_examines_the_model_that_is_started_from(tmp_path: Path) -> None:
    from ttrain.doctor.run import gather

    source = save(llama(size_of(tmp_path / "x"), layers=1), tmp_path / "source")
    settings = with_files(tmp_path, source)
    (tmp_path / "made").mkdir()
    found = gather("sft", settings, {}, tmp_path / "made")
    assert found.trained and str(source) in found.figure
    prepared = sft.prepare(SftConfig(sft=settings.sft), found.paths, Encoder(found.paths["tokenizer"]))
    assert prepared.model.config.num_hidden_layers == 1
    with pytest.raises(UsageError, match="stage pretrain is not needed here"):
        gather("pretrain", settings, {}, tmp_path / "made")
    (source / "model.safetensors").write_bytes(b"")
    (tmp_path / "again").mkdir()
    with pytest.raises(UsageError, match=r"sft.start_from is .*: cannot load a model"):
        gather("sft", settings, {}, tmp_path / "again")
