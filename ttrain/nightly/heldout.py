"""The held-out documents of all nights: where those of earlier nights are, and which night brought which."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ttrain.config import Settings
from ttrain.errors import ArtifactError
from ttrain.evaluate.forgetting import BestFigure
from ttrain.evaluate.promotion import metric_of_texts
from ttrain.nightly.records import COMPLETED, Champion, NightRecord
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

BEFORE = "before the nights"  # the name of held-out documents that no night brought


class EarlierHeldout(NamedTuple):
    """Reference ("stage/key") of the held-out documents of earlier nights, and the names of these nights, oldest first.

    `note`: why there are none, where a user may have expected some.
    """

    reference: str | None = None
    nights: tuple[str, ...] = ()
    note: str = ""


def earlier_heldout(
    champion: Champion | None, nights: Iterable[NightRecord], store: ArtifactStore, settings: Settings
) -> EarlierHeldout:
    """The earlier held-out documents that both models are also evaluated on, if any.

    Those of the last completed night for which the user named none, else those of the champion's base model. They are not
    used if the user has changed the held-out share: some may have been learnt since. Where the user names the held-out
    documents, nothing is measured on them, but they are not learnt, either: later nights may use them again.
    Raises ArtifactError where those of a night are gone: without them nothing would show what is forgotten.
    """
    is_named = bool(settings.data.pretrain_heldout)
    for night in nights:
        if reference := night.heldout:
            reading = night.frozen.settings.get("reading", {})
            if (before := reading.get("heldout_fraction")) != (now := settings.reading.heldout_fraction):
                note = f"reading.heldout_fraction was {before} and is {now}: nothing is measured on earlier nights' text"
                return EarlierHeldout(note=note)
            if is_named:
                return EarlierHeldout(reference)
            find_heldout(store, reference, night.name)
            return EarlierHeldout(reference, tuple(night.data.get("heldout_nights") or ()))
    base = store.find("pretrain", champion.keys["pretrain"]) if champion and "pretrain" in champion.keys else None
    shards = store.input_of(base, "shards")
    return EarlierHeldout(f"{shards.stage}/{shards.key}", () if is_named else (BEFORE,)) if shards else EarlierHeldout()


def find_heldout(store: ArtifactStore, reference: str, night: str) -> Artifact:
    """The held-out documents of this "stage/key" reference. Raises ArtifactError where they are gone or damaged."""
    advice = (
        "without it nothing shows what a model forgets. Restore it from a copy of the home, or name held-out documents with "
        "data.pretrain_heldout"
    )
    return need_artifact(store, reference, f"{night} measures its models on the held-out documents", advice)


def need_artifact(store: ArtifactStore, reference: str, use: str, advice: str) -> Artifact:
    """The artifact of a "stage/key" reference. Raises ArtifactError, which tells its use and the advice, where it is gone or
    damaged."""
    stage, _, key = reference.partition("/")
    if artifact := store.find(stage, key):
        return artifact
    raise ArtifactError(f"{use} {stage} {key[:12]}, which is not in {store.root / 'store'}, or is damaged; {advice}")


def best_figures(nights: Iterable[NightRecord], metric: str) -> dict[str, BestFigure]:
    """By the label of a text, the best figure of a champion, as the records tell it; `nights` are the newest first,
    lower figures are better.

    Figures of another metric, of sources, whose text grows, and of a text that has other records by now tell nothing; so
    do texts that were judged together.
    """
    best: dict[str, BestFigure] = {}
    for night in nights:
        decision, champion = night.data.get("decision") or {}, night.frozen.champion
        if night.outcome not in COMPLETED or metric_of_texts(str(decision.get("metric"))) != metric:
            continue
        for text in night.data.get("texts") or ():
            values = {champion.version: text["champion"]} if champion else {}
            if night.outcome == "promoted":  # its challenger is the champion from then on
                values = {night.data["version"]: text["challenger"], **values}
            for version, value in values.items():
                known = best.get(text["name"])
                is_best = known is None or (known.records == text["records"] and known.value > value)
                if text["kind"] == "night" and value is not None and is_best:
                    best[text["name"]] = BestFigure(value, f"version {version}", text["records"])
    return best
