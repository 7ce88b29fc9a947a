"""Settings of the model."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import JsonValue, model_validator

from ttrain.config.base import Section, need, setting
from ttrain.config.yaml_text import shown
from ttrain.errors import UsageError

# Their rotary positions turn all numbers of a head in pairs (arXiv:2104.09864).
TURNING_KINDS = ("llama", "qwen3")

# The name is the number of parameters of a qwen3 with tied embeddings and the vocabulary beside
# (GPT-2's from 124m on, whose shapes 124m and 350m are). From 500m on a key is shared by several
# heads, which costs little and makes the cache smaller.
COLUMNS = ("hidden_size", "layers", "heads", "kv_heads", "max_length")
PRESETS: dict[str, tuple[int, int, int, int | None, int]] = {
    "1m": (128, 4, 2, None, 1024),  # 2,048
    "5m": (256, 5, 4, None, 1024),  # 4,096
    "10m": (320, 6, 5, None, 1024),  # 8,192
    "25m": (448, 9, 7, None, 2048),  # 8,192
    "50m": (512, 13, 8, None, 2048),  # 16,384
    "124m": (768, 12, 12, None, 2048),  # 50,257
    "350m": (1024, 24, 16, None, 2048),  # 50,257
    "500m": (1280, 25, 20, 5, 4096),  # 50,257
    "1b": (2048, 20, 16, 4, 4096),  # 50,257
}


class Moe(Section):
    """Mixture of experts as feed-forward layers (arXiv:2101.03961, arXiv:2401.06066)."""

    experts: int = setting(8, "routed experts of a layer", ge=2)
    top_k: int = setting(2, "routed experts that each token visits", ge=1)
    shared_experts: int = setting(0, "experts that every token visits besides", ge=0)
    expert_size: int | None = setting(
        None,
        "inner width of an expert; empty: as many active parameters as the dense layer has",
        ge=8,
    )
    dense_layers: int = setting(0, "first layers that stay dense", ge=0)
    balance: float = setting(
        0.01, "weight of the balance loss of each row (arXiv:2412.19437, eq. 17)", ge=0
    )
    z_loss: float = setting(0.0, "weight of the router z-loss (arXiv:2202.08906, eq. 5)", ge=0)
    bias_rate: float = setting(
        0.0,
        "balancing without a loss: a bias per expert moves so far a step (arXiv:2408.15664)",
        ge=0,
    )

    # What the model's own config calls them, so that stages which start from its weights go on in
    # the same way.
    IN_CONFIG: ClassVar[Mapping[str, str]] = {
        "router_aux_loss_coef": "balance",
        "router_z_loss_coef": "z_loss",
        "router_bias_rate": "bias_rate",
    }

    def check_values(self) -> None:
        need(
            self.top_k <= self.experts,
            f"model.moe.top_k is {self.top_k} but there are only model.moe.experts {self.experts}",
        )


class MultiToken(Section):
    """A head for the token after the next one (arXiv:2404.19737); loss ce1 + weight * ce2."""

    weight: float = setting(0.3, "of the second head's loss", gt=0)
    keep_head: bool = setting(
        True, "keep its weights beside the model, for SFT to train further; never inside it"
    )


class Model(Section):
    """A Hugging Face architecture, by its sizes."""

    preset: str | None = setting(
        None, "sizes by name, see docs/models.md; settings beside win", exclude=True
    )
    kind: str = setting(
        "qwen3", "qwen3, llama, moyun, tinyseek, or the model_type of any causal architecture"
    )
    hidden_size: int = setting(128, "width of the hidden states", ge=8)
    layers: int = setting(4, "transformer blocks", ge=1)
    heads: int = setting(2, "attention heads of a layer", ge=1)
    kv_heads: int | None = setting(None, "grouped-query attention; empty: as many as `heads`", ge=1)
    intermediate_size: int | None = setting(
        None, "empty: 8/3 of hidden_size, rounded up to 32", ge=8
    )
    max_length: int = setting(1024, "positions the model accepts, in tokens", ge=16)
    tie_embeddings: bool = setting(
        True,
        "output head and embedding share their weights; auto: where the head is large for "
        "the model",
    )
    rope_theta: float = setting(10_000.0, "base of the rotary positions", gt=0)
    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = setting(
        "default", "how positions beyond the trained ones are scaled"
    )
    rope_factor: float = setting(1.0, "of `rope_type`: times as many positions", ge=1)
    init_std: float = setting(0.02, "standard deviation of the first weights", gt=0)
    scaled_residuals: bool = setting(
        False,
        "initialise what writes into the residual stream with init_std / sqrt(2 * layers), as "
        "GPT-2 does",
    )
    dropout: float = setting(
        0.0, "on attention weights; its masks also depend on runtime.rows_per_device", ge=0, lt=1
    )
    fields: dict[str, JsonValue] = setting(
        {}, "more fields of the architecture's config, as model.fields.NAME=value"
    )
    moe: Moe | None = setting(None, "mixture of experts; empty: dense")
    multi_token: MultiToken | None = setting(
        None, "a second head for the token after the next; empty: none"
    )

    # For a `Model` made in Python; the loader does it itself, as it knows the layers.
    @model_validator(mode="before")
    @classmethod
    def _preset_fills_in(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping) or settings.get("preset") is None:
            return settings
        return {
            **sizes_of(settings["preset"]),
            **{key: value for key, value in settings.items() if key != "preset"},
        }

    def check_values(self) -> None:
        need(
            self.rope_factor == 1 or self.rope_type != "default",
            f"model.rope_factor is {self.rope_factor} but model.rope_type is default, which "
            "stretches nothing; "
            f"set model.rope_type, for example to yarn",
        )
        # Each head turns its numbers in pairs.
        pairs = self.kind in TURNING_KINDS and "head_dim" not in self.fields
        multiple = 2 * self.heads if pairs else self.heads
        need(
            self.hidden_size % multiple == 0,
            f"model.hidden_size is {self.hidden_size} but must be a multiple of {multiple}, as "
            f"model.heads {self.heads} "
            f"makes heads of {self.hidden_size / self.heads:.4g}; try model.hidden_size="
            f"{-(-self.hidden_size // (2 * self.heads)) * 2 * self.heads}",
        )
        need(
            self.heads % (self.kv_heads or self.heads) == 0,
            f"model.kv_heads is {self.kv_heads} but must divide model.heads {self.heads}; "
            f"try model.kv_heads={math.gcd(self.heads, self.kv_heads or 1)}",
        )


def sizes_of(name: object) -> dict[str, Any]:
    """Settings of `model` that a preset stands for. Raises UsageError for an unknown name.

    Sizes that follow from others are empty, so that no weaker layer's remain.
    """
    sizes = PRESETS.get(str(name).lower())
    if sizes is None:
        raise UsageError(f"model.preset is {shown(name)} but must be one of: {', '.join(PRESETS)}")
    return {
        **dict(zip(COLUMNS, sizes, strict=True)),
        "intermediate_size": None,
        "tie_embeddings": True,
    }
