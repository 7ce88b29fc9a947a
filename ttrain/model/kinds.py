"""Names of the known architectures; without heavy imports, so that the plan can check them."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.config import Lora, Model
from ttrain.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OWN_KINDS = ("moyun", "tinyseek")  # architectures that transformers lacks

# transformers' table of causal architectures. Importing that module takes seconds, reading it 26
# ms.
MODULE = ("auto", "modeling_auto.py")
TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


RULED_KINDS = ("llama", "qwen3")  # new models of these kinds have the layers below
RULED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PRESETS = ("all-linear", "attention")


def check_kind(kind: str) -> None:
    """Raise UsageError, with the closest names, for an unknown `model.kind`."""
    if kind not in names():
        near = difflib.get_close_matches(kind, sorted(names()), n=3, cutoff=0.5)
        hint = (
            f"; did you mean {' or '.join(near)}?"
            if near
            else "; docs/models.md names the usual ones"
        )
        raise UsageError(
            f"model.kind is '{kind}', which is not a causal architecture of transformers{hint}"
        )


@functools.cache
def names() -> frozenset[str]:
    """Architectures with a causal head in transformers, and ours; not all can be trained here."""
    spec = importlib.util.find_spec("transformers")
    source = (
        Path((spec and spec.origin) or "")
        .with_name("models")
        .joinpath(*MODULE)
        .read_text(encoding="utf-8")
    )
    # TABLE = OrderedDict([("name", ...), ...])
    table = source.partition(f"\n{TABLE} = OrderedDict(")[2].partition("\n)")[0]
    return frozenset(dict(ast.literal_eval(table.strip()))) | frozenset(OWN_KINDS)


def check_targets(section: str, adapter: Lora, model: Model) -> None:
    """Raise UsageError for an adapter's targets that a new llama or qwen3 does not have.

    Other kinds are checked against the model itself. `section`: of the adapter's settings.
    """
    if model.kind not in RULED_KINDS or model.moe is not None or adapter.kind == "prefix":
        return
    layers = RULED_LAYERS if model.tie_embeddings else (*RULED_LAYERS, "lm_head")
    unknown = [
        name for name in adapter.targets if name.rpartition(".")[2] not in (*layers, *PRESETS)
    ]
    if unknown:
        raise UsageError(
            f"{section}.targets names {', '.join(unknown)}, but the layers that can be adapted "
            f"are {', '.join(layers)}; name some of them, or write {' or '.join(PRESETS)}"
        )


def register_own() -> None:
    """Register our architectures with transformers, so that no code next to weights runs here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ttrain.model.modeling_moyun import MoyunConfig, MoyunForCausalLM
    from ttrain.model.modeling_tinyseek import TinySeekConfig, TinySeekForCausalLM

    for config, model in ((MoyunConfig, MoyunForCausalLM), (TinySeekConfig, TinySeekForCausalLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


def own_files(config: PretrainedConfig) -> dict[str, bytes]:
    """Source files that let a model directory with this config be loaded without ttrain.

    Elsewhere `from_pretrained` asks for `trust_remote_code=True`.
    """
    if config.model_type not in OWN_KINDS:
        return {}
    paths = (
        Path(__file__).with_name(f"modeling_{name}.py") for name in (config.model_type, "shared")
    )
    return {path.name: path.read_bytes() for path in paths}
