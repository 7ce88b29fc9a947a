"""What lets `mlflow.transformers` open a model: an `MLmodel` beside its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import yaml

from ttrain.core.files import read_object
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

MODEL, ADAPTER, BASE = "model", "adapter", "base"  # directories: of a model, an adapter, its base
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEXT = json.dumps([{"type": "string", "required": True}])


def loadable(artifact: Artifact, directory: str, store: ArtifactStore) -> tuple[Mapping[str, str], Mapping[str, Path]]:
    """(texts, files) to add to an artifact's model or adapter in its `directory`.

    An adapter gets the files of its base; without them MLflow cannot open it, and gets nothing.
    """
    place = whole = artifact.path / directory
    is_adapter, files = directory == ADAPTER, dict[str, Path]()
    if is_adapter:
        below = artifact.manifest["inputs"].get("base", {})
        whole = store.path(below.get("stage", ""), below.get("key", "")) / MODEL
        files = {f"{BASE}/{path.name}": path for path in whole.glob("*") if path.is_file()}
    config = read_object(whole / "config.json")
    if not config:
        return {}, {}
    components = (place / name for name in TOKENIZER)
    files |= {f"components/tokenizer/{path.name}": path for path in components if path.is_file()}
    flavor = {  # as mlflow/transformers/flavor_config.py names them
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        # an architecture of ttrain's own is loaded from the Python files in the directory
        "pipeline_model_type": config["architectures"][0] if config.get("auto_map") else "AutoModelForCausalLM",
        "source_model_name": "ttrain",
        "model_binary": BASE if is_adapter else ".",
        **({"peft_adaptor": "."} if is_adapter else {}),
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
    }
    described = {
        "flavors": {"transformers": flavor},
        "mlflow_version": metadata.version("mlflow"),
        "model_uuid": artifact.content[:32],
        "utc_time_created": str(datetime.fromtimestamp(artifact.manifest["published"], UTC).replace(tzinfo=None)),
        "signature": {"inputs": TEXT, "outputs": TEXT, "params": None},
        "metadata": {"ttrain.stage": artifact.stage, "ttrain.key": artifact.key},
    }
    return {"MLmodel": yaml.safe_dump(described, sort_keys=False)}, files
