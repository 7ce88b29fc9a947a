"""What a setting names as input: found wherever it lies, pinned, told from later versions, and missed in words."""

from __future__ import annotations

import re
from pathlib import Path

import fsspec
import pytest
from support.streamed_files import ROW, expand
from support.web import Site

from ttrain.config import Reading
from ttrain.data import locations
from ttrain.data.check import check
from ttrain.errors import UsageError

DATA = [
    "[1] 文件?.jsonl",
    "a.jsonl.gz",
    "b.jsonl",
    "deep/c.jsonl.zst",
    "deep/er/d.ndjson",
    "e.ndjson.gz",
    "f.parquet",
    "g.jsonl.bz2",
    "h.jsonl.xz",
]


def test_a_folder_is_its_data_files_of_any_depth_in_sorted_order_without_hidden_ones(
    folder: Path,
) -> None:
    assert expand(str(folder)) == [str(folder / name) for name in DATA]
    assert expand(f"file://{folder}") == expand(str(folder))


def test_what_is_left_out_of_a_folder_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.txt", "b.jsonl", "c.csv", "notes.md"):
        (tmp_path / name).write_bytes(ROW)
    for _ in range(2):
        assert expand(str(tmp_path)) == [str(tmp_path / "b.jsonl")]
    assert caplog.messages == [
        f"left out of {tmp_path}: a.txt, c.csv; name them, or a glob, to read them too"
    ]
    (tmp_path / "b.jsonl").unlink()
    assert expand(str(tmp_path)) == [str(tmp_path / "a.txt")]


def test_a_file_is_itself_and_a_glob_what_it_matches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("notes.txt", "[1] 文件?.jsonl", ".hidden.jsonl"):
        assert expand(str(folder / name)) == [str(folder / name)]
    monkeypatch.setenv("HOME", str(folder))
    for patterns, names in (
        ([f"{folder}/*.jsonl"], ["[1] 文件?.jsonl", "b.jsonl"]),
        ([f"{folder}/**/*.ndjson"], ["deep/er/d.ndjson"]),
        (
            [f"{folder}/f.*", f"{folder}/b.jsonl", f"{folder}/*.jsonl", f"file://{folder}/b.jsonl"],
            ["f.parquet", "b.jsonl", "[1] 文件?.jsonl"],
        ),
        (["~/b.jsonl", "~/deep"], ["b.jsonl", "deep/c.jsonl.zst", "deep/er/d.ndjson"]),
    ):
        assert expand(*patterns) == [str(folder / name) for name in names]


def test_what_is_not_there_is_said_with_setting_value_and_fix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "none").mkdir()
    (folder / "none" / "table.csv").touch()
    monkeypatch.chdir(folder / "deep")
    for pattern, reason in (
        (f"{folder}/nowhere.jsonl", "there is no such file; name a"),
        (f"{folder}/a\0b", "there is no such file; name a"),
        ("b.jsonl", f"there is no such file in {folder}/deep, where the command runs; "),
        (f"{folder}/none", "no file in that folder ends in"),
    ):
        with pytest.raises(UsageError) as raised:
            expand(str(folder / "b.jsonl"), pattern)
        assert f"data.pretrain is '{pattern}' but {reason}" in str(raised.value)


@pytest.fixture
def site(site: Site) -> Site:
    """A server with files at several depths."""
    names = ("b.jsonl", "deep/c.jsonl", "deep/er/d.parquet", "notes.txt", ".hidden.jsonl")
    site.files = {f"/data/{name}": ROW for name in names}
    return site


def test_a_url_is_a_file_or_a_glob_as_a_path_is(site: Site) -> None:
    url = f"{site.url}/data"
    assert expand(f"{url}/b.jsonl?token=1") == [f"{url}/b.jsonl?token=1"]
    assert expand(f"{url}/*.jsonl") == [f"{url}/.hidden.jsonl", f"{url}/b.jsonl"]
    assert expand(f"{url}/**/[cd].*") == [f"{url}/deep/c.jsonl", f"{url}/deep/er/d.parquet"]
    assert expand(f"{url}/deep/*") == [f"{url}/deep/c.jsonl"]


def test_a_folder_of_another_file_system_is_its_data_files() -> None:
    files = fsspec.filesystem("memory")
    for name in ("a.jsonl.gz", "deep/c.jsonl", ".hidden.jsonl", "notes.txt"):
        files.pipe(f"/set/{name}", ROW)
    assert expand("memory://set") == ["memory:///set/a.jsonl.gz", "memory:///set/deep/c.jsonl"]


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_less_data(site: Site) -> None:
    site.failing = "/data/deep/er/"
    with pytest.raises(UsageError, match=r"data\.pretrain is .* but it cannot be read: .*503"):
        expand(f"{site.url}/data/**/*.jsonl")


def test_a_url_that_is_not_there_and_an_unknown_protocol_are_named(site: Site) -> None:
    nowhere, none = f"{site.url}/data/nowhere.jsonl", f"{site.url}/data/*.nothing"
    reasons = {nowhere: "404", none: "there is no such file; name a", "foo://b.jsonl": "foo"}
    for pattern, reason in reasons.items():
        with pytest.raises(
            UsageError, match=rf"data\.pretrain is '{re.escape(pattern)}' but .*{reason}"
        ):
            expand(pattern)


def test_no_part_of_a_query_is_shown_whatever_it_holds(site: Site) -> None:
    query = "?x=ab'first&y=a second"
    site.etags = False
    for find, address in (
        (expand, f"{site.url}/data/nowhere.jsonl"),
        (expand, "foo://b.jsonl"),
        (locations.filesystem, "foo://b.jsonl"),
        (locations.version, f"{site.url}/data/nowhere.jsonl"),
        (locations.version, f"{site.url}/data/b.jsonl"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"{address}?***")) as raised:
            find(address + query)
        assert "first" not in str(raised.value) and "second" not in str(raised.value)
    site.files["/data/b.jsonl"] = b"[]\n[]\n"
    (report,) = check([f"{site.url}/data/b.jsonl{query}"], Reading())
    assert report.error and report.error.startswith(
        f"{site.url}/data/b.jsonl?***: 2 of 2 rows are bad"
    )
    assert "second" not in report.error


def version_of(url: str) -> str:
    found = locations.version(url)
    assert found
    return found


def test_a_version_changes_with_the_bytes_and_is_asked_for_anew_each_time(site: Site) -> None:
    url = f"{site.url}/data/b.jsonl"
    before = version_of(url)
    assert version_of(url) == before
    site.dates = True
    assert version_of(url) == before, "the date counts only where there is no other mark"
    assert not site.requests("GET"), "without reading the file"
    assert before != version_of(f"{site.url}/data/deep/c.jsonl"), "although it has the same mark"
    site.files["/data/b.jsonl"] = b'{"text":"b"}\n'
    assert version_of(url) != before
    site.etags, site.dates = False, True
    before = version_of(url)
    site.files["/data/b.jsonl"] = ROW * 2
    assert version_of(url) != before
    site.dates = False
    for statuses, reason in (
        ([], f"{url}.*no ETag, checksum or date; download it"),
        ([503] * 100, "503"),
    ):
        site.statuses = statuses
        with pytest.raises(UsageError, match=reason):
            locations.version(url)


def test_a_protocol_whose_servers_run_code_is_refused() -> None:
    for location in ("DASK://127.0.0.1:1::file:///x.jsonl", "zip://x.jsonl::dask::file:///x.zip"):
        with pytest.raises(
            UsageError, match="dask:// is refused, since its servers may run code here"
        ):
            expand(location)
