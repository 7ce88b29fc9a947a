"""The rows of a training stage from its shards, their order, and the validation batches."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.config import TRAINING_STAGES, Training
from ttrain.config.rules import AUTO
from ttrain.core.hashing import digest_of
from ttrain.data.encoder import Encoder
from ttrain.data.loader import BatchSource
from ttrain.data.order import (
    DRAWS_PER_CYCLE,
    LengthGroupedOrder,
    Order,
    ShuffledOrder,
    WeightedOrder,
)
from ttrain.data.packing import Intervals, MixedRows, Rows
from ttrain.data.pair_rows import answer_rows
from ttrain.data.record_rows import DocumentRows, SeparateDocumentRows
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError, DataError, TooFewRows, UsageError
from ttrain.tasks import SHARE
from ttrain.train.schedules import steps_of

MOST_DRAWS = 1 << 20  # of a cycle of exact shares, which is in memory


def open_rows(
    directory: Path, encoder: Encoder, config: Training, *, heldout: bool = False
) -> Rows:
    """The rows of a set of shards, by its kind; the held-out part is neither mixed by weight nor
    read with overlap.
    """
    shards = ShardSet(directory, encoder.digest)
    if shards.index.get("template", digest_of(encoder.jinja)) != digest_of(encoder.jinja):
        raise ArtifactError(
            f"the chats in {directory} were made with another chat template than the model's; "
            f"make them again"
        )
    if shards.weights and not heldout:
        numbers = range(len(shards.weights))
        return MixedRows(
            [_rows(shards.group(number), encoder, config) for number in numbers], shards.weights
        )
    return _rows(shards, encoder, config, overlap=not heldout)


def with_replay(rows: Rows, directory: Path, encoder: Encoder, config: Training) -> Rows:
    """The rows, and beside them those of a sample of documents learnt before, whose index has its
    share of all tokens.
    """
    shards = ShardSet(directory, encoder.digest)
    replayed = _rows(shards, encoder, config)
    if not len(replayed):
        return rows
    share = float(shards.index[SHARE])
    groups, weights = (
        (rows.groups, rows.weights) if isinstance(rows, MixedRows) else ((rows,), (1.0,))
    )
    new = [(1 - share) * weight / sum(weights) for weight in weights]
    return MixedRows([*groups, replayed], [*new, share], epoch=round(len(rows) / (1 - share)))


def _rows(shards: ShardSet, encoder: Encoder, config: Training, *, overlap: bool = True) -> Rows:
    masks = _intervals(config, encoder)
    kind = shards.index["kind"]
    if config.packing == "stream" and (kind != "documents" or shards.row_weights is not None):
        what = (
            f"{kind} are not one stream"
            if kind != "documents"
            else "rows with a weight cannot be drawn by it"
        )
        raise UsageError(
            f"{config.section}.packing is stream, but {what}; set "
            f"{config.section}.packing=best-fit, "
            f"or leave the key 'weight' out"
        )
    if kind == "documents":
        stride = config.stride if overlap else None
        if config.packing == "stream":
            return DocumentRows(
                shards, config.row_length, encoder.pad_id, stride=stride, masks=masks
            )
        return SeparateDocumentRows(
            shards,
            config.row_length,
            encoder.pad_id,
            packed=config.packing != "none",
            stride=stride,
            masks=masks,
        )
    if config.stride is not None:
        raise UsageError(
            f"{config.section}.stride is {config.stride}, but {kind} are not read in windows; "
            f"set it to null"
        )
    if kind == "pairs" and masks:
        raise UsageError(
            f"{config.section}.mask_intervals is set, but an answer of a pair counts as a "
            f"whole; leave it out"
        )
    return answer_rows(
        shards, config.row_length, encoder, packed=config.packing != "none", masks=masks
    )


def _intervals(config: Training, encoder: Encoder) -> Intervals:
    def number(marker: int | str) -> int:
        try:
            found = encoder.special(marker) if isinstance(marker, str) else marker
        except ArtifactError:
            found = -1
        if not 0 <= found < len(encoder):
            raise UsageError(
                f"{config.section}.mask_intervals names {marker!r}, which is not a token of "
                f"the tokenizer; "
                f"name one of its tokens, or an id from 0 to {len(encoder) - 1}"
            )
        return found

    return tuple((number(opens), number(closes)) for opens, closes in config.mask_intervals)


def order_of(config: Training, rows: Rows) -> Order:
    """The order that the settings and the data's weights ask for. Raises DataError where the data
    is not fit to train on.

    Packed rows count in full (documents fill 0.999 of them, the quickstart's chats 0.98), so that a
    budget is a number of steps. Rows of one record are short: they count by their length, and a
    budget in tokens ends with the step in which it has been read.
    """
    counts = rows.counts()
    too_long = (
        f"pairs are longer than {config.section}.row_length {config.row_length}, prompt and "
        f"both answers together"
    )
    for reason, what, fix in (
        ("too_long_dropped", too_long, "raise row_length"),
        (
            "all_masked_dropped",
            "chats have no token to learn from: no answer, or all of it masked",
            "fix the data",
        ),
    ):
        if counts.get(reason, 0) > config.dropped_fraction * counts["records"]:
            raise DataError(
                f"{counts[reason]} of {counts['records']} {what}. That is more than "
                f"{config.section}.dropped_fraction {config.dropped_fraction}; "
                f"{fix}, or raise the fraction"
            )
    if not len(rows):
        stage = TRAINING_STAGES.get(config.section)
        # The others start from the base model, which cannot be left out.
        fixes = [f"data.{stage.name}=none"] if stage and stage.role != "base" else []
        leave_out = f", or leave the stage out with {fixes[0]}" if fixes else ""
        raise TooFewRows(
            f"{config.section}: the training data gives no row to learn from; add rows{leave_out}",
            fixes,
        )
    if len(rows) < config.rows_per_step:
        name = f"{config.section}.tokens_per_step"
        most = len(rows) * config.row_length
        raise TooFewRows(
            f"{name} is {config.tokens_per_step}, {config.rows_per_step} rows of "
            f"{config.row_length} tokens, "
            f"but the training data gives {len(rows)} rows; set {name}={most} or less, or "
            f"bring more data",
            [
                f"{name}="
                f"{AUTO if type(config).model_fields['tokens_per_step'].default == AUTO else most}"
            ],
        )
    order = _order(config, rows)
    order.row_tokens = rows.lengths() if rows.trimmed else rows.row_length
    if rows.trimmed and config.token_budget is not None:
        order.total_rows = order.steps_to_read(config.token_budget) * order.rows_per_step
    return order


def _order(config: Training, rows: Rows) -> Order:
    _, total = steps_of(config, rows.epoch)
    counts, weights = zip(*rows.draws(), strict=True)
    is_exact = isinstance(rows, MixedRows) and rows.is_exact
    if isinstance(rows, MixedRows) or len(weights) > 1:
        if config.order != "shuffled":
            raise UsageError(
                f"{config.section}.order is {config.order}, but the data is mixed by weight; "
                f"set {config.section}.order=shuffled, or "
                f"{'nightly.replay=0' if is_exact else 'leave the weights out'}"
            )
        draws = DRAWS_PER_CYCLE
        if not isinstance(rows, MixedRows) or len(weights) > len(
            rows.groups
        ):  # rows of data have weights
            least = min(weights) / sum(weights)
            if least * MOST_DRAWS < 1:
                raise DataError(
                    f"the rows with the least weight would get one of {1 / least:.3g} draws, "
                    f"but may get one of "
                    f"{MOST_DRAWS:,}; raise their weight, or leave them out"
                )
            draws = max(draws, math.ceil(1 / least))
        if is_exact:
            draws = max(min(rows.epoch, total, MOST_DRAWS), math.ceil(1 / min(weights)))
        return WeightedOrder(counts, weights, config.rows_per_step, total, config.seed, draws=draws)
    if config.order == "length-grouped":
        return LengthGroupedOrder(rows.lengths(), config.rows_per_step, total, config.seed)
    return ShuffledOrder(len(rows), config.rows_per_step, total, config.seed)


def validation_batches(rows: BatchSource, limit: int, rows_per_batch: int) -> list[Any]:
    """At most `limit` rows, evenly spread: the first rows of packed chats are those with the
    longest.
    """
    count = min(limit, len(rows))
    numbers = np.arange(count) * len(rows) // max(1, count)
    return [
        rows.batch(numbers[start : start + rows_per_batch])
        for start in range(0, len(numbers), rows_per_batch)
    ]
