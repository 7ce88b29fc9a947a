"""Compiling the layers of a model, each for itself and for training passes alone."""
# Layers of one kind share their code: on an H200 the first steps of 124 M parameters in 14 layers
# take 8 s (35 for the model as a whole), and a pass 136 ms instead of 137.

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ttrain.core.text import first_line
from ttrain.errors import UsageError
from ttrain.train.distributed import Ranks

# Of what all layers compute, such as the rows of the last micro-batch and the number of records,
# and those that tuning tries. After so many, by default 8, torch warns and computes without
# compiling.
MOST_SHAPES = 64

log = logging.getLogger("ttrain")


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers that transformers keeps whole (`_no_split_modules`)."""
    names = {
        name
        for submodule in module.modules()
        for name in getattr(submodule, "_no_split_modules", None) or ()
    }
    return [submodule for submodule in module.modules() if type(submodule).__name__ in names]


class CompiledLayers:
    """The layers of a module, or the module if it has none, compiled in place."""

    def __init__(self, module: nn.Module | None) -> None:
        """None: nothing is compiled."""
        self._calls: dict[nn.Module, Any] = {}
        if module is None:
            return
        torch._dynamo.config.recompile_limit = MOST_SHAPES
        self._module = module
        for layer in layers_of(module) or [module]:
            layer.compile(dynamic=False)
            self._calls[layer] = layer._compiled_call_impl
            layer._compiled_call_impl = None

    @property
    def any(self) -> bool:
        """Whether anything is compiled."""
        return bool(self._calls)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the compiled passes inside the context."""
        for layer, call in self._calls.items():
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer in self._calls:
                layer._compiled_call_impl = None

    def keep(self, attempt: Callable[[], None], ranks: Ranks, *, sharded: bool) -> None:
        """Try a forward and backward pass; if any rank fails, no layer is compiled from now on.

        Clears gradients and restores buffers. Raises UsageError if a sharded pass ends all the
        same.
        """
        # A layer that cannot be compiled computes without, since a sharded pass that ends within
        # one leaves the hooks that gather it in the middle, and gradients become wrong.
        failures: list[Exception] = []
        calls = dict(self._calls)
        self._calls = {
            layer: partial(_call_or_fall_back, layer, call, failures)
            for layer, call in calls.items()
        }
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        ended: Exception | None = None
        try:
            with self.used():
                attempt()
        except Exception as error:
            ended = error
        self._module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        any_ended, any_failed = ranks.sum([float(ended is not None), float(bool(failures))])
        if any_ended and sharded:
            raise UsageError(
                "runtime.compile is on, but the first pass of the sharded model ended "
                f"({_described(ended)}); set runtime.compile=false"
            )
        if any_ended or any_failed:
            log.warning(
                "torch.compile failed (%s); training continues without it",
                _described(ended or next(iter(failures), None)),
            )
            torch._dynamo.reset()
        self._calls = {} if any_ended or any_failed else calls


def _call_or_fall_back(
    layer: nn.Module,
    call: Callable[..., Any],
    failures: list[Exception],
    *arguments: Any,
    **options: Any,
) -> Any:
    try:
        return call(*arguments, **options)
    except Exception as error:
        failures.append(error)
        return layer._call_impl(*arguments, **options)  # type: ignore[no-untyped-call]  # torch's


def _described(failure: Exception | None) -> str:
    return f"{type(failure).__name__}: {first_line(failure)}" if failure else "on another rank"
