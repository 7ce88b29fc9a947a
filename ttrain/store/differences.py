"""What changed between the ingredients of two artifacts, or between the libraries that made one and those of here."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from ttrain.core.files import JsonObject

SECOND_HEAD = "model.multi_token"  # which pretraining gives to an existing model too

Ingredients = JsonObject  # all that determines the result of a stage

UNSET = object()


def differences(old: Ingredients, new: Ingredients) -> list[str]:
    """What changed between two sets of ingredients, one line each: field, old value, new value.

    Where an existing model replaces all settings of a new one, that is one change and one line.
    """
    lines = []
    described, now_described = _description(old), _description(new)
    began_anew = {*described, *now_described} if bool(described) != bool(now_described) else set()
    if began_anew:
        kinds = ("a new model", "an existing one") if now_described else ("an existing model", "a new one")
        lines.append("starts from {} instead of {}".format(*kinds))
    for kind, label in (("arguments", "argument "), ("settings", "")):
        for name, old_value, new_value in _changed(old.get(kind, {}), new.get(kind, {})):
            if kind != "settings" or name not in began_anew:
                lines.append(f"{label}{name}: {_short(old_value)} → {_short(new_value)}")
    lines += _changed_files(old.get("files", {}), new.get("files", {}))
    for name, old_value, new_value in _changed(old.get("inputs", {}), new.get("inputs", {})):
        if name != "base" or not began_anew:
            lines.append(f"input {name}: {_short_digest(old_value)} → {_short_digest(new_value)}")
    for name, old_value, new_value in _changed(old.get("code", {}), new.get("code", {})):
        lines.append(f"module {name} {_change(old_value, new_value, 'is gone')}")
    return lines


def _changed(old: JsonObject, new: JsonObject) -> Iterator[tuple[str, Any, Any]]:
    """(name, old value, new value) of each value that differs; UNSET stands for one that is missing."""
    for name in sorted({*old, *new}):
        values = old.get(name, UNSET), new.get(name, UNSET)
        if values[0] != values[1]:
            yield name, *values


def _change(old_value: object, new_value: object, gone: str) -> str:
    return "is new" if old_value is UNSET else gone if new_value is UNSET else "changed"


def _description(ingredients: Ingredients) -> set[str]:
    """Names of the settings that describe a new model; empty where the stage starts from one that exists."""
    if "base" in ingredients.get("inputs", {}):
        return set()
    return {
        name for name in ingredients.get("settings", {}) if name.startswith("model.") and not name.startswith(SECOND_HEAD)
    }


def _changed_files(old: JsonObject, new: JsonObject) -> list[str]:
    lines = []
    for role in sorted({*old, *new}):
        old_files, new_files = _by_name(old.get(role, [])), _by_name(new.get(role, []))
        for name, old_value, new_value in _changed(old_files, new_files):
            if UNSET not in (old_value, new_value) and old_value.split()[0] == new_value.split()[0]:
                weights = (" ".join(file.split()[1:]) or "none" for file in (old_value, new_value))
                lines.append(f"weight of {role} file {name}: {' → '.join(weights)}")
            else:
                lines.append(f"{role} file {name} {_change(old_value, new_value, 'is no longer read')}")
        if old_files == new_files and old.get(role) != new.get(role):
            lines.append(f"{role} files come in another order")
    return lines


def _by_name(files: list[dict[str, str]]) -> dict[str, str]:
    """{name: digest}; a second file of the same name, from another folder, is "name (2)"."""
    digests: dict[str, str] = {}
    for file in files:
        name, number = file["name"], 2
        while name in digests:
            name, number = f"{file['name']} ({number})", number + 1
        digests[name] = f"{file['sha256']} {file['weight']}" if "weight" in file else file["sha256"]
    return digests


def _short(value: object) -> str:
    return "unset" if value is UNSET else json.dumps(value, ensure_ascii=False)


def _short_digest(value: object) -> str:
    return value[:12] if isinstance(value, str) else "none"


def library_changes(manifest: Mapping[str, Any], installed: Mapping[str, str]) -> list[str]:
    """How libraries differ from those that an artifact was made with (`installed`: `versions()`): one line, or none."""
    provenance = manifest.get("provenance", {})
    recorded = {**provenance.get("libraries", {}), "Python": provenance.get("python")}
    present = {**installed, "Python": platform.python_version()}
    changed = [name for name in recorded if recorded[name] and name in present and recorded[name] != present[name]]
    if not changed:
        return []
    pairs = (", ".join(f"{name} {libraries[name]}" for name in changed) for libraries in (recorded, present))
    return ["made with {}, here is {}".format(*pairs)]
