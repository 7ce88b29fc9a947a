"""The native kernels of `native.c`: layers of a training step in bf16, on CPUs that multiply it.

Letters in names: B rows, T positions, H heads, G heads of keys and values, K width of a head, D width of a token, C
positions of a chunk, V entries of the vocabulary, E matrices [A, B].
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_long, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

VERSION = 2  # as in native.c
LANES = 16  # numbers of a register: widths are multiples of it
NORM_ROWS = 64  # as in native.c
MOST_NUMBERS = 1 << 16  # of a matrix that is made orthogonal: 13 bytes each in the cache of a core, of 1 MB or more


class _States(ctypes.Structure):
    _fields_ = [("states", c_void_p), ("weight", c_void_p), ("epsilon", c_float), ("heads", c_long)]


class _Records(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin", "starts", "lengths")),
        *((name, c_long) for name in ("records", "longest", "K")), ("scale", c_float), ("threads", c_int),
    ]  # fmt: skip


ARGUMENTS: dict[str, list[Any]] = {
    "score": [c_void_p, c_void_p, c_long, c_long, c_int, c_float, c_void_p, c_int],
    "gated": [*[c_void_p] * 3, c_long, c_int],
    "gated_slopes": [*[c_void_p] * 6, c_long, c_int],
    "norm": [c_void_p, c_void_p, c_float, c_void_p, c_int, c_void_p, c_long, c_long, c_int],
    "norm_slopes": [*[c_void_p] * 6, c_long, c_long, c_int],
    "orthogonal": [c_void_p, c_void_p, c_long, c_long, c_long, c_float, c_float, c_float, c_int, c_float, c_int],
    "attention": [c_void_p] * 7,
    "attention_slopes": [c_void_p] * 12,
}


RETURNING = ("score", "orthogonal", "attention", "attention_slopes")  # whether there was memory for them

NO_MEMORY = -1


def suits_machine() -> bool:
    """Whether the CPU has their instructions. Without the compiled file only Linux says so."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "avx512_bf16" in flags.read_text().split()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where installation found no compiler, or compiled another version, and on a CPU
    without AVX512-BF16."""
    files = [Path(__file__).with_name(f"_native{suffix}") for suffix in EXTENSION_SUFFIXES]
    packages = Path(torch.__file__).parents[1]
    try:
        # Before the system's OpenMP, which is another one beside torch's where that has a name of its own.
        for path in (*packages.glob("torch/lib/libgomp*"), *packages.glob("torch.libs/libgomp*")):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(next(path for path in files if path.exists())))
        version = loaded.native_version()
    except (OSError, StopIteration, AttributeError):
        return None
    if version != VERSION:
        return None
    for name, types in ARGUMENTS.items():
        function = getattr(loaded, f"native_{name}")
        function.argtypes, function.restype = types, c_long if name in RETURNING else None
    return loaded


def takes(*tensors: Tensor, dtype: torch.dtype = torch.bfloat16, lanes: int = LANES) -> bool:
    """Whether the kernels take these tensors: plain, contiguous, of this type and a width of whole registers, on a CPU that
    has them."""
    return library() is not None and all(
        type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == dtype and tensor.device.type == "cpu"
        and tensor.is_contiguous() and tensor.shape[-1] % lanes == 0
        for tensor in tensors
    )  # fmt: skip


def _call(name: str, *arguments: Any) -> Any:
    function = getattr(library(), f"native_{name}")
    result = function(*(argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments))
    if result == NO_MEMORY:
        raise MemoryError(f"not enough memory for what {name} needs besides its tensors")
    return result


def score(logits_CV: Tensor, labels_C: Tensor, scale: float | None) -> Tensor:
    """Cross entropies in nats, [C]; with a scale the logits become scale times their gradients."""
    losses_C = torch.empty(len(logits_CV), dtype=torch.float32, device="cpu")
    labels_C = labels_C.to(torch.int64).contiguous()
    shape = len(logits_CV), logits_CV.shape[1]
    bad = _call("score", logits_CV, labels_C, *shape, scale is not None, scale or 0.0, losses_C, torch.get_num_threads())
    if bad:
        raise IndexError(f"label {labels_C[bad - 1]} is out of bounds for a vocabulary of {logits_CV.shape[1]} entries")
    return losses_C


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up"""
    out = torch.empty_like(gate)
    _call("gated", gate, up, out, out.numel(), torch.get_num_threads())
    return out


def gated_slopes(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) up, and the gradients of gate and up from that of it."""
    outs = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    _call("gated_slopes", grad, gate, up, *outs, gate.numel(), torch.get_num_threads())
    return outs


def norm(x: Tensor, weight: Tensor, epsilon: float, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight x scale in bf16, and the scale, which is 1 / rms(x) unless it is given."""
    out, D = torch.empty_like(x, dtype=torch.bfloat16), x.shape[-1]
    scales = x.new_empty(*x.shape[:-1], 1) if scale is None else scale
    _call("norm", x, weight, epsilon, scales, scale is not None, out, x.numel() // D, D, torch.get_num_threads())
    return out, scales


def norm_slopes(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight of `norm`."""
    of_x, D = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // D
    of_weight = x.new_empty(-(-rows // NORM_ROWS), D)
    _call("norm_slopes", grad, x, weight, scale, of_x, of_weight, rows, D, torch.get_num_threads())
    return of_x, of_weight.sum(0)


def takes_matrices(matrices_EAB: Tensor) -> bool:
    """Whether `orthogonal` takes them: of a size that a core works on in its own cache."""
    A, B = matrices_EAB.shape[1:]
    return A % LANES == 0 and A * B <= MOST_NUMBERS and takes(matrices_EAB, dtype=torch.float32)


def orthogonal(matrices_EAB: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float) -> Tensor:
    """Newton-Schulz steps of each matrix, in bf16, in one core for each; see `optim.orthogonal`."""
    out = torch.empty_like(matrices_EAB)
    _call("orthogonal", matrices_EAB, out, *matrices_EAB.shape, *coefficients, steps, epsilon, torch.get_num_threads())
    return out


class Attention(torch.autograd.Function):
    """Causal attention within records, of queries and keys after their norms and the rotation of their positions, if they
    have such.

    Of scores no more than a block is in memory; weights and rotated states are computed again for the gradients
    (arXiv:2205.14135).
    """

    @staticmethod
    def forward(
        ctx: Any, query_BTHK: Tensor, key_BTGK: Tensor, value_BTGK: Tensor, query_weight: Tensor | None,
        query_epsilon: float, key_weight: Tensor | None, key_epsilon: float, angles: tuple[Tensor, Tensor] | None,
        places: tuple[Tensor, Tensor], scale: float,
    ) -> Tensor:  # fmt: skip
        """`places`: the starts of the records and their lengths, longest first. `angles`: cosines and sines, [B, T, K]."""
        out = torch.empty_like(query_BTHK)
        tops, logs = (query_BTHK.new_empty(query_BTHK.shape[:3], dtype=torch.float32) for _ in range(2))
        tensors = query_BTHK, key_BTGK, value_BTGK, query_weight, key_weight, out, tops, logs
        ctx.save_for_backward(*tensors)
        ctx.others = query_epsilon, key_epsilon, angles, places, scale
        states, records = _arguments(tensors, ctx.others)
        _call("attention", *map(ctypes.byref, states), ctypes.byref(records), out, tops, logs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: each access unpacks them again
        query, key, value, query_weight, key_weight, out, tops, logs = tensors
        states, records = _arguments(tensors, ctx.others)
        slopes = [torch.empty_like(tensor) for tensor in (query, key, value)]
        of_weights = query.new_empty((records.records * key.shape[2], 2, key.shape[3]), dtype=torch.float32)
        grad = grad_BTHK.to(out.dtype).contiguous()
        arguments = out, tops, logs, grad, *slopes, of_weights
        _call("attention_slopes", *map(ctypes.byref, states), ctypes.byref(records), *arguments)
        of_query_weight, of_key_weight = of_weights.sum(0)
        return (
            *slopes, None if query_weight is None else of_query_weight, None, None if key_weight is None else of_key_weight,
            None, None, None, None,
        )  # fmt: skip


def _arguments(tensors: Any, others: Any) -> tuple[list[_States], _Records]:
    query, key, value, query_weight, key_weight, *_ = tensors
    query_epsilon, key_epsilon, angles, (starts, lengths), scale = others
    norms = (query_weight, query_epsilon), (key_weight, key_epsilon), (None, 0.0)
    states = [
        _States(tensor.data_ptr(), None if weight is None else weight.data_ptr(), epsilon, tensor.shape[2])
        for tensor, (weight, epsilon) in zip((query, key, value), norms, strict=True)
    ]
    turns = [None, None] if angles is None else [angle.data_ptr() for angle in angles]
    size = len(starts), int(lengths[0]), query.shape[3]
    return states, _Records(*turns, starts.data_ptr(), lengths.data_ptr(), *size, scale, torch.get_num_threads())
