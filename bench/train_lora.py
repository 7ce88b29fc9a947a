"""A LoRA step, all linear layers, against a full fine-tune; and both against transformers and PEFT as they are.

    python bench/train_lora.py                                  about 6 minutes on two cores
    python bench/train_lora.py --tokens 1024 --rounds 1         a quick try

The model is S (hidden 512, 8 layers, vocabulary 6400, sequence 512), in bf16 autocast. A step is one micro-batch of
random tokens in records of 180, the clip and the optimizer (fused AdamW); rank 16. All four sides take turns in one
process, step by step, with the allocator setting of a training stage.
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

STEPS, ROW_LENGTH = 5, 512
LEAST = 1.1
SIDES = ("lora", "full", "peft", "transformers")


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

    def line(what: str, ours: str, theirs: str, least: float | None = None) -> None:
        ratio = rates[ours] / rates[theirs]
        table.add(what, f"{rates[ours]:,.0f}", f"{rates[theirs]:,.0f}", ratio, least=least)

    line("tokens/s, LoRA against full, both ours", "lora", "full", LEAST)
    line("tokens/s, LoRA against PEFT as it is", "lora", "peft")
    line("tokens/s, full against transformers as it is", "full", "transformers")
    line("tokens/s, PEFT against transformers, both as they are", "peft", "transformers")
    train_common.write_json(chosen.json, table, {"all": costs})
    return int(table.failed)


def side_steps(tokens: str, steps: str) -> dict[str, float]:
    """Median seconds of a step of each side."""
    made = {side: step_of(side, int(tokens)) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(int(steps) + 1):
        for side, step in made.items():
            began = time.perf_counter()
            step()
            if number:
                seconds[side].append(time.perf_counter() - began)
    return {side: statistics.median(found) for side, found in seconds.items()}


def step_of(side: str, tokens: int) -> Callable[[], None]:
    """A side's step."""
    import torch
    from peft import LoraConfig, get_peft_model

    from ttrain.config import Lora, Model
    from ttrain.model import adapters, factory
    from ttrain.train.kernels import segment_mask
    from ttrain.train.language_modeling import LanguageModeling
    from ttrain.train.losses import token_loss_sum

    config = Model(hidden_size=512, layers=8, heads=8, max_length=ROW_LENGTH)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model: Any = factory.build(config, vocab_size=train_common.VOCAB_SIZE, ids=ids, stop_ids=[2], seed=1)
    settings = Lora()
    if side == "lora":
        model = adapters.attach(model, settings)
    elif side == "peft":
        model = get_peft_model(model, LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules="all-linear"))
    batch = random_batch(tokens, train_common.VOCAB_SIZE)
    task = LanguageModeling(settings, model) if side in ("lora", "full") else None
    module = (task.build_model() if task else model).train()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    inputs = {"input_ids": batch.input_ids_BT, "position_ids": batch.positions_BT}
    tensors = {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}
    segments, labels = torch.from_numpy(batch.segments_BT.copy()), torch.from_numpy(batch.labels_BT)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            if task:
                loss = task.train_step(module, batch, torch.device("cpu")).total
            else:
                loss = token_loss_sum(
                    module(**tensors, attention_mask=segment_mask(segments), use_cache=False).logits, labels
                )
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__" and not common.requested_side({"steps": side_steps}):
    sys.exit(main())
