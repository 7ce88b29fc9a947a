"""Suggestions for wrong names of settings, also other libraries' (`configs/other_names.yaml`)."""

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.config import yaml_text
from ttrain.config.training import TRAININGS
from ttrain.core.files import JsonObject
from ttrain.errors import UsageError

STAGE = "*."  # before a setting that every training stage has
SIMILAR = 0.85  # "learing_rate"; "layer" is no "n_layer" yet
MOST_NAMES = 8  # more settings of a name are not told


@functools.cache
def names() -> Mapping[str, Mapping[str, Any]]:
    """The tables of the file: settings by word in `names`, a note by word in `notes`."""
    tables: dict[str, Any] = yaml_text.parse(
        (yaml_text.configs_directory() / "other_names.yaml").read_text(encoding="utf-8")
    )
    for table in ("names", "notes"):
        tables[table] = {
            word: meaning for meaning, words in tables[table].items() for word in words.split()
        }
    return tables


def suggestion(key: str, valid_keys: Sequence[str]) -> str:
    """Advice on a wrong name: "did you mean 'sft.tokens'? (in tokens: ...)", or ""."""
    near = " or ".join(f"'{name}'" for name in similar_settings(key, valid_keys))
    note = names()["notes"].get(_last_part(key), "")
    if not near:
        return str(note)
    return f"did you mean {near}? ({note})" if note else f"did you mean {near}?"


def similar_settings(key: str, valid_keys: Sequence[str]) -> list[str]:
    """Settings that other libraries call so, else with this ending, else the most similar.

    If some are in the section of the key, only those.
    """
    last = _last_part(key)
    section = f"{key.lower().partition('.')[0]}."
    known = names()["names"]
    near = difflib.get_close_matches(last, [*known, *names()["notes"]], n=1, cutoff=SIMILAR)
    meant: list[str] = []
    for setting in known.get(near[0], "").split() if near else ():
        name = setting.removeprefix(STAGE)
        meant += [name] if name == setting else [name, *(f"{stage}.{name}" for stage in TRAININGS)]
    for found in (meant, [name for name in valid_keys if f".{name}".endswith(f".{last}")]):
        settable = [name for name in found if name in valid_keys]
        settable = [name for name in settable if name.startswith(section)] or settable
        if 1 <= len(settable) <= MOST_NAMES:
            return settable
    return [] if near else difflib.get_close_matches(key.lower(), valid_keys, n=1)


def _last_part(key: str) -> str:
    return key.rpartition(".")[2].lower().replace("-", "_")


def from_tinyseek(tree: JsonObject, origin: str) -> JsonObject:
    """The settings of TinySeek's `model_config.json`; any other tree as it is."""
    known = names()["tinyseek"]
    if tree.keys().isdisjoint(known):
        return tree
    if others := sorted(tree.keys() - known.keys()):
        near = difflib.get_close_matches(others[0], known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)};"
        raise UsageError(
            f"'{yaml_text.one_line(others[0])}' (from {origin}) is not a name of TinySeek's "
            f"model_config.json; {hint} "
            f"settings of ttrain go into a file of their own: -c {origin} -c OTHER.yaml"
        )
    return {
        "model.kind": "tinyseek",
        **{known[name]: value for name, value in tree.items() if known[name]},
    }
