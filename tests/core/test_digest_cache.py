"""The memory of digests: never an old answer, whatever the clock does and whoever writes at the same time."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from ttrain.core import hashing
from ttrain.core.hashing import KEPT_DAYS, DigestCache, sha256_file, stamp

DAY = 86400
LONG_AGO = 10**18  # nanoseconds since 1970, in 2001


def make(path: Path, data: bytes = b"data", mtime_ns: int = LONG_AGO) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def read_bytes() -> int:
    """What this process has read from files so far."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"])


def saved(path: Path) -> set[str]:
    return {Path(name.partition(":")[2]).name for name in json.loads(path.read_bytes())}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much was read")
def test_an_unchanged_file_is_not_read_again_by_the_next_process_either(tmp_path: Path) -> None:
    size = 8 << 20
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(size)  # a sparse file: its bytes are read, but take no place
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    first = DigestCache(tmp_path / "cache.json")
    before = read_bytes()
    digest = first.file(path)
    assert read_bytes() - before >= size
    first.save()
    before = read_bytes()
    assert first.file(path) == DigestCache(tmp_path / "cache.json").file(path) == digest
    assert read_bytes() - before < 100_000


@pytest.mark.parametrize("change", ["bytes", "size", "inode", "mtime"])
def test_what_changed_is_read_again(tmp_path: Path, change: str) -> None:
    path, cache = make(tmp_path / "file"), DigestCache(tmp_path / "cache.json")
    cache.file(path)
    if change == "bytes":
        make(path, b"atad")  # the same size and mtime; the ctime tells
    elif change == "size":
        make(path, b"data.")
    elif change == "inode":
        make(tmp_path / "other", b"else").replace(path)
    else:
        make(path, b"else", LONG_AGO + 1)
    assert cache.file(path) == sha256_file(path)


@pytest.mark.parametrize("jump", [-10 * DAY, -1.5, 0.0, 1.5])
def test_a_file_that_changed_a_moment_ago_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Around the file's own time another write could leave the same times; far from it, on either side, it cannot."""
    path = make(tmp_path / "file", mtime_ns=LONG_AGO)
    monkeypatch.setattr(time, "time", lambda: LONG_AGO / 1e9 + jump)
    cache = DigestCache(tmp_path / "cache.json")
    cache.file(path)
    cache.save()
    remembered = abs(jump) > hashing.RACY_SECONDS
    assert (tmp_path / "cache.json").exists() == remembered
    assert (stamp(path) is not None) == remembered


def test_a_file_from_the_future_is_remembered_and_seen_to_change(tmp_path: Path) -> None:
    """As after the clock was set back: until that time comes, every look would cost a read."""
    path = make(tmp_path / "file", mtime_ns=4 * LONG_AGO)
    cache = DigestCache(tmp_path / "cache.json")
    before = cache.file(path)
    cache.save()
    assert saved(tmp_path / "cache.json") == {"file"}
    path.write_bytes(b"atad")
    assert DigestCache(tmp_path / "cache.json").file(path) != before


def test_one_process_keeps_what_another_saved_meanwhile(tmp_path: Path) -> None:
    where = tmp_path / "cache.json"
    one, other = DigestCache(where), DigestCache(where)
    for cache, name in ((one, "a"), (other, "b"), (one, "c")):
        cache.file(make(tmp_path / name))
        cache.save()
    assert saved(where) == {"a", "b", "c"}


def test_threads_that_learn_and_save_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    files = [make(tmp_path / f"file-{number}") for number in range(80)]
    cache, errors = DigestCache(tmp_path / "cache.json"), []

    def learn(start: int) -> None:
        try:
            for path in files[start::4]:
                cache.file(path)
                cache.save()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=learn, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert saved(tmp_path / "cache.json") == {path.name for path in files}
    assert not list(tmp_path.glob("*.tmp"))


def test_what_nobody_asked_for_in_months_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, start = tmp_path / "cache.json", time.time()
    used, unused = make(tmp_path / "used"), make(tmp_path / "unused")
    for day in range(0, 2 * KEPT_DAYS, 10):
        monkeypatch.setattr(time, "time", lambda now=start + day * DAY: now)
        cache = DigestCache(where)
        cache.file(used)
        if day == 0:
            cache.file(unused)
        cache.save()
    assert saved(where) == {"used"}
    monkeypatch.setattr(time, "time", lambda: start)  # the clock was wrong: what is there stays
    DigestCache(where).save()
    assert saved(where) == {"used"}


def test_a_broken_memory_costs_only_time(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"file:x": 1}', '{"file:x": [1, 2]}', '{"file:x": null}'):
        (tmp_path / "cache.json").write_text(text)
        path, cache = make(tmp_path / "file"), DigestCache(tmp_path / "cache.json")
        assert cache.file(path) == sha256_file(path)
        cache.save()
        assert saved(tmp_path / "cache.json") == {"file"}
