"""Answers to a file of prompts: in batches of similar length, in the prompts' order, resumable."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.core.files import JsonDict
from ttrain.core.hashing import digest_of, sha256_file
from ttrain.data import existing, tools
from ttrain.data.chat import lead_text, prompt_ids
from ttrain.data.chat_shapes import CHAT_KEYS, messages_of
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.json_rows import NOT_UTF8
from ttrain.data.tools import Malformed
from ttrain.errors import DataError
from ttrain.inference import generate
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling
from ttrain.store.model_files import ADAPTER, Reference, weights_digest

WINDOW_BATCHES = (
    16  # the prompts of this many batches are sorted by length, and written when all are answered
)

PARTIAL = ".partial"  # ending of the file that collects answers until all are complete

TOO_LONG = "too long"
ANSWER_KEYS = ("answer", "tokens", "stop")  # keys of an answer, added to those of its prompt
NO_ANSWER = "-"


@dataclass
class AnswerCounts:
    """Counts of the answers in this run."""

    tokens: int = 0
    seconds: float = 0.0
    stops: Counter[str] = field(default_factory=Counter)

    def summary(self) -> JsonDict:
        """Counts for people and scripts."""
        return {
            "answers": self.stops["end"] + self.stops["length"],
            "ended by themselves": self.stops["end"],
            "cut at the longest answer": self.stops["length"],
            "prompts too long": self.stops[TOO_LONG],
            "tokens": self.tokens,
            "tokens per second": round(self.tokens / self.seconds) if self.seconds else None,
        }


def answers(
    loaded_model: LoadedModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch_size: int,
    tally: AnswerCounts,
    progress: Callable[[int], object] = lambda done: None,
) -> Iterator[list[JsonDict]]:
    """Yield windows of answers in the order of the prompts: the record, `answer`, `tokens`, `stop`.

    A prompt that leaves no room for an answer has the stop "too long" and no answer.
    """
    size = batch_size * WINDOW_BATCHES
    for start in range(0, len(prompts), size):
        window = prompts[start : start + size]
        ids = [
            prompt_ids(loaded_model.encoder, prompt.messages)
            if prompt.messages
            else loaded_model.text_ids([prompt.text])[0]
            for prompt in window
        ]
        answered: dict[int, JsonDict] = {}
        for batch in _batches(loaded_model, ids, sampling, batch_size):
            numbers = [window[at].number for at in batch]
            completions = generate.generate(
                loaded_model, [ids[at] for at in batch], sampling, numbers=numbers
            )
            tally.seconds += completions[0].seconds
            for at, completion in zip(batch, completions, strict=True):
                lead = lead_text(loaded_model.encoder) if window[at].messages else ""
                text = generate.completion_text(loaded_model.encoder, completion, lead)
                stop = "end" if completion.ended else "length"
                answered[at] = {"answer": text, "tokens": len(completion.ids), "stop": stop}
            progress(start + len(answered))
        rows = [
            {
                **prompt.record,
                **({} if prompt.reference is None else {"reference": prompt.reference}),
                **answered.get(at, {"answer": None, "tokens": 0, "stop": TOO_LONG}),
            }
            for at, prompt in enumerate(window)
        ]
        tally.tokens += sum(row["tokens"] for row in rows)
        tally.stops.update(row["stop"] for row in rows)
        yield rows


def identity(reference: Reference) -> list[str]:
    """Digests of the weights, the adapter, the tokenizer and its template."""
    adapter = [weights_digest(reference.adapter, name=ADAPTER)] if reference.adapter else []
    return [
        reference.base_digest,
        *adapter,
        *map(sha256_file, existing.files_in(reference.tokenizer)),
    ]


def write_answers(
    path: Path, header: JsonDict, make: Callable[[int], Iterable[list[JsonDict]]]
) -> int:
    """Write the rows of `make(n)`, from the n-th on, to `path`; n rows exist. Returns n."""
    # Rows are collected in `path`.DIGEST.partial, by the digest of the header, which identifies
    # their inputs: the same command continues an interrupted one, any other has a file of its own.
    partial = path.with_name(f"{path.name}.{digest_of(header)[:12]}{PARTIAL}")
    # A cut last row is removed. One by one, since the file may be larger than memory.
    partial.touch()
    with partial.open("r+b") as file:
        done = end = 0
        while file.readline().endswith(b"\n"):
            done += 1
            end = file.tell()
        file.truncate(end)
    with partial.open("ab") as file:
        for window in make(done):
            file.writelines(line_of(row) + b"\n" for row in window)
            file.flush()
    partial.replace(path)
    return done


def line_of(row: JsonDict) -> bytes:
    """A row as JSON; orjson would refuse integers beyond 64 bits."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()


def _batches(
    loaded_model: LoadedModel, ids: Sequence[list[int]], sampling: Sampling, batch_size: int
) -> Iterator[list[int]]:
    # Of similar length and equal limit, so that a long prompt does not shorten the answers to short
    # ones. Prompts that leave no room are left out.
    longest = loaded_model.max_length
    numbers = dict[int, list[int]]()
    for at in sorted(range(len(ids)), key=lambda at: len(ids[at])):
        room = (
            sampling.max_tokens
            if longest is None
            else min(sampling.max_tokens, longest - len(ids[at]))
        )
        if room > 0:
            numbers.setdefault(room, []).append(at)
    for alike in numbers.values():
        yield from (alike[start : start + batch_size] for start in range(0, len(alike), batch_size))


@dataclass(frozen=True)
class Prompt:
    """A prompt: `messages` that ask for an answer, or `text` to continue; `record` is its line."""

    number: int
    record: JsonDict
    messages: Messages = ()
    text: str = ""
    reference: str | None = None


def read(path: Path, *, raw: bool, system: str = "") -> list[Prompt]:
    """Read the prompts of a file, JSON Lines if its suffix says so. Empty lines are skipped.

    Raises DataError, with file and line, for a line that is not a prompt.
    """
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    prompts: list[Prompt] = []
    for at, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").rstrip("\r")
            if text.strip():
                record = json.loads(text) if is_json else {"prompt": text}
                prompts.append(_prompt(len(prompts), record, raw=raw, system=system))
        except UnicodeDecodeError:
            raise DataError(f"{path}:{at}: {NOT_UTF8}") from None
        except ValueError as error:  # also Malformed, and what is not JSON
            raise DataError(f"{path}:{at}: {error}") from None
    if not prompts:
        raise DataError(f"{path} holds no prompts")
    return prompts


def _prompt(number: int, record: Any, *, raw: bool, system: str) -> Prompt:
    if not isinstance(record, dict):
        raise Malformed("not a JSON object")
    if reserved_keys := [key for key in ANSWER_KEYS if key in record]:
        raise Malformed(
            f"the key '{reserved_keys[0]}' would be overwritten by the answer; rename it"
        )
    prompt = record.get("prompt")
    text = record.get("text")
    if isinstance(prompt, str) and raw:
        return Prompt(number, record, text=prompt)
    if isinstance(text, str) and not isinstance(prompt, str):
        return Prompt(number, record, text=text)
    if isinstance(prompt, str):
        messages = [Message("user", prompt)]
    elif any(record.get(key) is not None for key in ("prompt", *CHAT_KEYS)):
        answers = {
            key: record.get(key) or NO_ANSWER for key in ("output", "completion")
        }  # an answer is optional here
        # The record is written as it is.
        messages = messages_of(tools.without_null_keys(json.dumps({**record, **answers})))
    else:
        raise Malformed(
            f"none of the keys {', '.join(('prompt', 'text', *CHAT_KEYS))} holds a prompt"
        )
    reference = messages.pop().content if messages[-1].role == "assistant" else None
    if not messages:
        raise Malformed("there is no question before the answer")
    if system and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    return Prompt(
        number, record, tuple(messages), reference=None if reference == NO_ANSWER else reference
    )
