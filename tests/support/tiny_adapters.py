"""Tiny models of every shape with adapters."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.tiny_data import VOCAB
from torch import Tensor

from ttrain.config import Lora, Optim, Schedule
from ttrain.model import adapters, factory
from ttrain.store.model_files import ADAPTER, weights_digest
from ttrain.train.snapshots import copy_tensors

CPU = torch.device("cpu")
SHARED_EXPERTS = {"experts": 4, "shared_experts": 1, "dense_layers": 1, "bias_rate": 0.01}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "kv_heads": 1},
    "gpt2": {"kind": "gpt2"},
    "experts": {"kind": "qwen3", "moe": {"experts": 4}},
    "shared experts": {"kind": "llama", "moe": SHARED_EXPERTS},
}
KINDS = ("lora", "dora", "prefix")
# Each way of PEFT: layers, transposed ones, stacked experts, single weights; a prefix has no layer.
OTHERS = [("llama", "dora"), ("gpt2", "dora"), ("llama", "prefix")]
CASES = [*((shape, "lora") for shape in SHAPES), *OTHERS]
CASE_IDS = [f"{kind} on {shape}" for shape, kind in CASES]


def settings(**changes: Any) -> Lora:
    """Eight steps of six rows of sixteen tokens, in fp32, at a rate that moves every logit."""
    values: dict[str, Any] = {"rank": 2, "alpha": 8.0, "virtual_tokens": 4, "row_length": 16}
    values |= {"tokens": 8 * 96, "epochs": None, "tokens_per_step": 96, "precision": "fp32"}
    values |= {"optim": Optim(lr=3e-2, weight_decay=0.0), "schedule": Schedule(warmup_steps=1)}
    return Lora(**{**values, **changes})


def random_ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(9, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def disturb(model: Any, seed: int = 1, by: float = 0.3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapters.state(model).values():
            tensor.add_(by * torch.randn(tensor.shape, generator=generator))
    return model


def save_base(model: Any, directory: Path) -> Path:
    return save(directory, factory.files(model), "model.safetensors", factory.state(model))


def save_adapter(model: Any, directory: Path, base: Path) -> Path:
    files = adapters.files(model, base="a-base", base_digest=weights_digest(base))
    return save(directory, files, ADAPTER, adapters.state(model))


def save(directory: Path, files: dict[str, bytes], name: str, state: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (directory / file).write_bytes(data)
    save_file(copy_tensors(state), directory / name, metadata={"format": "pt"})
    return directory


@torch.no_grad()
def logits(model: Any) -> Any:
    return model.eval()(input_ids=random_ids(5, 2, 12)).logits
