"""ttrain: raw JSONL to an evaluated, registered language model, with one command.

    import ttrain
    settings = ttrain.load_settings(overrides={"data.pretrain": "docs.jsonl"})
    print(ttrain.plan("full", settings))
    run = ttrain.run("full", settings)

`ttrain.api` describes the functions; it is imported when one is first used.
"""

from typing import TYPE_CHECKING, Any

from ttrain.core.machine import VERSION as __version__
from ttrain.errors import TTrainError

if TYPE_CHECKING:
    from ttrain.api import load, load_settings, plan, run, runs

__all__ = ["TTrainError", "__version__", "load", "load_settings", "plan", "run", "runs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ttrain' has no attribute '{name}'")
    from ttrain import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
