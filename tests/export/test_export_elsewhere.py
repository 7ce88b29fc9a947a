"""Exports in transformers without ttrain."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import fresh, said_with_ttrain, said_without_ttrain

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


def code_of(directory: Path, base: Path) -> str:
    """The Python code of the card."""
    card = (directory / "README.md").read_text(encoding="utf-8")
    code = card.partition("```python")[2].partition("```")[0]
    return code.replace("THIS_DIRECTORY", str(directory)).replace("BASE", str(base))


def run_programs_of_the_card(directory: Path) -> None:
    """Run each command line of the card whose program is here; `ttrain` is."""
    card = (directory / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ (.*)$", card.replace("THIS_DIRECTORY", str(directory)), re.MULTILINE)
    programs = [line.split()[0] for line in lines]
    assert programs == ["llama-cli", "ollama", "ttrain"]
    for program, line in zip(programs, lines, strict=True):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if shutil.which(program, path=path):
            options = {"shell": True, "input": "Hello\n/exit\n", "text": True, "timeout": 300}
            subprocess.run(line, env={**os.environ, "PATH": path}, check=True, **options)


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
        types = "f16" if name == "full" else None
        request = Request(dtype="fp32", merge=name == "merged", shard_size="40KB", gguf=types)
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
    run_programs_of_the_card(tmp_path / "full")
    assert len(set(map(tuple, ours))) > 7, "equal answers prove little"
    assert len(set().union(*ours)) > 20, "nor do those that repeat a word"
