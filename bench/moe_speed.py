"""A step with experts against a dense model of the same active parameters; and the experts against transformers' own.

    python bench/moe_speed.py                                   about 6 minutes on two cores
    python bench/moe_speed.py --tokens 512 --rounds 1           a quick try

The models are S (hidden 512, 8 layers, vocabulary 6400, sequence 512), in bf16 autocast: dense, and with 8 experts in each
layer of which a token visits 2, as wide together as the dense layer. A step is one micro-batch of random tokens in records
of 180, the clip and the optimizer (fused AdamW), which updates all experts. The sides take turns in one process, step by
step, with the allocator setting of a training stage: ours; the dense model, also ours; ours with the grouped products of
transformers, and with its experts one after the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import train_common
from train_loss import random_batch

STEPS, ROW_LENGTH, EXPERTS, TOP_K = 5, 512, 8, 2
LEAST_OF_DENSE, LEAST_OF_GROUPED = 0.5, 1.2
IMPLEMENTATIONS = {"grouped": "grouped_mm", "one by one": "eager"}
SIDES = ("ours", "dense", *IMPLEMENTATIONS)


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = train_common.parser(__doc__)
    options.add_argument("--tokens", type=int, default=4096, help="of a step")
    chosen = options.parse_args()
    table = common.Table()
    costs = [
        train_common.side(__file__, "steps", chosen.tokens, chosen.steps or STEPS, **train_common.allocator())
        for _ in range(chosen.rounds)
    ]
    rates = {side: chosen.tokens / common.median(costs, side) for side in SIDES}

    def line(what: str, theirs: str, least: float | None = None) -> None:
        ratio = rates["ours"] / rates[theirs]
        table.add(what, f"{rates['ours']:,.0f}", f"{rates[theirs]:,.0f}", ratio, least=least)

    active, dense, every = (costs[0].found[name] / 1e6 for name in ("active", "dense_parameters", "parameters"))
    print(f"{every:.1f} M parameters, of which a token meets {active:.1f} M; the dense model {dense:.1f} M")
    line("tokens/s, experts against dense, same active parameters", "dense", LEAST_OF_DENSE)
    line("tokens/s, experts, ours against transformers' groups", "grouped", LEAST_OF_GROUPED)
    line("tokens/s, experts, ours against one after the other", "one by one")
    train_common.write_json(chosen.json, table, {"all": costs})
    return int(table.failed)


def side_steps(tokens: str, steps: str) -> dict[str, float]:
    """Median seconds of a step of each side, and the sizes of both models."""
    from ttrain.train.monitor import visited_shares

    models = {side: model_of(side) for side in SIDES}
    made = {side: step_of(side, model, int(tokens)) for side, model in models.items()}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(int(steps) + 1):
        for side, step in made.items():
            began = time.perf_counter()
            step()
            if number:
                seconds[side].append(time.perf_counter() - began)
    shares = visited_shares(models["ours"])
    sizes = {
        "parameters": sum(p.numel() for p in models["ours"].parameters()),
        "active": sum(p.numel() * shares.get(name, 1.0) for name, p in models["ours"].named_parameters()),
        "dense_parameters": sum(p.numel() for p in models["dense"].parameters()),
    }
    return {**{side: statistics.median(found) for side, found in seconds.items()}, **sizes}


def model_of(side: str) -> Any:
    """A side's model, freshly initialised."""
    from ttrain.config import Model
    from ttrain.model import factory

    moe = None if side == "dense" else {"experts": EXPERTS, "top_k": TOP_K}
    config = Model.model_validate({"hidden_size": 512, "layers": 8, "heads": 8, "max_length": ROW_LENGTH, "moe": moe})
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return factory.build(config, vocab_size=train_common.VOCAB_SIZE, ids=ids, stop_ids=[2], seed=1)


def step_of(side: str, model: Any, tokens: int) -> Callable[[], None]:
    """A side's step."""
    import torch

    from ttrain.config import Pretrain
    from ttrain.train.language_modeling import LanguageModeling

    task = LanguageModeling(Pretrain(), model)
    if side in IMPLEMENTATIONS:
        model.set_experts_implementation(IMPLEMENTATIONS[side])
    batch = random_batch(tokens, train_common.VOCAB_SIZE)
    module = task.build_model().train()
    trained = list(module.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.train_step(module, batch, torch.device("cpu")).total
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__" and not common.requested_side({"steps": side_steps}):
    sys.exit(main())
