"""What the manifests and settings of a run say, read once for terminal, pages, cards and MLflow. Plain values in and out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ttrain.config import Settings, flatten
from ttrain.config.training import model_order
from ttrain.core.hashing import digest_of

MISSING = "–"

SHOWN_DIGEST = 12  # letters of a digest that are shown


def changed_settings(settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{dotted name: (value, default)} of the settings that are not the defaults; also of settings that are texts."""
    defaults = dict(flatten(Settings().model_dump(mode="json")))
    return {
        name: (value, defaults.get(name, MISSING))
        for name, value in settings.items()
        if name not in defaults or value not in (defaults[name], str(defaults[name]))
    }


def row_tallies(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The counts of rows of a stage's result, by their role: train, heldout."""
    tallies = result.get("rows") or {}
    tallies = {"train": tallies} if "rows" in tallies else tallies
    return {role: tally for role, tally in tallies.items() if isinstance(tally, dict)}


def lost_rows(tally: Mapping[str, Any]) -> dict[str, int]:
    """{reason: count} of the rows that were skipped or rejected."""
    return {**tally.get("skipped", {}), **tally.get("rejected", {})}


def files_of(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """(role, name, short digest) of the files that a stage read itself."""
    for role, files in manifest.get("ingredients", {}).get("files", {}).items():
        for file in files:
            yield role, file["name"], file["sha256"][:SHOWN_DIGEST]


def code_of(manifest: Mapping[str, Any]) -> str:
    """The short digest of a stage's code."""
    return digest_of(manifest["ingredients"].get("code", {}))[:SHOWN_DIGEST]


def versions_of(manifests: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """{python, platform or library: its versions}: stages of one run can be made on different days."""
    versions: dict[str, list[str]] = {}
    for manifest in manifests:
        provenance = manifest.get("provenance", {})
        recorded = {name: provenance.get(name) for name in ("ttrain", "python", "platform")}
        for name, version in {**recorded, **provenance.get("libraries", {})}.items():
            if version and str(version) not in versions.setdefault(name, []):
                versions[name].append(str(version))
    return {name: values for name, values in versions.items() if values}


def samples_of(evaluation: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """{(model, prompt): answer} of an evaluation's manifest, in the order of the models."""
    answers = evaluation.get("result", {}).get("samples") or {}
    models = sorted(answers, key=model_order)
    return {(model, sample["prompt"]): sample["answer"] for model in models for sample in answers[model]}
