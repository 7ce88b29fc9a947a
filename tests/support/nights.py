"""Nights of a tiny pipeline: documents that come between them, and what must hold however they were killed."""

import json
import random
import sqlite3
from pathlib import Path

from support.pipeline_home import CHINESE, ENGLISH, Cli

from ttrain.store.registry import Registry

NAME = "tiny-test"
DOCUMENTS = 40  # of a file


def add_documents(data: Path, number: int, rng: random.Random, *, near: float = 0.0) -> None:
    """A new file of documents, of which this share are near-duplicates of those of the file before: a word more."""
    count = round(near * DOCUMENTS)
    lines = _path(data, number - 1).read_text(encoding="utf-8").splitlines() if count else []
    earlier = [json.loads(line)["text"] for line in lines[:count]]
    new = (
        " ".join([f"night {number}:", *rng.choices(ENGLISH, k=rng.randint(20, 60))])
        for _ in range(DOCUMENTS - count)
    )
    lines = [json.dumps({"text": text}) for text in (*new, *(f"{text} again" for text in earlier))]
    path = _path(data, number)
    (partial := path.with_suffix(".part")).write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(path)


def add_similar_documents(cli: Cli, name: str, seed: int) -> None:
    """A new file of documents like those of the corpus, so that the model gets better at them too."""
    rng = random.Random(seed)
    words = (list(CHINESE), "", "。"), (ENGLISH, " ", ".")
    texts = [
        between.join(rng.choices(vocabulary, k=rng.randint(5, 80))) + end
        for vocabulary, between, end in (rng.choice(words) for _ in range(150))
    ]
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (cli.data / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _path(data: Path, number: int) -> Path:
    return data / f"docs-night-{number}.jsonl"


def assert_registered_once(home: Path, versions: int) -> None:
    sets = Registry(home).sets(NAME)
    assert (
        len(sets) == versions
        and len({json.dumps(dict(one.keys), sort_keys=True) for one in sets}) == versions
    )
    assert sum("champion" in one.aliases for one in sets) == 1
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as db:
        keys = db.execute(
            "SELECT name, value, COUNT(*) FROM model_version_tags WHERE key = 'ttrain.key' GROUP BY name, value"
        )
        assert [row for row in keys if row[2] > 1] == []
