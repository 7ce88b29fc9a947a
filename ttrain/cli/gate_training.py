"""`ttrain gate train`: which experts and records are meant, and the process that trains the gate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttrain.cli import train_task
from ttrain.config import Expert, Gate, GateConfig
from ttrain.config.loading import Given, merge
from ttrain.core import redact
from ttrain.core.files import read_object
from ttrain.data import existing_model, locations
from ttrain.errors import UsageError
from ttrain.inference import gate_files
from ttrain.pipeline.names import resolve_all
from ttrain.pipeline.progress_display import Display
from ttrain.stages import GATE
from ttrain.store.artifacts import Store
from ttrain.store.layout import home
from ttrain.store.model_reference import Reference


def train(
    experts: Sequence[str], data: Sequence[str], given: Sequence[Given], out: Path, allow: Sequence[str], display: Display
) -> dict[str, Any]:
    """Train the gate, or continue where the same command was stopped; returns its figures.

    Raises UsageError where an expert or a file is missing, before anything is read, scored or written.
    """
    runtime, own = train_task.split_runtime(given)
    if runtime.devices > 1:
        raise UsageError(f"runtime.devices is {runtime.devices}, but a gate trains in one process; set runtime.devices=1")
    settings, _ = merge(Gate, own)
    out = out.absolute()
    train_task.check_output(out)
    found = resolve_all(named(experts))
    texts = locations.expand(data, "--data") if data else heldout_files(found)
    config = GateConfig(
        gate=settings, experts=distinct([gate_files.expert_of(one) for one in found]), data=tuple(texts), allow=tuple(allow)
    )
    for expert in config.experts:
        check_length(expert, settings)
    why = f"{len(found)} experts, {len(texts)} files, in {out}"
    figures = train_task.run_alone(GATE, GATE.name, config.model_dump(mode="json"), runtime, out, why, display)
    return {
        "out": str(out),
        "experts": [expert.model_dump() for expert in config.experts],
        "data": [redact.url(text) for text in texts],
        **figures,
    }


def named(experts: Sequence[str]) -> list[str]:
    """The references of options that may each hold several, between commas. Raises UsageError for fewer than two."""
    found = [name.strip() for option in experts for name in option.split(",") if name.strip()]
    if len(found) < 2:
        raise UsageError(f"--experts names {', '.join(found) or 'none'}, but a gate picks one of at least two")
    return found


def distinct(experts: Sequence[Expert]) -> tuple[Expert, ...]:
    """The same experts. Raises UsageError where two of them have the same weights."""
    known: dict[str, str] = {}
    for expert in experts:
        digest = gate_files.digest(expert)
        if digest in known:
            raise UsageError(f"--experts names the same weights twice: {known[digest]} and {expert.reference}")
        known[digest] = expert.reference
    return tuple(experts)


def check_length(expert: Expert, settings: Gate) -> None:
    """Raise UsageError where the expert takes fewer positions than a row has, by what its config says."""
    longest = existing_model.max_length({"config": [Path(expert.model) / existing_model.CONFIG]})
    if longest is not None and settings.row_length > longest:
        raise UsageError(
            f"row_length is {settings.row_length} but the expert {expert.reference} takes {longest} positions; "
            f"set row_length={longest} and stride={max(1, longest // 2)}"
        )


def heldout_files(experts: Sequence[Reference]) -> list[str]:
    """The held-out records of what each expert was trained on. Raises UsageError where there are none."""
    store, found = Store(home()), dict[str, None]()
    for expert in experts:
        shards = expert.artifact.manifest["inputs"].get("shards") if expert.artifact else None
        artifact = store.find(shards["stage"], shards["key"]) if shards else None
        if artifact is None:
            raise UsageError(
                f"what {expert.text} was trained on is not in {store.root}, nor the records held out from it; "
                f"name files with --data"
            )
        part = artifact.path / "heldout"
        index = read_object(part / "index.json")
        found.update(dict.fromkeys(str(part / shard["records"]) for shard in index.get("shards", ()) if "records" in shard))
    if not found:
        raise UsageError("the experts' data has no held-out records; name files with --data")
    return list(found)
