"""Answers to many prompts: in batches of like length, written in the order of the prompts, continued where they were cut."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from ttrain.core.hashing import canonical_json, sha256_file
from ttrain.data import existing_tokenizer
from ttrain.data.chat import prompt_ids
from ttrain.errors import DataError
from ttrain.inference import generate
from ttrain.inference.loading import Speaker
from ttrain.inference.prompts import Prompt
from ttrain.inference.sampling import Sampling
from ttrain.store.model_reference import Reference
from ttrain.store.weights import ADAPTER, weights_digest

WINDOW_BATCHES = 16  # prompts of so many batches are sorted by length, and written when all of them have their answers
PARTIAL = ".partial"
TOO_LONG = "too long"


@dataclass
class Tally:
    """What became of the prompts in this run."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stops: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Figures for people and scripts."""
        return {
            "answers": self.answers,
            "ended by themselves": self.stops["end"],
            "cut at the longest answer": self.stops["length"],
            "prompts too long": self.stops[TOO_LONG],
            "tokens": self.tokens,
            "tokens per second": round(self.tokens / self.seconds) if self.seconds else None,
        }


def answers(
    speaker: Speaker,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch_size: int,
    tally: Tally,
    progress: Callable[[int], object] = lambda done: None,
) -> Iterator[list[dict[str, Any]]]:
    """Windows of answers, in the order of the prompts: what each line held, and `answer`, `tokens`, `stop`.

    A prompt that leaves no room for an answer has the stop "too long" and no answer.
    """
    size = batch_size * WINDOW_BATCHES
    for start in range(0, len(prompts), size):
        window = prompts[start : start + size]
        ids = [_ids(speaker, prompt) for prompt in window]
        found: dict[int, dict[str, Any]] = {}
        for batch in _batches(speaker, ids, sampling, batch_size):
            numbers = [window[at].number for at in batch]
            said = generate.generate(speaker, [ids[at] for at in batch], sampling, numbers=numbers)
            tally.seconds += said[0].seconds
            for at, one in zip(batch, said, strict=True):
                stop = "end" if one.ended else "length"
                found[at] = {"answer": generate.text_of(speaker.encoder, one), "tokens": len(one.ids), "stop": stop}
            tally.answers += len(batch)
            progress(tally.answers)
        rows = []
        for at, prompt in enumerate(window):
            reference = {"reference": prompt.reference} if prompt.reference is not None else {}
            row = found.get(at, {"answer": None, "tokens": 0, "stop": TOO_LONG})
            tally.tokens += row["tokens"]
            tally.stops[row["stop"]] += 1
            rows.append({**prompt.given, **reference, **row})
        yield rows


def identity(reference: Reference) -> list[str]:
    """Digests of what answers: the model's weights, the adapter's where there is one, the tokenizer and its template."""
    adapter = [weights_digest(reference.adapter, name=ADAPTER)] if reference.adapter else []
    words = [
        sha256_file(reference.tokenizer / name)
        for name in existing_tokenizer.FILES
        if (reference.tokenizer / name).is_file()
    ]
    return [reference.base_digest, *adapter, *words]


def write(path: Path, header: dict[str, Any], make: Callable[[int], Iterable[list[dict[str, Any]]]]) -> int:
    """Write what `make(n)` gives, the rows from the n-th on, under `path`; returns n, the rows that were there already.

    They gather in `path`.partial under a line with the header, which says what they are made of: the same command goes on
    after the last whole row of one that was stopped, any other begins anew.
    """
    partial = partial_of(path)
    first = canonical_json(header) + b"\n"
    done = _continued(partial, first)
    with partial.open("ab") as file:
        for rows in make(done):
            file.writelines(orjson.dumps(row) + b"\n" for row in rows)
            file.flush()
    finished = path.with_name(path.name + ".tmp")
    with partial.open("rb") as source, finished.open("wb") as target:
        source.readline()
        shutil.copyfileobj(source, target)
    finished.replace(path)
    partial.unlink()
    return done


def partial_of(path: Path) -> Path:
    """Where answers gather until all are there."""
    return path.with_name(path.name + PARTIAL)


def _continued(partial: Path, first: bytes) -> int:
    """How many rows the file has after this first line; a row that was cut is taken off, a file of another run emptied."""
    done, end = 0, len(first)
    if partial.is_file():
        with partial.open("rb") as file:
            if file.readline() == first:
                for line in file:
                    if line.endswith(b"\n"):
                        done, end = done + 1, end + len(line)
                with partial.open("r+b") as whole:
                    whole.truncate(end)
                return done
    partial.write_bytes(first)
    return 0


def _ids(speaker: Speaker, prompt: Prompt) -> list[int]:
    if not prompt.messages:
        return [*speaker.begin_ids, *speaker.encoder.encode([prompt.text])[0]]
    return prompt_ids(speaker.encoder, prompt.messages)


def _batches(speaker: Speaker, ids: Sequence[list[int]], sampling: Sampling, batch_size: int) -> Iterator[list[int]]:
    """Numbers of prompts that are answered together: of like length, and with as much room each, so that a long prompt does
    not cut the answers to short ones. Those without room are in none."""
    batch: list[int] = []
    before = 0
    for at in sorted(range(len(ids)), key=lambda at: len(ids[at])):
        try:
            free = generate.room(speaker, len(ids[at]), sampling)
        except DataError:
            break  # and so are all that are longer
        if batch and (len(batch) == batch_size or free != before):
            yield batch
            batch = []
        batch.append(at)
        before = free
    if batch:
        yield batch
