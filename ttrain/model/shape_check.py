"""Checks whether a model's sizes fit each other, by a forward pass with fake tensors.

Run as a module: reads a model's settings as JSON, prints the problem as a JSON string, "" for none.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode

from ttrain.config import Model
from ttrain.errors import UsageError
from ttrain.model import factory

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
        network = factory.construct(model, vocab_size=VOCABULARY, ids=IDS)
        try:
            network(input_ids=torch.zeros(1, ROW, dtype=torch.long))
        except Exception as error:
            text = " ".join(str(error).split())
            return text if OF_SIZES.search(text) else ""
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
    """Check the model on standard input."""
    print(json.dumps(problem_of(Model.model_validate_json(sys.stdin.read()))))


if __name__ == "__main__":
    main()
