"""The resources that this machine offers a process."""

import contextlib
import functools
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

# Without -P an interpreter would import files of the user's directory.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
# Speed depends most on these.
INSTRUCTIONS = {"AMX": "amx_tile", "AVX512-BF16": "avx512_bf16", "SHA": "sha_ni"}
VERSION = "0.1.0"  # of ttrain
RECORDED = ("torch", "transformers", "tokenizers", "peft", "pyarrow", "numpy", "safetensors")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@functools.cache
def processor() -> str:
    """Model, cores and the most important instruction sets of the CPU."""
    flags = [name if flag in cpu_flags() else f"no {name}" for name, flag in INSTRUCTIONS.items()]
    return ", ".join([processor_model(), f"{os.cpu_count()} cores", *flags])


def processor_model() -> str:
    """Model of the CPU, or its architecture if Linux does not report it."""
    match = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


@functools.cache
def cpu_flags() -> frozenset[str]:
    return frozenset(_cpu_info().split())


def _cpu_info() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return ""


@functools.cache  # 15 ms, which a process that runs ten stages spends once
def versions() -> Mapping[str, str]:
    from importlib import metadata  # 20 ms that a cached pipeline need not spend

    versions_by_name = {}
    for name in RECORDED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions_by_name[name] = metadata.version(name)
    return versions_by_name
