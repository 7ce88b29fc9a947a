"""Checks whether a model's sizes fit each other, and an adapter's targets the model, by a forward pass with fake tensors.

Run as a module: reads a request of `registry.ShapeChecks` as JSON, prints the problem as a JSON string, "" for none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode

from ttrain.config import Lora, Model
from ttrain.core.files import JsonObject, parse_json
from ttrain.core.text import first_of
from ttrain.errors import UsageError
from ttrain.model import adapters, factory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHOWN = 3  # tensors of another shape
VOCABULARY, ROW = 256, 8  # tokens; no architecture's rules depend on them
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# Fake tensors cannot do all that real ones can, so only errors about sizes count.
OF_SIZES = re.compile(
    r"broadcast|size of tensor|sizes? of tensors|shapes cannot be multiplied|shape '|must match|reduction dim"
)


def problem_of(model: Model) -> str:
    """Why no model can have these sizes; "" if one can."""
    try:
        text = _error_of_sizes(model)
    except UsageError as error:
        return str(error)
    if not text:
        return ""
    return f"model.kind is {model.kind}, which cannot compute in these sizes: {text}{_advice(model)}"


def _error_of_sizes(model: Model) -> str:
    """Error about sizes when the model is built and reads a row, else ""; raises UsageError if it cannot be built."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _error_of_a_row(factory.construct(model, vocab_size=VOCABULARY, ids=IDS))


def _error_of_a_row(network: PreTrainedModel) -> str:
    try:
        network(input_ids=torch.zeros(1, ROW, dtype=torch.long))
    except Exception as error:
        text = " ".join(str(error).split())
        return text if OF_SIZES.search(text) else ""
    return ""


def problem_of_existing(start: str, config: JsonObject, shapes: Mapping[str, list[int]]) -> str:
    """Why no model can have this config, or these weights, each with its shape; "" if one can."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            network = factory.construct_existing(config)
        except UsageError as error:
            return f"{start}, whose config.json contradicts itself: {error}; correct it"
        wanted = {name: [*tensor.shape] for name, tensor in network.state_dict().items()}
        text = _error_of_a_row(network)
    wrong = [
        f"{name} is {shape} in the weights but {wanted[name]} in the config"
        for name, shape in shapes.items()
        if name in wanted and shape != wanted[name]
    ]
    if wrong:
        return f"{start}, whose config.json does not fit its weights: {first_of(wrong, SHOWN, '; ')}; correct it"
    return f"{start}, whose config.json contradicts itself: {text}; correct it" if text else ""


def problem_of_adapter(section: str, adapter: Lora, model: Model | None, config: JsonObject) -> str:
    """Why the new or existing model cannot have this adapter; "" if it can, or if there is no such model."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            if model is None:
                network = factory.construct_existing(config)
            else:
                network = factory.construct(model, vocab_size=VOCABULARY, ids=IDS)
        except UsageError:
            return ""  # which another check reports
        try:
            adapters.check(network, adapter)
        except UsageError as error:
            return str(error).replace("lora.", f"{section}.")
    return ""


def _advice(model: Model) -> str:
    """Hint with other sizes that were tested and work; "" if none of the usual ones do."""
    candidates: list[dict[str, int | None]] = [{"hidden_size": model.next_hidden_size()}, {"kv_heads": None}]
    for sizes in candidates:
        try:
            candidate = Model.model_validate({**model.model_dump(), **sizes})
            if candidate != model and not _error_of_sizes(candidate):
                return f"; {model.with_other_sizes(sizes)}"
        except (UsageError, ValidationError):
            continue
    return ""


def main() -> None:
    """Check what the request on standard input describes."""
    request = parse_json(sys.stdin.read())
    model = Model.model_validate(request["model"]) if "model" in request else None
    if "adapter" in request:
        adapter = Lora.model_validate(request["adapter"])
        problem = problem_of_adapter(request["section"], adapter, model, request.get("config", {}))
    elif model is not None:
        problem = problem_of(model)
    else:
        problem = problem_of_existing(request["start"], request["config"], request["shapes"])
    print(json.dumps(problem))


if __name__ == "__main__":
    main()
