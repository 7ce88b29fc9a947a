"""The other sides of the measurements of training: bare loops, `transformers.Trainer`, `litgpt`, and matmuls alone.

Each is run as a process, `python train_peers.py --side NAME ARGUMENT...`, and imports none of the other sides' libraries, so
that it also runs in an environment of its own. Rows are arrays [N, T] from `train_common.export`; labels are shifted.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import common

IGNORE = -100
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
WARMUP_FRACTION = 0.05  # of the steps, for transformers.Trainer
PEAK_SIZES = (1024, 2048, 3072, 4096)
PEAK_SECONDS = 1.0  # of each size


def side_bare(rows: str, config: str, rows_per_step: str, steps: str, attention: str) -> dict[str, Any]:
    """The shortest loop that does the same work; `attention` keeps documents apart, or is plainly causal and has no mask."""
    import torch

    found = arrays(rows)
    T = found["input_ids"].shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool).tril()

    def batches() -> Iterator[tuple[dict[str, Any], Any]]:
        for step in range(int(steps)):
            there = slice(step * int(rows_per_step), (step + 1) * int(rows_per_step))
            batch = {name: torch.from_numpy(array[there]) for name, array in found.items()}
            inputs = {"input_ids": batch["input_ids"]}
            if attention == "documents":
                same = batch["segments"][:, :, None] == batch["segments"][:, None, :]
                inputs |= {"position_ids": batch["positions"], "attention_mask": (same & causal_TT)[:, None]}
            yield inputs, batch["labels"]

    return train(batches(), config)


def side_padded(
    rows: str, config: str, rows_per_batch: str, accumulated: str, steps: str, width: str, seed: str
) -> dict[str, Any]:
    """Chats in any order, each a row: padded to the longest of all (`maximum`) or of its batch, with an attention mask."""
    import numpy as np
    import torch

    found, lengths = arrays(rows), np.load(Path(rows) / "lengths.npy")
    T = found["input_ids"].shape[1]
    order = np.random.default_rng(int(seed)).permutation(len(lengths))
    useful: list[int] = []
    positions: list[int] = []

    def batches() -> Iterator[tuple[dict[str, Any], Any]]:
        size = int(rows_per_batch)
        for number in range(int(steps) * int(accumulated)):
            chosen = order[np.arange(number * size, (number + 1) * size) % len(order)]
            length = torch.from_numpy(lengths[chosen])
            longest = T if width == "maximum" else int(length.max())
            ids, labels = (torch.from_numpy(found[name][chosen, :longest]) for name in ("input_ids", "labels"))
            mask = torch.arange(longest) < length[:, None]
            useful.append(int(length.sum()))
            positions.append(ids.numel())
            yield {"input_ids": ids.clamp(min=0), "attention_mask": mask.long()}, labels

    trained = train(batches(), config, int(accumulated))
    return {**trained, "accumulated": int(accumulated), "useful": useful, "positions": positions}


def train(batches: Iterator[tuple[dict[str, Any], Any]], config: str, accumulated: int = 1) -> dict[str, Any]:
    """AdamW (fused), clipping, bf16 autocast over fp32 weights, the loss outside the model; wall time after each step."""
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
    stamps = []
    for number, (inputs, labels) in enumerate(batches, start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(**inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)
        (loss / accumulated).backward()
        if number % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            stamps.append((number // accumulated, time.time()))
    return {"stamps": stamps, "loss": float(loss)}


def side_transformers(
    rows: str, config: str, rows_per_step: str, steps: str, output: str, learning_rate: str, schedule: str
) -> dict[str, Any]:
    """`transformers.Trainer` in bf16 with its own loader, logs and final checkpoint; the held-out loss at the end."""
    import torch
    from torch.utils.data import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    found = arrays(rows)["input_ids"]

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return len(found)

        def __getitem__(self, row: int) -> dict[str, Any]:
            ids = torch.from_numpy(found[row])
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
        output_dir=output, use_cpu=True, bf16=True, per_device_train_batch_size=int(rows_per_step), max_steps=count,
        learning_rate=float(learning_rate), lr_scheduler_type=schedule, warmup_steps=round(WARMUP_FRACTION * count),
        adam_beta2=BETAS[1], weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP, logging_steps=10, save_steps=count,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Stamp()]).train()
    return {"stamps": stamps, "validation_loss": heldout_loss(model, rows)}


def heldout_loss(model: Any, rows: str) -> float:
    """Nats per target on the held-out rows, in bf16, as the stage measures them; without a mask, as the model was taught."""
    import torch
    from torch.nn import functional as F

    found, total, count = arrays(rows, "heldout"), 0.0, 0
    model.eval()
    for start in range(0, len(found["input_ids"]), 16):
        ids, labels = (torch.from_numpy(found[name][start : start + 16]) for name in ("input_ids", "labels"))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
            total += float(
                F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            )
        count += int((labels != IGNORE).sum())
    return total / count


def side_litgpt(rows: str, config: str, rows_per_step: str, steps: str, output: str) -> dict[str, Any]:
    """`litgpt pretrain` with a model of the same sizes and mixed bf16; eager where the environment disables compiling."""
    import numpy as np
    import torch
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import DataModule
    from litgpt.pretrain import setup
    from torch.utils.data import DataLoader, TensorDataset

    os.chdir(output)
    sys.argv = ["litgpt", "pretrain", "bench"]  # it keeps its command line beside its checkpoint, and so parses it
    found = arrays(rows)
    following = np.maximum(found["labels"][:, -1:], 0)
    ids = torch.from_numpy(np.concatenate([found["input_ids"], following], axis=1))
    collate = Stacked()

    class Data(DataModule):
        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None, **_: Any) -> None:
            self.batch_size = batch_size

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(ids), batch_size=self.batch_size, shuffle=True, collate_fn=collate)

        def val_dataloader(self) -> Any:
            return DataLoader(ids[: self.batch_size], batch_size=self.batch_size)

    sizes = json.loads((Path(config) / "config.json").read_text())
    length, batch = ids.shape[1] - 1, int(rows_per_step)
    model = Config(
        name="bench", block_size=length, n_layer=sizes["num_hidden_layers"], n_embd=sizes["hidden_size"],
        n_head=sizes["num_attention_heads"], vocab_size=sizes["vocab_size"], padded_vocab_size=sizes["vocab_size"],
        intermediate_size=sizes["intermediate_size"], rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    arguments = TrainArgs(
        global_batch_size=batch, micro_batch_size=batch, max_tokens=int(steps) * batch * length, max_seq_length=length,
        tie_embeddings=sizes["tie_word_embeddings"], max_norm=CLIP, lr_warmup_steps=None, log_interval=1, save_interval=1000,
    )  # fmt: skip
    adamw = {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
    }
    setup(
        "bench", model_config=model, out_dir=Path(output) / "out", precision="bf16-mixed", data=Data(), train=arguments,
        eval=EvalArgs(interval=1000, max_iters=1, final_validation=False), optimizer=adamw, logger_name="csv", devices=1,
    )  # fmt: skip
    return {"stamps": collate.stamps}


class Stacked:
    """Makes a batch of rows, and notes when it was asked for: at the end of the step before. litgpt pickles its loader."""

    def __init__(self) -> None:
        self.stamps: list[tuple[int, float]] = []

    def __call__(self, batch: Any) -> Any:
        import torch

        self.stamps.append((len(self.stamps), time.time()))
        return torch.stack([row for (row,) in batch])


def side_peak() -> dict[str, Any]:
    """The most FLOP/s that a bf16 matmul reaches here, of several sizes, with all threads."""
    import torch

    best = {}
    for size in PEAK_SIZES:
        left, right = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
        fastest, end = float("inf"), time.perf_counter() + PEAK_SECONDS
        for done in itertools.count():
            began = time.perf_counter()
            if done > 2 and began > end:
                break
            torch.mm(left, right)
            fastest = min(fastest, time.perf_counter() - began)
        best[size] = 2 * size**3 / fastest
    return {"flops": max(best.values()), "size": max(best, key=best.__getitem__), "sizes": best}


def arrays(rows: str, part: str = "train") -> dict[str, Any]:
    """The rows of a part, by name."""
    import numpy as np

    return {name: np.load(Path(rows) / f"{part}_{name}.npy") for name in ("input_ids", "labels", "positions", "segments")}


SIDES: Mapping[str, Callable[..., Mapping[str, Any] | None]] = {
    "bare": side_bare,
    "padded": side_padded,
    "transformers": side_transformers,
    "litgpt": side_litgpt,
    "peak": side_peak,
}

if __name__ == "__main__":
    common.requested_side(SIDES)
