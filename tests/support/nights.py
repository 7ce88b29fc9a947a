"""Nights of a tiny pipeline: documents that come between them, what must hold after any kill."""

import json
import random
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from support.pipeline_home import CHINESE, ENGLISH, Cli

from ttrain.store.registry import Registry

NAME = "tiny-test"
DOCUMENTS = 40  # of a file
TWICE = """
SELECT name, value FROM model_version_tags
WHERE key = 'ttrain.key' GROUP BY name, value HAVING COUNT(*) > 1
"""


def add_documents(data: Path, number: int, rng: random.Random, *, near: float = 0.0) -> None:
    """A new file of documents; the fraction `near` repeats the file before, with a word more."""
    count = round(near * DOCUMENTS)
    words = (rng.choices(ENGLISH, k=rng.randint(20, 60)) for _ in range(DOCUMENTS - count))
    texts = [" ".join([f"night {number}:", *some]) for some in words]
    before = data / f"docs-night-{number - 1}.jsonl"
    lines = before.read_text(encoding="utf-8").splitlines()[:count] if count else []
    texts += [json.loads(line)["text"] + " again" for line in lines]
    _write(data / f"docs-night-{number}.jsonl", texts)


def add_similar_documents(cli: Cli, name: str, seed: int) -> None:
    """A new file of documents like those of the corpus, so that the model gets better at them."""
    rng = random.Random(seed)
    languages = ((CHINESE, "", "。"), (ENGLISH, " ", "."))
    texts = []
    for _ in range(150):
        vocabulary, separator, end = rng.choice(languages)
        texts.append(separator.join(rng.choices(vocabulary, k=rng.randint(5, 80))) + end)
    _write(cli.data / f"{name}.jsonl", texts)


def _write(path: Path, texts: Iterable[str]) -> None:
    """At once, since a night may begin while they are written."""
    partial = path.with_suffix(".part")
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    partial.write_text("".join(lines), encoding="utf-8")
    partial.rename(path)


def assert_registered_once(home: Path, versions: int) -> None:
    sets = Registry(home).sets(NAME)
    keys = {json.dumps(dict(registered.keys), sort_keys=True) for registered in sets}
    assert len(sets) == len(keys) == versions
    assert sum("champion" in registered.aliases for registered in sets) == 1
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as db:
        assert db.execute(TWICE).fetchall() == []
