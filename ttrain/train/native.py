"""The native kernels of `native.c`, for CPUs: bf16 (AVX512-BF16) and fp32 (AVX2, AVX-512)."""
# Letters in names: B rows, T positions, H heads, G heads of keys and values, K width of a head, D
# width of a token, C positions of a chunk, V entries of the vocabulary, E matrices [A, B].

import ctypes
import functools
import logging
from ctypes import c_float, c_int, c_long, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ttrain.core.machine import INSTRUCTIONS, cpu_flags

VERSION = 5  # as in native.c
LANES = 16  # numbers of a register: widths are multiples of it
NORM_ROWS = 64  # as in native.c
# Numbers of a matrix that is made orthogonal where the CPU has AMX, by which torch's products of
# larger ones are faster.
MOST_NUMBERS = 1 << 16


ARGUMENTS: dict[str, list[Any]] = {
    "score": [c_void_p, c_void_p, c_long, c_long, c_int, c_float, c_void_p, c_int],
    "gated": [*[c_void_p] * 3, c_long, c_int],
    "gated_slopes": [*[c_void_p] * 6, c_long, c_int],
    "norm": [c_void_p, c_void_p, c_float, c_void_p, c_int, c_void_p, c_long, c_long, c_int],
    "norm_slopes": [*[c_void_p] * 6, c_long, c_long, c_int],
    "orthogonal": [
        c_void_p,
        c_void_p,
        c_long,
        c_long,
        c_long,
        c_float,
        c_float,
        c_float,
        c_int,
        c_float,
        c_int,
    ],
    "attention": [c_void_p] * 7,
    "attention_slopes": [c_void_p] * 12,
}
# Whether there was memory for them.
RETURNING = (
    "score",
    "orthogonal",
    "attention",
    "attention_slopes",
)
NO_MEMORY = -1
# Kind of number, its part of `native_kinds`, suffix of its functions; the last one that a CPU has
# counts.
KINDS = (
    (torch.float32, 1, "fp32_avx2"),
    (torch.float32, 2, "fp32_avx512"),
    (torch.bfloat16, 4, "bf16"),
)
ADVICE = "with gcc 10 or newer, install ttrain again"


class _States(ctypes.Structure):
    _fields_ = [("states", c_void_p), ("weight", c_void_p), ("epsilon", c_float), ("heads", c_long)]


class _Records(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin", "starts", "lengths", "branches")),
        *((name, c_long) for name in ("records", "longest", "K")),
        ("scale", c_float),
        ("threads", c_int),
    ]


log = logging.getLogger("ttrain")


@functools.cache
def kernels() -> dict[torch.dtype, dict[str, Any]]:
    """The kernels that this CPU can run, by number format.

    {} if installation found no compiler, or compiled another version.
    """
    files = [Path(__file__).with_name(f"_native{suffix}") for suffix in EXTENSION_SUFFIXES]
    packages = Path(torch.__file__).parents[1]
    try:
        # Before the system's OpenMP, which is another one beside torch's where that has a name of
        # its own.
        for path in (*packages.glob("torch/lib/libgomp*"), *packages.glob("torch.libs/libgomp*")):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(next(path for path in files if path.exists())))
        kinds = library.native_kinds() if library.native_version() == VERSION else 0
    except (OSError, StopIteration, AttributeError):
        return {}
    found = {}
    for dtype, kind, suffix in KINDS:
        if kinds & kind:
            found[dtype] = {name: getattr(library, f"native_{name}_{suffix}") for name in ARGUMENTS}
            for name, function in found[dtype].items():
                function.argtypes = ARGUMENTS[name]
                function.restype = c_long if name in RETURNING else None
    return found


@functools.cache
def warn_if_missing() -> None:
    """Warn once per process if they could be used and are not compiled."""
    if not kernels() and {"avx2", "fma"} <= cpu_flags():
        log.warning(
            "native kernels are not compiled, so training takes up to twice as long: %s", ADVICE
        )


def takes(*tensors: Tensor, dtype: torch.dtype | None = None, lanes: int = LANES) -> bool:
    """Whether the kernels take these tensors, or tensors of `dtype` that accompany theirs.

    They must be plain, contiguous, as wide as whole registers, and of a type with kernels.
    """
    kind = dtype or tensors[0].dtype
    return (kind is dtype or kind in kernels()) and all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype == kind
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.shape[-1] % lanes == 0
        for tensor in tensors
    )


def _call(dtype: torch.dtype, name: str, *arguments: Any) -> Any:
    result = kernels()[dtype][name](
        *(
            argument.data_ptr() if isinstance(argument, Tensor) else argument
            for argument in arguments
        )
    )
    if result == NO_MEMORY:
        raise MemoryError(f"not enough memory for what {name} needs besides its tensors")
    return result


def score(logits_CV: Tensor, labels_C: Tensor, scale: float | None) -> Tensor:
    """Cross entropies in nats, [C]; with a scale the logits become scale times their gradients."""
    losses_C = torch.empty(len(logits_CV), dtype=torch.float32, device="cpu")
    labels_C = labels_C.to(torch.int64).contiguous()
    bad = _call(
        logits_CV.dtype,
        "score",
        *(logits_CV, labels_C, *logits_CV.shape, scale is not None, scale or 0.0, losses_C),
        torch.get_num_threads(),
    )
    if bad:
        raise IndexError(
            f"label {labels_C[bad - 1]} is out of bounds for a vocabulary of {logits_CV.shape[1]} "
            "entries"
        )
    return losses_C


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up"""
    out = torch.empty_like(gate)
    _call(gate.dtype, "gated", gate, up, out, out.numel(), torch.get_num_threads())
    return out


def gated_slopes(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) up, and the gradients of gate and up."""
    outs = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    _call(gate.dtype, "gated_slopes", grad, gate, up, *outs, gate.numel(), torch.get_num_threads())
    return outs


def takes_norm(dtype: torch.dtype, x: Tensor, weight: Tensor) -> bool:
    """Whether `norm` takes these fp32 tensors and returns this type."""
    return dtype in kernels() and takes(x, weight, dtype=torch.float32)


def norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight x scale in this type, and the scale, 1 / rms(x)."""
    out = torch.empty_like(x, dtype=dtype)
    D = x.shape[-1]
    scale = x.new_empty(*x.shape[:-1], 1)
    _call(
        dtype,
        "norm",
        x,
        weight,
        epsilon,
        scale,
        False,
        out,
        x.numel() // D,
        D,
        torch.get_num_threads(),
    )
    return out, scale


def norm_slopes(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight of `norm`."""
    of_x = torch.empty_like(x)
    D = x.shape[-1]
    rows = x.numel() // D
    of_weight = x.new_empty(-(-rows // NORM_ROWS), D)
    _call(
        grad.dtype,
        "norm_slopes",
        grad,
        x,
        weight,
        scale,
        of_x,
        of_weight,
        rows,
        D,
        torch.get_num_threads(),
    )
    return of_x, of_weight.sum(0)


def takes_matrices(matrices_EAB: Tensor, dtype: torch.dtype) -> bool:
    """Whether `orthogonal` takes these fp32 matrices and is faster than torch."""
    A, B = matrices_EAB.shape[1:]
    has_tiles = dtype == torch.bfloat16 and INSTRUCTIONS["AMX"] in cpu_flags()
    fits = A % LANES == 0 and (A * B <= MOST_NUMBERS or not has_tiles)
    return fits and dtype in kernels() and takes(matrices_EAB, dtype=torch.float32)


def orthogonal(
    matrices_EAB: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    epsilon: float,
    dtype: torch.dtype,
) -> Tensor:
    """Newton-Schulz steps of each matrix; see `optim.orthogonal`."""
    # Half of each symmetric product is computed.
    out = torch.empty_like(matrices_EAB)
    _call(
        dtype,
        "orthogonal",
        matrices_EAB,
        out,
        *matrices_EAB.shape,
        *coefficients,
        steps,
        epsilon,
        torch.get_num_threads(),
    )
    return out


def takes_heads(dtype: torch.dtype, width: int, hidden: Tensor) -> bool:
    """Whether `Attention` takes heads of this width and type, made of these hidden states."""
    return (
        dtype in kernels()
        and width % (2 * LANES) == 0
        and takes(hidden, dtype=hidden.dtype, lanes=1)
    )


class Attention(torch.autograd.Function):
    """Causal attention within records, with optional norms and rotation of queries and keys.

    No more than a block of scores is in memory; weights and rotated states are recomputed for the
    gradients (arXiv:2205.14135).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BTHK: Tensor,
        key_BTGK: Tensor,
        value_BTGK: Tensor,
        query_weight: Tensor | None,
        query_epsilon: float,
        key_weight: Tensor | None,
        key_epsilon: float,
        angles: tuple[Tensor, Tensor] | None,
        places: tuple[Tensor, Tensor, Tensor | None],
        scale: float,
    ) -> Tensor:
        """`angles`: cosines and sines, [B, T, K]. `places`: as in `attention.Records`."""
        out = torch.empty_like(query_BTHK)
        tops, logs = (
            query_BTHK.new_empty(query_BTHK.shape[:3], dtype=torch.float32) for _ in range(2)
        )
        tensors = query_BTHK, key_BTGK, value_BTGK, query_weight, key_weight, out, tops, logs
        ctx.save_for_backward(*tensors)
        ctx.others = query_epsilon, key_epsilon, angles, places, scale
        states, records = _arguments(tensors, ctx.others)
        _call(
            out.dtype,
            "attention",
            *map(ctypes.byref, states),
            ctypes.byref(records),
            out,
            tops,
            logs,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: each access unpacks them again
        query, key, value, query_weight, key_weight, out, tops, logs = tensors
        states, records = _arguments(tensors, ctx.others)
        slopes = [torch.empty_like(tensor) for tensor in (query, key, value)]
        of_weights = query.new_empty(
            (records.records * key.shape[2], 2, key.shape[3]), dtype=torch.float32
        )
        grad = grad_BTHK.to(out.dtype).contiguous()
        _call(
            out.dtype,
            "attention_slopes",
            *map(ctypes.byref, (*states, records)),
            *(out, tops, logs, grad, *slopes, of_weights),
        )
        of_query_weight, of_key_weight = of_weights.sum(0)
        return (
            *slopes,
            None if query_weight is None else of_query_weight,
            None,
            None if key_weight is None else of_key_weight,
            None,
            None,
            None,
            None,
        )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _arguments(tensors: Any, others: Any) -> tuple[list[_States], _Records]:
    query, key, value, query_weight, key_weight, *_ = tensors
    query_epsilon, key_epsilon, angles, (starts, lengths, branches), scale = others
    norms = (query_weight, query_epsilon), (key_weight, key_epsilon), (None, 0.0)
    states = [
        _States(_pointer(tensor), _pointer(weight), epsilon, tensor.shape[2])
        for tensor, (weight, epsilon) in zip((query, key, value), norms, strict=True)
    ]
    pointers = map(_pointer, (*(angles or (None, None)), starts, lengths, branches))
    return states, _Records(
        *pointers, len(starts), int(lengths[0]), query.shape[3], scale, torch.get_num_threads()
    )
