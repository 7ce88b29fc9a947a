"""Pages of the documentation: commands parse, settings load, snippets run, links exist.

full/test_readme.py runs what needs a finished pipeline.
"""

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.snippets import PAGES, ROOT, Command, Snippet, commands, snippets
from test_reference import leaf_commands
from typer.core import TyperGroup
from typer.main import get_command

from ttrain.cli.main import app
from ttrain.config import Settings
from ttrain.config.loading import load, types_by_name
from ttrain.data import contamination
from ttrain.data.preferences import is_preference, preference_of
from ttrain.evaluate import suites
from ttrain.experiments.changes import read_changes

FILES = ("my.yaml", "mine.yaml", "suite.yaml", "model_config.json")  # of the reader, on the pages
IDS = {"ids": lambda value: value.name if isinstance(value, Snippet) else ""}
LINK = re.compile(r"\]\(([^()\s#]*)(?:#([\w-]+))?\)")
SPAN = re.compile(r"`([^`\n]+)`")
SETTING = re.compile(rf"({'|'.join(Settings.model_fields)})((?:\.[a-z_]+)+)(=.*)?")
TAKE_SETTINGS = ("pipeline run", "pipeline plan", "stage run", "doctor", "config show")


def content(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    return re.sub(r"```.*?```", "", content(page), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower() for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for name, anchor in LINK.findall(prose(page)):
        if name.startswith(("http:", "https:")):
            continue
        target = ((ROOT / page).parent / name) if name else ROOT / page
        assert target.exists(), f"{page} links to {name}"
        assert not anchor or anchor in anchors(target), f"{page} links to {name}#{anchor}"


def parsed(words: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    command, context, rest, name = get_command(app), None, list(words), "ttrain"
    while isinstance(command, TyperGroup):
        context = command.make_context(name, rest, parent=context)
        arguments = [*context._protected_args, *context.args]
        called, command, rest = command.resolve_command(context, arguments)
        assert command is not None
        name = f"{name} {called}"
    if "--help" in rest:
        return name, {}
    return name, command.make_context(name, rest, parent=context).params


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        (tmp_path / name).write_text("name: mine\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "command", {each.text: each for each in commands()}.values(), ids=lambda each: each.text
)
def test_commands_of_pages_have_valid_arguments_and_settings(
    command: Command, directory: Path
) -> None:
    name, values = parsed(command.words)
    if name.startswith("ttrain train task") or "=(" in str(values.get("overrides")):
        return  # the settings of a task are its own
    if name.removeprefix("ttrain ") in TAKE_SETTINGS:
        overrides = values.get("overrides") or ()
        layers = {"files": values.get("config") or (), "profiles": values.get("profile") or ()}
        loaded = load(list(overrides), environment={}, **layers)
        assert len(loaded.sources) >= len(overrides)


@pytest.mark.parametrize("page", PAGES)
def test_settings_and_commands_within_sentences_exist(page: str) -> None:
    known = [*types_by_name(Settings)]
    commands_known = {name for name, _ in leaf_commands()}
    groups = {name.rpartition(" ")[0] for name in commands_known}
    for span in SPAN.findall(prose(page)):
        if (setting := SETTING.fullmatch(span)) and not span.endswith((".json", ".safetensors")):
            name = f"{setting[1]}{setting[2]}"
            is_known = any(f"{key}.".startswith(f"{name}.") for key in known)
            assert is_known or name.startswith("model.fields."), f"{page}: {span}"
        elif span.startswith("ttrain ") and span[7].islower():
            command = re.sub("^ttrain train ", "ttrain train task ", span)
            is_known = any(f"{command} ".startswith(f"{name} ") for name in commands_known)
            assert is_known or span in groups, f"{page}: {span}"


@pytest.mark.parametrize("snippet", snippets("yaml"), **IDS)
def test_yaml_is_settings_or_a_suite_or_a_manifest(snippet: Snippet, tmp_path: Path) -> None:
    first, *others = yaml.safe_load_all(snippet.text)
    if "apiVersion" in first:
        assert {document["kind"] for document in (first, *others)} == {"Service", "Job"}
        for argument in re.findall(r"exec ttrain (.*?)\n +env:", snippet.text, flags=re.DOTALL):
            words = re.sub(r"\$\w+", "1", argument).split()
            parsed(tuple(word for word in words if not word.startswith(("-c", "/"))))
        return
    path = tmp_path / "page.yaml"
    path.write_text(snippet.text, encoding="utf-8")
    if "changes.yaml" in snippet.text:
        assert all(load(change.values, environment={}).settings for change in read_changes(path))
    elif "tasks" in first:
        assert set(suites.load(str(path)).suite.tasks) == set(first["tasks"])
    else:
        assert load((), files=[path], environment={}).settings


@pytest.mark.parametrize("snippet", snippets("json"), **IDS)
def test_json_is_an_item(snippet: Snippet) -> None:
    for row in map(json.loads, snippet.text.splitlines()):
        assert preference_of(row) if is_preference(row) else contamination.of_row(row) is not None


def test_the_tutorial_s_script_makes_data_that_its_settings_name(tmp_path: Path) -> None:
    script = tmp_path / "make_data.py"
    codes = [snippet.text for snippet in snippets("python") if "ast.parse" in snippet.text]
    script.write_text("".join(codes), encoding="utf-8")
    package = Path(sysconfig.get_path("stdlib")) / "json"
    subprocess.run([sys.executable, script, package, "stdlib"], cwd=tmp_path, check=True)
    documents, chats = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("stdlib-docs.jsonl", "stdlib-chats.jsonl")
    )
    assert len(documents) > len(chats) > 5
    assert set(documents[0]) == {"text", "source"} and set(chats[0]) == {"instruction", "output"}
    texts = [snippet.text for snippet in snippets("yaml") if snippet.page == "docs/tutorial.md"]
    (settings,) = map(yaml.safe_load, texts)
    assert (tmp_path / settings["data"]["sft"]).is_file()
