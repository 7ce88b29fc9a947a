"""Architectures that transformers lacks: registered here, and saved as a source file beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KINDS = ("moyun", "tinyseek")


def register() -> None:
    """Register our architectures with transformers, so that no code beside weights is ever executed here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ttrain.model.modeling_moyun import MoyunConfig, MoyunForCausalLM
    from ttrain.model.modeling_tinyseek import TinySeekConfig, TinySeekForCausalLM

    for config, model in ((MoyunConfig, MoyunForCausalLM), (TinySeekConfig, TinySeekForCausalLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


def files(config: PretrainedConfig) -> dict[str, bytes]:
    """Source file with which a directory of this config opens without ttrain; {} for transformers' own architectures.

    Its `auto_map` is in the config already. Elsewhere `from_pretrained` asks for `trust_remote_code=True`.
    """
    if config.model_type not in KINDS:
        return {}
    path = Path(__file__).with_name(f"modeling_{config.model_type}.py")
    return {path.name: path.read_bytes()}
