"""Exports: the same tokens in a process without ttrain, exact bits or an error, a target that is whole or untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.tiny_data import make_tokenizer
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import CPU

from ttrain.config import Model, Settings
from ttrain.data.encoder import Encoder
from ttrain.errors import ArtifactError, TTrainError, UsageError
from ttrain.evaluate.baselines import greedy
from ttrain.export import export as exporting
from ttrain.export.export import Request, export, size_of
from ttrain.model import adapters, factory
from ttrain.pipeline.lineage import History
from ttrain.pipeline.model_card import Exported, card
from ttrain.pipeline.names import resolve
from ttrain.pipeline.plan import plan_stage, section_of
from ttrain.stages import LORA, PRETRAIN, SFT, Stage, lora, new_model, pretrain, sft
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.model_files import ADAPTER, MODEL, SECOND_HEAD, Reference, weight_files, weights_digest

NEW_TOKENS = 12
TALKATIVE = {"tie_embeddings": False, "init_std": 0.3}  # small weights repeat the last token for ever
# Opens directories as anybody would, and prints what each says after a prompt.
PLAIN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def say(directory, adapter, prompt, trust):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", trust_remote_code=trust)
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter)
    ids = AutoTokenizer.from_pretrained(adapter or directory)(prompt, return_tensors="pt")
    said = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1]:].tolist()
    return [token for token in said if token not in model.generation_config.eos_token_id]

for code in json.loads(sys.argv[2]):
    exec(code, {})
print("SAID", json.dumps([say(*asked) for asked in json.loads(sys.argv[1])]))
assert not [name for name in sys.modules if name.split(".")[0] == "ttrain"]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    """A pretrained model, an SFT model and an adapter, by the real stages, with their manifests."""
    home = Home.make(tmp_path_factory.mktemp("home"))
    tree = stage_settings().model_dump()
    settings = Settings.model_validate({**tree, "model": {**tree["model"], **TALKATIVE}})

    def build(stage: Stage, module: ModuleType, inputs: Mapping[str, Artifact]) -> Artifact:
        planned = plan_stage(stage, settings, home.store, inputs)
        assert planned.key
        output = home.store.work(stage.name, planned.key)
        paths = {name: artifact.path for name, artifact in inputs.items()}
        result = run_here(module, stage.config.model_validate(section_of(stage, settings)), output, paths, settings.runtime)
        used = {name: {"stage": one.stage, "key": one.key, "content": one.content} for name, one in inputs.items()}
        manifest = {"result": result, "ingredients": planned.ingredients, "inputs": used}
        return home.store.publish(stage.name, planned.key, output, manifest)

    base = build(PRETRAIN, pretrain, home.pretrain_inputs())
    chat = build(SFT, sft, {"base": base, "shards": home.chats})
    build(LORA, lora, {"base": chat, "shards": home.chats})
    return home.store


@pytest.fixture(autouse=True)
def use_trained_home(trained: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(trained.root))


def fresh(directory: Path, **settings: Any) -> Path:
    """A model of random weights, as stages leave theirs."""
    encoder = make_tokenizer(directory / "tokenizer")
    config = Model.model_validate({"hidden_size": 32, "layers": 2, "heads": 2, "max_length": 128, **TALKATIVE, **settings})
    new_model.write(new_model.new(config, encoder, seed=3), directory / "tokenizer", directory / "model")
    return directory / "model"


def everything(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model's directory."""
    return {name: tensor for file in weight_files(directory) for name, tensor in load_file(file).items()}


def said_by_us(reference: Reference, prompt: str) -> list[int]:
    model: Any = factory.load(reference.model)
    if reference.adapter:
        model = adapters.load(model, reference.adapter, reference.base_digest)
    encoder = Encoder(reference.tokenizer)
    stops = [encoder.eos_id, encoder.end_id]
    return greedy(model, [encoder.bos_id, *encoder.encode([prompt])[0]], new_tokens=NEW_TOKENS, stop_ids=stops, device=CPU)


def code_of(directory: Path, base: Path) -> str:
    """The example on the card of an export."""
    text = (directory / "README.md").read_text(encoding="utf-8").partition("```python")[2].partition("```")[0]
    return text.replace("THIS_DIRECTORY", str(directory)).replace("BASE", str(base))


def said_elsewhere(asked: list[tuple[Path, Path | None, str, bool]]) -> list[list[int]]:
    """What a process without ttrain says: (model, adapter, prompt, whether the directory's own code may run).

    It runs the code on the models' cards before.
    """
    words = json.dumps([(str(model), adapter and str(adapter), prompt, trust) for model, adapter, prompt, trust in asked])
    code = [code_of(adapter or model, model) for model, adapter in dict.fromkeys(one[:2] for one in asked)]
    command = [sys.executable, "-P", "-c", PLAIN, words, json.dumps(code)]
    environment = {**os.environ, "HF_MODULES_CACHE": str(asked[0][0].parent / "modules")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[int]] = json.loads(done.stdout.partition("SAID")[2])
    return found


@pytest.mark.soak
def test_an_export_says_the_same_tokens_in_a_process_without_ttrain(tmp_path: Path) -> None:
    """Full and merged models, an adapter, experts, and a shape that transformers does not have."""
    references = {
        "full": resolve("sft"),
        "merged": resolve("lora"),
        "adapter": resolve("lora"),
        "experts": resolve(str(fresh(tmp_path / "a", kind="qwen3", moe={"experts": 4, "shared_experts": 0}))),
        "own shape": resolve(str(fresh(tmp_path / "b", kind="moyun"))),
    }
    for name, reference in references.items():
        export(reference, tmp_path / name, Request(dtype="fp32", merge=name == "merged", shard_size="40KB"))
    prompts = ("The man", "What did")
    asked, ours = [], []
    for name, reference in references.items():
        place = (tmp_path / "full", tmp_path / name) if name == "adapter" else (tmp_path / name, None)
        asked += [(*place, prompt, name == "own shape") for prompt in prompts]
        ours += [said_by_us(reference, prompt) for prompt in prompts]
    assert said_elsewhere(asked) == ours
    assert len({tuple(said) for said in ours}) > 7, "models that all say the same prove little"
    assert len({token for said in ours for token in said}) > 20, "nor do those that repeat a word"


def test_shards_hold_every_tensor_once_and_stay_below_their_size(tmp_path: Path) -> None:
    done = export(resolve("sft"), tmp_path / "out", Request(dtype="fp32", shard_size="40KB"))
    files = weight_files(tmp_path / "out")
    index = json.loads((tmp_path / "out" / f"{MODEL}.index.json").read_bytes())["weight_map"]
    assert len(files) > 2
    for file in files:
        with safe_open(file, "pt") as shard:
            assert sorted(shard.keys()) == sorted(name for name, place in index.items() if place == file.name)
        assert done.files[file.name] == file.stat().st_size < 45_000
    source = everything(resolve("sft").model)
    written = everything(tmp_path / "out")
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in source.items()), "fp32 is as it was trained"
    assert done.parameters == sum(tensor.numel() for tensor in source.values())


@pytest.mark.parametrize(("word", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_shorter_type_is_the_nearest_number_of_every_weight(tmp_path: Path, word: str, kind: torch.dtype) -> None:
    export(resolve("sft"), tmp_path / "out", Request(dtype=word))
    written = everything(tmp_path / "out")
    assert all(torch.equal(written[name], tensor.to(kind)) for name, tensor in everything(resolve("sft").model).items())
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["dtype"] == str(kind).removeprefix("torch.")


@pytest.mark.parametrize(
    ("value", "word", "error", "message"),
    [
        (70_000.0, "fp16", UsageError, "--dtype is fp16, which holds numbers up to 65504, but the tensor {} reaches 70000"),
        (float("nan"), "bf16", ArtifactError, "the tensor {} holds a value that is NaN or infinite"),
        (float("-inf"), "fp32", ArtifactError, "the tensor {} holds a value that is NaN or infinite"),
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer"], "nothing is left"
    if value == 70_000:
        export(resolve(str(model)), tmp_path / "out", Request(dtype="bf16"))


@pytest.mark.parametrize("kind", ["llama", "qwen3"], ids=["a parameter", "a buffer"])
def test_experts_get_the_names_that_other_programs_know_and_the_routers_bias_stays_fp32(tmp_path: Path, kind: str) -> None:
    model = fresh(tmp_path, kind=kind, moe={"experts": 4, "shared_experts": 1, "bias_rate": 0.01})
    export(resolve(str(model)), tmp_path / "out", Request(dtype="bf16"))
    source, written = everything(model), everything(tmp_path / "out")
    fused = [name for name in source if name.endswith("experts.gate_up_proj")]
    assert fused
    for name in fused:
        gate, up = source[name][2].to(torch.bfloat16).chunk(2)
        assert torch.equal(written[name.replace("gate_up_proj", "2.gate_proj.weight")], gate)
        assert torch.equal(written[name.replace("gate_up_proj", "2.up_proj.weight")], up)
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
        adapted = adapters.load(base, reference.adapter, reference.base_digest).eval()(input_ids=ids).logits
        merged = factory.load(tmp_path / "out").eval()(input_ids=ids).logits
    scale = adapted.abs().max()  # fp32 rounds relative to it: 1.4e-5 at 4.7 on a CPU with AMX
    assert (merged - adapted).abs().max() / scale < 1e-5 < (plain - adapted).abs().max() / scale


def test_an_adapter_alone_is_its_weights_its_settings_and_the_digest_of_its_base(tmp_path: Path) -> None:
    reference = resolve("lora")
    assert reference.adapter
    done = export(reference, tmp_path / "out", Request(dtype="bf16"))
    source = load_file(reference.adapter / ADAPTER)
    written = load_file(tmp_path / "out" / ADAPTER)
    assert {name: tensor.to(torch.bfloat16).tolist() for name, tensor in source.items()} == {
        name: tensor.tolist() for name, tensor in written.items()
    }
    assert (done.kind, done.parameters) == ("adapter", sum(map(torch.Tensor.numel, source.values())))
    assert not list((tmp_path / "out").glob("model*"))
    found = resolve(str(tmp_path / "out"))
    assert (found.model, found.base_digest) == (reference.model, weights_digest(reference.model))


def test_the_tokenizer_the_template_and_the_tokens_that_end_an_answer_come_along(tmp_path: Path) -> None:
    reference = resolve("sft")
    export(reference, tmp_path / "out", Request())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (reference.model / name).read_bytes()
    encoder = Encoder(reference.model)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_bytes())
    assert generation["eos_token_id"] == [encoder.eos_id, encoder.end_id]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "out").iterdir()), "others may read it"


def test_the_second_head_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    model = fresh(tmp_path)
    with pytest.raises(UsageError, match=f"holds no {SECOND_HEAD}; leave --keep-head out"):
        export(resolve(str(model)), tmp_path / "out", Request(keep_head=True))
    weight = torch.randn(8, 4)
    save_file({"weight": weight}, model / SECOND_HEAD)
    done = export(resolve(str(model)), tmp_path / "without", Request())
    assert SECOND_HEAD not in done.files
    assert "its second head is left out" in done.remarks[0]
    export(resolve(str(model)), tmp_path / "with", Request(keep_head=True))
    assert torch.equal(load_file(tmp_path / "with" / SECOND_HEAD)["weight"], weight.to(torch.bfloat16))
    assert resolve(str(tmp_path / "with")).second_head == tmp_path / "with" / SECOND_HEAD


def test_a_target_is_replaced_only_when_asked_and_only_if_it_is_a_model(tmp_path: Path, trained: ArtifactStore) -> None:
    reference, out = resolve("lora"), tmp_path / "out"
    export(reference, out, Request())
    with pytest.raises(UsageError, match="which is not empty; choose another directory, or replace it with --force"):
        export(reference, out, Request())
    export(resolve("sft"), out, Request(force=True))
    assert not (out / ADAPTER).exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds no model; --force replaces models only"):
        export(reference, other, Request(force=True))
    with pytest.raises(UsageError, match="which is a file"):
        export(reference, other / "thesis.tex", Request())
    for place in (reference.model / "x", trained.root / "store" / "x", reference.model):
        with pytest.raises(UsageError, match="choose a directory of its own"):
            export(reference, place, Request(force=True))
    empty = tmp_path / "empty"
    empty.mkdir()
    export(reference, empty, Request())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "other", "out"], "nothing is left beside"


@pytest.mark.parametrize("mine", ["thesis.tex", ".git/HEAD", "train.py", "src/model.safetensors"])
def test_what_lies_beside_a_model_is_never_replaced(tmp_path: Path, mine: str) -> None:
    reference, out = resolve("lora"), tmp_path / "out"
    export(reference, out, Request())
    (out / mine).parent.mkdir(exist_ok=True)
    (out / mine).write_text("precious")
    with pytest.raises(UsageError, match=f"holds more than a model: {mine.partition('/')[0]}; .* move the rest away"):
        export(reference, out, Request(force=True))
    assert (out / mine).read_text() == "precious"


def test_a_target_that_is_a_link_is_the_directory_it_leads_to(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    for force in (False, True):
        export(resolve("lora"), link, Request(force=force))
    assert link.is_symlink() and (real / ADAPTER).is_file()


@pytest.mark.parametrize("licence", ["", "a: b", "mit\ntags: [x]"])
def test_a_licence_that_would_break_the_card_is_refused(tmp_path: Path, licence: str) -> None:
    with pytest.raises(UsageError, match="but must be one word that names it"):
        export(resolve("lora"), tmp_path / "out", Request(licence=licence))


def test_a_target_is_whole_or_as_it_was_and_what_a_killed_export_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, out = resolve("lora"), tmp_path / "out"
    export(reference, out, Request())
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full_disk(*_: object, **__: object) -> int:
        (tmp_path / f".out.writing-{os.getpid()}" / ADAPTER).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(exporting, "write_tensors", full_disk)
        export(reference, out, Request(force=True))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    for number in (gone.pid, os.getppid()):
        (tmp_path / f".out.writing-{number}").mkdir()
    export(reference, out, Request(force=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".out.writing-{os.getppid()}", "out"]


def test_merging_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'sft' is a full model, not an adapter; leave --merge out"):
        export(resolve("sft"), tmp_path / "out", Request(merge=True))
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    (prefix / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')
    with pytest.raises(UsageError, match="which adds positions and no weights"):
        export(replace(resolve("lora"), adapter=prefix), tmp_path / "out", Request(merge=True))


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("40KB", 40_000)])
def test_sizes_are_decimal(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "0GB", "-1GB", "5TB", "5GiB", "0.0001KB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="for example 5GB"):
        size_of(text)


def test_the_card_tells_training_settings_and_lineage_from_the_manifests(tmp_path: Path, trained: ArtifactStore) -> None:
    export(resolve("sft"), tmp_path / "out", Request(licence="apache-2.0"))
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    base, chat = trained.latest("pretrain"), trained.latest("sft")
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: apache-2.0\n")
    for artifact in (base, chat):
        figures = (f"{artifact.result[name]:.4f}" for name in ("loss", "validation_loss"))
        assert f"| {artifact.stage} | {artifact.result['steps']} | " in text
        assert all(figure in text for figure in figures)
        assert f"| {artifact.stage} | `{artifact.key[:12]}` | `{artifact.content[:12]}` |" in text
    assert f"base `{base.key[:12]}`" in text
    changed = text.partition("What differs from ttrain's defaults:")[2].partition("<details>")[0]
    assert "model.hidden_size=32" in changed
    assert "sft.epochs" not in changed
    assert "sft.epochs: 1.0" in text
    assert str(trained.root) not in text, "no path of the user's disk"


EXPORTED = Exported(name="mine", files="model", dtype="bf16", parameters=1, config={})


def artifact(stage: str, **manifest: Any) -> Artifact:
    return Artifact(
        stage, "k" * 64, Path("/nowhere"), {"inputs": {}, "ingredients": {}, "files": {}, "result": {}, **manifest}
    )


@pytest.mark.parametrize("parts", [{}, {"loss_ce1": 4.0, "loss_balance": 2.0}], ids=["plain", "experts"])
def test_the_card_says_where_the_loss_of_training_is_more_than_the_validation_loss(
    tmp_path: Path, parts: dict[str, float]
) -> None:
    (tmp_path / "run").mkdir()
    line = {"step": 3, "tokens": 9, "metrics": {"loss": 4.5, **parts}}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    made = replace(artifact("pretrain", result={"train_seconds": 1.0}), path=tmp_path)
    text = card(EXPORTED, History((made,), None, {}))
    assert "| 3 | 9 | 4.5000 |  |" in text
    assert ("holds more than that of the next tokens" in text) is bool(parts)


def test_the_card_names_the_model_that_was_started_from_but_no_path() -> None:
    files = {
        "config": [{"name": "config.json", "sha256": "abcdef" * 10}],
        "weights": [{"name": MODEL, "sha256": "fedcba" * 10}],
    }
    history = History((artifact("base-model", ingredients={"files": files}), artifact("sft")), None, {}, "owner/name")
    text = card(EXPORTED, history)
    assert "base_model: owner/name\n" in text.partition("---\n\n")[0]
    assert "From `owner/name` on the Hugging Face Hub" in text
    assert "| config.json | `abcdefabcdef` |" in text and f"| {MODEL} | `fedcbafedcba` |" in text
    text = card(EXPORTED, replace(history, base=None))
    assert "base_model" not in text and "From a local model" in text


@pytest.mark.parametrize(
    ("start", "base"), [("owner/name@main", "owner/name"), ("here", None), ("./x/y", None), ("sft", None)]
)
def test_where_a_pipeline_started_and_read_is_told_of_public_places_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, base: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    store = ArtifactStore(tmp_path / "home")
    inputs: dict[str, Any] = {}
    data = ["hf://owner/data", "/home/me/secret.jsonl", {"path": "https://example.org/x.jsonl", "weight": 2}]
    provenance = {"settings": {"sft": {"start_from": start}, "data": {"sft": data}}}
    for stage in ("base-model", "shards-sft", "sft"):
        (output := store.work(stage, stage)).mkdir(parents=True)
        made = store.publish(
            stage, stage, output, {"inputs": dict(inputs), "provenance": provenance, "result": {}, "ingredients": {}}
        )
        inputs[stage] = {"stage": stage, "key": stage}
    history = History.of(made, store)
    assert [one.stage for one in history.artifacts] == ["base-model", "shards-sft", "sft"]
    assert history.locations == {"sft": ("hf://owner/data", "https://example.org/x.jsonl")}
    assert history.base == base


def test_the_card_tells_the_data_its_digests_and_what_is_known_of_its_licence() -> None:
    file = {"role": "train", "kept": 7, "tokens": 70, "bytes": 700}
    own = artifact(
        "shards-pretrain",
        result={"files": [{**file, "name": "docs.jsonl"}]},
        ingredients={"files": {"train": [{"name": "docs.jsonl", "sha256": "abcdef" * 10}]}},
    )
    shipped = artifact(
        "shards-sft",
        result={"files": [{**file, "name": "sft.jsonl"}]},
        inputs={"source": {"stage": "source", "key": "k" * 64}},
    )
    source = artifact("source", files={"sft.jsonl": {"bytes": 700, "sha256": "fedcba" * 10}})
    history = History((source, own, shipped, artifact("sft")), None, {"pretrain": ("hf://owner/name",)})
    text = card(EXPORTED, history)
    assert "| pretrain | train | docs.jsonl | 7 | 70 | 700 | `abcdefabcdef` |" in text
    assert "| sft | train | sft.jsonl | 7 | 70 | 700 | `fedcbafedcba` |" in text
    assert "- sft: PSF-2.0, text of the Python documentation" in text
    assert "- pretrain: not recorded" in text
    assert "(`hf://owner/name`)" in text


def test_the_card_scores_the_model_itself_and_not_what_was_trained_on_top_of_it() -> None:
    metrics = {"bits_per_byte": 1.5, "chat_loss_base": 3.0, "chat_loss_sft": 2.0, "chat_loss_lora": 2.5}
    said = {"sft": [{"prompt": "Who | `you`?", "answer": "I\nam"}], "lora": [{"prompt": "x", "answer": "never shown"}]}
    scored = artifact("evaluate", result={"metrics": metrics, "counts": {}, "samples": said})
    text = card(EXPORTED, History((artifact("pretrain"), artifact("sft")), scored, {}))
    assert "| chats loss, sft | 2.000 | -1.000 |" in text
    assert "lora" not in text
    assert "| `Who \\| 'you'?` | `I am` |" in text
    assert "never shown" not in text


FAKE_BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "known":
            return "theirs"
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
"""
FAKE_CONVERTER = """
import argparse, pathlib, sys
from conversion.base import TextModel

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("outfile", "outtype", "model-name"):
        parser.add_argument("--" + name)
    given = parser.parse_args()
    if not pathlib.Path(given.model, "config.json").is_file():
        sys.exit("no config")
    names = [TextModel().get_vocab_base_pre(tokenizer) for tokenizer in ("known", "new")]
    pathlib.Path(given.outfile).write_text(" ".join([*names, given.outtype, given.model_name]))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    """A converter that recognises one tokenizer and refuses others, as llama.cpp's does."""
    (tmp_path / "llama.cpp" / "conversion").mkdir(parents=True)
    (tmp_path / "llama.cpp" / "conversion" / "base.py").write_text(FAKE_BASE)
    (tmp_path / "llama.cpp" / exporting.SCRIPT).write_text(FAKE_CONVERTER)
    return tmp_path / "llama.cpp"


def test_the_converter_is_told_how_a_tokenizer_that_it_does_not_know_splits_words(tmp_path: Path, llama_cpp: Path) -> None:
    done = export(resolve("sft"), tmp_path / "mine", Request(dtype="fp16", gguf=llama_cpp))
    assert (tmp_path / "mine" / "mine-f16.gguf").read_text() == "theirs gpt-2 f16 mine"
    assert "mine-f16.gguf" in done.files


def test_a_converter_that_fails_is_quoted_and_nothing_is_exported(tmp_path: Path, llama_cpp: Path) -> None:
    (llama_cpp / exporting.SCRIPT).write_text("raise SystemExit('this architecture is not supported')")
    with pytest.raises(TTrainError, match=r"(?s)made no GGUF file; leave --gguf out.*this architecture is not supported"):
        export(resolve("sft"), tmp_path / "out", Request(gguf=llama_cpp))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"git clone --depth 1 https://github\.com/ggml-org/llama\.cpp"):
        export(resolve("sft"), tmp_path / "out", Request(gguf=tmp_path))
    with pytest.raises(UsageError, match="make it part of its base with --merge"):
        export(resolve("lora"), tmp_path / "out", Request(gguf=llama_cpp))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda tokenizer: None, "gpt-2"),
        (lambda tokenizer: tokenizer["pre_tokenizer"].update(add_prefix_space=True), None),
        (lambda tokenizer: tokenizer["pre_tokenizer"].update(use_regex=False), None),
        (lambda tokenizer: tokenizer.update(normalizer={"type": "NFC"}), None),
        (lambda tokenizer: tokenizer["model"].update(type="Unigram"), None),
    ],
)
def test_only_a_tokenizer_that_splits_as_gpt2_does_is_called_so(
    change: Callable[[dict[str, Any]], None], name: str | None
) -> None:
    tokenizer = json.loads((resolve("sft").model / "tokenizer.json").read_bytes())
    change(tokenizer)
    assert exporting.pre_tokenizer(tokenizer) == name


@pytest.mark.skipif("TTRAIN_LLAMA_CPP" not in os.environ, reason="TTRAIN_LLAMA_CPP names no clone of llama.cpp")
def test_the_real_converter_takes_an_export(tmp_path: Path) -> None:
    done = export(resolve("sft"), tmp_path / "mine", Request(gguf=Path(os.environ["TTRAIN_LLAMA_CPP"])))
    assert (tmp_path / "mine" / "mine-bf16.gguf").read_bytes()[:4] == b"GGUF"
    assert done.files["mine-bf16.gguf"] > done.parameters * 2
