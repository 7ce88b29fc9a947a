"""Whether a model of these settings can exist, for the plan: known before a tokenizer and shards are built for it.

Building it says so for certain, but loads torch, which takes seconds. For the two usual kinds with settings of sizes alone
the rules of `config.Model` are the whole truth (a test compares them with building, over a grid). Any other model is built
once, in a process of its own, and what came of it is remembered.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ttrain.config import Model
from ttrain.core.files import parse_json
from ttrain.core.hashing import DigestCache, code_digests, digest_of
from ttrain.core.libraries import versions
from ttrain.errors import UsageError
from ttrain.model import registry

RULED_KINDS = ("llama", "qwen3")
RULED_SETTINGS = frozenset(
    {
        *("kind", "hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "max_length", "tie_embeddings"),
        *("rope_theta", "init_std", "scaled_residuals", "dropout", "multi_token"),
    }
)
BUILDER = "ttrain.model.shape_check"  # the module that builds a model of no bytes
SECONDS = 300.0


def check(model: Model, cache: DigestCache, memory: Path) -> None:
    """Raise UsageError, which names a setting, where no model has these sizes. `memory`: a directory for what was tried."""
    registry.check(model.kind)
    if has_all_rules(model):
        return
    libraries = {name: version for name, version in versions().items() if name in ("torch", "transformers")}
    settings = model.model_dump(mode="json")
    record = memory / digest_of({"model": settings, "code": code_digests(BUILDER, cache), "libraries": libraries})
    problem = _read(record)
    if problem is None:
        problem = _build_elsewhere(settings)
        if problem is None:
            return  # it is not known, and the stage itself will say
        _write(record, problem)
    if problem:
        raise UsageError(problem)


def has_all_rules(model: Model) -> bool:
    """Whether the rules of the settings say all about this model."""
    changed = {name for name in Model.model_fields if getattr(model, name) != Model.model_fields[name].default}
    return model.kind in RULED_KINDS and changed - {"preset"} <= RULED_SETTINGS


def _build_elsewhere(settings: object) -> str | None:
    """What is wrong with the model, "" for nothing; None where the process ended without an answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", BUILDER], input=json.dumps(settings), capture_output=True, text=True, timeout=SECONDS
        )
        answer = parse_json(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None
    return answer if isinstance(answer, str) else None


def _read(record: Path) -> str | None:
    try:
        return record.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _write(record: Path, problem: str) -> None:
    """Remember it. A home that cannot be written costs the next plan some seconds."""
    temporary = record.with_suffix(".tmp")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(problem, encoding="utf-8")
        temporary.replace(record)
    except OSError:
        temporary.unlink(missing_ok=True)
