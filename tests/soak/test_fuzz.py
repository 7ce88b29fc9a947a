"""Mutated lines of every shape become shards; `make soak` sends 100,000.

Whatever the bytes are, a TTrainError names the file, or every row is accounted for and what was
kept is exactly what the line said.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.shard_sets import ALL, build
from support.tiny_data import LINES, make_tokenizer

from ttrain.data import tools
from ttrain.data.blocks import BlockRecipe
from ttrain.data.encoder import Encoder
from ttrain.data.jinja_templates import ROLES, SPECIAL_TOKENS
from ttrain.data.records import (
    Conversation,
    Record,
    TextDocument,
    document_parser,
    parse_conversation,
)
from ttrain.data.shards import ShardSet
from ttrain.errors import TTrainError
from ttrain.tasks.shards import recipe_of

LINES_PER_FILE = 1000
MAX_LINE_BYTES = 4096
SPECIAL = SPECIAL_TOKENS["ttrain"]
WORDS = (
    *(*LINES, *SPECIAL, "<|im_start|>system", "<|im_end|>", "{{ 7*7 }}", "{% raw %}", "[INST]"),
    *("</s>", "\ufeff", "\u200b", " ", "\n", "\r\n", "\t", "\0", "\u2028", "\x85", "e\u0301"),
    *("👩\u200d👧", "\U0010ffff", "<tool_call>", "\\", '"', "a" * 300),
)
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**30, "", " ", "user", "assistant", "text", [], {}, [[]]),
    *({"role": "user"}, ["a", 1], {"type": "text", "text": "x"}, {"function": {"name": "f"}}),
    *("{}", "[]", "[{}]", '{"name": "f"}', "{", "tool"),
)
KEYS = (
    *("text", "content", "body", "paragraphs", "messages", "conversations", "instruction", "input"),
    *("output", "role", "from", "value", "system", "tools", "tool_calls", "tool_call_id"),
    *("function", "name", "arguments", "type", "id", "x", ""),
)
RAW = (
    *(b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\0", b"\x01", b"\r", b"\n"),
    *(b"\n\n", b"\xef\xbb\xbf", b",", b"\\", b"\\u0000", b"\\ud800", b"\\udc00\\ud800", b"\\x"),
    *(b'"', b"{", b"}", b"[", b"[" * 300, b"NaN", b"-", b"01", b"\x1e", b"1e400", b"9" * 5000),
    *(b"\xe2\x80\xa8", b" " * 5000, b"\x1f\x8b", b"PAR1", b"//", b"'"),
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": "W"}}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "W"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "W"},
    {"role": "assistant", "content": "W"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = '{"name": "f", "arguments": {}}'
SHAREGPT = [("human", "W"), ("function_call", CALLED), ("observation", "1"), ("gpt", "W")]
ROWS: tuple[Any, ...] = (  # of each kind; a "W" is replaced by random words
    *[{"id": 1, "text": "W"}] * 5,
    {"content": "W"},
    {"body": "W"},
    {"paragraphs": ["W", "W"]},
    *[{"messages": TURNS[:1] + TURNS[3:]}] * 2,
    {"messages": TURNS},
    {"messages": TURNS, "tools": [TOOL]},
    *[{"conversations": [{"role": role, "content": "W"} for role in ROLES[:3] + ROLES[1:3]]}] * 2,
    {"conversations": [{"from": name, "value": text} for name, text in SHAREGPT], "system": "W"},
    {"instruction": "W", "input": "W", "output": "W"},
    {"instruction": "W", "input": None, "output": "W"},
    {"question": "W", "choices": ["W", "W"], "answer": 1},
)


def random_words(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 4)))


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from nodes(value[key])


def mutate_structure(value: Any, chance: random.Random) -> Any:
    """One node is another value, gone, doubled, renamed or put one level deeper."""
    places = list(nodes(value))
    junk = deepcopy(chance.choice(JUNK))
    if not places:
        return junk
    holder, key = chance.choice(places)
    node = holder[key]
    how = chance.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.insert(key, node)
    elif how == 2 and isinstance(holder, dict):
        holder[chance.choice(KEYS)] = holder.pop(key)
    else:
        deeper = [[node], {chance.choice(KEYS): node}, json.dumps(node)]
        holder[key] = chance.choice([junk, random_words(chance), chance.choice(deeper)])
    return value


def mutate_bytes(line: bytes, chance: random.Random) -> bytes:
    """One place is another byte, gone, doubled, or has something put in."""
    start = chance.randint(0, len(line))
    end = min(len(line), start + chance.choice([1, 1, 2, 8, 40, 400]))
    part = line[start:end]
    flipped = bytes(byte ^ 1 << chance.randrange(8) for byte in part[:1]) + part[1:]
    junk = chance.randbytes(len(part))
    middle = chance.choice([flipped, b"", part + part, junk, chance.choice(RAW) + part])
    rest = b"" if chance.random() < 1 / 6 else line[end:]
    return line[:start] + middle + rest


def mutated_line(chance: random.Random) -> bytes:
    template = json.dumps(chance.choice(ROWS))
    value = json.loads(re.sub('"W"', lambda _: json.dumps(random_words(chance)), template))
    for _ in range(chance.choice([0, 0, 0, 1, 1, 3])):
        value = mutate_structure(value, chance) if isinstance(value, dict | list) else value
    line = json.dumps(value, ensure_ascii=chance.random() < 0.3).encode("utf-8")
    if line.startswith(b"{") and chance.random() < 0.01:
        depth = chance.choice([200, 300, 1000, 2000])
        key = chance.choice(KEYS).encode()
        line = b'{"%s": %s%s, ' % (key, b"[" * depth, b"]" * depth) + line[1:]
    for _ in range(chance.choice([0, 0, 0, 0, 1, 2])):
        line = mutate_bytes(line, chance)
    return line


def understood(line: bytes, kind: str) -> Record | None:
    """The record of a line, by Python's own JSON; None where it is none."""

    def whole_number(digits: str) -> float:  # one longer than 64 bits is read as a float
        return int(digits) if -(2**63) <= int(digits) < 2**64 else float(digits)

    if len(line) > MAX_LINE_BYTES:
        return None
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)  # orjson reads 1024 levels
    try:
        value = json.loads(line.decode("utf-8"), parse_int=whole_number)
        if kind == "chats":  # null is absent there, and whole numbers of functions are exact
            value = tools.without_null_keys(line)
    except ValueError:
        return None
    finally:
        sys.setrecursionlimit(limit)
    if not isinstance(value, dict):
        return None
    parsed = (document_parser("text") if kind == "documents" else parse_conversation)(value)
    return parsed if isinstance(parsed, TextDocument | Conversation) else None


def check_build(
    path: Path, output: Path, recipe: BlockRecipe, encoder: Encoder, block_bytes: int
) -> Counter[str]:
    """Build a file's shards and compare them with its lines; returns the counts."""
    try:
        built = build(output, [path], recipe, block_bytes=block_bytes)
    except TTrainError as error:
        assert str(path) in str(error), error
        return Counter({"refused files": 1})
    (tally,) = built.tallies.values()
    assert tally.rows == tally.kept + tally.skipped.total() + tally.rejected.total()
    rejected = (output / "run" / "rejected.jsonl").read_bytes()
    listed = [json.loads(line) for line in rejected.splitlines()]
    bad = {row["line"] for row in listed}
    assert len(bad) == len(listed) == tally.rejected.total()
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert tally.rows == sum(bool(line.strip()) or len(line) > MAX_LINE_BYTES for line in lines)
    good = [line for number, line in enumerate(lines, start=1) if number not in bad]
    records = dict.fromkeys(understood(line, recipe.kind) for line in good)
    records.pop(None, None)
    shards = ShardSet(output / "train")
    assert len(shards) == tally.kept == len(records)
    check_rows([shards.row(number) for number in range(len(shards))], list(records), encoder)
    return Counter(kept=tally.kept, skipped=tally.skipped.total(), rejected=len(bad))


def check_rows(
    rows: Sequence[tuple[Any, ...]], records: Sequence[Record], encoder: Encoder
) -> None:
    """Ids, and of chats the mask, are what the records say; no special token comes from a text."""
    special = {encoder.special(token) for token in SPECIAL}
    end_id = encoder.special("<|end|>")
    for row, record in zip(rows, records, strict=True):
        if isinstance(record, TextDocument):
            begin, *text, end = row[0].tolist()
            assert (begin, end, len(row)) == (encoder.bos_id, encoder.eos_id, 1)
            assert encoder.decode(text) == record.text
            assert not special.intersection(text)
            continue
        ids, live = row
        expected_ids = [encoder.bos_id]
        expected_live = [False]
        for turn in record.messages:
            (tokens,) = encoder.encode([turn.content])
            assert not special.intersection(tokens)
            is_trained_on = turn.role == "assistant" and bool(turn.content.strip())
            expected_ids += [encoder.special(f"<|{turn.role}|>"), *tokens, end_id]
            expected_live += [False, *[is_trained_on] * (len(tokens) + 1)]
        assert (ids.tolist(), (live != 0).tolist()) == (expected_ids, expected_live)
        assert live.any()


@pytest.mark.parametrize("lines", [400, pytest.param(100_000, marks=pytest.mark.soak)])
def test_mutated_lines_are_kept_exactly_skipped_or_rejected(tmp_path: Path, lines: int) -> None:
    chance = random.Random(1)
    counts = Counter[str]()
    encoder = make_tokenizer(tmp_path / "tokenizer")
    recipes = [recipe_of(ALL, tmp_path / "tokenizer", kind) for kind in ("documents", "chats")]
    for number in range(-(-lines // LINES_PER_FILE)):
        path = tmp_path / f"{number}.jsonl"
        mutated = (mutated_line(chance) for _ in range(min(LINES_PER_FILE, lines)))
        path.write_bytes(b"\n".join(mutated) + chance.choice([b"", b"\n"]))
        for recipe in recipes:
            small = replace(recipe, max_line_bytes=MAX_LINE_BYTES)
            output = tmp_path / f"{number}-{recipe.kind}"
            block_bytes = chance.choice([1 << 14, 1 << 16, 1 << 20])
            counts += check_build(path, output, small, encoder, block_bytes)
    # Every outcome happens, and often: a fuzzer whose rows are all bad proves little
    assert min(counts["kept"], counts["rejected"]) > 0.1 * counts.total()
    assert counts["skipped"]
