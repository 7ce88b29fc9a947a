"""What became of the last nights: what each learnt and lost, promoted or not and why, as rows of a table.

Reads the nights' own records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ttrain.core.text import ABSENT, counted, first_of, format_time
from ttrain.errors import UsageError
from ttrain.evaluate.few_records import not_judged
from ttrain.nightly.records import NightRecord, Nights
from ttrain.stages import REPLAY, SHARDS_PRETRAIN
from ttrain.store.layout import Artifact, Artifacts

NIGHTS = 30  # that are shown


def learnt_of(artifacts: Artifacts, chats: Artifact | None) -> dict[str, int]:
    """What a night learnt, for its record: new documents and their tokens, rows that were left out, the tokens that the
    training read, those of them that were learnt before, and the conversations in `chats`, shards that SFT learnt.
    Without those of documents where the base model stays."""
    shards, pretrain, replay = (artifacts.get(name) for name in (SHARDS_PRETRAIN.name, "pretrain", REPLAY.name))
    of_chats = {"chats": chats.result.get("train", {}).get("rows", 0)} if chats else {}
    if shards is None:
        return of_chats
    train, tally = shards.result.get("train", {}), shards.result.get("rows", {}).get("train", {})
    left_out = sum(sum(tally.get(kind, {}).values()) for kind in ("skipped", "rejected"))
    read, sample = (one.result if one else {} for one in (pretrain, replay))
    return {
        "documents": train.get("rows", 0),
        "tokens": train.get("tokens", 0),
        "left_out": left_out,
        "read_tokens": read.get("tokens", 0),
        "replayed_tokens": round(read.get("tokens", 0) * sample.get("share", 0.0)) if sample.get("records") else 0,
        **of_chats,
    }


@dataclass(frozen=True)
class TextHistory:
    """The figures on one held-out text in one night. `change` is the loss as a share of the champion's figure; below 0: a
    gain."""

    name: str
    kind: str
    records: int
    challenger: float | None
    champion: float | None
    change: float | None
    lost: bool

    @property
    def not_judged(self) -> str:
        """Why nothing is said of the change: the text has too few records. A loss that was found counts on few, too."""
        return "" if self.lost else not_judged(self.records)


@dataclass(frozen=True)
class NightHistory:
    """One night."""

    night: str
    began: float | None
    outcome: str
    reason: str
    files: tuple[str, ...]
    learnt: Mapping[str, int]
    champion: str | None
    version: str | None
    run: str | None
    metric: str
    figure: float | None
    champion_figure: float | None
    lost: tuple[str, ...] = ()
    texts: tuple[TextHistory, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """What `models history --json` prints for it."""
        return asdict(self)

    @property
    def worst(self) -> TextHistory | None:
        """The text on which the challenger is worse than the champion by most; None where it is on none."""
        worse = [text for text in self.texts if not text.not_judged and text.change is not None and text.change > 0]
        return max(worse, key=lambda text: text.change or 0.0, default=None)


def history(home: Path, name: str | None, most: int = NIGHTS) -> tuple[str, list[NightHistory]]:
    """(name of the pipeline, its last nights, the newest first). Raises UsageError where there is none, or no single one."""
    names = sorted(path.name for path in (home / "nightly").glob("*") if path.is_dir())
    if name is None and len(names) != 1:
        if not names:
            raise UsageError("there was no night yet; `ttrain pipeline run nightly` runs one")
        raise UsageError(f"there are nights of {', '.join(names)}; choose one with --name, for example --name {names[0]}")
    if name is not None and name not in names:
        raise UsageError(f"there was no night of {name} yet; there are nights of {', '.join(names) or 'no pipeline'}")
    chosen = name or names[0]
    return chosen, [of_record(night.as_it_is_now()) for night in islice(Nights(home, chosen).newest_first(), most)]


def of_record(night: NightRecord) -> NightHistory:
    """A night as its record tells it."""
    data, decision = night.data, night.data.get("decision") or {}
    frozen, tries = data["frozen"], data["tries"]
    files = (file["location"] for listed in frozen["files"].values() for file in listed)
    return NightHistory(
        night=night.name,
        began=tries[0]["began"],
        outcome=night.outcome,
        reason=data["reason"] or tries[-1].get("reason", ""),
        files=tuple(dict.fromkeys(files)),
        learnt=data.get("learnt", {}),
        champion=frozen["champion"] and frozen["champion"]["version"],
        version=data.get("version"),
        run=data.get("run") or tries[-1].get("run"),
        metric=decision.get("metric", ""),
        figure=decision.get("challenger"),
        champion_figure=decision.get("champion"),
        lost=tuple(decision.get("lost") or ()),
        texts=tuple(_text(text) for text in data.get("texts") or ()),
    )


def _text(text: Mapping[str, Any]) -> TextHistory:
    names = ("name", "kind", "records", "challenger", "champion", "lost")
    champion, difference = text["champion"], text["difference"]
    change = None if champion is None or difference is None else -difference / (abs(champion) or 1.0) + 0.0
    return TextHistory(**{name: text[name] for name in names}, change=change)


HEADER = (
    "night", "began", "outcome", "files", "new documents", "new tokens", "chats", "metric", "challenger", "champion", "lost",
    "why",
)  # fmt: skip


def row(night: NightHistory) -> tuple[str, ...]:
    """A night as a row of the table below HEADER."""
    learnt = night.learnt
    return (
        night.night,
        format_time(night.began),
        night.outcome + (f" as version {night.version}" if night.outcome == "promoted" else ""),
        f"{len(night.files):,}",
        *(f"{learnt[figure]:,}" if figure in learnt else ABSENT for figure in ("documents", "tokens", "chats")),
        night.metric or ABSENT,
        ABSENT if night.figure is None else f"{night.figure:.4f}",
        ABSENT if night.champion_figure is None else f"{night.champion_figure:.4f}",
        lost_text(night),
        night.reason,
    )


def lost_text(night: NightHistory) -> str:
    """What the night lost: the texts beyond the bound; where there is none, also the one that became worse by most."""
    if night.lost:
        return first_of(night.lost, 3)
    if not night.texts:
        return ABSENT
    most = max(night.texts, key=lambda text: text.records)
    if most.not_judged:
        return most.not_judged
    return "nothing" + (f"; worst: {night.worst.name} {night.worst.change:+.1%}" if night.worst else "")


def summary_line(nights: Sequence[NightHistory]) -> str:
    """How many nights came to what, and what the champion learnt in them."""
    promoted = [night for night in nights if night.outcome == "promoted"]
    documents, tokens = (sum(night.learnt.get(figure, 0) for night in promoted) for figure in ("documents", "tokens"))
    kinds = {outcome: sum(night.outcome == outcome for night in nights) for outcome in [n.outcome for n in nights]}
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in kinds.items())
    return f"{counted(len(nights), 'night')}: {outcomes}; promoted models learnt {documents:,} documents, {tokens:,} tokens"
