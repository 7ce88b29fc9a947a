"""Registered models and their sets, as deliveries: each can be told twice, and is registered once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ttrain.core.files import exclusive
from ttrain.tracking import model_sets
from ttrain.tracking.calls import RefusedError
from ttrain.tracking.delivery import directory, file, text
from ttrain.tracking.journal import Entry
from ttrain.tracking.runs import Run


def register(run: Run, entry: Entry) -> str:
    """A version of a registered model, whose files the run holds."""
    with run.store.turn:
        return _registered(run, {**entry.data, "artifact_path": entry.data["path"]})


def register_models(run: Run, entry: Entry) -> str:
    """The models of a run as one set, which can become champion; a model that is not registered yet is, from this run."""
    data, members = entry.data, []
    with exclusive(model_sets.lock_of(run.store.home)):
        for model in data["models"]:
            with run.store.turn:
                version = run.store.versions.find(model["name"], model["tags"])
            if version is None:
                if not model["path"]:
                    raise RefusedError(f"{model['name']} is registered nowhere, and its files are not here")
                directory(run, Entry(entry.number, "directory", {"path": model["path"], "to": model["stage"]}, entry.parts))
                _beside(run, entry, model)
            with run.store.turn:
                version = _registered(run, model)  # or only described anew: there is an evaluation now
            members.append(model_sets.Member(model["name"], version, model["stage"], model["tags"]["ttrain.key"]))
        contents = {model["stage"]: model["tags"]["ttrain.content"] for model in data["models"]}
        told = model_sets.tags_of(data["run_name"], members, contents=contents, keys=data["keys"], metrics=data["metrics"])
        with run.store.turn:
            return _registered_set(run, data["name"], told, data.get("description", ""), data.get("about", ""))


def _beside(run: Run, entry: Entry, model: Mapping[str, Any]) -> None:
    """What opens a registered model elsewhere, in its directory."""
    place = PurePosixPath(model["artifact_path"])
    for name, content in model.get("texts", {}).items():
        text(run, Entry(entry.number, "text", {"to": str(place / name), "text": content}, entry.parts))
    for name, source in model.get("files", {}).items():
        told = {"path": source, "to": str((place / name).parent), "name": PurePosixPath(name).name}
        file(run, Entry(entry.number, "file", told, entry.parts))


def _registered(run: Run, model: Mapping[str, Any]) -> str:
    """The version of a model whose files this run holds, or another did. Entries of an earlier ttrain describe nothing."""
    words = (model.get("description", ""), model.get("about", ""))
    version: str = run.store.versions.register(model["name"], run, model["artifact_path"], model["tags"], *words)
    return version


def _registered_set(run: Run, name: str, tags: Mapping[str, str], description: str, about: str) -> str:
    try:
        return model_sets.register(run.store.client, name, run, tags, description, about)
    except ValueError as error:
        if type(error) is ValueError:
            raise RefusedError(str(error)) from None
        raise
