"""Data sets on the Hub: pinned to a commit, fetched once, read without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.streamed_files import CONVERTED, NEW, OLD, ROW, expand, read
from support.web import FakeHub, served_hub

from ttrain.data import locations, streams
from ttrain.errors import DataError, UsageError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    locations.listing.cache_clear()
    return tmp_path / "hub"


NAMES = [
    "README.md",
    "data/train-00000-of-00002.jsonl",
    "data/train-00001-of-00002.jsonl",
    "data/test.jsonl",
    "constraints.jsonl",
    "strain.jsonl",
]


@pytest.fixture
def online(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub that holds one data set with two commits, and a converted copy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    commits = {
        OLD: {"only.jsonl.gz": b"old"},
        NEW: {name: name.encode() + b"\n" for name in NAMES},
        CONVERTED: {"default/train/0.parquet": b"p", "default/test/0.parquet": b"p"},
    }
    revisions = {"main": NEW, "v1": OLD, "refs/convert/parquet": CONVERTED}
    with served_hub(FakeHub({"owner/some-set": revisions}, commits)) as opened:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", opened.site.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("{")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{opened.site.url}/{''.join(template[1:])}"
        )
        yield opened


TRAIN = [f"hf://owner/some-set@{NEW}/{name}" for name in NAMES[1:3]]


def test_a_data_set_is_its_training_split_at_a_commit_that_is_asked_for_once(
    online: FakeHub,
) -> None:
    assert expand("hf://owner/some-set") == expand("hf://datasets/owner/some-set") == TRAIN
    assert [locations.version(location) for location in TRAIN] == TRAIN
    online.repos["owner/some-set"]["main"] = OLD
    asked = len(online.site.asked)
    assert expand("hf://owner/some-set/data") == [
        f"hf://owner/some-set@{NEW}/data/test.jsonl",
        *TRAIN,
    ]
    assert len(online.site.asked) == asked, "one process sees one commit"


FILES = {
    "/data": (NEW, ["data/test.jsonl", *NAMES[1:3]]),
    "/data/t*0*.jsonl": (NEW, NAMES[1:3]),
    "@v1": (OLD, ["only.jsonl.gz"]),
    "@refs%2Fconvert%2Fparquet/default/test": (CONVERTED, ["default/test/0.parquet"]),
}


def test_files_of_a_data_set_are_named_by_path_or_glob(online: FakeHub) -> None:
    for pattern, (commit, names) in FILES.items():
        assert expand(f"hf://owner/some-set{pattern}") == [
            f"hf://owner/some-set@{commit}/{name}" for name in names
        ]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("hf://owner/other", "no data set owner/other.*hf auth login"),
        ("hf://owner/some-set@v9", "no data set owner/some-set@v9"),
        ("hf://owner/some-set/nowhere", "there is no such file: owner/some-set holds .*README.md"),
        ("hf://owner", "not the name of a data set.*hf://owner/name"),
    ],
)
def test_what_the_hub_does_not_have_is_said_with_its_cure(
    online: FakeHub, pattern: str, says: str
) -> None:
    with pytest.raises(UsageError, match=rf"data\.pretrain is '{pattern}' but .*{says}"):
        expand(pattern)


def test_a_file_is_fetched_once_and_read_from_the_cache_offline(
    online: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = online.commits[NEW]["data/train-00000-of-00002.jsonl"] = ROW * 10_000
    location = expand("hf://owner/some-set")[0]
    assert read(location) == data
    asked = len(online.site.asked)
    assert read(location) == data
    assert len(online.site.asked) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read(location) == data
    with (
        pytest.raises(DataError, match=f"cannot read {TRAIN[1]}: .*offline"),
        streams.noting_faults(TRAIN[1]),
    ):
        read(TRAIN[1])
