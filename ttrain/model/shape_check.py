"""Checks whether a model's sizes fit each other, and an adapter's targets the model, by a forward pass with fake tensors.

Run as a module: reads a request of `registry.ShapeChecks` as JSON, prints the problem as a JSON string, "" for none.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ttrain.config import Lora, Model
from ttrain.errors import UsageError
from ttrain.model import adapters, factory

if TYPE_CHECKING:
    pass

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
    return f"model.kind is {model.kind}, which cannot compute in these sizes: {text}; set others"


def _error_of_sizes(model: Model) -> str:
    """Error about sizes when the model is built and reads a row, else ""; raises UsageError if it cannot be built."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = factory.construct(model, vocab_size=VOCABULARY, ids=IDS)
        try:
            network(input_ids=torch.zeros(1, ROW, dtype=torch.long))
        except Exception as error:
            text = " ".join(str(error).split())
            return text if OF_SIZES.search(text) else ""
    return ""


def problem_of_adapter(section: str, adapter: Lora, model: Model) -> str:
    """Why the new model cannot have this adapter; "" if it can, or if there is no such model."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            network = factory.construct(model, vocab_size=VOCABULARY, ids=IDS)
        except UsageError:
            return ""  # which another check reports
        try:
            adapters.check(network, adapter)
        except UsageError as error:
            return str(error).replace("lora.", f"{section}.")
    return ""


def main() -> None:
    """Check what the request on standard input describes."""
    request = json.loads(sys.stdin.read())
    model = Model.model_validate(request["model"])
    if "adapter" in request:
        problem = problem_of_adapter(request["section"], Lora.model_validate(request["adapter"]), model)
    else:
        problem = problem_of(model)
    print(json.dumps(problem))


if __name__ == "__main__":
    main()
