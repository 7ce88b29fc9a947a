"""Rules as tests: which package imports which, what stays unloaded, how dependencies are bound."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from ttrain.config import Settings, flatten
from ttrain.config.loading import load, profile_names
from ttrain.config.yaml_text import configs_directory
from ttrain.data import pool

ROOT = Path(__file__).parents[1]
TOP = ("ttrain", "flows", "tasks")
# A module imports lower layers or its own package; packages of one layer do not know each other.
# `errors` is in core.
LAYERS = """
core | config | store | data model | train | inference | evaluate | tasks | reports | engine |
tracking | lineage | nightly doctor export | experiments | flows | api | cli
"""
RANK = {
    package: number for number, layer in enumerate(LAYERS.split("|")) for package in layer.split()
}
# These load models; without the others `--help`, a plan and a cached run load no torch.
HEAVY = {"model", "train", "inference", "evaluate", "tasks", "doctor"}
LIGHT = RANK.keys() - HEAVY
# Modules of light packages for commands that load a model or a server anyway.
LOADS = {
    "ttrain.cli.chat_screen": "torch",
    "ttrain.cli.evaluation": "torch",
    "ttrain.flows.serve": "prefect",
    "ttrain.flows.prefect_run": "prefect",
}
STARTED = """
import contextlib, functools, importlib, io, json, sys
from unittest.mock import MagicMock
import typer
# Cached: else each page builds all commands again.
typer.main.get_command = functools.cache(typer.main.get_command)
from ttrain.cli.main import app, main
heavy = ("torch", "prefect", "mlflow", "transformers", "pyarrow", "optuna")
def walk(command, words):
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, [*words, name])
pages = {}
stages = [["train", name] for name in ("pretrain", "sft", "lora")]
for words in [*walk(typer.main.get_command(app), []), *stages]:
    out = io.StringIO()
    code = None
    try:
        with contextlib.redirect_stdout(out):
            main([*words, "--help"])
    except SystemExit as end:
        code = end.code
    names = [*heavy, *(["pydantic"] if not words else [])]  # importing the settings takes 0.15 s
    loaded = [name for name in names if name in sys.modules]
    pages[" ".join(["ttrain", *words])] = [code, "Usage:" in out.getvalue(), loaded]
brought = {}
sys.modules |= {name: MagicMock() for name in ("wandb", "swanlab")}  # importing them takes 2.8 s
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    for name in heavy[:3]:
        if name in sys.modules:
            brought.setdefault(name, module)
print(json.dumps([pages, brought]))
"""
STATEMENTS = ast.stmt | ast.excepthandler | ast.match_case
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
BY_NAME = ("import_module", "__import__", "find_spec")
# Libraries of which only public names are used, so that an upgrade breaks nothing in silence.
PUBLIC_ONLY = ("prefect", "mlflow")
PRIVATE = re.compile(r"(^|\.)_(?!_)")
OWN = ("self", "cls", "os")  # `os._exit` is documented
# The pin is the newest release with a CPU build; this one was tried, with the same digests.
TRIED_ABOVE_THE_PIN = {"torch": "2.15.0"}
# Their interfaces change, or their files are migrated, at a minor version.
CHANGES_AT_MINOR = """
fastokens lm_eval mlflow peft prefect prefect-dask pydantic safetensors swanlab tokenizers torch
transformers typer wandb
"""


@dataclass(frozen=True)
class Import:
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
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in BY_NAME and isinstance(node.args[0].value, str):
            yield node.args[0].value


def _scan(
    tree: ast.AST, importer: str, path: str, *, is_package: bool, by_name: bool = True
) -> Iterator[Import]:
    """Imports anywhere in a module; those by name only where `by_name` says that there are some."""

    def scan(tree: ast.AST, in_function: bool) -> Iterator[Import]:
        for node in ast.iter_child_nodes(tree):
            if not by_name and not isinstance(node, STATEMENTS):
                continue
            for name in _names(node, importer, is_package):
                where = f"{path}:{getattr(node, 'lineno', 0)} imports {name}"
                yield Import(importer, name, in_function, where)
            is_typing = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            yield from scan(node, in_function or is_typing or isinstance(node, FUNCTIONS))

    return scan(tree, False)


def _modules() -> dict[str, Path]:
    """Modules by the names under which they are imported: `flows.full` is `ttrain.flows.full`."""
    modules = {}
    for path in (path for top in TOP for path in sorted((ROOT / top).rglob("*.py"))):
        place = path.relative_to(ROOT).with_suffix("")
        parts = place.parent.parts if place.name == "__init__" else place.parts
        modules[".".join(parts if parts[0] == "ttrain" else ("ttrain", *parts))] = path
    return modules


MODULES = _modules()


@functools.cache
def imports() -> list[Import]:
    imports: list[Import] = []
    for name, path in MODULES.items():
        code = path.read_text(encoding="utf-8")
        place = path.relative_to(ROOT).as_posix()
        is_package = path.stem == "__init__"
        by_name = any(call in code for call in BY_NAME)
        imports += _scan(ast.parse(code), name, place, is_package=is_package, by_name=by_name)
    return imports


def _package(module: str) -> str:
    _, *others = module.split(".")
    if module == "ttrain.errors":
        return "core"
    return others[0] if others and others[0] != "__main__" else ""


def _module(name: str) -> str | None:
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def _below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_the_scanner_sees_imports_at_the_top_in_functions_relative_and_by_name() -> None:
    code = "import a.b\ndef f():\n  from c import d\n  import_module('e.f')\nfrom . import g\n"
    tree = ast.parse(f"{code}from ..h import i\n")
    items = list(_scan(tree, "p.q.r", "file", is_package=False))
    assert [item.name for item in items] == ["a.b", "c.d", "e.f", "p.q.g", "p.h.i"]
    assert [item.in_function for item in items] == [False, True, True, False, False]
    libraries = {item.name.split(".")[0] for item in imports()}
    assert {"torch", "prefect", "mlflow", "ttrain"} <= libraries


def test_every_package_has_a_layer_and_no_module_lies_loose() -> None:
    assert {_package(module) for module in MODULES} - {""} == set(RANK)
    loose = {path.stem for path in (ROOT / "ttrain").glob("*.py")}
    assert loose == {"__init__", "__main__", "api", "errors"}


def test_imports_point_down() -> None:
    offenders = []
    for item in imports():
        above = _package(item.importer)
        below = _package(_module(item.name) or "")
        if above and below and above != below and RANK[below] >= RANK[above]:
            offenders.append(item.where)
    assert offenders == []


def test_no_files_import_each_other() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for item in imports():
        module = _module(item.name)
        if module and module != item.importer:
            graph[item.importer].add(module)
    cycle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert cycle == []


@pytest.mark.parametrize(
    ("importers", "forbidden", "exceptions"),
    [
        ("ttrain", "prefect", "ttrain.flows"),
        ("ttrain", "mlflow", "ttrain.tracking"),
        ("ttrain.train ttrain.evaluate", "ttrain.model ttrain.tracking", ""),
        ("ttrain.tasks", "ttrain.tracking", "ttrain.tasks.common.callbacks"),
        ("ttrain", "flows tasks", ""),  # a user's packages of these names
        (
            "ttrain",
            "ttrain.tasks.common.training ttrain.tasks.pretrain ttrain.tasks.sft ttrain.tasks.lora",
            "ttrain.tasks ttrain.doctor",
        ),
    ],
)
def test_what_else_no_package_imports(importers: str, forbidden: str, exceptions: str) -> None:
    offenders = [
        item.where
        for item in imports()
        if _below(item.importer, *importers.split())
        and _below(item.name, *forbidden.split())
        and not _below(item.importer, *exceptions.split())
    ]
    assert offenders == []


@pytest.mark.parametrize("library", PUBLIC_ONLY)
def test_no_private_name_of_a_library_is_used(library: str) -> None:
    """No such import, and no such attribute of anything in a module that imports it."""
    uses = [item for item in imports() if _below(item.name, library)]
    offenders = [item.where for item in uses if PRIVATE.search(item.name)]
    for module in sorted({item.importer for item in uses}):
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            is_private = isinstance(node, ast.Attribute) and PRIVATE.match(node.attr)
            if is_private and getattr(node.value, "id", "") not in OWN:
                offenders.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
    assert uses and offenders == []


def test_a_process_of_python_imports_nothing_from_the_directory_that_it_is_started_in() -> None:
    """`python -m` and `-c` put it first; a script has its own directory there."""
    started = re.compile(r"\[\s*sys\.executable,\s*(.*)")
    code = "\n".join(path.read_text(encoding="utf-8") for path in MODULES.values())
    arguments = started.findall(code)
    safe = ('"-P"', "*program", '"-m", *module')
    assert len(arguments) > 2
    assert [text for text in arguments if not text.startswith(safe)] == []
    assert pool.ENVIRONMENT["PYTHONSAFEPATH"] == "1"


def test_the_command_line_imports_flows_inside_functions_only() -> None:
    of_cli = [item for item in imports() if _package(item.importer) == "cli"]
    of_flows = [item for item in of_cli if _below(item.name, "ttrain.flows")]
    assert of_flows and [item.where for item in of_flows if not item.in_function] == []


def test_every_help_page_and_what_plans_stores_and_reports_load_nothing_heavy() -> None:
    light = [module for module in MODULES if _package(module) in LIGHT and module not in LOADS]
    assert len(light) > 150
    command = [sys.executable, "-P", "-c", STARTED, json.dumps(light)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages, brought = json.loads(done.stdout.splitlines()[-1])
    commands = ("", " pipeline", " pipeline run", " stage run", " config show")
    assert {f"ttrain{command}" for command in commands} <= set(pages)
    assert {page: result for page, result in pages.items() if result != [0, True, []]} == {}
    assert brought == {}


def test_every_profile_loads() -> None:
    assert {"tiny", "small", "medium"} <= set(profile_names())
    for name in profile_names():
        settings = load(profiles=[name], environment={}).settings
        assert Settings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    "path", sorted((configs_directory() / "profiles").glob("*.yaml")), ids=lambda path: path.name
)
def test_config_files_hold_deviations_from_the_defaults_only(path: Path) -> None:
    named = dict(flatten(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
    default = dict(flatten(Settings().model_dump(mode="json")))
    loaded = dict(flatten(load(files=[path], environment={}).settings.model_dump(mode="json")))
    assert [key for key in named if loaded[key] == default.get(key, key)] == []


def test_dependencies_are_bounded_to_what_was_run() -> None:
    """An installation without the constraints takes no version that was not tried with ttrain."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    extras = {**project["optional-dependencies"], "test": []}
    for text in (*project["dependencies"], *chain.from_iterable(extras.values())):
        requirement = Requirement(text)
        pinned = Version(pins[requirement.name.lower()])
        assert pinned in requirement.specifier, text
        newest = Version(TRIED_ABOVE_THE_PIN.get(requirement.name, str(pinned)))
        assert newest in requirement.specifier, text
        assert f"{newest.major + 1}.0.0" not in requirement.specifier, text
        if requirement.name in CHANGES_AT_MINOR.split():
            assert f"{newest.major}.{newest.minor + 1}.0" not in requirement.specifier, text
