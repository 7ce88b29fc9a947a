"""The house rules as tests: who may import whom, what stays unloaded, and configuration files that say only what differs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ttrain.config import Settings, flatten
from ttrain.loading import configs_directory, load, profile_names

ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "tasks", "ttrain")
LIGHT = (
    "ttrain.config", "ttrain.store", "ttrain.plan", "ttrain.report", "ttrain.cli", "ttrain.errors", "ttrain.runs",
    "ttrain.execute", "ttrain.launch", "ttrain.cli_data", "ttrain.cli_doctor", "ttrain.from_files", "ttrain.from_gate",
    "ttrain.cli_adapter", "ttrain.adapter_files", "ttrain.references",
    "ttrain.weights", "ttrain.card", "ttrain.lineage", "ttrain.export", "ttrain.gguf", "ttrain.cli_export",
    "ttrain.reproduce", "ttrain.registering", "ttrain.cli_lineage", "ttrain.provenance",
    "ttrain.night_inputs", "ttrain.nights", "ttrain.promotion", "ttrain.notify", "ttrain.selection", "ttrain.unfinished",
    "ttrain.earlier", "ttrain.libraries", "ttrain.extending", "ttrain.artifacts", "ttrain.cleaning", "ttrain.fetching",
    "ttrain.cli_sweep", "ttrain.sweep.measure", "ttrain.sweep.records", "ttrain.sweep.page",
    "ttrain.pages.report", "ttrain.pages.comparison", "ttrain.pages.plots", "ttrain.cli_pages",
    "ttrain.overview", "ttrain.cli_ui", "ttrain.cli_eval", "ttrain.evaluate.suites", "ttrain.evaluate.confidence",
    "flows", "flows.full", "flows.engine", "flows.nightly", "flows.sweep", "flows.trial", "flows.trials",
)  # fmt: skip
HELP = """
import contextlib, io, json, sys
import typer
from ttrain.cli import app, main
heavy = ("torch", "prefect", "mlflow", "transformers", "pyarrow", "optuna", "vl_convert")
def walk(command, words):
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, [*words, name])
found = {}
for words in walk(typer.main.get_command(app), []):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main([*words, "--help"])
        code = None
    except SystemExit as end:
        code = end.code
    found[" ".join(["ttrain", *words])] = [code, "Usage:" in out.getvalue(), [name for name in heavy if name in sys.modules]]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Import:
    """One import statement, or one call that imports by name, somewhere in the tree."""

    importer: str
    name: str
    in_function: bool
    where: str


def _names(node: ast.AST, importer: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = importer.split(".") if is_package else importer.split(".")[:-1]
            base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__", "find_spec") and isinstance(node.args[0].value, str):
            yield node.args[0].value


def _scan(tree: ast.AST, importer: str, path: str, *, is_package: bool, in_function: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        for name in _names(node, importer, is_package):
            yield Import(importer, name, in_function, f"{path}:{getattr(node, 'lineno', 0)} imports {name}")
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _scan(node, importer, path, is_package=is_package, in_function=inside)


def _imports() -> list[Import]:
    found: list[Import] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT)
            is_package = path.stem == "__init__"
            parts = relative.parent.parts if is_package else relative.with_suffix("").parts
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += _scan(tree, ".".join(parts), relative.as_posix(), is_package=is_package)
    return found


IMPORTS = _imports()


def _below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _offenders(importers: tuple[str, ...], forbidden: tuple[str, ...], but: tuple[str, ...] = ()) -> list[str]:
    return [
        found.where for found in IMPORTS
        if _below(found.importer, *importers) and _below(found.name, *forbidden) and not _below(found.importer, *but)
    ]  # fmt: skip


def test_the_scanner_sees_imports_at_the_top_in_functions_relative_and_by_name() -> None:
    code = "import a.b\ndef f():\n  from c import d\n  import_module('e.f')\nfrom . import g\nfrom ..h import i\n"
    found = list(_scan(ast.parse(code), "p.q.r", "file", is_package=False))
    assert [(item.name, item.in_function) for item in found] == [
        ("a.b", False), ("c.d", True), ("e.f", True), ("p.q.g", False), ("p.h.i", False),
    ]  # fmt: skip
    names = {found.name.split(".")[0] for found in IMPORTS}
    assert {"torch", "prefect", "mlflow", "ttrain", "tasks", "flows"} <= names


@pytest.mark.parametrize(
    ("importers", "forbidden", "but"),
    [
        pytest.param(PACKAGES, ("prefect",), ("tasks", "flows"), id="prefect only in tasks and flows"),
        pytest.param(
            ("ttrain", "tasks"), ("flows",),
            (
                "ttrain.cli", "ttrain.cli_night", "ttrain.cli_pipeline", "ttrain.cli_schedule", "ttrain.cli_settings",
                "ttrain.cli_sweep", "ttrain.cli_train", "ttrain.cli_ui",
            ),
            id="only the command line reaches up into flows",
        ),
        pytest.param(("ttrain.doctor",), ("ttrain.model", "ttrain.stages"), (), id="the doctor's checks know no stages"),
        pytest.param(("ttrain",), ("tasks",), (), id="the library knows no tasks"),
        pytest.param(PACKAGES, ("ttrain.cli",), (), id="nothing imports the command line"),
        pytest.param(("ttrain.data",), ("ttrain.model",), (), id="data does not know models"),
        pytest.param(("ttrain.model",), ("ttrain.data",), (), id="models do not know data"),
        pytest.param(("ttrain.train",), ("ttrain.model",), (), id="training imports no model"),
        pytest.param(("ttrain.evaluate",), ("ttrain.model",), (), id="evaluation imports no model"),
        pytest.param(
            ("ttrain",), ("ttrain.stages.training", "ttrain.stages.pretrain", "ttrain.stages.sft", "ttrain.stages.lora"),
            ("ttrain.stages",), id="stages are imported by stages only",
        ),
    ],
)  # fmt: skip
def test_imports_point_down(importers: tuple[str, ...], forbidden: tuple[str, ...], but: tuple[str, ...]) -> None:
    assert _offenders(importers, forbidden, but) == []


def test_mlflow_stands_behind_one_door() -> None:
    offenders = [
        found.where for found in IMPORTS
        if _below(found.name, "mlflow") and not found.importer.startswith("ttrain.tracking")
    ]  # fmt: skip
    assert offenders == []


def test_the_command_line_imports_flows_inside_functions_only() -> None:
    reached = [found for found in IMPORTS if _below(found.importer, "ttrain") and _below(found.name, "flows")]
    assert reached
    assert [found.where for found in reached if not found.in_function] == []


def test_tests_have_no_init_files() -> None:
    """`tests/tasks/__init__.py` would stand before the package `tasks` on the path of pytest."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def _python(code: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", LIGHT)
def test_what_plans_and_reports_loads_nothing_heavy(module: str) -> None:
    heavy = ["torch"] if module.startswith("flows") else ["torch", "prefect", "mlflow"]
    code = f"import json, sys, {module}; print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    assert _python(code) == []


def test_every_help_page_opens_without_anything_heavy() -> None:
    pages = _python(HELP)
    assert {"ttrain", "ttrain pipeline", "ttrain pipeline run", "ttrain stage run", "ttrain config show"} <= set(pages)
    assert {page: result for page, result in pages.items() if result != [0, True, []]} == {}


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads(name: str) -> None:
    loaded = load(profiles=[name], environment={})
    assert Settings.model_validate(loaded.settings.model_dump(mode="json")) == loaded.settings


def test_the_three_profiles_are_there() -> None:
    assert {"tiny", "small", "medium"} <= set(profile_names())


@pytest.mark.parametrize("path", sorted((configs_directory() / "profiles").glob("*.yaml")), ids=lambda path: path.name)
def test_config_files_hold_deviations_from_the_defaults_only(path: Path) -> None:
    named = dict(flatten(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
    default = dict(flatten(Settings().model_dump(mode="json")))
    loaded = dict(flatten(load(files=[path], environment={}).settings.model_dump(mode="json")))
    assert [key for key in named if loaded[key] == default.get(key, key)] == []
