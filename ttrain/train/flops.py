"""What a model costs a token, and what a chip can do: the two sides of model FLOP/s utilisation (MFU)."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.train.precision import DTYPES, Precision

TERA = 1e12
# Dense TFLOP/s, accumulated in fp32, by a word of the name that torch.cuda.get_device_name gives. Sources:
#   T4     nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
#   A10, A100, L4, L40S, H100, H200, B200: the data sheets at nvidia.com/en-us/data-center; half of what stands there with
#          sparsity. GH200 holds the same chip as H100 SXM.
#   3090   "NVIDIA Ampere GA102 GPU Architecture", appendix A; 4090: "NVIDIA Ada GPU Architecture", appendix A
# Boards of the same name that are slower (PCIe, NVL) have lines of their own, or are measured.
TFLOPS: dict[str, dict[str, float]] = {
    "T4": {"fp16": 65, "fp32": 8.1},
    "A10": {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
    "A100": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "A100 PCIe": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "L4": {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
    "L40S": {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    "3090": {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6},
    "4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
    "H100": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H100 PCIe": {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51.2},
    "H200": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "GH200": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "B200": {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
}
OTHER_BOARDS = frozenset({"PCIe", "NVL", "Laptop", "D", "MIG"})  # which a line of the chip alone does not speak of
SIZES = (512, 1024, 2048, 4096, 8192)
LONGEST_SECONDS = 0.05  # of one product; three of each size


def peak_flops(precision: Precision) -> float:
    """FLOP/s that the device of a rank can reach in matrix products: from the table, else measured in under 0.3 s."""
    if precision.device.type == "cuda":
        found = listed(torch.cuda.get_device_name(precision.device), precision.word)
        if found is not None:
            return found
    return measured(DTYPES[precision.word], precision.device)


def listed(name: str, word: str) -> float | None:
    """The table's FLOP/s for a device's name and a precision; None where it has none."""
    words = {*name.replace("-", " ").split()}
    for chip, tflops in TFLOPS.items():
        wanted = {*chip.split()}
        if wanted <= words and words & OTHER_BOARDS <= wanted:
            return tflops[word] * TERA if word in tflops else None
    return None


def measured(dtype: torch.dtype, device: torch.device) -> float:
    """The best rate of some square products; the sizes grow while a product is short. Draws no random number."""
    best = 0.0
    for size in SIZES:
        factor = torch.full((size, size), 1 / size, dtype=dtype, device=device)
        seconds = min(_seconds_of_product(factor) for _ in range(3))
        best = max(best, 2 * size**3 / seconds)
        if 8 * seconds > LONGEST_SECONDS:
            break
    return best


def _seconds_of_product(factor: Tensor) -> float:
    _wait(factor.device)
    began = time.perf_counter()
    torch.mm(factor, factor)
    _wait(factor.device)
    return max(time.perf_counter() - began, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def flops_per_token(model: nn.Module, positions: int) -> float:
    """FLOPs of the forward and backward pass for a token of a row of `positions` (PaLM, arXiv:2204.02311, appendix B).

    6 for each weight that multiplies, 4 for a frozen one, which needs no gradient of its own; 12 for each layer, head
    width and position in attention. An embedding is looked up, not multiplied, and of the experts count those that a token
    visits. What gradient checkpointing computes twice does not count.
    """
    looked_up = looked_up_weights(model)
    shares = visited_shares(model)
    weights = sum(
        p.numel() * shares.get(name, 1.0) * (6 if p.requires_grad else 4)
        for name, p in model.named_parameters()
        if name not in looked_up
    )
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:
        return float(weights)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return float(weights + 12 * config.num_hidden_layers * width * positions)


def looked_up_weights(model: nn.Module) -> set[str]:
    """Names of the embeddings, of tokens or positions, that are not the output head's weight as well."""
    own: Any = model
    head = own.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    multiplied = None if head is None else head.weight
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, p in model.named_parameters() if id(p) in tables and p is not multiplied}


def visited_shares(model: nn.Module) -> dict[str, float]:
    """By name the share of routed experts' weights that a token meets, k of E; {} where there are no experts.

    transformers stacks the experts of a layer in tensors [E, ...] named `experts`.
    """
    config: Any = getattr(model, "config", None)
    visited = getattr(config, "num_experts_per_tok", None)
    if not visited:
        return {}
    stacked = {name: p for name, p in model.named_parameters() if ".experts." in name and p.ndim > 1}
    return {name: min(1.0, visited / len(p)) for name, p in stacked.items()}
