"""Tokens that a training reads in a second, from the FLOPs of a token. Imports nothing heavy."""

import math
import sys
from pathlib import Path

from ttrain.config import Settings, rules
from ttrain.core.files import JsonObject
from ttrain.core.machine import cpu_flags, usable_cores

# The quickstart on two cores, as README says: what its trainings compute in a second with bf16 and
# without it.
CPU_FLOPS = {True: 1.4e11, False: 0.4e11}
QUICKSTART_FLOPS = 8e6  # of a token
# A larger model uses more of a CPU: 0.7, 1.0 and 1.8e11 FLOP/s of a core were measured at 1, 10 and
# 25 M parameters.
EFFICIENCY = 0.2  # so FLOP/s grow by this power of a token's FLOPs, at least
MOST_CORES = 8  # to which the speed of so small models grows
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")


def flops_per_token(settings: JsonObject, row_length: int) -> float:
    """Forward and backward (arXiv:2204.02311, appendix B), of a dense model."""
    model = settings["model"]
    embeddings = settings["tokenizer"]["vocab_size"] * model["hidden_size"]
    weights = rules.layer_parameters(model) + embeddings
    return float(6.0 * weights + 12.0 * model["layers"] * model["hidden_size"] * row_length)


def speed_up(settings: Settings, flops_before: float, row_length: int) -> float:
    """How many times as many tokens a second as with other FLOPs of a token."""
    tree = settings.model_dump(mode="json", include={"model", "tokenizer"})
    return math.pow(flops_before / flops_per_token(tree, row_length), 1 - EFFICIENCY)


def quickstart_rate(settings: Settings, row_length: int) -> float | None:
    """Tokens a second by the quickstart on such a CPU.

    None for an existing model, and where a GPU may be used.
    """
    runtime = settings.runtime
    may_use_gpu = sys.platform == "darwin" or any(Path(file).exists() for file in GPU_FILES)
    is_cpu = runtime.device == "cpu" or (runtime.device == "auto" and not may_use_gpu)
    if not is_cpu or settings.existing_model:
        return None
    has_bf16 = not cpu_flags().isdisjoint({"amx_bf16", "avx512_bf16"})
    flops = CPU_FLOPS[has_bf16] * min(usable_cores(), MOST_CORES) / 2
    return flops / QUICKSTART_FLOPS * speed_up(settings, QUICKSTART_FLOPS, row_length)
