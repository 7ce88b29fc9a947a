"""The digest of the code behind a stage: what it means counts, how it is written does not."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.paths import ROOT
from support.planned_homes import append

from ttrain.core.hashing import NON_RESULT_NAMES, NON_RESULT_PACKAGES

SHAPING = ("data", "evaluate", "inference", "model", "stages", "train")
DIGESTS = """
import json, sys
from pathlib import Path
from ttrain.core.hashing import DigestCache, code_digests
from ttrain.stages import STAGES
cache = DigestCache(Path("nowhere.json"))
print(json.dumps({name: code_digests(stage.module, cache) for name, stage in STAGES.items()}))
"""


def code_of(package: Path) -> dict[str, dict[str, str]]:
    """{stage: {module: digest}} as a process of its own sees them, with that copy of the package."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", DIGESTS], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@functools.cache
def untouched() -> dict[str, dict[str, str]]:
    """Of the package as it is, wherever a copy of it lies."""
    return code_of(ROOT / "ttrain")


def changed(package: Path, edit: Callable[[], None]) -> dict[str, set[str]]:
    """{stage: modules whose digest the edit changed}, without the stages that it leaves alone."""
    before = untouched()
    edit()
    after = code_of(package)
    return {
        stage: found
        for stage in before
        if (found := {name for name in {*before[stage], *after[stage]} if before[stage].get(name) != after[stage].get(name)})
    }


def test_a_stage_depends_on_the_modules_that_its_module_imports_and_on_no_others() -> None:
    code = untouched()
    assert {"ttrain.stages.tokenizer", "ttrain.data.tokenizer", "ttrain.data.records"} <= set(code["tokenizer"])
    assert {"ttrain.stages.sft", "ttrain.model.factory", "ttrain.train.optim"} <= set(code["sft"])
    assert not any(name.startswith(("ttrain.model", "ttrain.train")) for name in code["shards-sft"])
    assert not NON_RESULT_NAMES & {name for modules in code.values() for name in modules}


def test_comments_formatting_and_docstrings_do_not_count(copy: Path) -> None:
    def reformat() -> None:
        path = copy / "data" / "records.py"
        _, _, code = path.read_text(encoding="utf-8").split('"""', 2)
        assert "class Tally:\n" in code
        code = code.replace("class Tally:\n", "class Tally(\n):  # a comment\n")
        code = code.replace('"""Counts for the manifest and the summary."""', '"""Another docstring."""')
        path.write_text(f'"""Another docstring."""\n\n\n{code}\n# the end\n', encoding="utf-8")

    assert changed(copy, reformat) == {}


def test_a_helper_two_modules_away_counts_for_all_that_reach_it(copy: Path) -> None:
    def edit() -> None:
        path = copy / "train" / "schedules.py"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("(1 + math.cos", "(1 - math.cos"), encoding="utf-8")
        assert text != path.read_text(encoding="utf-8")

    assert "schedules" not in (copy / "stages" / "sft.py").read_text()
    assert changed(copy, edit) == {name: {"ttrain.train.schedules"} for name in ("pretrain", "sft", "lora")}


def test_an_import_inside_a_function_counts(copy: Path) -> None:
    def edit() -> None:
        (copy / "data" / "fresh.py").write_text("VALUE = 1\n")
        append(copy / "stages" / "source.py", "\ndef later():\n    from ttrain.data.fresh import VALUE\n    return VALUE\n")

    assert changed(copy, edit) == {"source": {"ttrain.stages.source", "ttrain.data.fresh"}}


def test_what_shapes_a_result_is_named_by_packages(copy: Path) -> None:
    """A line more in every other module changes no digest, also where the module is imported; one in a shaping one does."""
    append(copy / "stages" / "source.py", "".join(f"\nimport {name}" for name in sorted(NON_RESULT_NAMES)))
    before = code_of(copy)
    others = [path for name in NON_RESULT_NAMES for path in files_of(copy, name)]
    unread = {"doctor", "export", "flows", "nightly", "sweep", "tasks"}  # no stage of a pipeline imports them
    packages = {path.parent.name for path in copy.glob("*/__init__.py")}
    assert packages == {*SHAPING, *NON_RESULT_PACKAGES, *unread} - {"errors"}
    for path in [*others, *(path for name in unread for path in files_of(copy, f"ttrain.{name}"))]:
        append(path, "\nUNUSED = 1\n")
    assert len(others) > 100 and code_of(copy) == before
    names = {
        next(name for modules in before.values() for name in sorted(modules) if name.startswith(f"ttrain.{package}."))
        for package in SHAPING
    }
    for name in names:
        append(module_path(copy, name), "\nUNUSED = 1\n")
    after = code_of(copy)
    for stage, modules in before.items():
        assert {name for name in modules if modules[name] != after[stage][name]} == names & modules.keys()


def files_of(package: Path, name: str) -> list[Path]:
    """The module's file, or those of the package."""
    path = module_path(package, name)
    return sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]


def module_path(package: Path, name: str) -> Path:
    stem = package.joinpath(*name.split(".")[1:])
    return next(path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file())


IN_THREADS = """
import gc, threading, time
from pathlib import Path
from ttrain.core.hashing import DigestCache, code_digests

gc.set_threshold(200)
gc.callbacks.append(lambda *_: time.sleep(0))  # another thread's turn, in the middle of a syntax tree
found = []
look = lambda: found.append(len(code_digests("ttrain.stages.pretrain", DigestCache(Path("nowhere.json")))))
threads = [threading.Thread(target=look) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(found)
"""


def test_threads_may_look_at_the_same_time() -> None:
    # CPython before 3.11.8 counts the depth of all syntax trees in one variable: without a lock three of four threads fail
    done = subprocess.run([sys.executable, "-P", "-c", IN_THREADS], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 4 and len(set(found)) == 1, done.stderr
