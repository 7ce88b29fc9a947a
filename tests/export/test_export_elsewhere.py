"""What other programs make of an export: transformers in a process without ttrain, and llama.cpp's converter."""

import json
import os
from pathlib import Path

import pytest
from support.loadable_models import fresh, said_with_ttrain, said_without_ttrain

from ttrain.errors import TTrainError, UsageError
from ttrain.export import export as exporting
from ttrain.export.export import Request, export
from ttrain.lineage.lookup import resolve

pytestmark = pytest.mark.usefixtures("use_trained_home")
NEW_TOKENS = 12

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


def code_of(directory: Path, base: Path) -> str:
    text = (
        (directory / "README.md")
        .read_text(encoding="utf-8")
        .partition("```python")[2]
        .partition("```")[0]
    )
    return text.replace("THIS_DIRECTORY", str(directory)).replace("BASE", str(base))


def said_elsewhere(asked: list[tuple[Path, Path | None, str, bool]]) -> list[list[int]]:
    """What a process without ttrain says: (model, adapter, prompt, whether the directory's own code may run).

    It runs the code on the models' cards before.
    """
    words = json.dumps(
        [
            (str(model), adapter and str(adapter), prompt, trust)
            for model, adapter, prompt, trust in asked
        ]
    )
    code = [
        code_of(adapter or model, model)
        for model, adapter in dict.fromkeys(one[:2] for one in asked)
    ]
    place = asked[0][0].parent
    environment = {"HF_MODULES_CACHE": str(place / "modules")}
    found = said_without_ttrain(PLAIN, words, json.dumps(code), directory=place, **environment)
    return list(found)


@pytest.mark.soak
def test_an_export_says_the_same_tokens_in_a_process_without_ttrain(tmp_path: Path) -> None:
    references = {
        "full": resolve("sft"),
        "merged": resolve("lora"),
        "adapter": resolve("lora"),
        "experts": resolve(
            str(
                fresh(
                    tmp_path / "a",
                    max_length=128,
                    kind="qwen3",
                    moe={"experts": 4, "shared_experts": 0},
                )
            )
        ),
        "own shape": resolve(str(fresh(tmp_path / "b", max_length=128, kind="moyun"))),
    }
    for name, reference in references.items():
        export(
            reference,
            tmp_path / name,
            Request(dtype="fp32", merge=name == "merged", shard_size="40KB"),
        )
    prompts = ("The man", "What did")
    asked, ours = [], []
    for name, reference in references.items():
        place = (
            (tmp_path / "full", tmp_path / name) if name == "adapter" else (tmp_path / name, None)
        )
        asked += [(*place, prompt, name == "own shape") for prompt in prompts]
        ours += [
            said_with_ttrain(prompt, NEW_TOKENS, reference.model, reference.adapter)
            for prompt in prompts
        ]
    assert said_elsewhere(asked) == ours
    assert len({tuple(said) for said in ours}) > 7, "models that all say the same prove little"
    assert len({token for said in ours for token in said}) > 20, "nor do those that repeat a word"


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


def test_the_converter_is_told_how_a_tokenizer_that_it_does_not_know_splits_words(
    tmp_path: Path, llama_cpp: Path
) -> None:
    done = export(resolve("sft"), tmp_path / "mine", Request(dtype="fp16", gguf=llama_cpp))
    assert (tmp_path / "mine" / "mine-f16.gguf").read_text() == "theirs gpt-2 f16 mine"
    assert "mine-f16.gguf" in done.files


def test_a_converter_that_fails_is_quoted_and_nothing_is_exported(
    tmp_path: Path, llama_cpp: Path
) -> None:
    (llama_cpp / exporting.SCRIPT).write_text(
        "raise SystemExit('this architecture is not supported')"
    )
    with pytest.raises(TTrainError, match=r"(?s)--gguf.*architecture is not supported"):
        export(resolve("sft"), tmp_path / "out", Request(gguf=llama_cpp))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"git clone"):
        export(resolve("sft"), tmp_path / "out", Request(gguf=tmp_path))
    with pytest.raises(UsageError, match="--merge"):
        export(resolve("lora"), tmp_path / "out", Request(gguf=llama_cpp))


def test_only_a_tokenizer_that_splits_as_gpt2_does_is_called_so() -> None:
    tokenizer = json.loads((resolve("sft").model / "tokenizer.json").read_bytes())
    assert exporting.pre_tokenizer(tokenizer) == "gpt-2"
    for change in (
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        {"normalizer": {"type": "NFC"}},
    ):
        assert exporting.pre_tokenizer(tokenizer | change) is None


@pytest.mark.skipif(
    "TTRAIN_LLAMA_CPP" not in os.environ, reason="TTRAIN_LLAMA_CPP names no clone of llama.cpp"
)
def test_the_real_converter_takes_an_export(tmp_path: Path) -> None:
    done = export(
        resolve("sft"), tmp_path / "mine", Request(gguf=Path(os.environ["TTRAIN_LLAMA_CPP"]))
    )
    assert (tmp_path / "mine" / "mine-bf16.gguf").read_bytes()[:4] == b"GGUF"
    assert done.files["mine-bf16.gguf"] > done.parameters * 2
