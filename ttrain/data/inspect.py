"""Show shards and tokenizers: ids as pieces of text, with whether the loss counts each."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ttrain.core.terminal import escaped
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, Rows
from ttrain.data.pair_rows import PairBatch, answer_rows
from ttrain.data.record_rows import DocumentRows
from ttrain.data.shards import INDEX, ShardSet
from ttrain.errors import ArtifactError, UsageError
from ttrain.store.artifacts import ArtifactStore


@dataclass
class TokenView:
    """A row or a record, token by token; all lists have the same length.

    segments    which record of the row, from 0; prompt and answers of a pair are several
    pieces      the text that each token completes
    headings    what each segment is, of pairs
    """

    number: int
    ids: list[int]
    live: list[bool]
    segments: list[int]
    pieces: list[str]
    headings: list[str] = field(default_factory=list)


class Span(NamedTuple):
    """Part of a line, of tokens that are alike in `live` and `special`."""

    text: str
    live: bool
    special: bool


def shards_at(path: Path) -> Path:
    """The shards at a path: the directory, or `train` in it. Raises UsageError."""
    directory = path if (path / INDEX).is_file() else path / "train"
    if not (directory / INDEX).is_file():
        raise UsageError(
            f"{path} holds no shards; name a stage such as shards-sft, or a directory with {INDEX}"
        )
    return directory


def encoder_of(shards: ShardSet, store: ArtifactStore) -> Encoder:
    """The tokenizer of a set of shards, by its digest. Raises UsageError if it is gone."""
    digest = shards.index["tokenizer"]
    for artifact in store.artifacts("tokenizer"):
        with contextlib.suppress(ArtifactError):  # not a tokenizer
            encoder = Encoder(artifact.path, fast=False)
            if encoder.digest == digest:
                return encoder
    raise UsageError(
        f"the tokenizer {digest[:12]} of the shards in {shards.directory} is not in {store.root}"
    )


def rows_of(shards: ShardSet, encoder: Encoder, row_length: int) -> Rows:
    """The packed rows that training with this row length would use."""
    return (
        DocumentRows(shards, row_length, encoder.pad_id)
        if shards.index["kind"] == "documents"
        else answer_rows(shards, row_length, encoder)
    )


def show_row(rows: Rows, number: int, tokenizer: Tokenizer) -> TokenView:
    """The tokens of a packed row, and the target after the last one, without padding."""
    batch = rows.batch([number])
    shown = TokenView(number, [], [], [], [])
    for segment, (start, end) in enumerate(batch.spans(0)):
        ids = batch.input_ids_BT[0, start:end].tolist()
        targets = batch.labels_BT[0, start:end].tolist()
        live = [False, *(target != IGNORE for target in targets)]
        # An input in no position of this record: the end of a chat, or the next row's first.
        if live[-1]:
            ids.append(targets[-1])
        shown.ids += ids
        shown.live += live[: len(ids)]
        shown.segments += [segment] * len(ids)
        shown.pieces += pieces_of(tokenizer, ids)
        if isinstance(batch, PairBatch):
            answer = int(batch.answers_BT[0, start:end].max())
            name = {0: "prompt", 1: "chosen", -1: "rejected"}[
                int(batch.ratings_A[answer]) if answer >= 0 else 0
            ]
            shown.headings.append(f"{name} of pair {batch.segments_BT[0, start]} of the row")
    return shown


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One piece of text per id; joined, they are the decoded text with its special tokens."""
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer, number) or "" for number in ids]
    if pieces and not pieces[-1]:  # the ids end within a character
        whole = tokenizer.decode(list(ids), skip_special_tokens=False)
        pieces[-1] = whole[len("".join(pieces)) :]
    return pieces


def lines(shown: TokenView, segment: int, special: frozenset[int]) -> Iterator[list[Span]]:
    """The record `segment` as lines, broken after each newline.

    Unprintable characters are escaped, so that text cannot control the terminal.
    """
    line: list[Span] = []
    for number, live, which, piece in zip(
        shown.ids, shown.live, shown.segments, shown.pieces, strict=True
    ):
        for part in piece.splitlines(keepends=True) if which == segment else ():
            line.append(Span(escaped(part), live, number in special))
            if part.endswith("\n"):
                yield line
                line = []
    if line:
        yield line
