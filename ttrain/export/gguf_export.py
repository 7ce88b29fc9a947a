"""Write GGUF files, read each back, and score what it holds on held-out text.

Loads torch if called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.config.evaluate import Windows
from ttrain.core.text import counted
from ttrain.errors import TTrainError
from ttrain.export import gguf_adapter, gguf_file, gguf_tokenizer
from ttrain.store.model_files import weight_files

if TYPE_CHECKING:
    from ttrain.inference.loading import LoadedModel


@dataclass(frozen=True)
class Scored:
    """A file's bits per byte of held-out text beside those of the model; None without a text."""

    file: str
    bits_per_byte: float | None
    original: float | None
    bytes: int  # of the text

    @property
    def change(self) -> float:
        """How much more bits the file needs, as a share."""
        return (self.bits_per_byte or 0) / (self.original or 1) - 1

    def check(self) -> None:
        """Raise TTrainError if the file needs more bits than its type may."""
        bound = gguf_file.BOUNDS[self.file.removesuffix(".gguf").rpartition("-")[2]]
        if not self.change <= bound:  # also where it is NaN
            raise TTrainError(
                f"{self.file} has {self.bits_per_byte:.4f} bits per byte, which is "
                f"{self.change:.2%} above the {self.original:.4f} of the model, on "
                f"{counted(self.bytes, 'byte')} of held-out text, but may be at most {bound:.1%} "
                "above; use a type with more bits, such as q8_0"
            )

    def row(self) -> tuple[str, str, str, str]:
        """File, bits per byte, the model's, and the change, for a table."""
        if self.bits_per_byte is None:
            return self.file, "no held-out text", "", ""
        return self.file, f"{self.bits_per_byte:.4f}", f"{self.original:.4f}", f"{self.change:+.2%}"


def write_checked(
    model: LoadedModel,
    directory: Path,
    targets: Sequence[Path],
    texts: Sequence[str],
    say: Callable[[str], object],
    adapter: Path | None = None,
) -> list[Scored]:
    """Write NAME-TYPE.gguf for each target, and score it beside the model.

    directory   the model in fp32, with its tokenizer
    adapter     directory of an adapter, which the files hold instead; its base is in `directory`
    Raises TTrainError for a file that scores above its bound, UsageError for another architecture.
    """
    import torch
    from safetensors.torch import load_file

    config = model.causal.config
    tensors = {
        name: tensor.numpy()
        for path in weight_files(directory)
        for name, tensor in load_file(path).items()
    }
    tokenizer = gguf_tokenizer.fields(model, directory)
    size = sum(len(text.encode()) for text in texts)
    original = bits_per_byte(model, texts)
    scores = []
    for target in targets:
        say(f"writing {target.name}")
        if adapter:
            gguf_adapter.write(target, config, adapter)
            values = gguf_adapter.add(target, config, tensors)
        else:
            gguf_file.write(target, config, tensors, tokenizer)
            values = gguf_file.read(target, config, list(tensors))
        state = {name: torch.from_numpy(array.copy()) for name, array in values.items()}
        causal = type(model.causal).from_pretrained(None, config=config, state_dict=state)
        copy = replace(model, model=causal.to(model.device).eval())
        scores.append(Scored(target.name, bits_per_byte(copy, texts), original, size))
        scores[-1].check()
    return scores


def bits_per_byte(model: LoadedModel, texts: Sequence[str]) -> float | None:
    """Bits per byte of all texts together; None where there is none."""
    from ttrain.evaluate import perplexity
    from ttrain.evaluate.task_result import LN2

    if not texts:
        return None
    sequences = [perplexity.text_tokens(model, ids) for ids in model.encoder.encode(texts)]
    scores = perplexity.score_items(Windows(), model, sequences, lambda done, total: None)
    return sum(score.nats for score in scores) / LN2 / sum(len(text.encode()) for text in texts)
