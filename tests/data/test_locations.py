"""What a setting names as input: paths, URLs and data sets on the Hub, pinned."""

import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from huggingface_hub import constants
from support.streamed_files import CONVERTED, NEW, OLD, ROW, expand, read
from support.web import FakeHub, Site, served_hub, use_hub

from ttrain.data import locations, streams
from ttrain.errors import DataError, UsageError

DATA = "[1]文件?.jsonl a.jsonl.gz b.jsonl deep/c.jsonl.zst deep/er/d.ndjson f.parquet"
NO_DATA = "notes.txt i.json j.jsonl.old .hidden.jsonl .hidden/k.jsonl"
NAMES = ["README.md", "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
NAMES += ["data/test.jsonl", "constraints.jsonl", "strain.jsonl"]
TRAIN = [f"hf://owner/some-set@{NEW}/{name}" for name in NAMES[1:3]]


def test_a_path_is_a_file_folder_or_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*DATA.split(), *NO_DATA.split()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(ROW)
    monkeypatch.setenv("HOME", str(tmp_path))
    for patterns, names in (
        ("{0}", DATA),
        ("file://{0}", DATA),
        ("{0}/.hidden.jsonl", ".hidden.jsonl"),
        ("{0}/**/*.ndjson", "deep/er/d.ndjson"),
        ("{0}/f.* {0}/b.jsonl {0}/[a-c]*.jsonl file://{0}/b.jsonl", "f.parquet b.jsonl"),
        ("{0}/[1]文件?.jsonl", "[1]文件?.jsonl"),  # which looks like a glob
        ("{0}/*.jsonl", "[1]文件?.jsonl b.jsonl"),
        ("~/b.jsonl ~/deep", "b.jsonl deep/c.jsonl.zst deep/er/d.ndjson"),
    ):
        expected = [str(tmp_path / name) for name in names.split()]
        assert expand(*patterns.format(tmp_path).split()) == expected
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"data.pretrain .*\.jsonl"):
        expand(f"{tmp_path}/empty")


@pytest.fixture
def data_url(site: Site) -> str:
    names = ("b.jsonl", "deep/c.jsonl", "deep/er/d.parquet", "notes.txt")
    site.files = {f"/data/{name}": ROW for name in names}
    return f"{site.url}/data"


def test_a_url_is_a_file_a_glob_or_a_folder(data_url: str) -> None:
    for pattern, names in (
        ("b.jsonl?token=1", ["b.jsonl?token=1"]),
        ("*.jsonl", ["b.jsonl"]),
        ("**/[cd].*", ["deep/c.jsonl", "deep/er/d.parquet"]),
    ):
        assert expand(f"{data_url}/{pattern}") == [f"{data_url}/{name}" for name in names]
    files = fsspec.filesystem("memory")
    for name in ("a.jsonl.gz", "deep/c.jsonl", ".hidden.jsonl", "notes.txt"):
        files.pipe(f"/set/{name}", ROW)
    assert expand("memory://set") == ["memory:///set/a.jsonl.gz", "memory:///set/deep/c.jsonl"]


def test_no_part_of_a_query_is_shown_whatever_it_holds(site: Site, data_url: str) -> None:
    query = "?x=ab'first&y=a second"
    site.etags = False
    for function, address in (
        (expand, f"{data_url}/nowhere.jsonl"),
        (locations.filesystem, "foo://b.jsonl"),
        (locations.version, f"{data_url}/b.jsonl"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"{address}?***")) as refused:
            function(address + query)
        assert "first" not in str(refused.value) and "second" not in str(refused.value)


def test_a_version_changes_with_the_bytes(site: Site, data_url: str) -> None:
    url = f"{data_url}/b.jsonl"
    before = locations.version(url)
    assert before and locations.version(url) == before
    assert "GET" not in {method for method, _, _ in site.asked}, "without reading the file"
    assert before != locations.version(f"{data_url}/deep/c.jsonl"), "although the mark is the same"
    site.files["/data/b.jsonl"] = b'{"text":"b"}\n'
    assert locations.version(url) != before
    site.etags, site.dates = False, True
    before = locations.version(url)
    site.files["/data/b.jsonl"] = ROW * 2
    assert locations.version(url) != before
    site.dates = False
    with pytest.raises(UsageError, match=rf"{url}.*ETag"):
        locations.version(url)


def test_a_protocol_whose_servers_run_code_is_refused() -> None:
    for location in ("DASK://127.0.0.1:1::file:///x.jsonl", "zip://x.jsonl::dask::file:///x.zip"):
        with pytest.raises(UsageError, match="dask://"):
            expand(location)


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    locations.listing.cache_clear()
    commits = {
        OLD: {"only.jsonl.gz": b"old"},
        NEW: {name: name.encode() + b"\n" for name in NAMES},
        CONVERTED: {"default/train/0.parquet": b"p", "default/test/0.parquet": b"p"},
    }
    revisions = {"main": NEW, "v1": OLD, "refs/convert/parquet": CONVERTED}
    with served_hub(FakeHub({"owner/some-set": revisions}, commits)) as opened:
        use_hub(monkeypatch, opened.site.url, tmp_path)
        yield opened


def test_a_data_set_is_its_training_split_at_a_commit(online: FakeHub) -> None:
    assert expand("hf://owner/some-set") == expand("hf://datasets/owner/some-set") == TRAIN
    assert [locations.version(location) for location in TRAIN] == TRAIN
    online.repos["owner/some-set"]["main"] = OLD
    test = f"hf://owner/some-set@{NEW}/data/test.jsonl"
    assert expand("hf://owner/some-set/data") == [test, *TRAIN], "one process sees one commit"
    for pattern, commit, names in (
        ("/data/t*0*.jsonl", NEW, NAMES[1:3]),
        ("@v1", OLD, ["only.jsonl.gz"]),
        ("@refs%2Fconvert%2Fparquet/default/test", CONVERTED, ["default/test/0.parquet"]),
    ):
        expected = [f"hf://owner/some-set@{commit}/{name}" for name in names]
        assert expand(f"hf://owner/some-set{pattern}") == expected
    with pytest.raises(UsageError, match=r"nowhere.*README"):
        expand("hf://owner/some-set/nowhere")


def test_files_are_fetched_once(online: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    location = expand("hf://owner/some-set")[0]
    data = read(location)
    assert data == online.commits[NEW][NAMES[1]]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read(location) == data
    with pytest.raises(DataError, match=TRAIN[1]), streams.noting_faults(TRAIN[1]):
        read(TRAIN[1])
