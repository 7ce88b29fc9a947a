"""How a night ends where it trains nothing: no news, damaged files, wrong settings, deadlines."""

import gzip
import io
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.night_files import inbox, list_of
from support.recorded_homes import NONE_SUCH

from ttrain.config import Settings
from ttrain.data import streams
from ttrain.errors import (
    CannotRead,
    DataError,
    Interrupted,
    NothingNew,
    StageFailed,
    TooFewRows,
    UsageError,
)
from ttrain.flows import night_plan, nightly
from ttrain.flows.engine import RunOptions
from ttrain.nightly import records
from ttrain.nightly.records import Champion, Nights
from ttrain.store.artifacts import ArtifactStore

DUE = datetime.fromtimestamp(time.time() - 1, UTC)


@pytest.fixture
def nights(store: ArtifactStore) -> Nights:
    return Nights(store.root, "quickstart")


def run_night(
    settings: Settings,
    store: ArtifactStore,
    out: io.StringIO | None = None,
    slot: datetime | None = None,
) -> nightly.NightResult:
    console = Console(file=out or io.StringIO(), width=200)
    return nightly.run_night(settings, store, console, nightly.RunOptions("none"), slot)


def kept_before(
    nights: Nights, settings: Settings, store: ArtifactStore, champion: Champion | None = None
) -> None:
    """A night that has read all files."""
    with nights.lock():
        nights.begin(list_of(settings, store, champion), None).end_try("kept", "", closed=True)


def trains_nothing(*_: object) -> None:
    raise Interrupted("the test needs no model")


def test_a_night_without_news_asks_nobody_and_leaves_a_record(
    tmp_path: Path, store: ArtifactStore, nights: Nights
) -> None:
    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    kept_before(nights, settings, store)
    result = run_night(settings, store, out)
    assert (result.outcome, result.night) == (
        "nothing-new",
        "night-000002",
    ) and "all 3 files" in out.getvalue()
    assert not (store.root / "mlflow").exists() and not (store.root / "runs").exists()
    with nights.lock():
        assert run_night(settings, store).outcome == "skipped"


def test_a_night_that_reaches_its_deadline_goes_on_in_the_next_slot_with_the_same_stages(
    tmp_path: Path, store: ArtifactStore, nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same keys, so the same work directories and checkpoints, though a file came and a setting changed meanwhile."""
    planned: list[Any] = []

    def stops(plan: Any, _: object, options: Any, *__: object) -> None:
        assert options.stop_at <= time.time()
        planned.append((plan.settings, {stage.name: stage.key for stage in plan}))
        raise Interrupted("stage pretrain: stopped by a signal")  # all that a stage knows

    monkeypatch.setattr(nightly, "run_pipeline", stops)
    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    late = {"deadline_hours": 1e-9}
    for nightly_settings, slot in (
        (late, DUE),
        ({**late, "replay": 0.5, "epochs": 3}, DUE + timedelta(days=1)),
    ):
        now = Settings.model_validate({**settings.model_dump(), "nightly": nightly_settings})
        result = run_night(now, store, out, slot=slot)
        assert (result.outcome, result.night) == (
            "unfinished",
            "night-000001",
        ) and "deadline" in result.reason
        inbox(tmp_path, a="1", later="2")
    [night] = nights.newest_first()
    assert (
        night.is_open
        and night.failures == 0
        and [one["outcome"] for one in night.data["attempts"]] == ["unfinished"] * 2
    )
    assert {one["reason"] for one in night.data["attempts"]} == {"stage pretrain: deadline reached"}
    told = " ".join(out.getvalue().split())
    assert (
        told.count(
            "goes on (unfinished: stage pretrain: deadline reached); with the settings that it began with"
        )
        == 1
    )
    assert planned[0] == planned[1] and planned[0][1]["tokenizer"] is not None


def test_a_plan_says_of_a_killed_night_that_its_process_is_gone(
    tmp_path: Path, store: ArtifactStore, nights: Nights
) -> None:
    settings = inbox(tmp_path, a="1")
    with nights.lock():
        night = nights.begin(list_of(settings, store), None)
    assert (
        "goes on (running: in another process)"
        in night_plan.choose_inputs(settings, store, nights, night)[1]
    )
    night.note_try(process=NONE_SUCH)
    assert (
        "goes on (crashed: its process was killed"
        in night_plan.choose_inputs(settings, store, nights, night)[1]
    )


def test_a_folder_that_is_empty_is_refused_before_there_is_a_champion_and_nothing_new_after_it(
    tmp_path: Path, store: ArtifactStore, nights: Nights
) -> None:
    settings = inbox(tmp_path)
    for _ in range(2):
        with pytest.raises(UsageError, match="no file in that folder ends in"):
            run_night(settings, store)
    [night] = nights.newest_first()
    assert (night.outcome, night.is_open) == ("refused", False), "several in a row are one record"
    settings = inbox(tmp_path, a="1")
    kept_before(nights, settings, store)
    (tmp_path / "inbox/a.jsonl").unlink()
    assert run_night(settings, store).outcome == "nothing-new"


def test_a_file_that_cannot_be_read_fails_the_night_and_the_next_one_tries_again(
    tmp_path: Path, store: ArtifactStore, nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike a damaged file, whose bytes say so, and unlike a wrong setting."""
    settings, inner = inbox(tmp_path, a="1", b="2"), type(store.cache).file
    closed = tmp_path / "inbox" / "b.jsonl"

    def file(cache: Any, path: Path, *rest: Any) -> Any:
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return inner(cache, path, *rest)

    monkeypatch.setattr(nightly, "run_pipeline", trains_nothing)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.cache), "file", file)
        with pytest.raises(
            CannotRead, match=rf"cannot read {closed}, which data.pretrain names: Permission denied"
        ):
            run_night(settings, store)
    [night] = nights.newest_first()
    assert night.outcome == records.FAILED, "not refused: nobody has to correct a setting"
    with pytest.raises(Interrupted):
        run_night(settings, store)
    newest = nights.newest()
    assert newest is not None and newest.is_open and len(newest.frozen.files["pretrain"]) == 2


def test_damaged_files_are_left_out_until_they_are_replaced_and_the_night_reads_the_others(
    tmp_path: Path, store: ArtifactStore, nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def shards(plan: Any, *_: object) -> None:
        settings = plan.settings
        read.append(", ".join(Path(location).stem for location in settings.data.pretrain))
        try:
            for location in settings.data.pretrain:
                with streams.noting_faults(str(location)):
                    list(streams.chunks(str(location)))
        except DataError as error:
            raise StageFailed(
                f"stage shards-pretrain failed: {error}", DataError.__name__, files=error.files
            ) from None
        trains_nothing()

    monkeypatch.setattr(nightly, "run_pipeline", shards)
    settings, out = inbox(tmp_path, a="1", c="3"), io.StringIO()
    packed = gzip.compress(b'{"text": "2"}\n')
    bad = {name: tmp_path / "inbox" / f"{name}.gz" for name in ("b.jsonl", "d.jsonl")}
    bad["b.jsonl"].write_bytes(packed[:-9])
    bad["d.jsonl"].write_bytes(b"\0" * 600)
    with pytest.raises(Interrupted):
        run_night(settings, store, out)
    assert (
        out.getvalue().count("the night goes on without it") == 2
        and "b.jsonl.gz is truncated" in out.getvalue()
    )
    assert read == ["a, b.jsonl, c, d.jsonl", "a, c, d.jsonl", "a, c"]
    [first] = nights.newest_first()
    assert [Path(file["location"]).name for file in first.left_out] == ["b.jsonl.gz", "d.jsonl.gz"]
    with nights.lock():
        first.end_try("kept", "", closed=True)
    nothing = run_night(settings, store)
    assert nothing.outcome == "nothing-new" and nothing.reason.endswith(
        "all 4 files have been read by a night before; left out, damaged until replaced: b.jsonl.gz, d.jsonl.gz"
    )
    assert len(read) == 3
    reading = settings.reading.model_copy(update={"max_line_bytes": 9999})
    frozen, _ = night_plan.choose_inputs(
        settings.model_copy(update={"reading": reading}), store, nights, None
    )
    assert frozen is not None and len(frozen.files["pretrain"]) == 4, "other settings may read them"
    bad["b.jsonl"].write_bytes(packed)
    with pytest.raises(Interrupted):
        run_night(settings, store, out)
    assert "1 new: b.jsonl.gz" in out.getvalue() and read[3:] == ["a, b.jsonl, c"], (
        "without a champion it reads all"
    )


def test_a_night_whose_only_new_file_is_damaged_fails_once(
    tmp_path: Path, store: ArtifactStore, nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_before(nights, inbox(tmp_path, a="1"), store)
    settings, path = inbox(tmp_path, a="1", b="2"), str(tmp_path / "inbox/b.jsonl")

    def fails(*_: object) -> None:
        raise StageFailed(
            f"stage shards-pretrain failed: {path} is binary", DataError.__name__, files=[path]
        )

    monkeypatch.setattr(nightly, "run_pipeline", fails)
    with pytest.raises(StageFailed, match="is binary"):
        run_night(settings, store)
    assert (next(nights.newest_first()).outcome, next(nights.newest_first()).is_open) == (
        "failed",
        False,
    )
    result = run_night(settings, store)
    assert (
        result.outcome == "nothing-new"
        and "left out, damaged until replaced: b.jsonl" in result.reason
    )


@pytest.mark.parametrize("has_new_chats", [False, True])
def test_a_night_of_known_documents_is_closed_as_nothing_new_or_learns_its_new_chats(
    tmp_path: Path,
    store: ArtifactStore,
    nights: Nights,
    champion: Champion,
    monkeypatch: pytest.MonkeyPatch,
    has_new_chats: bool,
) -> None:
    runs: list[set[str]] = []

    def finds_nothing(planned: Any, *_: object) -> None:
        runs.append(set(planned.stages))
        if "shards-pretrain" in runs[-1]:
            raise NothingNew("data.pretrain: 9 of 9 rows are near-duplicates")
        trains_nothing()

    monkeypatch.setattr(night_plan, "plan", lambda graph, *_: list(graph))
    monkeypatch.setattr(nightly, "run_pipeline", finds_nothing)
    monkeypatch.setattr(night_plan, "current_champion", lambda settings, store: champion)
    kept_before(nights, inbox(tmp_path, a="1"), store, champion)
    settings, out = (
        inbox(tmp_path, a="1", copied="1 again", **({"chats": "new"} if has_new_chats else {})),
        io.StringIO(),
    )
    if has_new_chats:
        with pytest.raises(Interrupted):
            run_night(settings, store, out)
        assert len(runs) == 2 and "sft" in runs[1] and "pretrain" not in runs[1]
        assert (
            out.getvalue().count("near-duplicates; the new chats are learnt") == 1
            and next(nights.newest_first()).is_open
        )
        return
    result = run_night(settings, store, out)
    assert (result.outcome, result.night) == ("nothing-new", "night-000002") and len(runs) == 1
    assert out.getvalue().count("nothing new: data.pretrain: 9 of 9 rows are near-duplicates") == 1
    assert run_night(settings, store).reason.startswith("nothing new: all")
    assert len(runs) == 1, "the files count as read"


def test_a_wrong_setting_is_no_failed_try_and_a_retry_of_its_slot_runs(
    tmp_path: Path, store: ArtifactStore, nights: Nights
) -> None:
    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    wrong = settings.model_copy(
        update={"model": settings.model.model_copy(update={"kind": "lama"})}
    )
    for slot in (DUE, None):
        with pytest.raises(UsageError, match=r"model\.kind is 'lama'.*did you mean llama"):
            run_night(wrong, store, out, slot=slot)
    again = run_night(wrong, store, out, slot=DUE + timedelta(days=1))
    assert (again.outcome, again.night) == ("skipped", "night-000001")
    assert again.reason.startswith("night-000001 is still refused: model.kind is 'lama'")
    assert "night-000001 is still refused" in (nights.directory / "skipped.jsonl").read_text()
    [night] = nights.newest_first()
    assert (night.outcome, night.is_open, night.failures, len(night.data["attempts"])) == (
        "refused",
        True,
        0,
        3,
    )
    assert (
        "night-000001 was refused, which does not count as a failed attempt; correct the settings"
        in out.getvalue()
    )
    frozen, reason = night_plan.choose_inputs(settings, store, nights, night)
    assert frozen is not None
    assert (
        frozen.settings["model"]["kind"] == settings.model.kind
        and "with the current settings" in reason
    )


def test_too_few_rows_are_no_failed_try_and_give_the_list_up(
    tmp_path: Path, store: ArtifactStore, nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TooFewRows("pretrain.tokens_per_step is 64000, but the training data gives 5 rows")

    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    monkeypatch.setattr(nightly, "run_pipeline", refuse)  # the stages before it take half a minute
    for slot in (DUE, None):
        with pytest.raises(TooFewRows):
            run_night(settings, store, out, slot=slot)
        inbox(tmp_path, later="2")
    again = run_night(settings, store, out, slot=DUE + timedelta(days=1))
    assert (
        again.outcome == "skipped"
        and "is still refused: pretrain.tokens_per_step is 64000" in again.reason
    )
    for night, files in zip(nights.newest_first(), (2, 2, 1), strict=True):
        assert (night.outcome, night.is_open, night.failures, len(night.data["attempts"])) == (
            "refused",
            False,
            0,
            1,
        )
        assert len(night.frozen.files["pretrain"]) == files, (
            "the next one reads what came meanwhile"
        )
    assert (
        "was refused, which does not count as a failed attempt; the next night takes these files"
        in out.getvalue()
    )


def test_a_file_s_name_is_nothing_that_a_terminal_obeys(
    store: ArtifactStore, known: Nights
) -> None:
    out = io.StringIO()
    running = nightly.NightRun(
        Settings(), store, Console(file=out), known, None, RunOptions("none")
    )
    running.say("1 new: a\x1b[2J[red].jsonl")
    assert out.getvalue() == "1 new: a\\x1b[2J[red].jsonl\n"
