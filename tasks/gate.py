"""The process of `ttrain gate train`: score experts and train a router to pick the best."""

import itertools
import logging
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from ttrain.config import Expert, Gate, GateJob, Reading
from ttrain.core.files import write_json
from ttrain.core.hashing import sha256_file
from ttrain.data import chat, first_rows, json_rows
from ttrain.data import records as sources
from ttrain.errors import DataError, Interrupted, UsageError
from ttrain.evaluate import perplexity
from ttrain.evaluate.items import sampled
from ttrain.inference import gate_files, loading
from ttrain.inference.gate_router import Router, padded, run_ids
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.train import precision
from ttrain.train.distributed import share_cores

Floats = npt.NDArray[np.float64]

log = logging.getLogger("ttrain")


def run(config: GateJob, job: StageContext) -> Figures:
    """Train a gate: write its router and `gate.json`, and return its metrics.

    Experts are only scored, and freed before the router is built.
    """
    settings = config.gate
    device = precision.resolve_device(job.runtime.device, share_cores(job.runtime.threads))
    records = read(config.data, settings)
    nats_RE = score(config.experts, records, settings, job, device)
    texts = [text_of(record) for record in records]
    heldout_R = heldout_flags(records, settings)
    router = train(settings, [*itertools.compress(texts, ~heldout_R)], nats_RE[~heldout_R])
    chosen_R = router.probabilities([*itertools.compress(texts, heldout_R)]).argmax(-1).numpy()
    heldout_bytes = sum(bytes_of(record) for record in itertools.compress(records, heldout_R))
    routing = routing_metrics(nats_RE[heldout_R], heldout_bytes, chosen_R)
    weights = job.output / gate_files.WEIGHTS
    save_file(router.state_dict(), weights)
    gate = gate_files.GateFile(
        experts=config.experts,
        settings=settings,
        figures=routing,
        router_sha256=sha256_file(weights),
    )
    write_json(
        job.output / gate_files.GATE, gate.model_dump(mode="json")
    )  # last, since it makes the directory a gate
    return {"routing": routing, "heldout_rows": int(heldout_R.sum())}


def train(settings: Gate, texts: Sequence[str], nats_RE: Floats) -> Router:
    """Train a router to predict the expert with the least loss, on the CPU in seconds."""
    torch.manual_seed(settings.seed)
    router = Router(settings, nats_RE.shape[1])
    rows = [run_ids(text, settings) for text in texts]
    best_R = torch.from_numpy(
        nats_RE.argmin(axis=1)
    )  # bytes and tokens of a record are the same for all experts
    steps = math.ceil(settings.epochs * len(rows) / settings.rows_per_step)
    optimizer = torch.optim.AdamW(
        router.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = itertools.chain.from_iterable(
        torch.randperm(len(rows)).tolist() for _ in itertools.count()
    )
    for _ in range(steps):
        batch = [*itertools.islice(order, settings.rows_per_step)]
        loss = torch.nn.functional.cross_entropy(
            router(padded([rows[row] for row in batch])), best_R[batch]
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        schedule.step()
    return router


# --- the records ----------------------------------------------------------------------------------


def read(locations: Sequence[str], settings: Gate) -> list[sources.Record]:
    """The distinct records of the files, in an order that does not depend on the files.

    Raises DataError if too many rows are bad or none is left.
    """
    tally = json_rows.Tally()
    by_content: dict[bytes, sources.Record] = {}
    for location in locations:
        parse = (
            sources.parse_conversation
            if first_rows.kind_of_file(location, Reading()) == "chats"
            else sources.document_parser(settings.text_field)
        )
        for record in sources.read(
            [location], parse, tally, json_rows.MAX_LINE_BYTES, settings.text_field
        ):
            by_content[sources.content_hash(record)] = record
    expected_fields = f"{sources.document_fields(settings.text_field, prefix='')}, or a chat"
    tally.check("--data", settings.rejected_fraction, expected_fields, prefix="")
    records = sampled(
        [by_content[key] for key in sorted(by_content)], settings.limit, settings.seed
    )
    log.info("%d records of %d files", len(records), len(locations))
    return records


def text_of(record: sources.Record) -> str:
    """The router's text: of a document, or of the user before the first answer."""
    if isinstance(record, sources.TextDocument):
        return record.text
    before = itertools.takewhile(lambda message: message.role != "assistant", record.messages)
    return "\n".join(message.content for message in before if message.role == "user")


def bytes_of(record: sources.Record) -> int:
    """UTF-8 bytes of the scored text: a document, or a chat's answers."""
    if isinstance(record, sources.TextDocument):
        return len(record.text.encode("utf-8"))
    return sum(
        len(message.content.encode("utf-8"))
        for message in record.messages
        if message.role == "assistant"
    )


def heldout_flags(records: Sequence[sources.Record], settings: Gate) -> npt.NDArray[np.bool_]:
    """Whether each record is held out, by its content, [R]. Raises DataError for all or none."""
    is_heldout = np.array(
        [sources.position(record) < settings.heldout_fraction for record in records]
    )
    if is_heldout.all() or not is_heldout.any():
        raise DataError(
            f"{is_heldout.sum()} of {len(records)} records went to the held-out part, but "
            f"router and metrics need some "
            f"each; bring more, or change heldout_fraction"
        )
    return is_heldout


# --- the experts' losses --------------------------------------------------------------------------


def score(
    experts: Sequence[Expert],
    records: Sequence[sources.Record],
    settings: Gate,
    job: StageContext,
    device: torch.device,
) -> Floats:
    """Summed negative log-likelihoods of all experts in nats, [R, E]. Raises Interrupted."""
    nats_ER = []
    for number, expert in enumerate(experts):

        def report_progress(done: int, total: int, scored: int = number) -> None:
            job.progress.update(scored + done / total, len(experts), "experts")
            if job.stop_requested():
                raise Interrupted(
                    f"stopped while scoring the experts: {scored} of {len(experts)} are scored"
                )

        log.info("scoring %s", expert.reference)
        model = loading.load(gate_files.reference_of(expert), device=device.type)
        if not model.can_chat and any(
            isinstance(record, sources.Conversation) for record in records
        ):
            raise UsageError(
                f"--data holds chats, but the tokenizer of the expert {expert.reference} has "
                f"no chat template"
            )
        # Trained on: all tokens of a document's text, the answers of a chat
        sequences = [
            perplexity.text_tokens(model, model.encoder.encode([record.text])[0])
            if isinstance(record, sources.TextDocument)
            else chat.encode_chat(model.encoder, record.messages)
            for record in records
        ]
        scores = perplexity.score_items(settings, model, sequences, report_progress)
        nats_ER.append([score.nats for score in scores])
    return np.array(nats_ER, np.float64).T


# --- the figures ----------------------------------------------------------------------------------


def routing_metrics(
    nats_RE: Floats, heldout_bytes: int, chosen_R: npt.NDArray[np.int64]
) -> Figures:
    """Metrics of records routed to `chosen_R`; losses are in bits per byte.

    accuracy           share of records whose expert has the least loss
    majority_accuracy  accuracy of always choosing the most frequent best expert
    loss_routed        mean loss as routed
    loss_oracle        mean loss, each record by its best expert
    loss_best_single   mean loss of the best single expert
    gain               share of the way from `loss_best_single` to `loss_oracle`; None if equal
    experts            of each: its loss, the share it is best at, the share routed to it
    """
    records, experts = nats_RE.shape
    best_R = nats_RE.argmin(axis=1)
    bits_RE = nats_RE / (heldout_bytes * math.log(2))
    losses_E = bits_RE.sum(axis=0)
    routed = float(bits_RE[np.arange(records), chosen_R].sum())
    oracle = float(bits_RE.min(axis=1).sum())
    best_often_E = np.bincount(best_R, minlength=experts)
    single = float(losses_E.min())
    return {
        "records": records,
        "accuracy": float((best_R == chosen_R).mean()),
        "majority_accuracy": float(best_often_E.max() / records),
        "loss_routed": routed,
        "loss_oracle": oracle,
        "loss_best_single": single,
        "gain": (single - routed) / (single - oracle) if single > oracle else None,
        "experts": [
            {
                "loss": float(loss),
                "best_share": float(often / records),
                "routed_share": float((chosen_R == expert).mean()),
            }
            for expert, (loss, often) in enumerate(zip(losses_E, best_often_E, strict=True))
        ],
    }
