"""The quickstart's data: true, split by module, free of copies across the split, and the same bytes every time."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ttrain.data import python_docs, python_reading
from ttrain.errors import UsageError

NAMES = ("pretrain", "pretrain_heldout", "sft", "sft_heldout", "lora", "lora_heldout")
SETTINGS: dict[str, Any] = {
    "document_bytes": 3_000_000,
    "chat_rows": 4000,
    "domain_rows": 800,
    "heldout_fraction": 0.05,
    "source_code_fraction": 0.2,
}
DIGESTS = """
import hashlib, json, pathlib, sys
if sys.argv[2] == "crowded":
    import asyncio, decimal, email.message, sqlite3, unittest.mock
from ttrain.data.python_docs import build
out = pathlib.Path(sys.argv[1])
build(out, **json.loads(sys.argv[3]))
assert not {"antigravity", "this", "turtle", "tkinter", "torch", "idlelib"} & set(sys.modules)
print({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())})
"""
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[tuple[int, int]]]:
    output = tmp_path_factory.mktemp("python_docs")
    progress: list[tuple[int, int]] = []
    counts = python_docs.build(output, **SETTINGS, progress=lambda done, total: progress.append((done, total)))
    return output, counts, progress


@pytest.fixture(scope="module")
def rows(built: tuple[Path, Any, Any]) -> Rows:
    return {name: [json.loads(line) for line in (built[0] / f"{name}.jsonl").open(encoding="utf-8")] for name in NAMES}


def texts(row: dict[str, Any], role: str = "") -> list[str]:
    return [row["text"]] if "text" in row else [m["content"] for m in row["messages"] if role in ("", m["role"])]


def top_module(row: dict[str, Any]) -> str:
    """Without the marks of a C or Python twin."""
    return re.sub("^_(py)?", "", row["source"].partition(":")[2].partition(".")[0])


def test_counts_are_those_of_the_files(built: tuple[Path, dict[str, Any], Any], rows: Rows) -> None:
    for name in NAMES:
        size = sum(len(text.encode()) for row in rows[name] for text in texts(row))
        assert built[1][name] == {"rows": len(rows[name]), "bytes": size}
        assert all(text.strip() for row in rows[name] for text in texts(row))
    assert built[1]["removed"]["exact_duplicates"] > 100 and built[1]["removed"]["near_duplicates"] > 0
    assert built[1]["removed"]["unreadable_files"] == 0


def test_progress_counts_every_file(built: tuple[Path, Any, list[tuple[int, int]]]) -> None:
    total = built[2][0][1]
    assert total > 300 and built[2] == [(done, total) for done in range(1, total + 1)]


def test_sizes_follow_the_settings(rows: Rows) -> None:
    size = {name: sum(len(text.encode()) for row in rows[name] for text in texts(row)) for name in NAMES}
    code = sum(len(row["text"].encode()) for row in rows["pretrain"] if row["source"].startswith("code:"))
    assert 100_000 <= size["pretrain_heldout"] <= 250_000
    assert 0.95 * 600_000 < code <= 600_000 and size["pretrain"] + size["pretrain_heldout"] <= 3_000_000
    assert len(rows["sft"]) == 4000 and len(rows["lora"]) == 800
    assert len(rows["sft_heldout"]) >= 100 and len(rows["lora_heldout"]) >= 100
    kinds = Counter(row["source"].partition(":")[0] for row in rows["pretrain_heldout"])
    assert set(kinds) == {"docstring", "reference"}


def test_no_module_is_on_both_sides(rows: Rows) -> None:
    heldout = {top_module(row) for row in rows["pretrain_heldout"] + rows["sft_heldout"]}
    assert len(heldout) > 10
    assert not heldout & {top_module(row) for row in rows["pretrain"] + rows["sft"]}


def eight_grams(text: str) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[start : start + 8]) for start in range(len(words) - 7)]


def test_heldout_documents_are_no_copies_of_training_text(rows: Rows) -> None:
    known = {gram for row in rows["pretrain"] for gram in eight_grams(row["text"])}
    shares = []
    for row in rows["pretrain_heldout"]:
        grams = eight_grams(row["text"])
        shares += [sum(gram in known for gram in grams) / len(grams)] if grams else []
    assert len(shares) > 200
    assert sum(share > 0.5 for share in shares) < 0.01 * len(shares)


def test_no_document_stands_twice(rows: Rows) -> None:
    seen = [" ".join(row["text"].split()) for name in ("pretrain", "pretrain_heldout") for row in rows[name]]
    assert len(set(seen)) == len(seen)


def test_no_answer_is_on_both_sides(rows: Rows) -> None:
    for name in ("sft", "lora"):
        train = {text for row in rows[name] for text in texts(row, "assistant")}
        assert train.isdisjoint(text for row in rows[f"{name}_heldout"] for text in texts(row, "assistant"))


def test_chats_are_short_and_varied(rows: Rows) -> None:
    for row in rows["sft"] + rows["sft_heldout"]:
        roles = [message["role"] for message in row["messages"]]
        assert roles[roles[0] == "system" :] in (["user", "assistant"], ["user", "assistant"] * 2)
        assert all(0 < len(text) <= 600 for text in texts(row, "assistant"))
    systems = [text for row in rows["sft"] for text in texts(row, "system")]
    assert 0.25 < len(systems) / len(rows["sft"]) < 0.35 and len(set(systems)) >= 3
    two_turns = sum(len(texts(row, "user")) == 2 for row in rows["sft"])
    assert 0.15 < two_turns / len(rows["sft"]) < 0.25
    forms = Counter(re.sub("`.*`", "``", texts(row, "user")[0]) for row in rows["sft"])
    assert sum(count >= 40 for count in forms.values()) >= 8


SAFE = (
    "collections",
    "functools",
    "heapq",
    "json",
    "logging",
    "os",
    "random",
    "shutil",
    "statistics",
    "string",
    "zipfile",
)


def answers_about_signatures(rows: Rows) -> Iterator[tuple[Any, str]]:
    for row in rows["sft"] + rows["sft_heldout"]:
        found = re.fullmatch("What arguments does `(.*)` take\\?", texts(row, "user")[0])
        module = row["source"].partition(":")[2]
        if found and module in SAFE:
            thing: Any = importlib.import_module(module)
            for part in found[1].removeprefix(module + ".").split("."):
                thing = getattr(thing, part)
            if not isinstance(thing, type) and getattr(thing, "__text_signature__", "") is not None:
                yield thing, texts(row, "assistant")[0]


def test_answers_agree_with_inspect(rows: Rows) -> None:
    checked = 0
    for thing, answer in answers_about_signatures(rows):
        parameters = [p for p in inspect.signature(thing).parameters if p not in ("self", "cls")]
        said = [name.lstrip("*") for name in re.findall("`([^`]*)`", answer)[1:]]
        assert said == parameters, answer
        checked += 1
    assert checked >= 20


def test_letters_are_true_and_pairs_stay_together(rows: Rows) -> None:
    sides = [{texts(row, "assistant")[0][0] for row in rows[name]} for name in ("lora", "lora_heldout")]
    assert len(sides[0]) == 800 and not {c.upper() for c in sides[0]} & {c.upper() for c in sides[1]}
    for row in rows["lora"]:
        answer = texts(row, "assistant")[0]
        code, utf8 = re.findall(r"U\+([0-9A-F]+)", answer)[0], answer.removesuffix(".").partition("UTF-8 it is ")[2]
        assert chr(int(code, 16)) == answer[0] == bytes.fromhex(utf8).decode()


def test_no_addresses_and_no_paths(rows: Rows) -> None:
    places = {sys.prefix, sys.base_prefix, str(Path.home()), sysconfig.get_path("stdlib")} - {"/usr", "/usr/local", "/"}
    for text in (text for name in NAMES for row in rows[name] for text in texts(row)):
        assert not re.search(r"at 0x[0-9a-fA-F]", text)
        assert not any(place + "/" in text for place in places)


@pytest.mark.soak
def test_same_python_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "math.py").write_text("raise SystemExit('a file of the working directory was imported')")
    root = Path(python_docs.__file__).parents[2]
    runs = []
    for seed, locale, crowd, folder in (("0", "C", "crowded", root), ("4321", "C.UTF-8", "lone", tmp_path / "cwd")):
        environment = {"PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONPATH": str(root), "PYTHONUTF8": "0"}
        command = [sys.executable, "-P", "-c", DIGESTS, str(tmp_path / seed), crowd, json.dumps(SETTINGS)]
        runs.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1] and outputs[0].count(".jsonl") == 6


def test_broken_files_and_missing_modules_are_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heapq.py").write_text("def broken(:\n")
    (tmp_path / "textwrap.py").write_text('def dedent(text):\n    """Remove common leading blanks."""\n')
    (tmp_path / "sitecustomize.py").write_text('"""Not part of the standard library."""\n')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    items, code, unreadable = python_reading.read_python(lambda done, total: None, with_code=True)
    assert unreadable == 1 and list(code) == ["textwrap"]
    assert [item.name for item in items if item.module in ("textwrap", "sitecustomize", "heapq")] == ["textwrap.dedent"]


def test_shares_outside_their_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"heldout_fraction is 1\.5"):
        python_docs.build(tmp_path, **(SETTINGS | {"heldout_fraction": 1.5}))
