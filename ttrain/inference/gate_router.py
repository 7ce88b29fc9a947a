"""The router: runs of characters, their mean embedding, and a small network over it. It knows no tokenizer.

The bag of runs is fastText's (arXiv:1607.01759, arXiv:1607.04606): whatever tokenizers the experts have, and in any script,
a text of a page is routed in two milliseconds on one core. Letters in names: B texts, L runs, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.config import Expert, Gate
from ttrain.core.hashing import sha256_file
from ttrain.errors import ArtifactError
from ttrain.inference import gate_files

PADDING = 0  # the id that stands for no run
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: 2**64 over the golden ratio
TEXTS_PER_BATCH = 256
Ids = npt.NDArray[np.int64]


def run_ids(text: str, settings: Gate) -> Ids:
    """Ids, from 1 to `buckets`, of the distinct runs of characters in the text's beginning, a space around it.

    The same on every machine: a polynomial over code points modulo 2**64, spread by the finalizer of SplitMix64
    (prng.di.unimi.it/splitmix64.c).
    """
    codes = np.frombuffer(f" {text[: settings.characters]} ".encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    hashes, found = codes, []
    for length in range(1, min(settings.ngram_characters, len(codes)) + 1):
        found.append(_spread(hashes + np.uint64(length)) % np.uint64(settings.buckets))
        hashes = hashes[:-1] * MULTIPLIER + codes[length:]
    return np.unique(np.concatenate(found)).astype(np.int64) + 1


def _spread(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def padded(rows: Sequence[Ids]) -> Tensor:
    """Ids of several texts, of shape [B, L]."""
    ids_BL = torch.full((len(rows), max(map(len, rows))), PADDING)
    for row, ids in enumerate(rows):
        ids_BL[row, : len(ids)] = torch.from_numpy(ids)
    return ids_BL


@final
class Router(nn.Module):
    """Ids of runs to the logits of the experts."""

    def __init__(self, settings: Gate, experts: int) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.buckets + 1, settings.embedding_size, padding_idx=PADDING)
        self.layers = nn.Sequential(
            nn.LayerNorm(settings.embedding_size),  # a mean over many runs is short
            nn.Linear(settings.embedding_size, settings.hidden),
            nn.GELU(),
            nn.Linear(settings.hidden, experts),
        )

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Logits of shape [B, E]."""
        mean = F.embedding_bag(ids_BL, self.embedding.weight, mode="mean", padding_idx=PADDING)
        logits_BE: Tensor = self.layers(mean)
        return logits_BE

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """Of shape [B, E], on the CPU, without gradients."""
        self.eval()
        device, found = self.embedding.weight.device, []
        for start in range(0, len(texts), TEXTS_PER_BATCH):
            ids_BL = padded([run_ids(text, self.settings) for text in texts[start : start + TEXTS_PER_BATCH]])
            with torch.inference_mode():
                found.append(self(ids_BL.to(device)).float().softmax(-1).cpu())
        return torch.cat(found)


@final
class OpenedGate:
    """A gate's router, loaded, and the experts between which it picks."""

    def __init__(self, directory: Path) -> None:
        """Raises UsageError where there is no gate, and ArtifactError where its router does not fit. Opens no expert."""
        gate = gate_files.read(directory)
        self.experts: tuple[Expert, ...] = gate.experts
        path = directory / gate_files.WEIGHTS
        if not path.is_file() or sha256_file(path) != gate.router:
            raise ArtifactError(
                f"the router {path} is not the one that {gate_files.GATE} beside it tells of; train the gate again"
            )
        self._router = Router(gate.settings, len(gate.experts))
        try:
            self._router.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ArtifactError(f"cannot load the router {path}: {error}") from None

    def route(self, text: str) -> tuple[int, list[float]]:
        """(number of the expert whose loss on the text is most likely the least, the probability of each)."""
        probabilities = self._router.probabilities([text])[0]
        return int(probabilities.argmax()), probabilities.tolist()
