"""The other sides of the measurements of training: bare loops, `transformers.Trainer`, and matmuls alone.

Rows are arrays [N, T] from `train_common.export`; labels are shifted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

COLUMNS = ("input_ids", "labels", "positions", "segments")
IGNORE = -100
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
WARMUP_FRACTION = 0.05  # of the steps, for transformers.Trainer
PEAK_SIZES = (1024, 2048, 3072, 4096)
PEAK_ROUNDS = 20


def train_bare(rows: str, config: str, rows_per_step: str, steps: str) -> dict[str, Any]:
    """The shortest loop that does the same work, with a mask that keeps documents apart."""
    import torch

    columns = {name: torch.from_numpy(array) for name, array in arrays(rows).items()}
    T = columns["input_ids"].shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool).tril()

    def batches() -> Iterator[tuple[dict[str, Any], Any]]:
        for step in range(int(steps)):
            span = slice(step * int(rows_per_step), (step + 1) * int(rows_per_step))
            ids_BT, labels_BT, positions_BT, segments_BT = (columns[name][span] for name in COLUMNS)
            mask_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT
            yield {"input_ids": ids_BT, "position_ids": positions_BT, "attention_mask": mask_BTT[:, None]}, labels_BT

    return train(batches(), config)


def train_padded(
    rows: str, config: str, rows_per_batch: str, accumulated: str, steps: str, width: str, seed: str
) -> dict[str, Any]:
    """Chats in any order, each a row: padded to the longest of all (`maximum`) or of its batch, with an attention mask."""
    import numpy as np
    import torch

    columns, lengths = arrays(rows), np.load(Path(rows) / "lengths.npy")
    T = columns["input_ids"].shape[1]
    order = np.random.default_rng(int(seed)).permutation(len(lengths))
    useful: list[int] = []
    positions: list[int] = []

    def batches() -> Iterator[tuple[dict[str, Any], Any]]:
        size = int(rows_per_batch)
        for number in range(int(steps) * int(accumulated)):
            chosen = order[np.arange(number * size, (number + 1) * size) % len(order)]
            length = torch.from_numpy(lengths[chosen])
            longest = T if width == "maximum" else int(length.max())
            ids, labels = (torch.from_numpy(columns[name][chosen, :longest]) for name in ("input_ids", "labels"))
            mask = torch.arange(longest) < length[:, None]
            useful.append(int(length.sum()))
            positions.append(ids.numel())
            yield {"input_ids": ids.clamp(min=0), "attention_mask": mask.long()}, labels

    trained = train(batches(), config, int(accumulated))
    return {**trained, "accumulated": int(accumulated), "useful": useful, "positions": positions}


def train(batches: Iterator[tuple[dict[str, Any], Any]], config: str, accumulated: int = 1) -> dict[str, Any]:
    """AdamW (fused), clipping, autocast over fp32 weights, the loss outside the model; wall time after each step."""
    import torch
    from torch.nn import functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(config), attn_implementation="sdpa", dtype=torch.float32
    )
    model.train()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    stamps, is_bf16 = [], in_bf16()
    for number, (inputs, labels) in enumerate(batches, start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            logits = model(**inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)
        (loss / accumulated).backward()
        if number % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            stamps.append((number // accumulated, time.time()))
    return {"stamps": stamps, "loss": float(loss)}


def train_with_transformers(
    rows: str, config: str, rows_per_step: str, steps: str, output: str, learning_rate: str, schedule: str
) -> dict[str, Any]:
    """`transformers.Trainer` with its own loader, logs and final checkpoint; the held-out loss at the end."""
    import torch
    from torch.utils.data import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    rows_of_ids = arrays(rows)["input_ids"]

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return len(rows_of_ids)

        def __getitem__(self, row: int) -> dict[str, Any]:
            ids = torch.from_numpy(rows_of_ids[row])
            return {"input_ids": ids, "labels": ids}

    stamps = []

    class Stamp(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            stamps.append((0, time.time()))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stamps.append((state.global_step, time.time()))

    count = int(steps)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=output, use_cpu=True, bf16=in_bf16(), max_steps=count,
        per_device_train_batch_size=int(rows_per_step),
        learning_rate=float(learning_rate), lr_scheduler_type=schedule, warmup_steps=round(WARMUP_FRACTION * count),
        adam_beta2=BETAS[1], weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP, logging_steps=10, save_steps=count,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Stamp()]).train()
    return {"stamps": stamps, "validation_loss": heldout_loss(model, rows)}


def train_with_trl(
    pairs: str, model: str, output: str, pairs_per_batch: int, accumulated: int, sampling: str, count: int, beta: float
) -> dict[str, Any]:
    """`trl.DPOTrainer` over the first `count` pairs of a file, once, with the reference's log-probabilities made before.

    A stamp is (pairs that are learnt, wall time, CPU seconds), of each optimizer step.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # these are the very tokens of the other side

    stamps = []
    pairs_per_step = pairs_per_batch * accumulated

    class Stamp(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            learnt = min(count, state.global_step * pairs_per_step)
            stamps.append((learnt, time.time(), time.process_time()))

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    arguments = DPOConfig(
        output_dir=output, use_cpu=True, bf16=in_bf16(), per_device_train_batch_size=pairs_per_batch,
        gradient_accumulation_steps=accumulated, num_train_epochs=1, train_sampling_strategy=sampling,
        remove_unused_columns=False, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta2=BETAS[1],
        weight_decay=0.0, max_grad_norm=CLIP, optim="adamw_torch_fused", beta=beta, loss_type="sigmoid",
        precompute_ref_log_probs=True, gradient_checkpointing=False, max_length=None, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_steps=10,
    )  # fmt: skip
    rows = Dataset.from_json(pairs, cache_dir=output).select(range(count))
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Tokenized(policy, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[Stamp()])
    return {"stamps": stamps, "loss": trainer.train().training_loss}


def heldout_loss(model: Any, rows: str) -> float:
    """Nats per target on the held-out rows, computed as in training; without a mask, as the model was taught."""
    import torch
    from torch.nn import functional as F

    columns, total, count, is_bf16 = arrays(rows, "heldout"), 0.0, 0, in_bf16()
    model.eval()
    for start in range(0, len(columns["input_ids"]), 16):
        ids, labels = (torch.from_numpy(columns[name][start : start + 16]) for name in ("input_ids", "labels"))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            logits = model(input_ids=ids, use_cache=False).logits
            total += float(
                F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            )
        count += int((labels != IGNORE).sum())
    return total / count


def matmul_peak() -> dict[str, float]:
    """The most FLOP/s that a matmul reaches here, of several sizes, with all threads; in bf16 where the CPU has it."""
    import torch

    best, dtype = 0.0, torch.bfloat16 if in_bf16() else torch.float32
    for size in PEAK_SIZES:
        left, right = (torch.randn(size, size, dtype=dtype) for _ in range(2))
        seconds = min(common.timed(lambda left=left, right=right: torch.mm(left, right)).wall for _ in range(PEAK_ROUNDS))
        best = max(best, 2 * size**3 / seconds)
    return {"flops": best}


def in_bf16() -> bool:
    """Whether the CPU has bf16, as `precision=auto` asks: where it only emulates it, all sides compute in fp32."""
    import torch

    from ttrain.train.precision import has_bf16

    return has_bf16(torch.device("cpu"))


def arrays(rows: str, part: str = "train") -> dict[str, Any]:
    """The rows of a part, by name."""
    import numpy as np

    return {name: np.load(Path(rows) / f"{part}_{name}.npy") for name in COLUMNS}


if __name__ == "__main__":
    common.main(str(__doc__), {})
