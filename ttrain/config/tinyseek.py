"""TinySeek's `model_config.json` as a file of settings: what each of its names means here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ttrain.config.yaml_text import one_line
from ttrain.core.files import JsonObject
from ttrain.errors import UsageError

# The names of its ConfigManager. None: not needed here, as `runtime.device` is `auto` and the tokenizer has a token for
# padding.
NAMES: Mapping[str, str | None] = {
    "n_layer": "model.layers",
    "n_head": "model.heads",
    "d_model": "model.hidden_size",
    "d_c": "model.fields.latent_size",
    "d_r": "model.fields.rope_head_dim",
    "hidden": "model.moe.expert_size",
    "other_experts": "model.moe.experts",
    "shared_experts": "model.moe.shared_experts",
    "keep": "model.moe.top_k",
    "alpha": "model.moe.balance",
    "dropout": "model.dropout",
    "ro_theta": "model.rope_theta",
    "scale": "model.init_std",
    "vocab_size": "tokenizer.vocab_size",
    "device": None,
    "pad_idx": None,
}


def settings_of(tree: JsonObject, origin: str) -> JsonObject:
    """The settings that such a file stands for, of the architecture `tinyseek`; the tree itself where it has none of these
    names. Raises UsageError for a name that is not one of them."""
    if not any(name in NAMES for name in tree):
        return tree
    for name in tree:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(NAMES)}"
            raise UsageError(
                f"'{one_line(name)}' (from {origin}) is not a name of TinySeek's model_config.json, to which the other "
                f"names belong; {hint} Settings of ttrain go into a file of their own: -c {origin} -c OTHER.yaml"
            )
    settings = {setting: tree[name] for name, setting in NAMES.items() if setting and name in tree}
    return {"model.kind": "tinyseek", **settings}
