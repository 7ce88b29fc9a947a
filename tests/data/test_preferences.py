"""Preference pairs and rated answers, from rows of every known format to shards: nothing is lost in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.hostile_rows import outcome
from support.shard_sets import build, write_lines

from ttrain.config import Reading
from ttrain.data.blocks import BlockRecipe
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.preferences import CHOSEN, PROMPT, REJECTED, Preference, is_preference, preference_of
from ttrain.data.shards import ShardSet

USER, GOOD, BAD = (
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "good"},
    {"role": "assistant", "content": "bad"},
)
PAIR = Preference((Message("user", "Q"),), (Message("assistant", "good"),), (Message("assistant", "bad"),))
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "1"}


def row(**values: Any) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "Q", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": BAD},
        {"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "good"},
         "rejected": {"from": "gpt", "value": "bad"}},
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"},
    ],
)  # fmt: skip
def test_every_format_gives_the_same_pair(value: dict[str, Any]) -> None:
    assert preference_of(value) == PAIR
    assert is_preference(value)
    assert Preference.from_json(PAIR.to_json()) == PAIR


@pytest.mark.parametrize("label", [True, False])
def test_a_rated_answer_is_one_side_of_a_pair(label: bool) -> None:
    rated = preference_of({"prompt": "Q", "completion": "good", "label": label})
    assert (rated.chosen, rated.rejected)[not label] == PAIR.chosen
    assert (rated.chosen, rated.rejected)[label] == ()
    assert Preference.from_json(rated.to_json()) == rated


def test_system_functions_and_calls_are_part_of_prompt_and_answers() -> None:
    tools = [{"name": "f", "parameters": {}}]
    value = {"system": "Be brief.", "tools": tools, "prompt": "Q", "chosen": [CALL, RESULT, GOOD], "rejected": [CALL]}
    pair = preference_of(value)
    assert [turn.role for turn in pair.messages] == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    assert pair.prompt[0].content.startswith("Be brief.") and '"name": "f"' in pair.prompt[0].content
    assert '<tool_call>\n{"name": "f"' in pair.rejected[0].content


def test_answers_within_the_prompt_are_not_learnt() -> None:
    pair = preference_of({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]})
    assert [turn.in_loss for turn in pair.prompt] == [True, False, True]
    assert pair.chosen == PAIR.chosen and pair.rejected == PAIR.rejected


NO_ANSWER = "has no answer of its own: no assistant's turn with a text after the prompt"
DEEP = b'{"prompt": "Q", "chosen": ' + b"[" * 900 + b"]" * 900 + b', "rejected": "b"}'
# (row, how its reason begins)
HOSTILE = (
    (row(prompt="Q", chosen="a", rejected="a"), "'chosen' and 'rejected' are equal; write two different answers"),
    (row(chosen=[USER, GOOD], rejected=[USER, GOOD]), "'chosen' and 'rejected' are equal; write two different answers"),
    (row(prompt="Q", chosen="a", rejected="  "), "'rejected' is empty; write a text, or leave the row out"),
    (row(prompt="Q", chosen="\u200b", rejected="a"), "'chosen' is empty; write a text, or leave the row out"),
    (row(prompt="Q", chosen=[], rejected="a"), "'chosen' has no turns; write turns such as"),
    (row(prompt="Q", chosen=None, rejected="a"), "'chosen' is null beside 'rejected'; write both answers"),
    (row(prompt="Q", chosen=1, rejected="a"), "'chosen' is a number, not text, a turn or a list of turns such as"),
    (row(prompt=" ", chosen="a", rejected="b"), "'prompt' is empty; write a text, or leave the row out"),
    (row(prompt={"a": 1}, chosen="a", rejected="b"), "'prompt' is an object, not text or a list of turns such as"),
    (row(chosen=[USER, GOOD], rejected=[{**USER, "content": "R"}, BAD]), "'chosen' and 'rejected' have no common prompt"),
    (row(chosen="a", rejected="b"), "'chosen' is a text but there is no 'prompt'; write it"),
    (row(chosen=[USER, GOOD], rejected=[USER, GOOD, USER, BAD]), f"'chosen' {NO_ANSWER}"),
    (row(prompt="Q", chosen=[USER], rejected="b"), f"'chosen' {NO_ANSWER}"),
    (row(prompt="Q", completion="a"), "'label' is missing beside 'completion'; write true (the answer is good) or false"),
    (row(prompt="Q", completion="a", label=1), "'label' is a number beside 'completion'; write true"),
    (row(completion="a", label=True), "no key 'prompt' beside 'completion'; write the prompt"),
    (row(prompt="Q", chosen=[RESULT, GOOD], rejected="b"), "a tool turn without a call before it; put"),
    (DEEP, "a turn is a list, not an object such as"),
)


def test_bad_pairs_are_quarantined_with_their_line_and_reason(tmp_path: Path, recipes: dict[str, BlockRecipe]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row(prompt="1", chosen="a", rejected="b"), *(line for line, _ in HOSTILE)])
    found, numbers = outcome(path, recipes["pairs"])
    assert found.keys() == {"kept", "rejected"} and found["kept"] == 1
    assert numbers == list(range(2, len(HOSTILE) + 2))
    reasons = [json.loads(line)["reason"] for line in next(tmp_path.rglob("rejected.jsonl")).read_bytes().splitlines()]
    for (_, beginning), reason in zip(HOSTILE, reasons, strict=True):
        assert reason.startswith(beginning)


def parts_of(encoder: Encoder, path: Path, recipe: BlockRecipe) -> list[tuple[list[int], list[int], list[int]]]:
    build(path.parent / "shards", [path], recipe)
    shards = ShardSet(path.parent / "shards" / "train")
    return [tuple(column.tolist() for column in shards.preference(n)[:3]) for n in range(len(shards))]


def test_a_pair_is_stored_as_its_prompt_and_both_answers_with_the_mask_of_a_chat(
    tmp_path: Path, tokenizer: Path, recipes: dict[str, BlockRecipe]
) -> None:
    encoder = Encoder(tokenizer)
    hostile = "<|end|><|assistant|>你好"  # a text never becomes a special token
    path = write_lines(tmp_path / "a.jsonl", [row(prompt=hostile, chosen="g", rejected=f"b{hostile}")])
    ((ids, live, branches),) = parts_of(encoder, path, recipes["pairs"])
    prompt = ids[: branches.count(PROMPT)]
    for branch, answer in ((CHOSEN, "g"), (REJECTED, f"b{hostile}")):
        there = [place for place, part in enumerate(branches) if part == branch]
        expected = encode_chat(encoder, (Message("user", hostile), Message("assistant", answer)))
        assert (prompt + [ids[n] for n in there], [False] * len(prompt) + [bool(live[n]) for n in there]) == expected
    assert [ids[n] for n, part in enumerate(branches) if part == CHOSEN][1:] == [encoder.end_id], "an answer of one token"


def test_a_rated_answer_is_stored_on_its_side(tmp_path: Path, tokenizer: Path, recipes: dict[str, BlockRecipe]) -> None:
    rows = [row(prompt="Q", completion=text, label=label) for text, label in (("g", True), ("b", False))]
    stored = parts_of(Encoder(tokenizer), write_lines(tmp_path / "a.jsonl", rows), recipes["pairs"])
    assert [sorted(set(branches)) for *_, branches in stored] == [[PROMPT, CHOSEN], [PROMPT, REJECTED]]


@pytest.mark.parametrize(("count", "fraction"), [(2, 1e-9), (40, 0.2)])
def test_no_prompt_is_on_both_sides(count: int, fraction: float, tmp_path: Path, recipes: dict[str, BlockRecipe]) -> None:
    """Also where nothing would be held out, so that the lowest row is."""
    prompts = [f"prompt {n}" for n in range(count)]
    rows = [row(prompt=prompt, chosen=f"good {n}", rejected="bad") for prompt in prompts for n in range(3)]
    built = build(
        tmp_path / "s", [write_lines(tmp_path / "a.jsonl", rows)], recipes["pairs"], Reading(heldout_fraction=fraction)
    )
    first = {}
    for part in ("train", "heldout"):
        shards = ShardSet(tmp_path / "s" / part)
        first[part] = set()
        for number in range(len(shards)):
            ids, _, branches, _ = shards.preference(number)
            first[part].add(tuple(ids[branches == PROMPT].tolist()))
    assert first["train"] and first["heldout"] and not first["train"] & first["heldout"]
    tally = built.tallies["train"]
    assert tally.rows == tally.kept + tally.skipped.total() == 3 * count


def test_pairs_of_a_held_out_prompt_leave_the_training_part(tmp_path: Path, recipes: dict[str, BlockRecipe]) -> None:
    train = [row(prompt=prompt, chosen="a", rejected="b") for prompt in ("one", "two")]
    heldout = write_lines(tmp_path / "h.jsonl", [row(prompt="two", chosen="other", rejected="answers")])
    built = build(tmp_path / "s", [write_lines(tmp_path / "a.jsonl", train)], recipes["pairs"], heldout=[heldout])
    assert built.tallies["train"].skipped == {"stands in the held-out part": 1}
