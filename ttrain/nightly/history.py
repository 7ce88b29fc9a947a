"""The last nights as rows of a table: what each was trained on and lost, and its decision."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from ttrain.core.files import JsonDict
from ttrain.core.text import ABSENT, counted, first_of, format_time
from ttrain.errors import UsageError
from ttrain.evaluate.task_result import not_judged
from ttrain.nightly.records import NightRecord, Nights
from ttrain.reports.summary import LOST
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.results import ReplayResult, ShardsResult, TrainingResult
from ttrain.tasks import REPLAY, SHARDS_PRETRAIN

HEADER = (
    "night",
    "began",
    "outcome",
    "files",
    "new documents",
    "new tokens",
    "chats",
    "metric",
    "challenger",
    "champion",
    "lost",
    "why",
)
COUNTS = ("documents", "tokens", "chats")  # of what a night learnt, in the table


def learnt_of(artifacts: Artifacts, chats: Artifact | None) -> dict[str, int]:
    """Counts of what a night was trained on; of its conversations alone if no document was new."""
    shards, pretrain, replay = (
        artifacts.get(name) for name in (SHARDS_PRETRAIN.name, "pretrain", REPLAY.name)
    )
    of_chats = {"chats": ShardsResult.of(chats.result).train.rows} if chats else {}
    if shards is None:
        return of_chats
    made = ShardsResult.of(shards.result)
    tally = made.rows.get("train", {})
    tokens = (TrainingResult.of(pretrain.result).tokens or 0) if pretrain else 0
    sample = ReplayResult.of(replay.result) if replay else ReplayResult()
    return {
        "documents": made.train.rows,
        "tokens": made.train.tokens,
        "left_out": sum(sum(tally.get(group, {}).values()) for group in LOST),
        "read_tokens": tokens,
        "replayed_tokens": round(tokens * sample.share) if sample.records else 0,
        **of_chats,
    }


def history(home: Path, name: str | None, most: int) -> tuple[str, list[JsonDict]]:
    """(name of the pipeline, its last nights, newest first). Raises UsageError."""
    names = sorted(path.name for path in (home / "nightly").glob("*") if path.is_dir())
    chosen = name or (names[0] if len(names) == 1 else "")
    if not names:
        raise UsageError("there was no night yet; `ttrain pipeline run nightly` runs one")
    if chosen not in names:
        raise UsageError(
            f"--name is {name or 'not set'}, but there are nights of {', '.join(names)}; "
            "choose one of these"
        )
    return chosen, [
        of_record(night.as_it_is_now())
        for night in islice(Nights(home, chosen).newest_first(), most)
    ]


def of_record(night: NightRecord) -> JsonDict:
    """A night as `models history --json` prints it."""
    data = night.data
    decision = night.data.get("decision") or {}
    frozen = data["inputs"]
    tries = data["attempts"]
    files = (file["location"] for listed in frozen["files"].values() for file in listed)
    return {
        "night": night.name,
        "began": tries[0]["began"],
        "outcome": night.outcome,
        "reason": data["reason"],
        "files": list(dict.fromkeys(files)),
        "learnt": data.get("learnt", {}),
        "champion": frozen["champion"] and frozen["champion"]["version"],
        "version": data.get("version"),
        "run": tries[-1].get("run"),
        "metric": decision.get("metric", ""),
        "figure": decision.get("challenger"),
        "champion_figure": decision.get("champion"),
        "lost": list(decision.get("lost") or ()),
        "texts": [_text(text) for text in data.get("texts") or ()],
    }


def _text(text: JsonDict) -> JsonDict:
    names = ("name", "kind", "records", "challenger", "champion", "lost")
    difference = text["difference"]
    change = None if difference is None else -difference / (abs(text["champion"]) or 1.0) + 0.0
    return {**{name: text[name] for name in names}, "change": change}


def row(night: JsonDict) -> tuple[str, ...]:
    """A night as a row of the table below HEADER."""
    learnt = night["learnt"]
    promoted = f" as version {night['version']}" if night["outcome"] == "promoted" else ""
    return (
        night["night"],
        format_time(night["began"]),
        night["outcome"] + promoted,
        f"{len(night['files']):,}",
        *(f"{learnt[name]:,}" if name in learnt else ABSENT for name in COUNTS),
        night["metric"] or ABSENT,
        *(
            ABSENT if value is None else f"{value:.4f}"
            for value in (night["figure"], night["champion_figure"])
        ),
        lost_text(night),
        night["reason"],
    )


def lost_text(night: JsonDict) -> str:
    """The texts that became worse beyond the bound, else the one that became worse by most."""
    if night["lost"]:
        return first_of(night["lost"], 3)
    texts = night["texts"]
    if not texts:
        return ABSENT
    if few := not_judged(max(text["records"] for text in texts)):
        return few
    judged = [text for text in texts if not not_judged(text["records"])]
    worst = max(judged, key=lambda text: text["change"] or 0.0)
    change = worst["change"] or 0.0
    return f"nothing; worst: {worst['name']} {change:+.1%}" if change > 0 else "nothing"


def summary_line(nights: Sequence[JsonDict]) -> str:
    """Numbers of nights by outcome, and what the promoted models were trained on."""
    promoted = [night["learnt"] for night in nights if night["outcome"] == "promoted"]
    documents = sum(learnt.get("documents", 0) for learnt in promoted)
    tokens = sum(learnt.get("tokens", 0) for learnt in promoted)
    counts = Counter(night["outcome"] for night in nights)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return (
        f"{counted(len(nights), 'night')}: {outcomes}; promoted models learnt {documents:,} "
        f"documents, {tokens:,} tokens"
    )
