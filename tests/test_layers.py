"""Rules as tests: which package may import which, what stays unloaded, what a configuration file may repeat."""

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
LAYERS = (
    ("core",),  # with `errors`
    ("config",),
    ("store",),
    ("data", "model"),
    ("train",),
    ("inference",),
    ("evaluate",),
    ("tasks",),
    ("reports",),
    ("engine",),
    ("tracking",),
    ("lineage",),
    ("nightly", "doctor", "export"),
    ("experiments",),
    ("flows",),
    ("api",),
    ("cli",),
)
RANK = {package: number for number, layer in enumerate(LAYERS) for package in layer}
# Packages that plan, store and report, so that `--help`, a plan and a cached run load neither torch, Prefect nor MLflow.
LIGHT = (
    "core",
    "config",
    "store",
    "data",
    "tracking",
    "lineage",
    "engine",
    "nightly",
    "export",
    "reports",
    "experiments",
    "flows",
    "api",
    "cli",
)
# What a light package has for those who have decided to load a model, or a server, already
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
typer.main.get_command = functools.cache(typer.main.get_command)  # else each page builds all commands anew
from ttrain.cli.main import app, main
heavy = ("torch", "prefect", "mlflow", "transformers", "pyarrow", "optuna")
def walk(command, words):
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, [*words, name])
found = {}
for words in [*walk(typer.main.get_command(app), []), *(["train", name] for name in ("pretrain", "sft", "lora"))]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main([*words, "--help"])
        code = None
    except SystemExit as end:
        code = end.code
    found[" ".join(["ttrain", *words])] = [code, "Usage:" in out.getvalue(), [name for name in heavy if name in sys.modules]]
    if not words and "pydantic" in sys.modules:  # the settings: 0.15 s
        found["ttrain"][-1].append("pydantic")
brought = {}
sys.modules |= {name: MagicMock() for name in ("wandb", "swanlab")}  # whose own imports take 2.8 s
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    for name in heavy[:3]:
        if name in sys.modules:
            brought.setdefault(name, module)
print(json.dumps([found, brought]))
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
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if called in BY_NAME and isinstance(node.args[0].value, str):
            yield node.args[0].value


BY_NAME = ("import_module", "__import__", "find_spec")


def _scan(
    tree: ast.AST,
    importer: str,
    path: str,
    *,
    is_package: bool,
    by_name: bool = True,
    in_function: bool = False,
) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if not by_name and not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        for name in _names(node, importer, is_package):
            yield Import(
                importer, name, in_function, f"{path}:{getattr(node, 'lineno', 0)} imports {name}"
            )
        is_for_types = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        inside = (
            in_function
            or is_for_types
            or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )
        yield from _scan(
            node, importer, path, is_package=is_package, by_name=by_name, in_function=inside
        )


def _modules() -> dict[str, Path]:
    paths = [path for top in TOP for path in sorted((ROOT / top).rglob("*.py"))]
    places = [path.relative_to(ROOT).with_suffix("") for path in paths]
    names = [
        ".".join(place.parent.parts if place.name == "__init__" else place.parts)
        for place in places
    ]
    names = [
        name if name.split(".")[0] == "ttrain" else f"ttrain.{name}" for name in names
    ]  # as they are imported
    return dict(zip(names, paths, strict=True))


MODULES = _modules()


@functools.cache
def imports() -> list[Import]:
    found = []
    for name, path in MODULES.items():
        code, place = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        by_name = any(call in code for call in BY_NAME)
        found += _scan(
            ast.parse(code), name, place, is_package=path.stem == "__init__", by_name=by_name
        )
    return found


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
    code = "import a.b\ndef f():\n  from c import d\n  import_module('e.f')\nfrom . import g\nfrom ..h import i\n"
    found = list(_scan(ast.parse(code), "p.q.r", "file", is_package=False))
    assert [(item.name, item.in_function) for item in found] == [
        ("a.b", False),
        ("c.d", True),
        ("e.f", True),
        ("p.q.g", False),
        ("p.h.i", False),
    ]
    names = {found.name.split(".")[0] for found in imports()}
    assert {"torch", "prefect", "mlflow", "ttrain"} <= names


def test_every_package_has_a_layer_and_no_module_lies_loose() -> None:
    assert {_package(module) for module in MODULES} - {""} == set(RANK)
    assert {path.name for path in (ROOT / "ttrain").glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "api.py",
        "errors.py",
    }


def test_imports_point_down() -> None:
    offenders = []
    for found in imports():
        module = _module(found.name)
        if (
            module is None
            or not (above := _package(found.importer))
            or not (below := _package(module))
        ):
            continue
        if above != below and RANK[below] >= RANK[above]:
            offenders.append(found.where)
    assert offenders == []


def test_no_files_import_each_other() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in imports():
        module = _module(found.name)
        if module and module != found.importer:
            graph[found.importer].add(module)
    cycle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert cycle == []


@pytest.mark.parametrize(
    ("importers", "forbidden", "but"),
    [
        pytest.param(("ttrain",), ("prefect",), ("ttrain.flows",), id="prefect only in flows"),
        pytest.param(("ttrain",), ("mlflow",), ("ttrain.tracking",), id="mlflow only in tracking"),
        pytest.param(
            ("ttrain.train", "ttrain.evaluate"),
            ("ttrain.model", "ttrain.tracking"),
            (),
            id="no model in train",
        ),
        pytest.param(
            ("ttrain.tasks",),
            ("ttrain.tracking",),
            ("ttrain.tasks.common.callbacks",),
            id="stages do not track",
        ),
        pytest.param(
            ("ttrain",), ("flows", "tasks"), (), id="a user's packages of these names are not ours"
        ),
        pytest.param(
            ("ttrain",),
            (
                "ttrain.tasks.common.training",
                "ttrain.tasks.pretrain",
                "ttrain.tasks.sft",
                "ttrain.tasks.lora",
            ),
            ("ttrain.tasks", "ttrain.doctor"),
            id="only stages and the doctor import a stage",
        ),
    ],
)
def test_what_else_no_package_imports(
    importers: tuple[str, ...], forbidden: tuple[str, ...], but: tuple[str, ...]
) -> None:
    offenders = [
        found.where
        for found in imports()
        if _below(found.importer, *importers)
        and _below(found.name, *forbidden)
        and not _below(found.importer, *but)
    ]
    assert offenders == []


# Libraries of which ttrain uses public names alone, so that an upgrade breaks nothing in silence.
PUBLIC_ONLY = ("prefect", "mlflow")
PRIVATE = re.compile(r"(^|\.)_(?!_)")
OWN = ("self", "cls", "os")  # `os._exit` is documented


@pytest.mark.parametrize("library", PUBLIC_ONLY)
def test_no_private_name_of_a_library_is_used(library: str) -> None:
    """Neither a module or name with an underscore, nor such an attribute of anything in a module that imports it."""
    uses = [found for found in imports() if _below(found.name, library)]
    offenders = [found.where for found in uses if PRIVATE.search(found.name)]
    for module in sorted({found.importer for found in uses}):
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and PRIVATE.match(node.attr)
                and getattr(node.value, "id", "") not in OWN
            ):
                offenders.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
    assert uses and offenders == []


def test_a_process_of_python_imports_nothing_from_the_directory_that_it_is_started_in() -> None:
    """`python -m` and `-c` put it first. A script has its own directory there, and a server starts in that of its log."""
    started = re.compile(r"\[\s*sys\.executable,\s*(.*)")
    paths = [path for package in TOP for path in (ROOT / package).rglob("*.py")]
    arguments = [
        match for path in paths for match in started.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(arguments) > 3
    assert [
        rest for rest in arguments if not rest.startswith(('"-P"', "*program", '"-m", *module'))
    ] == []
    assert pool.ENVIRONMENT["PYTHONSAFEPATH"] == "1"


def test_the_command_line_imports_flows_inside_functions_only() -> None:
    reached = [
        found
        for found in imports()
        if _package(found.importer) == "cli" and _below(found.name, "ttrain.flows")
    ]
    assert reached
    assert [found.where for found in reached if not found.in_function] == []


def test_every_help_page_and_what_plans_stores_and_reports_load_nothing_heavy() -> None:
    light = [module for module in MODULES if _package(module) in LIGHT and module not in LOADS]
    assert len(light) > 150
    command = [sys.executable, "-P", "-c", STARTED, json.dumps(light)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    pages, brought = json.loads(done.stdout.splitlines()[-1])
    assert {
        "ttrain",
        "ttrain pipeline",
        "ttrain pipeline run",
        "ttrain stage run",
        "ttrain config show",
    } <= set(pages)
    assert {page: result for page, result in pages.items() if result != [0, True, []]} == {}
    assert brought == {}


def test_every_profile_loads() -> None:
    assert {"tiny", "small", "medium"} <= set(profile_names())
    for name in profile_names():
        loaded = load(profiles=[name], environment={})
        assert Settings.model_validate(loaded.settings.model_dump(mode="json")) == loaded.settings


@pytest.mark.parametrize(
    "path", sorted((configs_directory() / "profiles").glob("*.yaml")), ids=lambda path: path.name
)
def test_config_files_hold_deviations_from_the_defaults_only(path: Path) -> None:
    named = dict(flatten(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
    default = dict(flatten(Settings().model_dump(mode="json")))
    loaded = dict(flatten(load(files=[path], environment={}).settings.model_dump(mode="json")))
    assert [key for key in named if loaded[key] == default.get(key, key)] == []


CHANGES_AT_MINOR = {  # whose interfaces change, or whose files are migrated, at a minor version
    "fastokens",
    "lm_eval",
    "mlflow",
    "peft",
    "prefect",
    "prefect-dask",
    "pydantic",
    "safetensors",
    "swanlab",
    "tokenizers",
    "torch",
    "transformers",
    "typer",
    "wandb",
}


def test_dependencies_are_bounded_to_what_was_run() -> None:
    """An installation without the constraints takes no version that nobody has run with ttrain."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = [
        text
        for name, texts in project["optional-dependencies"].items()
        if name != "test"
        for text in texts
    ]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        pinned = Version(
            pins.get(requirement.name) or pins[{"sqlalchemy": "SQLAlchemy"}[requirement.name]]
        )
        minor, major = f"{pinned.major}.{pinned.minor + 1}.0", f"{pinned.major + 1}.0.0"
        assert pinned in requirement.specifier, f"{requirement} leaves out {pinned}, which is run"
        assert major not in requirement.specifier, f"{requirement} has no upper bound"
        if requirement.name in CHANGES_AT_MINOR:
            assert minor not in requirement.specifier, (
                f"{requirement} takes {minor}, but {pinned} is run"
            )
