"""Which architectures there are, by name. Light, so that a wrong name is told before anything is built."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from pathlib import Path

from ttrain.errors import UsageError
from ttrain.model import own_architectures

# transformers' table of causal architectures. Importing that module takes seconds, reading it 26 ms.
MODULE, TABLE = Path("models", "auto", "modeling_auto.py"), "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check(kind: str) -> None:
    """Raise UsageError, with the nearest names, where there is no such `model.kind`."""
    if kind not in names():
        near = difflib.get_close_matches(kind, sorted(names()), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `ttrain model show --kinds` lists them all"
        raise UsageError(f"model.kind is '{kind}', which is no causal architecture of transformers{hint}")


@functools.cache
def names() -> frozenset[str]:
    """What has a causal head in transformers, and ours; some of them have more than can be trained here."""
    try:
        found = _read()
    except (OSError, SyntaxError, LookupError, ValueError, AttributeError, TypeError):  # it is written otherwise now
        from transformers.models.auto import modeling_auto

        found = frozenset(getattr(modeling_auto, TABLE))
    return found | frozenset(own_architectures.KINDS)


def _read() -> frozenset[str]:
    """The table as it stands in the file: TABLE = OrderedDict([("name", ...), ...])."""
    spec = importlib.util.find_spec("transformers")
    locations = (spec and spec.submodule_search_locations) or []
    tree = ast.parse((Path(locations[0]) / MODULE).read_text(encoding="utf-8"))
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    call = values[TABLE]
    if not isinstance(call, ast.Call):
        raise ValueError(f"{TABLE} is no OrderedDict")
    return frozenset(dict(ast.literal_eval(call.args[0])))
