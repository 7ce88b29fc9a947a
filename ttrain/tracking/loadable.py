"""The files that let MLflow open a model: `MLmodel` with its flavor and signature, requirements, examples, card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import yaml

from ttrain.core.files import JsonDict, JsonObject, read_object
from ttrain.store.layout import Artifact

CARD = "README.md"

MODEL, ADAPTER, BASE = "model", "adapter", "base"  # directories: of an artifact's model and adapter, of an adapter's base

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

COMPONENTS = "components/tokenizer"  # where MLflow looks for it

TASK = "text-generation"

EXAMPLE, SERVED_EXAMPLE = "input_example.json", "serving_input_example.json"

TEXT_IN_AND_OUT = json.dumps([{"type": "string", "required": True}])
# Only these are needed to open a model; an environment that MLflow makes for it has no others.
REQUIRED_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "peft")


@dataclass(frozen=True)
class LoadableModel:
    """Extra files for a model's directory: generated texts, and files from elsewhere."""

    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether MLflow can load it; it cannot load an adapter without its base."""
        return "MLmodel" in self.texts


def loadable(artifact: Artifact, directory: str, *, base: Path | None, card: str, examples: Sequence[str]) -> LoadableModel:
    """Extra files for an artifact's model or adapter in its `directory`.

    `base` is an adapter's base model, if it is to be included; `examples` are sample inputs for the model.
    """
    model_directory = artifact.path / directory
    texts = {CARD: card} if card else {}
    is_adapter = directory == ADAPTER
    if directory not in (MODEL, ADAPTER) or (is_adapter and base is None):
        return LoadableModel(texts)
    files = {f"{COMPONENTS}/{name}": model_directory / name for name in TOKENIZER if (model_directory / name).is_file()}
    if base is not None:
        files |= {f"{BASE}/{path.name}": path for path in sorted(base.iterdir()) if path.is_file()}
    flavor = _flavor(base if is_adapter and base else model_directory, is_adapter=is_adapter)
    texts["MLmodel"] = yaml.safe_dump(_description(artifact, flavor), sort_keys=False, allow_unicode=True)
    texts["requirements.txt"] = "".join(f"{line}\n" for line in _requirements(artifact))
    texts["python_env.yaml"] = yaml.safe_dump(
        {"python": _python(artifact), "dependencies": ["-r requirements.txt"]}, sort_keys=False
    )
    texts[EXAMPLE] = json.dumps(list(examples), ensure_ascii=False)
    texts[SERVED_EXAMPLE] = json.dumps({"inputs": list(examples)}, ensure_ascii=False)
    return LoadableModel(texts, files)


def _flavor(model: Path, *, is_adapter: bool) -> JsonDict:
    """What MLflow's flavor `transformers` reads (mlflow/transformers/flavor_config.py).

    An architecture of ttrain's own is named by its class, which MLflow then loads from the files in the directory.
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


def _description(artifact: Artifact, flavor: JsonObject) -> JsonDict:
    created = datetime.fromtimestamp(artifact.manifest["published"], UTC)
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
        "utc_time_created": f"{created:%Y-%m-%d %H:%M:%S.%f}",
        "signature": {"inputs": TEXT_IN_AND_OUT, "outputs": TEXT_IN_AND_OUT, "params": None},
        "saved_input_example_info": {
            "artifact_path": EXAMPLE,
            "serving_input_path": SERVED_EXAMPLE,
            "type": "json_object",
        },
        "metadata": {"ttrain.stage": artifact.stage, "ttrain.key": artifact.key, "ttrain.content": artifact.content},
    }


def _python(artifact: Artifact) -> str:
    return str(artifact.provenance.get("python") or "3.11")


def _requirements(artifact: Artifact) -> list[str]:
    """Required libraries with the versions that made the artifact, without local build suffixes ("+cpu")."""
    made_with = artifact.provenance.get("libraries", {})
    pinned = [f"{name}=={made_with[name].partition('+')[0]}" for name in REQUIRED_LIBRARIES if name in made_with]
    return [f"mlflow=={metadata.version('mlflow')}", *pinned]
