"""The process of `ttrain gate train`: score experts on records, and train a router to choose the best of them."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ttrain.config import Expert, Gate, GateConfig, Reading
from ttrain.core.files import read_json, write_json
from ttrain.core.hashing import digest_of, sha256_file
from ttrain.data import chat, first_rows
from ttrain.data import records as sources
from ttrain.data.records import Conversation, Record, Tally, TextDocument
from ttrain.errors import DataError, Interrupted, UsageError
from ttrain.evaluate import perplexity
from ttrain.evaluate.log_likelihood import beginning
from ttrain.inference import gate_files, loading
from ttrain.inference.evaluated_model import as_evaluated_model
from ttrain.inference.gate_files import GateFile
from ttrain.inference.gate_router import Ids, Router, padded, run_ids
from ttrain.inference.loading import LoadedModel
from ttrain.tasks import user_task
from ttrain.tasks.common import trainable_model
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.train import optim, schedules
from ttrain.train.task import LossSum, UserTask

log = logging.getLogger("ttrain")


def run(config: GateConfig, job: StageContext) -> Figures:
    """Train a gate: write `gate.json` beside the files that the training of a task writes, and return its figures.

    No weight of an expert changes: they are loaded to be scored, and freed before the router is built.
    """
    settings = config.gate
    allow = user_task.allowed(config.allow, Gate)
    ranks = trainable_model.start(job.runtime)
    records = read(config.data, settings)
    losses = score(config.experts, records, settings, job, ranks.device)
    scored = losses.tokens_RE.min(axis=1) > 0
    records, unscored = [*itertools.compress(records, scored)], int((~scored).sum())
    if not records:
        raise DataError("--data: no record has a token to score")
    if unscored:
        log.warning("%d records are left out: an expert has no token to score in them", unscored)
    nats_RE, tokens_RE = losses.nats_RE[scored], losses.tokens_RE[scored]
    texts, best_R = [text_of(record) for record in records], best(nats_RE)
    heldout_R = heldout_flags(records, settings)

    task = Routing(settings, len(config.experts), texts, best_R, heldout_R)
    identity = {
        "experts": ", ".join(map(gate_files.digest, config.experts)),
        "records": content_digest(records),
    }
    router, figures = user_task.train(task, job, ranks, identity=identity, allow=allow)
    assert isinstance(router, Router), "it is what the task builds"

    bytes_R = np.array([bytes_of(record) for record in records])
    chosen_R = router.probabilities([*itertools.compress(texts, heldout_R)]).argmax(-1).numpy()
    routing_figures = routing_metrics(nats_RE[heldout_R], tokens_RE[heldout_R], bytes_R[heldout_R], chosen_R)
    gate_files.check(config.experts)
    digest = sha256_file(job.output / gate_files.WEIGHTS)
    gate_files.write(
        job.output,
        GateFile(format=1, experts=config.experts, settings=settings, figures=routing_figures, router_sha256=digest),
    )
    return {**figures, "routing": routing_figures, "unscored_records": unscored}


@final
class Routing(UserTask):
    """Classify texts by the expert that has the least loss on them, with cross entropy."""

    config: Gate

    def __init__(self, config: Gate, experts: int, texts: Sequence[str], best_R: Ints, heldout_R: Flags) -> None:
        super().__init__(config)
        self._experts = experts
        rows = list(zip(texts, best_R.tolist(), strict=True))
        self._train = Labelled([*itertools.compress(rows, ~heldout_R)], config)
        self._heldout = Labelled([*itertools.compress(rows, heldout_R)], config)

    def rows(self) -> Labelled:
        return self._train

    def heldout_rows(self) -> Labelled:
        return self._heldout

    def collate(self, rows: list[tuple[Ids, int]]) -> tuple[Tensor, Tensor]:
        return padded([ids for ids, _ in rows]), torch.tensor([best for _, best in rows])

    def build_model(self) -> nn.Module:
        return Router(self.config, self._experts)

    def build_optimizer(self, model: nn.Module) -> optim.Optimizers:
        return optim.build(model, self.config.optim)

    def build_scheduler(self, steps: int) -> Callable[[int], float]:
        return schedules.schedule(self.config.schedule, steps)

    def build_criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.CrossEntropyLoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> LossSum:
        ids_BL, best_B = (tensor.to(device) for tensor in batch)
        return LossSum(self.criterion(model(ids_BL), best_B), count=len(best_B))

    def validation_step(self, model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


@final
class Labelled:
    """Texts as the ids that the router reads, each with the number of its best expert."""

    def __init__(self, rows: Sequence[tuple[str, int]], settings: Gate) -> None:
        self._rows, self._settings = rows, settings

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> tuple[Ids, int]:
        text, best = self._rows[row]
        return run_ids(text, self._settings), best


LOSSES = "losses"  # under run/: a file for each expert

MAX_LINE_BYTES = 32 << 20


# --- the records --------------------------------------------------------------------------------------------------------
def read(locations: Sequence[str], settings: Gate) -> list[Record]:
    """The distinct records of the files, each file read by its kind, in a hash order that does not depend on the files.

    Raises DataError where too many rows are bad or none is left, as sharding does.
    """
    records = heapq.nsmallest(
        settings.limit or 2**62, _distinct(locations, settings), key=lambda record: _sort_key(record, settings)
    )
    log.info("%d records of %d files", len(records), len(locations))
    return records


def text_of(record: Record) -> str:
    """The text for the router: that of a document, or what the user says in a chat before the first answer."""
    if isinstance(record, TextDocument):
        return record.text
    before = itertools.takewhile(lambda message: message.role != "assistant", record.messages)
    return "\n".join(message.content for message in before if message.role == "user")


def bytes_of(record: Record) -> int:
    """UTF-8 bytes of what is scored: a document's text, or a chat's answers."""
    if isinstance(record, TextDocument):
        return len(record.text.encode("utf-8"))
    return sum(len(message.content.encode("utf-8")) for message in record.messages if message.role == "assistant")


def heldout_flags(records: Sequence[Record], settings: Gate) -> Flags:
    """Whether each record is held out, by its content, of shape [R]. Raises DataError where all are."""
    contents = {record.content() for out, record in sources.split(iter(records), settings.heldout_fraction) if out}
    is_heldout = np.array([record.content() in contents for record in records])
    if is_heldout.all():
        raise DataError(f"all {len(records)} records went to the held-out part; bring more, or lower heldout_fraction")
    return is_heldout


def content_digest(records: Sequence[Record]) -> str:
    """Digest of the records' contents, wherever they are stored."""
    return digest_of([sources.content_hash(record).hex() for record in records])


def _distinct(locations: Sequence[str], settings: Gate) -> Iterator[Record]:
    tally, content_hashes = Tally(), set[bytes]()
    for location in locations:
        kind = first_rows.kind_of_file(location, Reading())
        parse = sources.parse_conversation if kind == "chats" else sources.document_parser(settings.text_field)
        for record in sources.read([location], parse, tally, MAX_LINE_BYTES, settings.text_field):
            key = sources.content_hash(record)
            if key not in content_hashes:
                content_hashes.add(key)
                yield record
    expected_fields = f"{sources.document_fields(settings.text_field, prefix='')}, or a chat"
    tally.check("--data", settings.rejected_fraction, expected_fields, prefix="")


def _sort_key(record: Record, settings: Gate) -> bytes:
    """The key that orders records: another hash than the one that holds records out."""
    key = settings.seed.to_bytes(8, "big")
    return hashlib.blake2b(sources.content_hash(record), digest_size=16, key=key).digest()


# --- the experts' losses ------------------------------------------------------------------------------------------------
class ExpertLosses(NamedTuple):
    """Summed negative log-likelihood in nats, and scored tokens, both of shape [R, E]."""

    nats_RE: Floats
    tokens_RE: Ints


def score(
    experts: Sequence[Expert], records: Sequence[Record], settings: Gate, job: StageContext, device: torch.device
) -> ExpertLosses:
    """The losses of all experts, which are loaded one after the other; those that an earlier attempt saved are reused.

    Raises Interrupted after a request to stop; the losses of finished experts are saved.
    """
    directory = job.run_directory / LOSSES
    directory.mkdir(exist_ok=True)
    content = content_digest(records)
    losses_by_expert: list[dict[str, Any]] = []
    for number, expert in enumerate(experts):

        def report_progress(scored_fraction: float, scored: int = number) -> None:
            job.progress.update(scored + scored_fraction, len(experts), "experts")
            if job.stop_requested():
                raise Interrupted(f"stopped while scoring the experts: {scored} of {len(experts)} are scored")

        key = digest_of([gate_files.digest(expert), content, settings.row_length, settings.stride])[:16]
        path = directory / f"{key}.json"
        expert_losses = read_json(path)
        if expert_losses is None:
            log.info("scoring %s", expert.reference)
            expert_losses = _scored(expert, records, settings, device, report_progress)
            write_json(path, expert_losses)
        losses_by_expert.append(expert_losses)
    return ExpertLosses(
        np.array([losses["nats"] for losses in losses_by_expert], np.float64).T,
        np.array([losses["tokens"] for losses in losses_by_expert], np.int64).T,
    )


def _scored(
    expert: Expert, records: Sequence[Record], settings: Gate, device: torch.device, report_progress: Callable[[float], None]
) -> Figures:
    speaker = loading.load(gate_files.reference_of(expert), device=device.type)
    if not speaker.can_chat and any(isinstance(record, Conversation) for record in records):
        raise UsageError(f"--data holds chats, but the tokenizer of the expert {expert.reference} has no chat template")
    scores = perplexity.score_each(
        speaker.model,
        _sequences(speaker, records),
        length=settings.row_length,
        stride=settings.stride,
        device=device,
        progress=lambda done, total: report_progress(done / total),
    )
    return {"nats": [score.nats for score in scores], "tokens": [score.tokens for score in scores]}


def _sequences(speaker: LoadedModel, records: Sequence[Record]) -> list[perplexity.Tokens]:
    """(ids, live) of each record: all tokens of a document's text, the answers of a chat."""
    encoder = speaker.encoder
    texts = [record.text for record in records if isinstance(record, TextDocument)]
    talks = [record.messages for record in records if isinstance(record, Conversation)]
    begins = beginning(as_evaluated_model(speaker)) if texts else ()
    documents = iter(encoder.encode(texts))
    chats = iter(chat.encode_chats(encoder, talks) if talks else ())  # not every tokenizer has a template
    sequences: list[perplexity.Tokens] = []
    for record in records:
        if isinstance(record, TextDocument):
            ids = next(documents)
            sequences.append(([*begins, *ids], [False] * len(begins) + [True] * len(ids)))
        else:
            chat_ids, live = next(chats)
            sequences.append((chat_ids.tolist(), live.tolist()))
    return sequences


Floats = npt.NDArray[np.float64]

Ints = npt.NDArray[np.int64]

Flags = npt.NDArray[np.bool_]


def best(nats_RE: Floats) -> Ints:
    """Expert with the least loss on each record, the first of equal ones; of shape [R].

    A record's bytes, and under one tokenizer its tokens, are the same for all experts: its sums compare as its means do.
    """
    best_R: Ints = nats_RE.argmin(axis=1)
    return best_R


def routing_metrics(nats_RE: Floats, tokens_RE: Ints, bytes_R: Ints, chosen_R: Ints) -> Figures:
    """Compute the metrics of records routed to `chosen_R`.

    accuracy            share of records that went to the expert with the least loss
    majority_accuracy   the same if all went to the expert that is best most often: what the accuracy must exceed
    loss_routed         mean loss of the records as routed
    loss_oracle         the same, each by its best expert
    loss_best_single    the same, all by the one expert that is best for them together
    gain                share of the way from `loss_best_single` to `loss_oracle`; None if the two are equal
    unit                "nats per token"; "bits per byte" if the experts tokenize the records differently
    experts             of each: its loss on all records, the share of them it is best at, and the share routed to it
    """
    records, experts = nats_RE.shape
    best_R, rows = best(nats_RE), np.arange(records)
    same_tokens = bool((tokens_RE == tokens_RE[:, :1]).all())
    size = float(tokens_RE[:, 0].sum()) if same_tokens else float(bytes_R.sum()) * math.log(2)
    losses_E = nats_RE.sum(axis=0) / size
    routed, oracle = float(nats_RE[rows, chosen_R].sum() / size), float(nats_RE[rows, best_R].sum() / size)
    best_often_E, chosen_often_E = (np.bincount(choice, minlength=experts) for choice in (best_R, chosen_R))
    single = float(losses_E.min())
    return {
        "records": records,
        "unit": "nats per token" if same_tokens else "bits per byte",
        "accuracy": float((best_R == chosen_R).mean()),
        "majority_accuracy": float(best_often_E.max() / records),
        "loss_routed": routed,
        "loss_oracle": oracle,
        "loss_best_single": single,
        "gain": (single - routed) / (single - oracle) if single > oracle else None,
        "experts": [
            {"loss": float(loss), "best_share": float(often / records), "routed_share": float(chosen / records)}
            for loss, often, chosen in zip(losses_E, best_often_E, chosen_often_E, strict=True)
        ],
    }
