"""Changes between the ingredients of two artifacts, or between recorded and installed libraries."""

import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ttrain.core.files import JsonObject

SECOND_HEAD = "model.multi_token"  # prefix; pretraining can also add this head to an existing model

Ingredients = JsonObject  # all that determines the result of a stage

UNSET = object()


def differences(old: Ingredients, new: Ingredients) -> list[str]:
    """A line for each change between two sets of ingredients: name, old value, new value.

    If an existing model replaces all settings of a new one, that is one line.
    """
    lines = []
    described = _description(old)
    now_described = _description(new)
    hidden = (
        {"base", *described, *now_described} if bool(described) != bool(now_described) else set()
    )
    if hidden:
        kinds = (
            "a new model instead of an existing one"
            if now_described
            else "an existing model instead of a new one"
        )
        lines.append(f"starts from {kinds}")
    for kind, label in (("arguments", "argument "), ("settings", ""), ("inputs", "input ")):
        for name, old_value, new_value in _changed(old.get(kind, {}), new.get(kind, {})):
            if name not in hidden:
                lines.append(
                    f"{label}{name}: {_short(old_value, kind)} → {_short(new_value, kind)}"
                )
    files = old.get("files", {})
    new_files = new.get("files", {})
    for role in sorted({*files, *new_files}):
        lines += _changed_files(role, files.get(role, []), new_files.get(role, []))
    for name, old_value, new_value in _changed(old.get("code", {}), new.get("code", {})):
        lines.append(f"module {name} {_change(old_value, new_value, 'is gone')}")
    return lines


def _changed(old: JsonObject, new: JsonObject) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*old, *new}):
        values = old.get(name, UNSET), new.get(name, UNSET)
        if values[0] != values[1]:
            yield name, *values


def _change(old_value: object, new_value: object, gone: str) -> str:
    if old_value is UNSET:
        return "is new"
    return gone if new_value is UNSET else "changed"


def _description(ingredients: Ingredients) -> set[str]:
    names = ingredients.get("settings", {}) if "base" not in ingredients.get("inputs", {}) else ()
    return {
        name for name in names if name.startswith("model.") and not name.startswith(SECOND_HEAD)
    }


def _changed_files(role: str, old: list[JsonObject], new: list[JsonObject]) -> Iterator[str]:
    old_files = _by_name(old)
    new_files = _by_name(new)
    for name, was, now in _changed(old_files, new_files):
        if UNSET in (was, now) or was["sha256"] != now["sha256"]:
            yield f"{role} file {name} {_change(was, now, 'is no longer read')}"
        else:
            weights = [file.get("weight", "none") for file in (was, now)]
            yield f"weight of {role} file {name}: {weights[0]} → {weights[1]}"
    if old_files == new_files and old != new:
        yield f"{role} files come in another order"


def _by_name(files: list[JsonObject]) -> dict[str, JsonObject]:
    named = dict[str, JsonObject]()
    count = Counter[str]()
    for file in files:
        count[file["name"]] += 1
        number = count[file["name"]]
        named[file["name"] if number == 1 else f"{file['name']} ({number})"] = file
    return named


def _short(value: object, kind: str) -> str:
    if kind == "inputs":
        return value[:12] if isinstance(value, str) else "none"
    return "unset" if value is UNSET else json.dumps(value, ensure_ascii=False)


def library_changes(manifest: Mapping[str, Any], installed: Mapping[str, str]) -> list[str]:
    """How installed libraries (`versions()`) differ from an artifact's: one line, or none."""
    provenance = manifest.get("provenance", {})
    recorded = {**provenance.get("libraries", {}), "Python": provenance.get("python")}
    present = {**installed, "Python": platform.python_version()}
    changed = [
        name
        for name in recorded
        if recorded[name] and name in present and recorded[name] != present[name]
    ]
    if not changed:
        return []
    made_with = ", ".join(f"{name} {recorded[name]}" for name in changed)
    here = ", ".join(f"{name} {present[name]}" for name in changed)
    return [f"made with {made_with}, here is {here}"]
