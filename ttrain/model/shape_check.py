"""Builds a model without its numbers, and lets it learn a row of them, to see whether its sizes fit each other.

Run as a module: settings of a model as JSON come in, what is wrong with them goes out as a JSON string, "" for nothing.
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

VOCABULARY, ROW = 256, 8  # tokens; no rule of an architecture depends on them
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# Tensors without numbers cannot do all that real ones can, so that only what is said of sizes counts.
OF_SIZES = re.compile(
    r"broadcast|size of tensor|sizes? of tensors|shapes cannot be multiplied|shape '|must match|reduction dim"
)


def problem_of(model: Model) -> str:
    """Why no model has these sizes; "" where one has."""
    try:
        text = _error_of_sizes(model)
    except UsageError as error:
        return str(error)
    if not text:
        return ""
    return f"model.kind is {model.kind}, which cannot compute in these sizes: {text}{_advice(model)}"


def _error_of_sizes(model: Model) -> str:
    """What is said of the sizes where the model is built and reads a row; raises UsageError where it is not built."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = factory.construct(model, vocab_size=VOCABULARY, ids=IDS)
        try:
            network(input_ids=torch.zeros(1, ROW, dtype=torch.long))
        except Exception as error:
            text = " ".join(str(error).split())
            return text if OF_SIZES.search(text) else ""
    return ""


def _advice(model: Model) -> str:
    """Sizes that were tried, and can compute; "" where none of those that suit most kinds can."""
    width = {"hidden_size": model.next_hidden_size()}
    all_heads: dict[str, int | None] = {"kv_heads": None}
    for sizes in ({**width}, all_heads, {**width, **all_heads}):
        try:
            other = Model.model_validate({**model.model_dump(), **sizes})
            if other != model and not _error_of_sizes(other):
                return f"; {model.with_other_sizes(sizes)}"
        except (UsageError, ValidationError):
            continue
    return ""


def main() -> None:
    """Answer for the model on standard input."""
    print(json.dumps(problem_of(Model.model_validate_json(sys.stdin.read()))))


if __name__ == "__main__":
    main()
