"""Digests of files are never stale; digests of code change with its meaning, not its layout."""

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from support.paths import ROOT
from support.planned_homes import append

from ttrain.config.rules import usual_intermediate_size
from ttrain.core import hashing
from ttrain.core.hashing import NON_RESULT_NAMES, NON_RESULT_PACKAGES, DigestCache, sha256_file
from ttrain.tasks import RUNNABLE, STAGES, TRAINING_STAGES

DAY = 86400
LONG_AGO = 10**18  # nanoseconds since 1970, in 2001
SHAPING = {"data", "evaluate", "inference", "model", "tasks", "train"}
UNREAD = {"doctor", "engine", "experiments", "export", "flows", "nightly"}  # by stages of pipelines
Digests = dict[str, dict[str, str]]  # {stage: {module: digest}}


def make(path: Path, data: bytes = b"data", mtime_ns: int = LONG_AGO) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def saved(path: Path) -> set[str]:
    return {Path(name.partition(":")[2]).name for name in json.loads(path.read_bytes())}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much was read")
def test_a_file_is_read_once_a_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "RACY_SECONDS", -1.0)  # a new file is remembered at once
    path = make(tmp_path / "file", bytes(8 << 20))
    digests = []

    def is_read(boot: str) -> bool:
        cache = DigestCache(tmp_path / f"{bool(boot)}.json", boot=boot)
        before = read_bytes()
        digests.append(cache.file(path))
        cache.save()
        return read_bytes() - before > 100_000

    boots = ("", "", "monday", "monday", "tuesday", "")
    assert [is_read(boot) for boot in boots] == [True, False, True, False, True, False]
    make(path, bytes(8 << 20))  # the same bytes, size and mtime
    assert is_read("") and is_read("tuesday") and len(set(digests)) == 1
    assert (tmp_path / "True.json").stat().st_mode & 0o777 == 0o600


CHANGES = [  # (data, later mtime in ns, into another inode)
    (b"atad", 0, False),  # the same size and mtime; the ctime tells
    (b"data.", 0, False),
    (b"else", 0, True),
    (b"else", 1, False),
]


@pytest.mark.parametrize(("data", "later", "is_replaced"), CHANGES)
def test_changes_are_read_again(tmp_path: Path, data: bytes, later: int, is_replaced: bool) -> None:
    path, cache = make(tmp_path / "file"), DigestCache(tmp_path / "cache.json")
    cache.file(path)
    make(tmp_path / "new" if is_replaced else path, data, LONG_AGO + later)
    if is_replaced:
        (tmp_path / "new").replace(path)
    assert cache.file(path) == sha256_file(path)


@pytest.mark.parametrize("jump", [-10 * DAY, -1.5, 0.0, 1.5])
def test_new_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Another write could leave the same times, unless the clock is far from the file's time."""
    path = make(tmp_path / "file", mtime_ns=LONG_AGO)
    monkeypatch.setattr(time, "time", lambda: LONG_AGO / 1e9 + jump)
    cache = DigestCache(tmp_path / "cache.json")
    cache.file(path)
    cache.save()
    assert (tmp_path / "cache.json").exists() == (abs(jump) > hashing.RACY_SECONDS)


def test_with_a_boot_a_change_with_an_old_mtime_is_not_remembered(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "verified.json", boot="monday")
    cache.file(make(tmp_path / "file"))
    cache.save()
    assert not (tmp_path / "verified.json").exists()


def test_one_process_keeps_what_another_saved_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    caches = [DigestCache(path), DigestCache(path)]
    for number, name in enumerate("abc"):
        caches[number % 2].file(make(tmp_path / name))
        caches[number % 2].save()
    assert saved(path) == {"a", "b", "c"}


def test_threads_that_learn_and_save_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    files = [make(tmp_path / f"file-{number}") for number in range(80)]
    cache = DigestCache(tmp_path / "cache.json")

    def learn(start: int) -> None:
        for path in files[start::4]:
            cache.file(path)
            cache.save()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(learn, range(4)))
    assert saved(tmp_path / "cache.json") == {path.name for path in files}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_broken_memory_costs_only_time(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"file:x": 1}', '{"file:x": [1, 2]}', '{"file:x": null}'):
        (tmp_path / "cache.json").write_text(text)
        path = make(tmp_path / "file")
        cache = DigestCache(tmp_path / "cache.json")
        assert cache.file(path) == sha256_file(path)
        cache.save()
        assert saved(tmp_path / "cache.json") == {"file"}


# --- the code behind a stage


class Package:
    """A copy of the package whose digests are remembered; a test restores it after changes."""

    def __init__(self, path: Path) -> None:
        ignored = shutil.ignore_patterns("__pycache__", "configs")
        shutil.copytree(ROOT / "ttrain", path, ignore=ignored)
        self.path = path
        self._cache = DigestCache(path.parent / "digests.json")
        self._files = {file: file.read_bytes() for file in path.rglob("*.py")}
        self.untouched = self.digests()

    def digests(self) -> Digests:
        with mock.patch.object(hashing, "PACKAGE_DIRECTORY", self.path):
            modules = {stage.module for stage in STAGES.values()}
            digests = {module: hashing.code_digests(module, self._cache) for module in modules}
        return {name: digests[stage.module] for name, stage in STAGES.items()}

    def changes(self) -> dict[str, set[str]]:
        """{stage: modules whose digest changed}, without the stages that are as they were."""
        digests, old = self.digests(), self.untouched
        changes = {stage: dict(digests[stage].items() ^ old[stage].items()) for stage in digests}
        return {stage: {*names} for stage, names in changes.items() if names}

    def restore(self) -> None:
        for file in self.path.rglob("*.py"):
            if file not in self._files:
                file.unlink()
            elif file.read_bytes() != self._files[file]:
                file.write_bytes(self._files[file])

    def files_of(self, name: str) -> list[Path]:
        stem = self.path.joinpath(*name.split(".")[1:])
        file = stem.with_suffix(".py")
        return [file] if file.is_file() else sorted(stem.rglob("*.py"))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package(tmp_path_factory.mktemp("code") / "ttrain")


@pytest.fixture
def package(copied: Package) -> Iterator[Package]:
    yield copied
    copied.restore()


def test_a_stage_depends_on_the_modules_that_its_module_imports(package: Package) -> None:
    code = package.untouched
    read = {"ttrain.tasks.tokenizer", "ttrain.data.tokenizer", "ttrain.data.records"}
    assert read <= code["tokenizer"].keys()
    assert {"ttrain.tasks.sft", "ttrain.model.factory", "ttrain.train.optim"} <= {*code["sft"]}
    assert not any(name.startswith(("ttrain.model", "ttrain.train")) for name in code["shards-sft"])
    assert all(NON_RESULT_NAMES.isdisjoint(modules) for modules in code.values())


def test_no_training_depends_on_evaluation_and_no_task_on_models(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "digests.json")
    code = {name: hashing.code_digests(stage.module, cache) for name, stage in RUNNABLE.items()}
    for name in (*TRAINING_STAGES, "reference", "task"):
        assert not any(module.startswith("ttrain.evaluate") for module in code[name]), name
    assert {"ttrain.tasks.new_model", "ttrain.model.multi_token"}.isdisjoint(code["task"])
    # What the evaluation writes counts.
    assert "ttrain.tasks.common.callbacks" not in (ROOT / "tasks/evaluate.py").read_text()


def test_the_usual_width_of_a_layer_which_no_key_has_stays_as_it_is() -> None:
    sizes = {8: 32, 96: 256, 128: 352, 768: 2048, 4096: 10944}
    assert {width: usual_intermediate_size(width) for width in sizes} == sizes


def test_comments_formatting_and_docstrings_do_not_count(package: Package) -> None:
    path = package.path / "data" / "json_rows.py"
    _, _, code = path.read_text(encoding="utf-8").split('"""', 2)
    assert "class Tally:\n" in code
    code = code.replace("class Tally:\n", "class Tally(\n):  # a comment\n")
    code = code.replace('"""Counts for the manifest', '"""Another docstring')
    path.write_text(f'"""Another docstring."""\n\n\n{code}\n# the end\n', encoding="utf-8")
    assert package.changes() == {}


def test_a_helper_two_modules_away_counts_for_all_that_reach_it(package: Package) -> None:
    path = package.path / "train" / "schedules.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("(1 + math.cos", "(1 - math.cos"), encoding="utf-8")
    assert text != path.read_text(encoding="utf-8")
    assert "schedules" not in (package.path / "tasks" / "sft.py").read_text()
    reached = ("pretrain", "sft", "lora", "dpo", "reference", "teacher")
    assert package.changes() == {name: {"ttrain.train.schedules"} for name in reached}


def test_an_import_inside_a_function_counts(package: Package) -> None:
    (package.path / "data" / "fresh.py").write_text("VALUE = 1\n")
    code = "\ndef later():\n    from ttrain.data.fresh import VALUE\n    return VALUE\n"
    append(package.path / "tasks" / "source.py", code)
    assert package.changes() == {"source": {"ttrain.tasks.source", "ttrain.data.fresh"}}


def test_what_shapes_a_result_is_named_by_packages(package: Package) -> None:
    """A new line changes digests of shaping modules alone, whatever else is imported."""
    imports = "".join(f"\nimport {name}" for name in sorted(NON_RESULT_NAMES))
    append(package.path / "tasks" / "source.py", imports)
    before = package.digests()
    packages = {path.parent.name for path in package.path.glob("*/__init__.py")}
    assert packages == {*SHAPING, *NON_RESULT_PACKAGES, *UNREAD} - {"errors"}
    others = [file for name in NON_RESULT_NAMES for file in package.files_of(name)]
    unread = [file for name in UNREAD for file in package.files_of(f"ttrain.{name}")]
    for file in (*others, *unread):
        append(file, "\nUNUSED = 1\n")
    assert len(others) > 100 and package.digests() == before
    modules_read = sorted({name for modules in before.values() for name in modules})
    modules = [name for name in modules_read if name.count(".") > 1]  # no package itself
    first = {name.split(".")[1]: name for name in reversed(modules)}
    names = {first[part] for part in SHAPING}
    for name in names:
        append(package.files_of(name)[0], "\nUNUSED = 1\n")
    for stage, modules in package.digests().items():
        changed = {name for name, digest in modules.items() if before[stage][name] != digest}
        assert changed == names & modules.keys()


def test_sources_in_c_count_with_the_module_of_their_name(tmp_path: Path) -> None:
    digests = hashing.code_digests("ttrain.tasks.pretrain", DigestCache(tmp_path / "digests.json"))
    native = {name: digests[name] for name in digests if name.endswith((".c", ".h"))}
    assert native == {
        "ttrain.train.native.c": sha256_file(ROOT / "ttrain/train/native.c"),
        "ttrain.train.native.h": sha256_file(ROOT / "ttrain/train/native.h"),
    }


def test_threads_may_look_at_the_same_time(tmp_path: Path) -> None:
    """CPython before 3.11.8 counts the depth of all syntax trees in one unguarded variable."""
    threshold, cache = gc.get_threshold(), DigestCache(tmp_path / "nowhere.json")

    def next_thread(*_: object) -> None:
        time.sleep(0)  # lets go of the interpreter lock

    gc.set_threshold(200)
    gc.callbacks.append(next_thread)  # in the middle of a syntax tree
    try:
        with ThreadPoolExecutor(3) as threads:
            first, *others = threads.map(
                hashing.code_digests, ["ttrain.data.loader"] * 3, [cache] * 3
            )
        assert others == [first] * 2
    finally:
        gc.callbacks.remove(next_thread)
        gc.set_threshold(*threshold)
