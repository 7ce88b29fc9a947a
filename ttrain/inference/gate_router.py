"""The router of a gate: character n-grams, their mean embedding, and a small network."""

# A bag of n-grams as in fastText (arXiv:1607.01759, arXiv:1607.04606) needs no tokenizer: a text of
# a page is routed in two milliseconds on one core. Letters in names: B texts, L n-grams, E experts.

from collections.abc import Sequence
from pathlib import Path
from typing import cast, final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ttrain.config import Expert, Gate
from ttrain.core.hashing import sha256_file
from ttrain.data.order import spread
from ttrain.errors import ArtifactError
from ttrain.inference import gate_files, loading
from ttrain.inference.chat import ModelSelector, Selected

PADDING = 0  # the id of no n-gram

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: 2**64 over the golden ratio

TEXTS_PER_BATCH = 256

Ids = npt.NDArray[np.int64]


def run_ids(text: str, settings: Gate) -> Ids:
    """Ids, from 1 to `buckets`, of the distinct character n-grams in the text's beginning."""
    # The same on every machine: a polynomial over code points modulo 2**64, spread by the finalizer
    # of SplitMix64 (prng.di.unimi.it/splitmix64.c).
    codes = np.frombuffer(
        f" {text[: settings.characters]} ".encode("utf-32-le", "surrogatepass"), "<u4"
    ).astype(np.uint64)
    hashes = codes
    ids_by_length = []
    for length in range(1, min(settings.ngram_characters, len(codes)) + 1):
        ids_by_length.append(spread(hashes + np.uint64(length)) % np.uint64(settings.buckets))
        hashes = hashes[:-1] * MULTIPLIER + codes[length:]
    return np.unique(np.concatenate(ids_by_length)).astype(np.int64) + 1


def padded(rows: Sequence[Ids]) -> Tensor:
    """Pad the ids of several texts to shape [B, L]."""
    return pad_sequence(
        [torch.from_numpy(ids) for ids in rows], batch_first=True, padding_value=PADDING
    )


@final
class Router(nn.Module):
    """Maps n-gram ids to logits of the experts."""

    def __init__(self, settings: Gate, experts: int) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.EmbeddingBag(
            settings.buckets + 1, settings.embedding_size, mode="mean", padding_idx=PADDING
        )
        self.layers = nn.Sequential(
            nn.LayerNorm(settings.embedding_size),  # a mean over many n-grams is small
            nn.Linear(settings.embedding_size, settings.hidden),
            nn.GELU(),
            nn.Linear(settings.hidden, experts),
        )

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Logits of shape [B, E]."""
        return cast(Tensor, self.layers(self.embedding(ids_BL)))

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """Probability of each expert, [B, E], on the CPU, without gradients."""
        self.eval()
        batches = []
        for start in range(0, len(texts), TEXTS_PER_BATCH):
            ids_BL = padded(
                [run_ids(text, self.settings) for text in texts[start : start + TEXTS_PER_BATCH]]
            )
            with torch.inference_mode():
                batches.append(
                    self(ids_BL.to(self.embedding.weight.device)).float().softmax(-1).cpu()
                )
        return torch.cat(batches)


def single_model(loaded_model: loading.LoadedModel) -> ModelSelector:
    """Select the same model for every question."""
    return lambda question: (loaded_model, {})


@final
class GateSelector:
    """Selects the expert that most likely has the lowest loss; loads it when first selected."""

    def __init__(self, directory: Path, *, device: str, dtype: str) -> None:
        """Raises UsageError if there is no gate, ArtifactError if its router is another one."""
        gate = gate_files.read(directory)
        path = directory / gate_files.WEIGHTS
        if not path.is_file() or sha256_file(path) != gate.router_sha256:
            raise ArtifactError(
                f"the router {path} is not the one that {gate_files.GATE} beside it names; "
                "train the gate again"
            )
        self.experts: tuple[Expert, ...] = gate.experts
        self._router = Router(gate.settings, len(gate.experts))
        self._router.load_state_dict(load_file(path))
        self._load_options = {"device": device, "dtype": dtype}
        self._models: dict[int, loading.LoadedModel] = {}

    def route(self, text: str) -> tuple[int, list[float]]:
        """(number of the expert with the highest probability, the probability of each)."""
        probabilities = self._router.probabilities([text])[0]
        return int(probabilities.argmax()), probabilities.tolist()

    def __call__(self, question: str) -> Selected:
        """Select and load an expert. Raises ArtifactError if its weights changed."""
        number, probabilities = self.route(question)
        if number not in self._models:
            expert = self.experts[number]
            gate_files.check(expert)
            self._models[number] = loading.load(
                gate_files.reference_of(expert), **self._load_options
            )
        return self._models[number], {"probabilities": [round(share, 4) for share in probabilities]}
