"""What a teacher thinks of rows: its likeliest next tokens at every position, in files of rows."""
# Letters in names: B rows, T positions, K likeliest tokens, V entries of the vocabulary.

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from torch import Tensor

from ttrain.data.packing import Array, Batch, Rows

TOP = 32  # tokens a position: they had 0.8 of the teacher's probability on the quickstart's rows
BLOCK_ROWS = 1024  # rows of a file
IDS, LOG_PROBABILITIES = "ids", "log_probabilities"


def likeliest(probabilities_BTV: Tensor, row_length: int) -> dict[str, npt.NDArray[Any]]:
    """The `TOP` tokens of each position with their log-probabilities, [B, row_length, K]."""
    width, vocab_size = probabilities_BTV.shape[1:]
    top = probabilities_BTV.topk(min(TOP, vocab_size))
    types = {IDS: np.min_scalar_type(vocab_size), LOG_PROBABILITIES: np.dtype(np.float16)}
    found = {}
    for (name, dtype), tensor in zip(types.items(), (top.indices, top.values.log()), strict=True):
        found[name] = np.pad(
            tensor.cpu().numpy().astype(dtype), ((0, 0), (0, row_length - width), (0, 0))
        )
    return found


@dataclass(frozen=True)
class TaughtBatch(Batch):
    """Rows, a teacher's likeliest next tokens, and their shares of the targets, [B, T, K]."""

    taught: tuple[Array, npt.NDArray[np.float32]]


@final
class TaughtRows:
    """Rows whose batches bring the shares of the targets that a teacher gives to tokens.

    The last rows are taught, as many as the teacher has read.
    """

    def __init__(self, rows: Rows, directory: Path, weight: float) -> None:
        """`directory`: of the files of `likeliest`. `weight`: the teacher's share of a target."""
        self.trimmed = rows.trimmed
        self._rows = rows
        self._weight = np.float32(weight)
        files = [safe_open(path, "np") for path in sorted(directory.glob("*.safetensors"))]
        self._blocks = {
            name: [file.get_slice(name) for file in files]  # type: ignore[no-untyped-call]
            for name in (IDS, LOG_PROBABILITIES)
        }
        shapes = [ids.get_shape() for ids in self._blocks[IDS]]
        self._first = len(rows) - sum(shape[0] for shape in shapes)
        self._tokens = shapes[0][-1] if shapes else 0

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Collection[int]) -> TaughtBatch:
        """A batch of the rows with these numbers."""
        batch = self._rows.batch(rows)
        shape = (*batch.input_ids_BT.shape, self._tokens)
        ids_BTK = np.zeros(shape, np.int64)
        log_probs_BTK = np.full(shape, -np.inf, np.float32)
        for line, row in enumerate(np.asarray(rows) - self._first):
            if row >= 0:
                block, place = divmod(int(row), BLOCK_ROWS)
                ids_BTK[line] = self._blocks[IDS][block][place][: shape[1]]
                log_probs_BTK[line] = self._blocks[LOG_PROBABILITIES][block][place][: shape[1]]
        return TaughtBatch(**vars(batch), taught=(ids_BTK, np.exp(log_probs_BTK) * self._weight))
