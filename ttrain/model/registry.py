"""Names of the known architectures; without heavy imports, so that a wrong name is reported before anything is built."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.config import Lora, Model
from ttrain.core.files import JsonObject, write_bytes
from ttrain.core.hashing import DigestCache, code_digests, digest_of
from ttrain.core.machine import versions
from ttrain.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OWN_KINDS = ("moyun", "tinyseek")  # architectures that transformers lacks

# transformers' table of causal architectures. Importing that module takes seconds, reading it 26 ms.
MODULE, TABLE = ("auto", "modeling_auto.py"), "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_kind(kind: str) -> None:
    """Raise UsageError, with the closest names, if there is no such `model.kind`."""
    if kind not in names():
        near = difflib.get_close_matches(kind, sorted(names()), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; docs/models.md names the usual ones"
        raise UsageError(f"model.kind is '{kind}', which is not a causal architecture of transformers{hint}")


@functools.cache
def names() -> frozenset[str]:
    """Architectures with a causal head in transformers, and ours; not all of them can be trained here."""
    spec = importlib.util.find_spec("transformers")
    source = Path((spec and spec.origin) or "").with_name("models").joinpath(*MODULE).read_text(encoding="utf-8")
    # TABLE = OrderedDict([("name", ...), ...])
    table = source.partition(f"\n{TABLE} = OrderedDict(")[2].partition("\n)")[0]
    return frozenset(dict(ast.literal_eval(table.strip()))) | frozenset(OWN_KINDS)


RULED_KINDS = ("llama", "qwen3")
LIBRARIES = ("torch", "transformers", "peft")

RULED_SETTINGS = frozenset(
    {
        *("kind", "hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "max_length", "tie_embeddings"),
        *("rope_theta", "init_std", "scaled_residuals", "dropout", "multi_token"),
    }
)

RULED_LAYERS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("all-linear", "attention"),
    }
)

BUILDER = "ttrain.model.shape_check"  # the module that builds a model of fake tensors


@dataclass(frozen=True)
class ShapeChecks:
    """Checks of models before any is made, each in a process that loads torch. `memory`: directory of earlier answers.

    All raise UsageError, which names a setting.
    """

    cache: DigestCache
    memory: Path

    def new_model(self, model: Model) -> None:
        """Refuse sizes that no model can have."""
        check_kind(model.kind)
        if not has_all_rules(model):
            self._ask({"model": model.model_dump(mode="json")})

    def adapter(self, section: str, adapter: Lora, model: Model) -> None:
        """Refuse targets that the new model does not have. `section`: of the adapter's settings."""
        fits_all = adapter.targets == ("all-linear",) and adapter.kind == "lora" and not adapter.dropout
        is_ruled = has_all_rules(model) and RULED_LAYERS.issuperset(adapter.targets)
        if not (fits_all or is_ruled or adapter.kind == "prefix"):
            settings = {"model": model.model_dump(mode="json"), "adapter": adapter.model_dump(mode="json")}
            self._ask({**settings, "section": section})

    def _ask(self, request: JsonObject) -> None:
        libraries = {name: version for name, version in versions().items() if name in LIBRARIES}
        code = code_digests(BUILDER, self.cache)
        record = self.memory / digest_of({"request": request, "code": code, "libraries": libraries})
        problem = record.read_text(encoding="utf-8") if record.exists() else _build_elsewhere(request)
        if problem is None:
            return  # unknown; the stage itself will report it
        record.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(record, problem.encode("utf-8"))
        if problem:
            raise UsageError(problem)


def has_all_rules(model: Model) -> bool:
    """Whether the rules of the settings are complete for this model."""
    changed = {name for name in Model.model_fields if getattr(model, name) != Model.model_fields[name].default}
    return model.kind in RULED_KINDS and changed - {"preset"} <= RULED_SETTINGS


def _build_elsewhere(request: JsonObject) -> str | None:
    """Problem of the model, "" for none; None if the process ended without an answer."""
    command = [sys.executable, "-P", "-m", BUILDER]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    return None if done.returncode else str(json.loads(done.stdout.splitlines()[-1]))


def register_own() -> None:
    """Register our architectures with transformers, so that no code beside weights is ever executed here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ttrain.model.modeling_moyun import MoyunConfig, MoyunForCausalLM
    from ttrain.model.modeling_tinyseek import TinySeekConfig, TinySeekForCausalLM

    for config, model in ((MoyunConfig, MoyunForCausalLM), (TinySeekConfig, TinySeekForCausalLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


def own_files(config: PretrainedConfig) -> dict[str, bytes]:
    """Source files with which a directory of this config opens without ttrain; {} for transformers' own architectures.

    Its `auto_map` is in the config already. Elsewhere `from_pretrained` asks for `trust_remote_code=True`.
    """
    if config.model_type not in OWN_KINDS:
        return {}
    paths = (Path(__file__).with_name(f"modeling_{name}.py") for name in (config.model_type, "shared"))
    return {path.name: path.read_bytes() for path in paths}
