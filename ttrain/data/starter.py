"""A first file of settings for a user's own data, sorted into data sets by their first rows."""

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from ttrain.config.data import Reading
from ttrain.data import first_rows, locations
from ttrain.data.json_rows import Tally
from ttrain.errors import DataError, TTrainError

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
_HELD_OUT = re.compile(
    r"(^|[-_. ])(val|valid|validation|eval|test|dev|held-?_?out)([-_. ]|$)", re.I
)
_NO_DATA = re.compile(
    r"\.|(readme|licen[cs]e|notice|change|requirements|constraints|robots)\b.*\.txt", re.I
)


def files_in(directory: Path) -> list[str]:
    """The data files of a directory itself, without those that lie beside any code."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.is_file() and path.name.endswith(SEARCHED) and not _NO_DATA.match(path.name)
    )


def sort(files: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(files of each data set, why others are left out), by what most of their first rows are.

    All chats are for SFT. A file of validation or test rows, by its name, is the held-out part.
    """
    datasets: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for location in files:
        try:
            rows = first_rows.read(location, Reading(), Tally())
            kind = first_rows.kind_of(rows)
            if kind is None:
                raise DataError("has no rows")
            reasons = [first_rows.why_bad(row, kind, Reading().text_field) for _, _, row in rows]
            if all(reasons):
                raise DataError(
                    f"holds no documents, chats or pairs: line {rows[0][1]}: {reasons[0]}"
                )
        except (TTrainError, OSError) as error:
            left_out[location] = str(error).removeprefix(f"{location} ")
            continue
        part = "_heldout" if _HELD_OUT.search(Path(location).name.partition(".")[0]) else ""
        datasets.setdefault(f"{first_rows.DATASETS[kind]}{part}", []).append(location)
    for dataset in DATA:  # a held-out part of nothing is the data
        if dataset not in datasets and f"{dataset}_heldout" in datasets:
            datasets[dataset] = datasets.pop(f"{dataset}_heldout")
    return datasets, left_out


def render(datasets: dict[str, list[str]], name: str, path: str) -> str:
    """The text of the file of settings, with what one sets next as comments."""
    data = yaml.safe_dump(
        {"name": name, "data": datasets},
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
    )
    missing = [
        f"  # {dataset}: [FILE.jsonl]  {about}\n"
        for dataset, about in DATA.items()
        if dataset not in datasets
    ]
    return f"{HEAD.format(path)}{data}{''.join(missing)}{NEXT}"


def run_name(directory: Path) -> str:
    """A name for the runs, after a directory."""
    return re.sub(r"[^A-Za-z0-9]+", "-", directory.name)[:32].strip("-") or "my-model"
