"""A GGUF file of an export, by llama.cpp's own converter (https://github.com/ggml-org/llama.cpp)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ttrain.core.files import read_json
from ttrain.errors import TTrainError, UsageError
from ttrain.export import gguf_convert

SCRIPT = "convert_hf_to_gguf.py"
OUTTYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
TOLD_LINES = 3


def converter(path: Path) -> Path:
    """The converter's script, from it or from the directory of llama.cpp. Raises UsageError with what to fetch."""
    script = path.expanduser().absolute()
    script = script / SCRIPT if script.is_dir() else script
    if not script.is_file():
        raise UsageError(
            f"--gguf is {path}, but {script} is not there; fetch it with `git clone --depth 1 "
            f"https://github.com/ggml-org/llama.cpp` and name that directory"
        )
    return script


def convert(directory: Path, script: Path, *, dtype: str, name: str) -> Path:
    """Write `NAME-DTYPE.gguf` into an exported directory. Raises TTrainError with the converter's last words."""
    target = directory / f"{name}-{OUTTYPES[dtype]}.gguf"
    pre = pre_tokenizer(read_json(directory / "tokenizer.json"))
    program = ["-P", gguf_convert.__file__, pre, str(script)] if pre else [str(script)]
    arguments = [str(directory), "--outfile", str(target), "--outtype", OUTTYPES[dtype], "--model-name", name]
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode or not target.is_file():
        said = [line for line in done.stdout.splitlines() if line.strip()][-TOLD_LINES:]
        needs = script.parent / "requirements" / "requirements-convert_hf_to_gguf.txt"
        raise TTrainError(
            "\n  ".join([f"{script} made no GGUF file; leave --gguf out, or see what it needs ({needs}) and says:", *said])
        )
    return target


def pre_tokenizer(tokenizer: Any) -> str | None:
    """llama.cpp's name for how this tokenizer splits text into words; None where only the converter may know.

    ttrain's own are split as GPT-2's.
    """
    if not isinstance(tokenizer, dict) or tokenizer.get("normalizer") or tokenizer["model"].get("type") != "BPE":
        return None
    split = tokenizer.get("pre_tokenizer") or {}
    is_gpt2 = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split.get("add_prefix_space")
    return "gpt-2" if is_gpt2 else None
