"""A frozen base in 4 or 8 bits, so that an adapter of it trains in less memory (QLoRA, arXiv:2305.14314)."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ttrain.config import Lora
from ttrain.errors import UsageError
from ttrain.model import factory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTED_IN = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}  # else bf16
log = logging.getLogger("ttrain")


def load(directory: Path, config: Lora) -> PreTrainedModel:
    """The base model as `lora.quantize` says: fp32, or its linear layers in NF4 (double-quantized) or int8.

    Embeddings, norms and the output head stay in fp32, and so do stacked experts, which bitsandbytes knows nothing of.
    Raises UsageError, with the command that installs it, where bitsandbytes is not there.
    """
    if config.quantize == "none":
        return factory.load(directory)
    if find_spec("bitsandbytes") is None:
        raise UsageError(
            f"lora.quantize is {config.quantize}, which needs bitsandbytes; install it with: pip install bitsandbytes, "
            f"or set lora.quantize=none"
        )
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line per layer and pass on a CPU
    settings = (
        BitsAndBytesConfig(load_in_8bit=True) if config.quantize == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=COMPUTED_IN.get(config.precision, torch.bfloat16),
        )
    )  # fmt: skip
    model = factory.load(directory, quantization_config=settings)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Else the first validation packs the weights for inference, and later steps have no gradient through them.
            module.support_avx512bf16_for_cpu = False
    held = sum(_numbers(p) for p in model.parameters() if not p.is_floating_point())
    whole = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    if not held:
        raise UsageError(
            f"lora.quantize is {config.quantize}, but the model {model.config.model_type} has no linear layer that "
            f"bitsandbytes can hold so; set lora.quantize=none"
        )
    log.info("%d of the base's %d weights are held in %s", held, held + whole, config.quantize)
    return model


def _numbers(parameter: Any) -> int:
    """How many weights a quantized parameter holds: two in a byte, in 4 bits."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
    return int(torch.Size(shape).numel())
