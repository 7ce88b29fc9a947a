"""Descriptions of registered models and their versions, as MLflow's pages show them. A user's own text stays.

A description by ttrain ends with its digest in a comment that the pages hide: this distinguishes it from an edited
one, with a single write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from ttrain.core.files import JsonDict, JsonObject, read_object
from ttrain.core.hashing import digest_of
from ttrain.store.layout import Artifact
from ttrain.tracking.calls import plain
from ttrain.tracking.runs import AnyRun
from ttrain.tracking.uploads import local_path

HERE = "<NAME/VERSION>"  # in a text: the version that it describes

CHARACTERS = 5000  # that MLflow's database holds

DECISION = "\n\n## Decision\n\n"

MARK = re.compile(r"\n\n<!-- ttrain ([0-9a-f]{12}) -->\Z")

MARK_CHARACTERS = 30


def marked(text: str) -> str:
    """A description by ttrain, cut to MLflow's limit, with its digest."""
    text = plain(text)[: CHARACTERS - MARK_CHARACTERS]
    return f"{text}\n\n<!-- ttrain {digest_of(text)[:12]} -->"


def is_ours(description: str | None) -> bool:
    """Whether the description is empty or as ttrain wrote it."""
    match = MARK.search(description or "")
    return not description or (match is not None and marked(description[: match.start()]) == description)


def set_description(client: Any, version: Any, text: str) -> None:
    """Set the description of a version, above the decision about it; one that a user wrote stays as it is."""
    old_text = version.description or ""
    if text and is_ours(old_text):
        _, heading, decision = MARK.sub("", old_text).partition(DECISION)
        new_text = marked(text.replace(HERE, f"{version.name}/{version.version}") + heading + decision)
        if new_text != old_text:
            client.update_model_version(version.name, str(version.version), new_text)


def add_decision(client: Any, version: Any, table: str) -> None:
    """Put a decision below the description of a version, replacing an earlier one."""
    old_text = version.description or ""
    new_text = MARK.sub("", old_text).partition(DECISION)[0] + DECISION + table
    client.update_model_version(
        version.name, str(version.version), marked(new_text) if is_ours(old_text) else new_text[:CHARACTERS]
    )


CARD = "README.md"

LOADS = "ttrain.loads"  # tag of a version: the flavor that loads it, if MLflow can

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

    @property
    def tags(self) -> dict[str, str]:
        """Tags for the model version."""
        return {LOADS: "mlflow.transformers"} if self.is_whole else {}


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


def shares_disk(run: AnyRun, base: Path) -> bool:
    """Whether the run's artifacts are on the same disk as a base model, so that its weights can be hard links there."""
    root = local_path(run.artifact_uri) if run.artifact_uri else None
    if root is None:
        return False
    while not root.exists() and root != root.parent:
        root = root.parent
    try:
        return root.stat().st_dev == base.stat().st_dev
    except OSError:
        return False


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
