"""The other sides of the measurements of training: bare loops, and `transformers.Trainer`.

Rows are arrays [N, T] from `train_common.export`; labels are shifted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

COLUMNS = ("input_ids", "labels", "positions", "segments")
IGNORE = -100
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARMUP_FRACTION = 0.05  # of the steps, for transformers.Trainer


def train_bare(rows: str, config: str, rows_per_step: str, steps: str) -> dict[str, Any]:
    """The shortest loop that does the same work, with a mask that keeps documents apart."""
    import torch

    columns = arrays(rows)
    T = columns["input_ids"].shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool).tril()

    def batches() -> Iterator[tuple[dict[str, Any], Any]]:
        for step in range(int(steps)):
            span = slice(step * int(rows_per_step), (step + 1) * int(rows_per_step))
            ids_BT, labels_BT, positions_BT, segments_BT = (columns[name][span] for name in COLUMNS)
            mask_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT
            yield (
                {
                    "input_ids": ids_BT,
                    "position_ids": positions_BT,
                    "attention_mask": mask_BTT[:, None],
                },
                labels_BT,
            )

    return {"stamps": train(batches(), config)}


def train_padded(
    rows: str, config: str, rows_per_batch: str, accumulated: str, steps: str, width: str, seed: str
) -> dict[str, Any]:
    """Chats in any order, each a row, with an attention mask.

    Rows are padded to the longest of all (`maximum`) or of their batch. The result has the useful
    tokens of each step, too.
    """
    import numpy as np
    import torch

    columns = arrays(rows)
    lengths = torch.from_numpy(np.load(Path(rows) / "lengths.npy"))
    order = torch.from_numpy(np.random.default_rng(int(seed)).permutation(len(lengths)))
    useful = [0] * int(steps)

    def batches() -> Iterator[tuple[dict[str, Any], Any]]:
        size = int(rows_per_batch)
        for number in range(int(steps) * int(accumulated)):
            chosen = order[torch.arange(number * size, (number + 1) * size) % len(order)]
            length = lengths[chosen]
            longest = columns["input_ids"].shape[1] if width == "maximum" else int(length.max())
            ids, labels = (columns[name][chosen, :longest] for name in ("input_ids", "labels"))
            mask = torch.arange(longest) < length[:, None]
            useful[number // int(accumulated)] += int(length.sum())
            yield {"input_ids": ids.clamp(min=0), "attention_mask": mask.long()}, labels

    return {"stamps": train(batches(), config, int(accumulated)), "useful": useful}


def train(
    batches: Iterator[tuple[dict[str, Any], Any]], config: str, accumulated: int = 1
) -> list[tuple[int, float]]:
    """AdamW (fused), clipping, autocast over fp32 weights; wall time after each step."""
    import torch

    model = new_model(config)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [
        {"params": matrices},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    stamps = []
    for number, (inputs, labels) in enumerate(batches, start=1):
        (loss_of(model, inputs, labels) / accumulated).backward()
        if number % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            stamps.append((number // accumulated, time.time()))
    return stamps


def train_with_transformers(
    rows: str,
    config: str,
    rows_per_step: str,
    steps: str,
    output: str,
    learning_rate: str,
    schedule: str,
) -> dict[str, Any]:
    """`transformers.Trainer` with its own loader, logs and final checkpoint; the held-out loss."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    stamps: list[tuple[int, float]] = []

    class Stamp(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stamps.append((state.global_step, time.time()))

        on_train_begin = on_step_end

    model = new_model(config)
    count = int(steps)
    arguments = TrainingArguments(
        output_dir=output,
        use_cpu=True,
        bf16=in_bf16(),
        max_steps=count,
        per_device_train_batch_size=int(rows_per_step),
        learning_rate=float(learning_rate),
        lr_scheduler_type=schedule,
        warmup_steps=round(WARMUP_FRACTION * count),
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        logging_steps=10,
        save_steps=count,
        report_to="none",
        disable_tqdm=True,
    )
    examples = [{"input_ids": ids, "labels": ids} for ids in arrays(rows)["input_ids"]]
    Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Stamp()]).train()
    return {"stamps": stamps, "validation_loss": heldout_loss(model, rows)}


def heldout_loss(model: Any, rows: str) -> float:
    """Nats per target on the held-out rows, computed as in training, without a mask."""
    import torch

    columns = arrays(rows, "heldout")
    total = 0.0
    count = 0
    model.eval()
    for ids, labels in zip(
        columns["input_ids"].split(16), columns["labels"].split(16), strict=True
    ):
        with torch.no_grad():
            total += float(loss_of(model, {"input_ids": ids}, labels, reduction="sum"))
        count += int((labels != IGNORE).sum())
    return total / count


def new_model(config: str) -> Any:
    """A model with random weights, in fp32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    shape = AutoConfig.from_pretrained(config)
    return AutoModelForCausalLM.from_config(
        shape, attn_implementation="sdpa", dtype=torch.float32
    ).train()


def loss_of(model: Any, inputs: dict[str, Any], labels: Any, **how: str) -> Any:
    """Cross-entropy of shifted labels, under autocast where the CPU has bf16."""
    import torch
    from torch.nn import functional as F

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bf16()):
        logits = model(**inputs, use_cache=False).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, **how
        )


@functools.cache
def in_bf16() -> bool:
    """Whether the CPU has bf16, as `precision=auto` asks; otherwise all sides compute in fp32."""
    import torch

    from ttrain.train.precision import has_bf16

    return has_bf16(torch.device("cpu"))


def arrays(rows: str, part: str = "train") -> dict[str, Any]:
    """The rows of a part, by name, as tensors."""
    import numpy as np
    import torch

    return {name: torch.from_numpy(np.load(Path(rows) / f"{part}_{name}.npy")) for name in COLUMNS}


if __name__ == "__main__":
    common.main(str(__doc__), {})
