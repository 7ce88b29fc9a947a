"""The held-out documents of all nights: where those of earlier nights are, and which night brought which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ttrain.config import Settings
from ttrain.errors import ArtifactError
from ttrain.evaluate.forgetting import BestFigure
from ttrain.evaluate.promotion import metric_of_texts
from ttrain.nightly.records import COMPLETED, Champion, NightRecord
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

BEFORE = "before the nights"  # the name of held-out documents that no night brought
UNNAMED = "earlier nights"  # of those in a record that does not name them


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


def names_by_night(heldout: Artifact, names: Sequence[str]) -> dict[str, list[str]]:
    """What identifies the held-out records in scores, by the night that brought them, the oldest first.

    `names`: of the nights. Empty for a set of one night alone. Raises ArtifactError if the set is damaged.
    """
    from ttrain.tasks.heldout import read_nights  # loads what reads shards

    groups = read_nights(heldout.path)
    unnamed = [UNNAMED] * max(0, len(groups) - len(names))
    by_night: dict[str, list[str]] = {}
    for name, group in zip([*unnamed, *names[max(0, len(names) - len(groups)) :]], groups, strict=True):
        by_night.setdefault(name, []).extend(group)
    return by_night


def best_figures(nights: Iterable[NightRecord], metric: str) -> dict[str, BestFigure]:
    """By the label of a text, the best figure of a champion, as the records tell it; `nights` are the newest first,
    lower figures are better.

    Figures of another metric, of sources, whose text grows, and of a text that has other records by now tell nothing; so
    do texts that were judged together.
    """
    best: dict[str, BestFigure] = {}

    def take(text: Mapping[str, Any], value: float | None, version: str) -> None:
        name, records = text["name"], text["records"]
        known = best.get(name)
        if value is not None and (known is None or (known.records == records and known.value > value)):
            best[name] = BestFigure(value, f"version {version}", records)

    for night in nights:
        decision, champion = night.data.get("decision") or {}, night.frozen.champion
        if night.outcome not in COMPLETED or metric_of_texts(str(decision.get("metric"))) != metric:
            continue
        for text in night.data.get("texts") or ():
            if text["kind"] != "night":
                continue
            if night.outcome == "promoted":  # its challenger is the champion from then on
                take(text, text["challenger"], night.data["version"])
            if champion is not None:
                take(text, text["champion"], champion.version)
    return best
