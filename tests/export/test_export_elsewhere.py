"""Exports in other programs: transformers without ttrain, and llama.cpp's converter."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import fresh, said_with_ttrain, said_without_ttrain

from ttrain.errors import TTrainError, UsageError
from ttrain.export import export as exporting
from ttrain.export.export import Request, export
from ttrain.lineage.lookup import resolve

pytestmark = pytest.mark.usefixtures("use_trained_home")

PLAIN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def answer(directory, adapter, prompt, trust):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", trust_remote_code=trust)
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter)
    ids = AutoTokenizer.from_pretrained(adapter or directory)(prompt, return_tensors="pt")
    row = model.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    tokens = row[ids["input_ids"].shape[1]:].tolist()
    return [token for token in tokens if token not in model.generation_config.eos_token_id]

for code in json.loads(sys.argv[2]):
    exec(code, {})
print("SAID", json.dumps([answer(*case) for case in json.loads(sys.argv[1])]))
assert not [name for name in sys.modules if name.split(".")[0] == "ttrain"]
"""
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
    options = parser.parse_args()
    if not pathlib.Path(options.model, "config.json").is_file():
        sys.exit("no config")
    names = [TextModel().get_vocab_base_pre(tokenizer) for tokenizer in ("known", "new")]
    text = " ".join([*names, options.outtype, options.model_name])
    pathlib.Path(options.outfile).write_text(text)

if __name__ == "__main__":
    main()
"""


def code_of(directory: Path, base: Path) -> str:
    """The Python code of the card."""
    card = (directory / "README.md").read_text(encoding="utf-8")
    code = card.partition("```python")[2].partition("```")[0]
    return code.replace("THIS_DIRECTORY", str(directory)).replace("BASE", str(base))


@pytest.mark.soak
def test_an_export_gives_the_same_tokens_in_a_process_without_ttrain(tmp_path: Path) -> None:
    """That process also runs the code on the models' cards."""
    moe = {"experts": 4, "shared_experts": 0}
    experts = fresh(tmp_path / "a", max_length=128, kind="qwen3", moe=moe)
    references = {
        "full": resolve("sft"),
        "merged": resolve("lora"),
        "adapter": resolve("lora"),
        "experts": resolve(str(experts)),
        "own shape": resolve(str(fresh(tmp_path / "b", max_length=128, kind="moyun"))),
    }
    cases: list[tuple[Any, ...]] = []  # model, adapter, prompt, whether its own code may run
    codes = []
    ours = []
    for name, reference in references.items():
        directory = tmp_path / name
        request = Request(dtype="fp32", merge=name == "merged", shard_size="40KB")
        export(reference, directory, request)
        paths = (directory, None)
        if name == "adapter":
            paths = (tmp_path / "full", directory)
        codes.append(code_of(directory, paths[0]))
        for prompt in ("The man", "What did"):
            cases.append((str(paths[0]), paths[1] and str(paths[1]), prompt, name == "own shape"))
            ours.append(said_with_ttrain(prompt, 12, reference.model, reference.adapter))
    arguments = (PLAIN, json.dumps(cases), json.dumps(codes))
    modules = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    assert said_without_ttrain(*arguments, directory=tmp_path, **modules) == ours
    assert len(set(map(tuple, ours))) > 7, "equal answers prove little"
    assert len(set().union(*ours)) > 20, "nor do those that repeat a word"


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    """A converter that recognises one tokenizer and refuses others, as llama.cpp's does."""
    directory = tmp_path / "llama.cpp"
    (directory / "conversion").mkdir(parents=True)
    (directory / "conversion" / "base.py").write_text(FAKE_BASE)
    (directory / exporting.SCRIPT).write_text(FAKE_CONVERTER)
    return directory


def test_the_converter_learns_how_an_unknown_tokenizer_splits_words(
    tmp_path: Path, llama_cpp: Path
) -> None:
    exported = export(resolve("sft"), tmp_path / "mine", Request(dtype="fp16", gguf=llama_cpp))
    assert (tmp_path / "mine" / "mine-f16.gguf").read_text() == "theirs gpt-2 f16 mine"
    assert "mine-f16.gguf" in exported.files


def test_a_converter_that_fails_is_quoted_and_nothing_is_exported(
    tmp_path: Path, llama_cpp: Path
) -> None:
    (llama_cpp / exporting.SCRIPT).write_text("raise SystemExit('unsupported')")
    out = tmp_path / "out"
    with pytest.raises(TTrainError, match=r"(?s)--gguf.*unsupported"):
        export(resolve("sft"), out, Request(gguf=llama_cpp))
    assert not out.exists()
    with pytest.raises(UsageError, match=r"git clone"):
        export(resolve("sft"), out, Request(gguf=tmp_path))
    with pytest.raises(UsageError, match="--merge"):
        export(resolve("lora"), out, Request(gguf=llama_cpp))


def test_only_a_tokenizer_that_splits_as_gpt2_does_is_called_so() -> None:
    tokenizer = json.loads((resolve("sft").model / "tokenizer.json").read_bytes())
    split_elsewhere = {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}
    assert exporting.pre_tokenizer(tokenizer) == "gpt-2"
    assert exporting.pre_tokenizer(tokenizer | split_elsewhere) is None
    assert exporting.pre_tokenizer(tokenizer | {"normalizer": {"type": "NFC"}}) is None
