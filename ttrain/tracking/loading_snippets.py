"""What makes a registered model's directory one that MLflow itself opens: `mlflow.transformers.load_model("models:/...")`.

A file `MLmodel` (https://mlflow.org/docs/latest/ml/model) goes beside the weights and names them where they are, so there
is no second copy. MLflow wants the tokenizer in a directory of its own, and an adapter's base below it: the first is small,
the second is given only where it costs nothing, as second names of the same files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import yaml

from ttrain.core.files import read_object
from ttrain.store.layout import Artifact
from ttrain.tracking.atomic_files import local_path
from ttrain.tracking.null_tracker import NullRun
from ttrain.tracking.runs import Run

CARD: Final = "README.md"
LOADS: Final = "ttrain.loads"  # tag of a version: what it opens with, where MLflow can open it
MODEL, ADAPTER, BASE = "model", "adapter", "base"  # directories: of an artifact's model and adapter, of an adapter's base
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COMPONENTS: Final = "components/tokenizer"  # where MLflow looks for it
TASK: Final = "text-generation"
EXAMPLE, SERVED_EXAMPLE = "input_example.json", "serving_input_example.json"
TEXT_IN_AND_OUT: Final = json.dumps([{"type": "string", "required": True}])
# Only these are needed to open a model; an environment that MLflow makes for it has no others.
NEEDED: Final = ("torch", "transformers", "tokenizers", "safetensors", "peft")


@dataclass(frozen=True)
class Loadable:
    """What goes into the directory of a model beside what the artifact has: new texts, and files that are elsewhere."""

    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether MLflow can open it; an adapter without its base it cannot."""
        return "MLmodel" in self.texts

    @property
    def tags(self) -> dict[str, str]:
        """What a version's tags say of it."""
        return {LOADS: "mlflow.transformers"} if self.is_whole else {}


def describe(artifact: Artifact, directory: str, *, base: Path | None, card: str, examples: Sequence[str]) -> Loadable:
    """For an artifact's model or adapter, which lies in its `directory`.

    `base` is the model below an adapter, where that may go along; `examples` are texts that one may give to the model.
    """
    place = artifact.path / directory
    texts = {CARD: card} if card else {}
    is_adapter = directory == ADAPTER
    if directory not in (MODEL, ADAPTER) or (is_adapter and base is None):
        return Loadable(texts)
    files = {f"{COMPONENTS}/{name}": place / name for name in TOKENIZER if (place / name).is_file()}
    if base is not None:
        files |= {f"{BASE}/{path.name}": path for path in sorted(base.iterdir()) if path.is_file()}
    flavor = _flavor(base if is_adapter and base else place, is_adapter=is_adapter)
    texts["MLmodel"] = yaml.safe_dump(_description(artifact, flavor), sort_keys=False, allow_unicode=True)
    texts["requirements.txt"] = "".join(f"{line}\n" for line in _requirements(artifact))
    texts["python_env.yaml"] = yaml.safe_dump(
        {"python": _python(artifact), "dependencies": ["-r requirements.txt"]}, sort_keys=False
    )
    texts[EXAMPLE] = json.dumps(list(examples), ensure_ascii=False)
    texts[SERVED_EXAMPLE] = json.dumps({"inputs": list(examples)}, ensure_ascii=False)
    return Loadable(texts, files)


def shares_disk(run: Run | NullRun, base: Path) -> bool:
    """Whether the run's artifacts are on the same disk as a base model, so that its weights get second names there."""
    root = local_path(run.artifact_uri) if run.artifact_uri else None
    if root is None:
        return False
    while not root.exists() and root != root.parent:
        root = root.parent
    try:
        return root.stat().st_dev == base.stat().st_dev
    except OSError:
        return False


def _flavor(model: Path, *, is_adapter: bool) -> dict[str, Any]:
    """What MLflow's flavor `transformers` reads (mlflow/transformers/flavor_config.py).

    A shape of ttrain's own is named by its class, which MLflow then takes from the files in the directory.
    """
    config = read_object(model / "config.json")
    own_code = bool(config.get("auto_map"))
    return {
        "task": TASK,
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": config["architectures"][0] if own_code else "AutoModelForCausalLM",
        "source_model_name": "ttrain",
        "model_binary": BASE if is_adapter else ".",
        **({"peft_adaptor": "."} if is_adapter else {}),
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
    }


def _description(artifact: Artifact, flavor: Mapping[str, Any]) -> dict[str, Any]:
    made = datetime.fromtimestamp(artifact.manifest["published"], UTC)
    return {
        "flavors": {
            "transformers": dict(flavor),
            "python_function": {
                "loader_module": "mlflow.transformers",
                "python_version": _python(artifact),
                "env": {"virtualenv": "python_env.yaml"},
            },
        },
        "mlflow_version": metadata.version("mlflow"),
        "model_uuid": artifact.content[:32],
        "utc_time_created": f"{made:%Y-%m-%d %H:%M:%S.%f}",
        "signature": {"inputs": TEXT_IN_AND_OUT, "outputs": TEXT_IN_AND_OUT, "params": None},
        "saved_input_example_info": {
            "artifact_path": EXAMPLE,
            "serving_input_path": SERVED_EXAMPLE,
            "type": "json_object",
        },
        "metadata": {"ttrain.stage": artifact.stage, "ttrain.key": artifact.key, "ttrain.content": artifact.content},
    }


def _python(artifact: Artifact) -> str:
    return str(artifact.manifest.get("provenance", {}).get("python") or "3.11")


def _requirements(artifact: Artifact) -> list[str]:
    """With the versions that made it, without the letters of a local build ("+cpu")."""
    made_with = artifact.manifest.get("provenance", {}).get("libraries", {})
    pinned = [f"{name}=={made_with[name].partition('+')[0]}" for name in NEEDED if name in made_with]
    return [f"mlflow=={metadata.version('mlflow')}", *pinned]
