"""The digest of the code behind a stage: what it means counts, how it is written does not."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from support.paths import ROOT
from support.planned_homes import append

from ttrain.core import hashing
from ttrain.core.hashing import NON_RESULT_NAMES, NON_RESULT_PACKAGES, DigestCache, code_digests
from ttrain.stages import STAGES

SHAPING = ("data", "evaluate", "inference", "model", "stages", "train")
Digests = dict[str, dict[str, str]]  # {stage: {module: digest}}


class Package:
    """A copy of the package, whose digests are remembered; what a test changes in it is taken back."""

    def __init__(self, path: Path) -> None:
        shutil.copytree(ROOT / "ttrain", path, ignore=shutil.ignore_patterns("__pycache__", "configs"))
        self.path, self._cache = path, DigestCache(path.parent / "digests.json")
        self._files = {file: file.read_bytes() for file in path.rglob("*.py")}
        self.untouched = self.digests()

    def digests(self) -> Digests:
        with mock.patch.object(hashing, "PACKAGE_DIRECTORY", self.path):
            found = {module: code_digests(module, self._cache) for module in {stage.module for stage in STAGES.values()}}
        return {name: found[stage.module] for name, stage in STAGES.items()}

    def changes(self) -> dict[str, set[str]]:
        """{stage: modules whose digest changed}, without the stages that are as they were."""
        found: dict[str, set[str]] = {}
        for stage, new in self.digests().items():
            old = self.untouched[stage]
            found[stage] = {name for name in {*old, *new} if old.get(name) != new.get(name)}
        return {stage: names for stage, names in found.items() if names}

    def restore(self) -> None:
        for file in self.path.rglob("*.py"):
            if file not in self._files:
                file.unlink()
            elif file.read_bytes() != self._files[file]:
                file.write_bytes(self._files[file])

    def files_of(self, name: str) -> list[Path]:
        """The module's file, or those of the package."""
        stem = self.path.joinpath(*name.split(".")[1:])
        return [stem.with_suffix(".py")] if stem.with_suffix(".py").is_file() else sorted(stem.rglob("*.py"))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package(tmp_path_factory.mktemp("code") / "ttrain")


@pytest.fixture
def package(copied: Package) -> Iterator[Package]:
    yield copied
    copied.restore()


def test_a_stage_depends_on_the_modules_that_its_module_imports_and_on_no_others(package: Package) -> None:
    code = package.untouched
    assert {"ttrain.stages.tokenizer", "ttrain.data.tokenizer", "ttrain.data.records"} <= set(code["tokenizer"])
    assert {"ttrain.stages.sft", "ttrain.model.factory", "ttrain.train.optim"} <= set(code["sft"])
    assert not any(name.startswith(("ttrain.model", "ttrain.train")) for name in code["shards-sft"])
    assert not NON_RESULT_NAMES & {name for modules in code.values() for name in modules}


def test_comments_formatting_and_docstrings_do_not_count(package: Package) -> None:
    path = package.path / "data" / "records.py"
    _, _, code = path.read_text(encoding="utf-8").split('"""', 2)
    assert "class Tally:\n" in code
    code = code.replace("class Tally:\n", "class Tally(\n):  # a comment\n")
    code = code.replace('"""Counts for the manifest and the summary."""', '"""Another docstring."""')
    path.write_text(f'"""Another docstring."""\n\n\n{code}\n# the end\n', encoding="utf-8")
    assert package.changes() == {}


def test_a_helper_two_modules_away_counts_for_all_that_reach_it(package: Package) -> None:
    path = package.path / "train" / "schedules.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("(1 + math.cos", "(1 - math.cos"), encoding="utf-8")
    assert text != path.read_text(encoding="utf-8")
    assert "schedules" not in (package.path / "stages" / "sft.py").read_text()
    reached = ("pretrain", "sft", "lora", "dpo", "reference")
    assert package.changes() == {name: {"ttrain.train.schedules"} for name in reached}


def test_an_import_inside_a_function_counts(package: Package) -> None:
    (package.path / "data" / "fresh.py").write_text("VALUE = 1\n")
    code = "\ndef later():\n    from ttrain.data.fresh import VALUE\n    return VALUE\n"
    append(package.path / "stages" / "source.py", code)
    assert package.changes() == {"source": {"ttrain.stages.source", "ttrain.data.fresh"}}


def test_what_shapes_a_result_is_named_by_packages(package: Package) -> None:
    """A line more in every other module changes no digest, also where the module is imported; one in a shaping one does."""
    append(package.path / "stages" / "source.py", "".join(f"\nimport {name}" for name in sorted(NON_RESULT_NAMES)))
    before = package.digests()
    unread = {"doctor", "export", "flows", "nightly", "sweep", "tasks"}  # no stage of a pipeline imports them
    packages = {path.parent.name for path in package.path.glob("*/__init__.py")}
    assert packages == {*SHAPING, *NON_RESULT_PACKAGES, *unread} - {"errors"}
    others = [file for name in NON_RESULT_NAMES for file in package.files_of(name)]
    for file in [*others, *(file for name in unread for file in package.files_of(f"ttrain.{name}"))]:
        append(file, "\nUNUSED = 1\n")
    assert len(others) > 100 and package.digests() == before
    modules_read = sorted({name for modules in before.values() for name in modules})
    names = {next(name for name in modules_read if name.startswith(f"ttrain.{part}.")) for part in SHAPING}
    for name in names:
        append(package.files_of(name)[0], "\nUNUSED = 1\n")
    after = package.digests()
    for stage, modules in before.items():
        assert {name for name in modules if modules[name] != after[stage][name]} == names & modules.keys()


def test_threads_may_look_at_the_same_time(tmp_path: Path) -> None:
    """CPython before 3.11.8 counts the depth of all syntax trees in one variable: without a lock some threads fail."""
    threshold = gc.get_threshold()
    gc.set_threshold(200)
    gc.callbacks.append(next_thread)  # in the middle of a syntax tree
    try:
        with ThreadPoolExecutor(3) as threads:
            look = partial(code_digests, "ttrain.data.loader", DigestCache(tmp_path / "nowhere.json"))
            found = [threads.submit(look) for _ in range(3)]
        assert [one.result() for one in found] == [found[0].result()] * 3
    finally:
        gc.callbacks.remove(next_thread)
        gc.set_threshold(*threshold)


def next_thread(*_: object) -> None:
    time.sleep(0)
