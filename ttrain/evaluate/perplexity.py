"""Loss on held-out text and chats: every token is scored once, with context."""

# Letters in names: B windows, T positions.

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ttrain.config.evaluate import TextTask, Windows
from ttrain.data import records as sources
from ttrain.data.packing import IGNORE, Array, Flags
from ttrain.evaluate import baselines
from ttrain.evaluate.items import Items, Parsers, SuiteFiles, accepted, read_texts
from ttrain.evaluate.task_result import LN2, Metric, TaskResult
from ttrain.evaluate.token_losses import TokenLosses
from ttrain.inference.loading import LoadedModel, most_batch_tokens
from ttrain.train.distributed import Ranks

LEAST_FILL = 0.9  # of a row that is added to a batch with enough tokens

ProgressCallback = Callable[[int, int], None]
Tokens = tuple[Sequence[int], Sequence[bool]]  # ids, and whether each counts
EXCERPT_CHARACTERS = 200
log = logging.getLogger("ttrain")


class Score(NamedTuple):
    """Summed negative log-likelihood in nats over `tokens` scored tokens."""

    nats: float
    tokens: int


class ScoringWindow(NamedTuple):
    """A span of ids: the model reads [start, end), and the ids from `first` on are scored."""

    start: int
    first: int
    end: int

    @property
    def inputs(self) -> int:
        """Number of input tokens: the last token is a target only."""
        return self.end - self.start - 1


def windows(tokens: int, length: int, stride: int) -> Iterator[ScoringWindow]:
    """Windows of at most `length` inputs in which each token after the first is scored once.

    As in https://huggingface.co/docs/transformers/perplexity, by `stride`.
    """
    # The first window scores all its tokens; each later one its last `stride` tokens, which have at
    # least `length - stride + 1` tokens before them.
    first = 1
    while first < tokens:
        end = min(tokens, length + 1 if first == 1 else first + stride)
        yield ScoringWindow(max(0, end - length - 1), first, end)
        first = end


def score_each(
    model: nn.Module,
    sequences: Sequence[Tokens],
    *,
    length: int,
    stride: int,
    device: torch.device,
    progress: ProgressCallback,
    batch_tokens: int | None = None,
    ranks: Ranks | None = None,
) -> list[Score]:
    """Compute the loss of the live tokens of each sequence, (ids, live); the first is context only.

    Bit-identical on any number of `ranks`, equal up to 1e-7 with any `batch_tokens` of a pass.
    `progress` gets (batches done, batches) of this rank.
    """
    arrays = [(np.asarray(ids, np.int64), np.asarray(live, np.bool_)) for ids, live in sequences]
    numbered_windows = [
        (number, window)
        for number, (ids, live) in enumerate(arrays)
        for window in windows(len(ids), length, stride)
        if live[window.first : window.end].any()
    ]
    numbered_windows.sort(key=lambda item: -item[1].inputs)
    batches = batch_slices(
        [window.inputs for _, window in numbered_windows],
        batch_tokens or most_batch_tokens(device),
        # Enough for full speed: on a CPU they take as long each as of 2048
        512 if device.type == "cpu" else 8192,
    )
    mine = batches if ranks is None else batches[ranks.rank :: ranks.world]
    nats = np.zeros(len(numbered_windows))
    was_training = model.training
    model.eval()
    try:
        losses = TokenLosses(model)
        for done, batch in enumerate(mine, start=1):
            inputs_BT, labels_BT = padded(
                [(*arrays[number], window) for number, window in numbered_windows[batch]]
            )
            each_N = losses(inputs_BT.to(device), labels_BT)
            firsts_B = (labels_BT != IGNORE).sum(1).cumsum(0)[:-1].numpy()
            nats[batch] = [
                window_nats.sum()
                for window_nats in np.split(each_N.double().cpu().numpy(), firsts_B)
            ]
            progress(done, len(mine))
    finally:
        model.train(was_training)
    if ranks is not None:  # a window has a number on one rank and zero on the others
        nats = np.array(ranks.sum(nats.tolist()))
    totals = [0.0] * len(arrays)
    for cost, (number, _) in zip(nats.tolist(), numbered_windows, strict=True):
        totals[number] += cost
    return [
        Score(total, int(live[1:].sum())) for total, (_, live) in zip(totals, arrays, strict=True)
    ]


def batch_slices(lengths: Sequence[int], most: int, enough: int) -> list[slice]:
    """Split descending lengths into batches of at most `most` tokens, padded to their first.

    A batch with `enough` tokens ends before a length that would be padded by more than a tenth.
    """
    # Of 6,000 tokens in texts of log-normal lengths the padding is then 4 % instead of 29 %.
    slices = []
    start = 0
    while start < len(lengths):
        widest = lengths[start]
        end = start + 1
        while end < len(lengths) and (end + 1 - start) * widest <= most:
            if (end - start) * widest >= enough and lengths[end] < LEAST_FILL * widest:
                break
            end += 1
        slices.append(slice(start, end))
        start = end
    return slices


def padded(rows: Sequence[tuple[Array, Flags, ScoringWindow]]) -> tuple[Tensor, Tensor]:
    """Inputs and labels of windows, padded on the right, where a causal model cannot see it."""
    shape = (len(rows), max(window.inputs for _, _, window in rows))
    inputs_BT = np.zeros(shape, np.int64)
    labels_BT = np.full(shape, IGNORE, np.int64)
    for row, (ids, live, (start, first, end)) in enumerate(rows):
        inputs_BT[row, : end - start - 1] = ids[start : end - 1]
        labels_BT[row, first - start - 1 : end - start - 1] = np.where(
            live[first:end], ids[first:end], IGNORE
        )
    return torch.from_numpy(inputs_BT), torch.from_numpy(labels_BT)


def read(task: str, spec: TextTask, files: SuiteFiles) -> Items[str]:
    """Read the documents of a file, or those that the model's run held out.

    Raises UsageError if the file does not exist, DataError if it has no document.
    """
    parse = sources.document_parser(spec.text_field)
    of_file = (
        lambda row: accepted(parse(row), sources.TextDocument).text,
        sources.document_fields(spec.text_field, f"tasks.{task}."),
    )
    return read_texts(task, spec, files, Parsers(of_file, lambda row: str(row["text"]), str))


def run(items: Items[str], subject: LoadedModel, progress: ProgressCallback) -> TaskResult:
    """Compute bits per byte, loss in nats per token, and perplexity per token.

    Bits per byte of the file's text can be compared between tokenizers
    (https://arxiv.org/abs/2101.00027, section 3.1).
    """
    # A tokenizer that does not reproduce a text had less to predict: such documents are counted in
    # a warning and `lossy` in the rows.
    ids = subject.encoder.encode(items.items)
    scores = score_items(
        items.spec, subject, [text_tokens(subject, text_ids) for text_ids in ids], progress
    )
    sizes = [len(text.encode("utf-8")) for text in items.items]
    lossy = [
        subject.encoder.decode(text_ids) != text
        for text, text_ids in zip(items.items, ids, strict=True)
    ]
    if any(lossy):
        log.warning(
            "%s: the tokenizer of %s does not reproduce %d of %d documents, "
            "so its bits per byte are too low",
            items.task,
            subject.name,
            sum(lossy),
            len(lossy),
        )
    rows = [
        {
            "text": text[:EXCERPT_CHARACTERS],
            "bytes": size,
            "tokens": tokens,
            "nats": nats,
            "lossy": is_lossy,
        }
        for text, size, (nats, tokens), is_lossy in zip(
            items.items, sizes, scores, lossy, strict=True
        )
    ]
    bits = Metric(
        "bits_per_byte",
        tuple(score.nats for score in scores),
        tuple(map(float, sizes)),
        False,
        "bits per byte",
        factor=1 / LN2,
    )
    return items.result(
        subject.name,
        [bits, *loss_figures(scores)],
        rows,
        baselines.bits_per_byte("".join(items.items).encode("utf-8")),
    )


def text_tokens(subject: LoadedModel, ids: Sequence[int]) -> Tokens:
    """The tokens of a text, all of which count, after those that begin a text."""
    begin_ids = subject.beginning()
    return [*begin_ids, *ids], [False] * len(begin_ids) + [True] * len(ids)


def score_items(
    spec: Windows,
    subject: LoadedModel,
    sequences: Sequence[Tokens | str],
    progress: ProgressCallback,
) -> list[Score]:
    """Score the live tokens of each item in windows that the model accepts; errors score none."""
    length = min(spec.row_length, subject.max_length or spec.row_length)
    return score_each(
        subject.model,
        [([], []) if isinstance(sequence, str) else sequence for sequence in sequences],
        length=length,
        stride=min(spec.stride, length),
        device=subject.device,
        progress=progress,
        batch_tokens=subject.batch_tokens,
        ranks=subject.ranks,
    )


def loss_figures(scores: Sequence[Score]) -> list[Metric]:
    """Loss and perplexity per token."""
    nats = tuple(score.nats for score in scores)
    tokens = tuple(float(score.tokens) for score in scores)
    return [
        Metric("loss", nats, tokens, False, "nats per token"),
        Metric("perplexity", nats, tokens, False, "per token", shown="exp"),
    ]
