"""State dicts in the layouts of TinySeek's and MiniMind's own files, of random numbers.

Letters in names: V vocabulary, D width, H heads, K width of a head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, D, H = 23, 16, 4


class Made(dict[str, Tensor]):
    """A state dict of random tensors, large enough for every part to matter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, *shape: int, around: float = 0.0) -> None:
        self[name] = around + 0.4 * torch.randn(*shape, generator=self._generator)

    def linear(self, name: str, out: int, into: int) -> None:
        self.add(f"{name}.weight", out, into)
        self.add(f"{name}.bias", out)


C, R, F, E, S, KEEP = 6, 4, 5, 6, 2, 3
TINYSEEK = {
    "vocab_size": V, "device": "cuda", "n_layer": 2, "n_head": H, "d_model": D, "d_c": C, "d_r": R, "hidden": F,
    "other_experts": E, "shared_experts": S, "keep": KEEP, "ro_theta": 500.0, "dropout": 0.1, "scale": 0.02, "alpha": 0.02,
    "pad_idx": 0,
}  # fmt: skip


def tinyseek(shared_layer: bool = False, inner: int = F) -> Made:
    made = Made(1)
    made.add("tokenEmbedding.tokenEmbedding.weight", V, D)
    for layer in ("synonymous_layer",) if shared_layer else ("layers.0", "layers.1"):
        for name, out, into in (
            ("w_dq", C, D), ("w_dkv", C, D), ("w_qr", R, C), ("w_kr", R, D), ("w_uq", D, C), ("w_uk", D, C), ("w_uv", D, C),
            ("w_o", D, D),
        ):  # fmt: skip
            made.linear(f"{layer}.mla.{name}", out, into)
        for norm in ("norm1", "norm2"):
            made.add(f"{layer}.{norm}.gamma", D, around=1.0)
            made.add(f"{layer}.{norm}.beta", D)
        made.add(f"{layer}.moe_ffn.w_g", D, E)
        made.add(f"{layer}.moe_ffn.w_n", D, E)
        for expert in [f"experts.{n}" for n in range(E)] + [f"shared_experts.{n}" for n in range(S)]:
            made.linear(f"{layer}.moe_ffn.{expert}.fc1", inner, D)
            made.linear(f"{layer}.moe_ffn.{expert}.fc2", D, inner)
    for head in ("fc",) if shared_layer else ("fc1", "fc2"):
        made.linear(head, V, D)
    return made


LAYERS, KV, INNER, EXPERTS, TOP_K = 2, 2, 24, 4, 2
OLD = {"num_attention_heads": H}


def minimind(*, normed: bool = False, experts: int = 0, shared: int = 0, head_dim: int = 4) -> Made:
    made = Made(2)
    made.add("model.embed_tokens.weight", V, D)
    made["lm_head.weight"] = made["model.embed_tokens.weight"]
    made.add("model.norm.weight", D, around=1.0)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part, out, into in (
            ("q_proj", H * head_dim, D), ("k_proj", KV * head_dim, D), ("v_proj", KV * head_dim, D),
            ("o_proj", D, H * head_dim),
        ):  # fmt: skip
            made.add(f"{name}.self_attn.{part}.weight", out, into)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made.add(f"{name}.{norm}.weight", D, around=1.0)
        for norm in ("q_norm", "k_norm") if normed else ():
            made.add(f"{name}.self_attn.{norm}.weight", head_dim, around=1.0)
        blocks = [f".experts.{n}" for n in range(experts)] + [f".shared_experts.{n}" for n in range(shared)]
        for block in blocks or [""]:
            made.add(f"{name}.mlp{block}.gate_proj.weight", INNER, D)
            made.add(f"{name}.mlp{block}.up_proj.weight", INNER, D)
            made.add(f"{name}.mlp{block}.down_proj.weight", D, INNER)
        if experts:
            made.add(f"{name}.mlp.gate.weight", experts, D)
    return made


def save(directory: Path, weights: dict[str, Tensor], name: str = "weights.pkl", config: Any = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(dict(weights), directory / name)
    else:
        torch.save(dict(weights), directory / name)
    if config is not None:
        (directory / "model_config.json").write_text(json.dumps(config))
    return directory / name
