"""What the settings make of a set of shards: its rows, their order, and what is refused."""

import contextlib
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_data import make_tokenizer, write_shards

from ttrain.config import Pretrain, Sft, Training
from ttrain.core.files import read_json, write_json
from ttrain.core.hashing import digest_of
from ttrain.data.encoder import Encoder
from ttrain.data.order import WeightedOrder
from ttrain.data.packing import MixedRows, Rows
from ttrain.data.pair_rows import PairRows
from ttrain.data.record_rows import ChatRows, DocumentRows, SeparateDocumentRows
from ttrain.data.shards import Column, write_index, write_shard
from ttrain.engine import row_counts
from ttrain.errors import ArtifactError, DataError, UsageError
from ttrain.tasks.common.rows import open_rows, order_of, validation_batches
from ttrain.train.schedules import steps_of

DOCUMENTS: list[Any] = [([*range(20, 40)], []), ([*range(40, 45)], []), ([*range(50, 66)], [])]


def settings(**changes: Any) -> Training:
    return Training.model_validate(
        {"epochs": 1.0, "row_length": 8, "tokens_per_step": 16, **changes}
    )


def documents(path: Path, encoder: Encoder, **more: Any) -> Path:
    write_shards(
        path, DOCUMENTS, kind="documents", tokenizer=encoder.digest, tokens_per_shard=1, **more
    )
    return path


def chats(path: Path, encoder: Encoder, answered: int = 9, unanswered: int = 0) -> Path:
    ids = [encoder.bos_id, 30, 31, encoder.end_id, 32, 33, encoder.end_id]
    records = [(ids, [False] * 4 + [True] * 3)] * answered + [(ids, [False] * 7)] * unanswered
    write_shards(path, records, kind="chats", tokenizer=encoder.digest, tokens_per_shard=35)
    return path


def write_set(path: Path, encoder: Encoder, column: Column, kind: str) -> Path:
    path.mkdir(exist_ok=True)
    entry = {**write_shard(path / "0.arrow", column, len(encoder)), "bytes": 1, "group": 0}
    sizes = {"vocab_size": len(encoder), "tokenizer": encoder.digest}
    write_index(path, kind=kind, shards=[entry], **sizes)
    return path


def pairs(path: Path, encoder: Encoder, sizes: Sequence[int] = (3, 4, 5)) -> Path:
    """Pairs of a prompt of six tokens with answers of so many."""
    prompt = [encoder.bos_id, 30, 31, encoder.end_id, 32, 33]
    ids = [[*prompt, *range(40, 40 + size), *range(60, 60 + size)] for size in sizes]
    parts = np.concatenate([[0] * 6 + [1] * size + [2] * size for size in sizes])
    offsets = np.cumsum([0, *map(len, ids)])
    return write_set(path, encoder, Column(np.concatenate(ids), offsets, parts > 0, parts), "pairs")


def test_rows_follow_the_kind_and_the_packing(tmp_path: Path, encoder: Encoder) -> None:
    sets = documents(tmp_path / "documents", encoder), chats(tmp_path / "chats", encoder)
    for packing in ("best-fit", "none"):
        kinds = [type(open_rows(path, encoder, settings(packing=packing))) for path in sets]
        assert kinds == [SeparateDocumentRows, ChatRows]
    assert type(open_rows(sets[0], encoder, settings(packing="stream"))) is DocumentRows
    answers = pairs(tmp_path / "pairs", encoder)
    long_rows = settings(row_length=32, tokens_per_step=32)
    assert type(open_rows(answers, encoder, long_rows)) is PairRows
    for heldout in (False, True):
        counts = open_rows(sets[0], encoder, settings(stride=4), heldout=heldout).counts()
        assert (counts["target_multiplicity"] == 1) == heldout, "only training rows overlap"


def test_what_a_kind_does_not_have_is_refused(tmp_path: Path, encoder: Encoder) -> None:
    paths = {"chats": chats(tmp_path / "chats", encoder), "pairs": pairs(tmp_path, encoder)}
    for kind, name, value in (
        *(("chats", "packing", "stream"), ("pairs", "packing", "stream")),
        *(("chats", "stride", 4), ("pairs", "stride", 4), ("pairs", "mask_intervals", [[1, 4]])),
    ):
        with pytest.raises(UsageError, match=rf"training\.{name}"):
            open_rows(paths[kind], encoder, settings(**{name: value}))


def test_intervals_are_named_by_word_or_by_id(tmp_path: Path, encoder: Encoder) -> None:
    path = documents(tmp_path, encoder)
    first, last = encoder.special("t"), 44
    for pair in (["t", last], [first, last]):
        rows = open_rows(path, encoder, settings(mask_intervals=[pair]))
        assert rows.masks == ((first, last),)  # type: ignore[attr-defined]
    rows = open_rows(path, encoder, settings(mask_intervals=[[25, 30]]))
    labels = {*rows.batch(range(len(rows))).labels_BT.flatten().tolist()}
    assert not {*range(25, 31)} & labels and {24, 31} <= labels
    for marker in ("<nowhere>", len(encoder)):
        with pytest.raises(UsageError, match=rf"mask_intervals.*{marker}"):
            open_rows(path, encoder, settings(mask_intervals=[[marker, 7]]))


def test_weights_mix_the_training_rows_alone(tmp_path: Path, encoder: Encoder) -> None:
    path = documents(tmp_path, encoder, groups=[0, 1, 0], weights=[0.25, 0.75])
    config = settings()
    rows = open_rows(path, encoder, config)
    assert isinstance(rows, MixedRows)
    assert [len(group) for group in rows.groups] == [5, 1]
    order = order_of(config, rows)
    assert isinstance(order, WeightedOrder)
    assert order.quotas == [2500, 7500]
    assert isinstance(open_rows(path, encoder, config, heldout=True), SeparateDocumentRows)
    config = settings(packing="none", order="length-grouped")
    with pytest.raises(UsageError, match=r"training\.order.*=shuffled"):
        order_of(config, open_rows(path, encoder, config))


@pytest.mark.parametrize(("kind", "packing"), [("documents", "none"), ("chats", "best-fit")])
def test_rows_are_drawn_by_weight(
    tmp_path: Path, encoder: Encoder, kind: str, packing: str
) -> None:
    """Nine of ten draws, where as many have a weight of 1; rows of one weight share packed rows."""
    numbers = range(16)  # each fills a record
    ids = np.concatenate([[encoder.bos_id, *[30 + n] * 9, encoder.eos_id] for n in numbers])
    live = np.tile([0] * 5 + [1] * 6, 16) if kind == "chats" else None
    column = Column(ids, np.arange(17) * 11, live, weights=np.array([9.0, 1.0] * 8))
    path = write_set(tmp_path, encoder, column, kind)
    config = settings(packing=packing, row_length=20, tokens_per_step=20, epochs=2000)
    rows = open_rows(path, encoder, config)
    order = order_of(config, rows)
    drawn = order.rows_at(np.arange(10_000))
    lines = rows.batch(range(len(rows))).input_ids_BT[:, 1::10].tolist()
    records = [{*line} & {*range(30, 60)} for line in lines]
    drawn_records = [number for row in drawn.tolist() for number in records[row]]
    assert abs(np.mean([number % 2 == 0 for number in drawn_records]) - 0.9) < 0.01
    resumed = order_of(config, rows).rows_at(np.arange(7001, 10_000))
    assert np.array_equal(drawn[7001:], resumed)
    assert {*range(len(rows))} == {*drawn[: 20 * len(rows)].tolist()}, "none is left out"


def test_chats_of_another_tokenizer_are_refused(tmp_path: Path, encoder: Encoder) -> None:
    directory = chats(tmp_path / "chats", encoder, 20)
    index = {**read_json(directory / "index.json"), "template": digest_of(encoder.jinja)}
    write_json(directory / "index.json", index)
    assert len(open_rows(directory, encoder, settings()))
    for other in ("tokenizer", "template"):
        write_json(directory / "index.json", {**index, other: "e" * 64})
        with pytest.raises(ArtifactError, match=other):
            open_rows(directory, encoder, settings())


def test_a_budget_counts_packed_rows_in_full(tmp_path: Path, encoder: Encoder) -> None:
    """Nine chats of six positions: 16 tokens a step are two rows, which have 12."""
    path = chats(tmp_path / "chats", encoder, 9)
    budget = {"epochs": None, "tokens": 48}
    packed, alone = (settings(packing=packing, **budget) for packing in ("best-fit", "none"))
    assert order_of(packed, open_rows(path, encoder, packed)).steps == 3
    order = order_of(alone, open_rows(path, encoder, alone))
    assert (order.steps, sum(map(order.step_tokens, range(order.steps)))) == (4, 48)


def test_too_many_dropped_records_end_the_stage(tmp_path: Path, encoder: Encoder) -> None:
    unanswered = chats(tmp_path / "chats", encoder, 95, 5), 8
    too_long = pairs(tmp_path / "pairs", encoder, [3] * 95 + [20] * 5), 32
    for path, row_length in (unanswered, too_long):
        config = settings(row_length=row_length, tokens_per_step=32)
        rows = open_rows(path, encoder, config)
        with pytest.raises(DataError, match=r"5 of 100 .*training\.dropped_fraction 0\.01"):
            order_of(config, rows)
        order_of(config.model_copy(update={"dropped_fraction": 0.05}), rows)


def test_budgets_follow_from_the_rows_unless_they_are_set() -> None:
    sizes = {10_000: (4096, 1), 320: (4096, 3), 100: (1280, 3), 20: (256, 3), 9: (256, 7)}
    for rows, (batch, passes) in {**sizes, 1: (256, 10)}.items():
        section = Sft().resolved(rows)
        assert (section.tokens_per_step, section.epochs) == (batch, passes)
        assert rows < 6 or steps_of(section, rows)[0] >= 60
    assert Sft(epochs=3).resolved(100) == Sft(epochs=3, tokens_per_step=1280)
    for rows, tokens in ((43, 5 * 43 * 256), (1406, 5 * 1406 * 256), (1407, 1_800_000)):
        assert Pretrain().resolved(rows) == Pretrain(tokens=tokens)
    assert Pretrain(tokens=5_000_000).resolved(43) == Pretrain(tokens=5_000_000)


@pytest.mark.parametrize("kind", ["documents", "chats"])
@pytest.mark.parametrize("tokens_per_step", [40, 48, 1600])
@pytest.mark.parametrize("more", [{}, {"packing": "none"}, {"mask_intervals": [[1, 4]]}])
def test_too_few_rows_are_known_from_the_shards_as_the_stage_finds_them(
    tmp_path: Path, encoder: Encoder, kind: str, tokens_per_step: int, more: dict[str, Any]
) -> None:
    write = documents if kind == "documents" else partial(chats, answered=6)
    shards = write(tmp_path / "train", encoder)
    make_tokenizer(tmp_path)
    config = settings(tokens_per_step=tokens_per_step, **more)
    refusal: Any = contextlib.nullcontext()
    try:
        order_of(config, open_rows(shards, encoder, config))
    except DataError as error:
        refusal = pytest.raises(DataError, match=f"^{re.escape(str(error))}$")
    with refusal:
        row_counts.check(config, tmp_path, tmp_path)


def test_validation_rows_come_from_the_whole_part(tmp_path: Path, encoder: Encoder) -> None:
    rows: Rows = open_rows(documents(tmp_path, encoder), encoder, settings(), heldout=True)
    for limit, numbers in {1: [0], 2: [0, 2], 5: range(5), 100: range(5)}.items():
        batches = validation_batches(rows, limit, rows_per_batch=2)
        chosen = np.concatenate([batch.input_ids_BT for batch in batches])
        assert np.array_equal(chosen, rows.batch(numbers).input_ids_BT)
        assert max(len(batch.input_ids_BT) for batch in batches) <= 2
