"""Talking: tokens a second of the second head, of batches and of what a chat keeps, each against going without.

    python bench/talk_speed.py                 the last model of the newest run
    python bench/talk_speed.py sft --rounds 5  any model, as of `ttrain chat`

All sides are one process and one model, interleaved, greedy. Without a second head its lines are left out. A model that
has learnt nothing says nothing that could be guessed: train it with `model.multi_token.weight=0.3` first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import common

TOKENS, PROMPTS, ROUNDS = 64, 16, 3
HISTORY_TOKENS = 400
LEAST_BATCHED, LEAST_KEPT = 2.0, 1.5
QUESTION = "What does `module_{number}.function` do with its argument {number}?"


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("model", nargs="?")
    found.add_argument("--rounds", type=int, default=ROUNDS)
    options = found.parse_args()

    from ttrain.data.chat import prompt_ids
    from ttrain.data.chat_templates import Message
    from ttrain.inference.generate import KVCache, generate
    from ttrain.inference.loading import load
    from ttrain.inference.sampling import Sampling
    from ttrain.pipeline import names

    one = load(names.resolve(options.model or "sft"))
    print(one.describe())
    questions = [(Message("user", QUESTION.format(number=number)),) for number in range(PROMPTS)]
    prompts = [prompt_ids(one.encoder, question) for question in questions]
    history = [token for prompt in prompts * HISTORY_TOKENS for token in prompt][:HISTORY_TOKENS]
    asked, short = Sampling(max_tokens=TOKENS), Sampling(max_tokens=4)
    kept = KVCache(one)

    def alone(**more: Any) -> list[Any]:
        return [said for prompt in prompts for said in generate(one, [prompt], asked, **more)]

    sides: dict[str, Callable[[], list[Any]]] = {
        "alone": alone,
        "batched": lambda: generate(one, prompts, asked),
        "from scratch": lambda: generate(one, [history], short),
        "kept": lambda: generate(one, [history], short, kv_cache=kept),
        **({"second head": lambda: alone(draft=True)} if one.second_head else {}),
    }
    for side in sides.values():
        side()  # the first time costs more, and fills what is kept
    costs: dict[str, list[common.Cost]] = common.interleave(
        {name: _timed(side) for name, side in sides.items()}, options.rounds
    )
    table = common.Table()
    rate = {name: statistics.median(cost.found["tokens"] / cost.wall for cost in costs[name]) for name in costs}
    _add(table, f"tokens/s, {PROMPTS} prompts in a batch, one by one", rate, "batched", "alone", LEAST_BATCHED)
    _add(table, f"tokens/s of a turn after {HISTORY_TOKENS} tokens", rate, "kept", "from scratch", LEAST_KEPT)
    table.claim(
        "the batch says what each prompt says alone", costs["batched"][0].found["ids"] == costs["alone"][0].found["ids"]
    )
    if one.second_head:
        _add(table, "tokens/s with the second head, without", rate, "second head", "alone", 1.0)
        told = costs["second head"][0].found
        table.claim("the second head changes no token", told["ids"] == costs["alone"][0].found["ids"])
        print(
            f"guesses accepted: {told['accepted']} of {told['drafted']} ({told['accepted'] / max(1, told['drafted']):.0%})"
        )
    return int(table.failed)


def _timed(side: Callable[[], list[Any]]) -> Callable[[], common.Cost]:
    def run() -> common.Cost:
        wall, cpu = time.perf_counter(), time.process_time()
        said = side()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        drafts = [one.drafts for one in said if one.drafts]
        return common.Cost(wall, cpu, 0.0, {
            "tokens": sum(len(one.ids) + one.ended for one in said), "ids": [one.ids for one in said],
            "accepted": sum(one.accepted for one in drafts), "drafted": sum(one.drafted for one in drafts),
        })  # fmt: skip

    return run


def _add(table: common.Table, what: str, rate: Mapping[str, float], ours: str, theirs: str, least: float) -> None:
    table.add(what, f"{rate[ours]:,.0f}", f"{rate[theirs]:,.0f}", rate[ours] / rate[theirs], least=least)


if __name__ == "__main__":
    raise SystemExit(main())
