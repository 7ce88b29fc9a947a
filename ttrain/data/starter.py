"""A first file of settings for a user's own data: files sorted into data sets by their first rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ttrain.config.data import Reading
from ttrain.data import first_rows, locations
from ttrain.errors import TTrainError

SEARCHED = (*locations.ROWS, *locations.TEXTS, ".csv", ".tsv")
DATA = {
    "pretrain": "documents: the base model learns them",
    "sft": "chats: the model learns to answer",
    "dpo": "pairs of a better and a worse answer",
    "lora": "chats of one domain: an adapter learns them",
}
HEAD = """\
# Settings of ttrain; paths are relative to the directory of the command.
# All others have defaults: ttrain config show -c {}
"""
NEXT = """\
# model: {preset: 10m}                    a larger model; 1m 5m 10m 25m 50m 124m 350m 500m 1b
# tokenizer: {vocab_size: 4096}           more words, for more text
# pretrain: {epochs: 4}                   passes over the documents
# sft: {epochs: 2}                        passes over the chats
# reading: {heldout_fraction: 0.05}       share of the rows that is only evaluated
"""
_HELD_OUT = re.compile(r"(^|[-_. ])(val|valid|validation|eval|test|dev|held-?_?out)([-_. ]|$)", re.I)
_NO_DATA = re.compile(r"\.|(readme|licen[cs]e|notice|change|requirements|constraints|robots)\b.*\.txt", re.I)


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
    data = yaml.safe_dump({"name": name, "data": datasets}, default_flow_style=None, sort_keys=False, allow_unicode=True)
    missing = "".join(
        f"  # {dataset}: [FILE.jsonl]  {about}\n" for dataset, about in DATA.items() if dataset not in datasets
    )
    return f"{HEAD.format(path)}{data}{missing}{NEXT}"


def run_name(directory: Path) -> str:
    """A name for the runs, after a directory."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", directory.name).strip("-")
    return name[:32].strip("-") or "my-model"
