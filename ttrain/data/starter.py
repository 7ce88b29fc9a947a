"""A first file of settings for a user's own data: files sorted into data sets by their first rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ttrain.config.data import Reading
from ttrain.core.files import user_path
from ttrain.core.text import format_size
from ttrain.data import first_rows, locations
from ttrain.errors import TTrainError

SEARCHED = (*locations.ROWS, *locations.TEXTS, ".csv", ".tsv")
COMMENT_COLUMN = 40
_HELD_OUT = re.compile(r"(^|[-_. ])(val|valid|validation|eval|test|dev|held-?_?out)([-_. ]|$)", re.I)
_NO_DATA = re.compile(r"\.|(readme|licen[cs]e|notice|change|requirements|constraints|robots)\b.*\.txt", re.I)
_PLAIN = re.compile(r"[\w./~-]+")


@dataclass
class Sorted:
    """The files of each data set, and why the others are left out."""

    datasets: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def files_in(directory: Path) -> list[str]:
    """The data files of a directory itself, without those of its folders and those that lie beside any code."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    return [name for name in names if name.endswith(SEARCHED) and not _NO_DATA.match(name)]


def sort(files: Iterable[str]) -> Sorted:
    """Sort files by what most of their first rows are. All chats are for SFT: which of them are an adapter's domain, no
    row says. A file of validation or test rows, by its name, is the held-out part."""
    reading, result = Reading(), Sorted()
    for location in files:
        try:
            rows = first_rows.read(location, reading, with_parquet=True)
        except (TTrainError, OSError) as error:
            result.left_out[location] = str(error).removeprefix(f"{location} ")
            continue
        kind, reason = first_rows.kind_of(rows), first_rows.why_unreadable(rows, reading.text_field)
        if kind is None or reason:
            result.left_out[location] = reason
            continue
        is_held_out = _HELD_OUT.search(Path(location).name.partition(".")[0])
        dataset = first_rows.DATASETS[kind]
        result.datasets.setdefault(f"{dataset}_heldout" if is_held_out else dataset, []).append(location)
    for name in [name for name in result.datasets if name.endswith("_heldout")]:
        dataset = name.removesuffix("_heldout")
        if dataset not in result.datasets:  # a held-out part of nothing is the data
            result.datasets[dataset] = result.datasets.pop(name)
    return result


def render(datasets: dict[str, list[str]], name: str, path: str) -> str:
    """The text of the file of settings: what is set, and as comments what one sets next."""
    data = [_data_line(dataset, about, datasets.get(dataset, ())) for dataset, about in DATA]
    held_out = [
        _commented(f"  {key}: {_list(files)}", "held out, never trained on")
        for key, files in datasets.items()
        if key.endswith("_heldout")
    ]
    head = [
        "# Settings of ttrain; paths are relative to the directory of the command.",
        f"# All others have defaults: ttrain config show -c {path}",
        _commented(f"name: {name}", "of the runs and of the registered models"),
        "data:",
    ]
    lines = [*head, *data, *held_out, *(_commented(text, about) for text, about in NEXT)]
    return "\n".join(lines) + "\n"


DATA = (
    ("pretrain", "documents: the base model learns them"),
    ("sft", "chats: the model learns to answer"),
    ("dpo", "pairs of a better and a worse answer"),
    ("lora", "chats of one domain: an adapter learns them"),
)
NEXT = (
    ("# model: {preset: 10m}", "a larger model; ttrain models size lists them"),
    ("# tokenizer: {vocab_size: 4096}", "more words, for more text"),
    ("# pretrain: {epochs: 4}", "passes over the documents"),
    ("# sft: {epochs: 2}", "passes over the chats"),
    ("# reading: {heldout_fraction: 0.05}", "share of the rows that is only evaluated"),
)


def _data_line(dataset: str, about: str, files: Sequence[str]) -> str:
    if not files:
        return _commented(f"  # {dataset}: [FILE.jsonl]", about)
    local = [file for file in files if not locations.is_remote(file)]
    size = sum(user_path(file).stat().st_size for file in local)
    return _commented(f"  {dataset}: {_list(files)}", f"{about} ({format_size(size)})")


def _commented(text: str, comment: str) -> str:
    return f"{text:<{COMMENT_COLUMN}}  # {comment}"


def _list(files: Sequence[str]) -> str:
    names = [file if _PLAIN.fullmatch(file) else json.dumps(file, ensure_ascii=False) for file in files]
    return f"[{', '.join(names)}]"


def run_name(directory: Path) -> str:
    """A name for the runs, after a directory."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", directory.name).strip("-")
    return name[:32].strip("-") or "my-model"
