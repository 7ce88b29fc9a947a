"""How a night ends where it trains nothing: no news, damaged files, wrong settings, deadlines."""

from __future__ import annotations

import gzip
import io
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.night_files import inbox, list_of
from support.recorded_homes import NONE_SUCH

from ttrain.config import Settings
from ttrain.errors import CannotRead, DataError, Interrupted, NothingNew, StageFailed, TooFewRows, UsageError
from ttrain.flows import night_plan
from ttrain.nightly import records
from ttrain.nightly.records import Champion, Nights
from ttrain.store.artifacts import ArtifactStore


def test_a_night_without_news_asks_nobody_and_leaves_a_record(tmp_path: Path, store: ArtifactStore, known: Nights) -> None:
    from rich.console import Console

    from ttrain.flows.nightly import run_night

    settings, known = inbox(tmp_path, a="1"), Nights(store.root, "quickstart")
    with known.lock():
        known.begin(list_of(settings, store), None).end_try("kept", "", closed=True)
    out = io.StringIO()
    result = run_night(settings, store, Console(file=out), engine="none")
    assert (result.outcome, result.night) == ("nothing-new", "night-000002") and "all 3 files" in out.getvalue()
    assert not (store.root / "mlflow").exists() and not (store.root / "runs").exists()
    with known.lock():
        assert run_night(settings, store, Console(file=out), engine="none").outcome == "skipped"


def test_a_night_that_reaches_its_deadline_goes_on_in_the_next_slot_with_the_same_stages(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same keys, so the same work directories and checkpoints, though a file came and a setting changed meanwhile."""
    from rich.console import Console

    from ttrain.flows import nightly

    planned: list[Any] = []

    def stops(
        _: str, settings: Settings, store: ArtifactStore, stages: Any, *__: object, stop_at: float, **___: Any
    ) -> None:
        assert stop_at <= time.time()
        planned.append((settings, {stage.stage.name: stage.key for stage in stages}))
        raise Interrupted("stage pretrain: stopped by a signal")  # all that a stage knows

    monkeypatch.setattr(nightly, "run_pipeline", stops)
    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    late = {"deadline_hours": 1e-9}
    due = datetime.fromtimestamp(time.time() - 1, UTC)
    for nightly_settings, slot in ((late, due), ({**late, "replay": 0.5, "epochs": 3}, due + timedelta(days=1))):
        now = Settings.model_validate({**settings.model_dump(), "nightly": nightly_settings})
        result = nightly.run_night(now, store, Console(file=out), engine="none", slot=slot)
        assert (result.outcome, result.night) == ("unfinished", "night-000001") and "deadline" in result.reason
        inbox(tmp_path, a="1", later="2")
    [night] = Nights(store.root, "quickstart").all()
    assert night.is_open and night.failures == 0 and [one["outcome"] for one in night.data["tries"]] == ["unfinished"] * 2
    assert {one["reason"] for one in night.data["tries"]} == {"stage pretrain: deadline reached"}
    told = " ".join(out.getvalue().split())
    assert told.count("goes on (unfinished: stage pretrain: deadline reached); with the settings that it began with") == 1
    assert planned[0] == planned[1] and planned[0][1]["tokenizer"] is not None


def test_a_plan_says_of_a_killed_night_that_its_process_is_gone(tmp_path: Path, store: ArtifactStore) -> None:
    settings, known = inbox(tmp_path, a="1"), Nights(store.root, "quickstart")
    with known.lock():
        night = known.begin(list_of(settings, store), None)
    assert "goes on (running: in another process)" in night_plan.choose_inputs(settings, store, known, night)[1]
    night.note_try(process=NONE_SUCH)
    assert "goes on (crashed: its process was killed" in night_plan.choose_inputs(settings, store, known, night)[1]


def test_a_folder_that_is_empty_is_refused_before_there_is_a_champion_and_nothing_new_after_it(
    tmp_path: Path, store: ArtifactStore
) -> None:
    from rich.console import Console

    from ttrain.flows.nightly import run_night

    settings, out, known = inbox(tmp_path), io.StringIO(), Nights(store.root, "quickstart")
    for _ in range(2):
        with pytest.raises(UsageError, match="no file in that folder ends in"):
            run_night(settings, store, Console(file=out), engine="none")
    [night] = known.all()
    assert (night.outcome, night.is_open) == ("refused", False), "several in a row are one record"
    settings = inbox(tmp_path, a="1")
    with known.lock():
        known.begin(list_of(settings, store), None).end_try("kept", "", closed=True)
    (tmp_path / "inbox/a.jsonl").unlink()
    assert run_night(settings, store, Console(file=out), engine="none").outcome == "nothing-new"


def test_a_file_that_cannot_be_read_fails_the_night_and_the_next_one_tries_again(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike a damaged file, whose bytes say so, and unlike a wrong setting."""
    from rich.console import Console

    from ttrain.flows import nightly

    def trained(*_: object, **__: object) -> None:
        raise Interrupted("the test needs no model")

    settings, inner = inbox(tmp_path, a="1", b="2"), type(store.cache).file
    closed = tmp_path / "inbox" / "b.jsonl"

    def file(cache: Any, path: Path, *rest: Any) -> Any:
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return inner(cache, path, *rest)

    monkeypatch.setattr(nightly, "run_pipeline", trained)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.cache), "file", file)
        with pytest.raises(CannotRead, match=rf"cannot read {closed}, which data.pretrain names: Permission denied"):
            nightly.run_night(settings, store, Console(file=io.StringIO()), engine="none")
    [night] = Nights(store.root, "quickstart").all()
    assert night.outcome == records.FAILED, "not refused: nobody has to correct a setting"
    with pytest.raises(Interrupted):
        nightly.run_night(settings, store, Console(file=io.StringIO()), engine="none")
    newest = Nights(store.root, "quickstart").newest()
    assert newest is not None and newest.is_open and len(newest.frozen.files["pretrain"]) == 2


def test_damaged_files_are_left_out_until_they_are_replaced_and_the_night_reads_the_others(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from ttrain.data import streams
    from ttrain.flows import nightly

    read: list[str] = []

    def shards(_: str, settings: Settings, *__: object, **___: object) -> None:
        read.append(", ".join(Path(location).stem for location in settings.data.pretrain))  # type: ignore[arg-type]
        try:
            for location in settings.data.pretrain:
                with streams.noting_faults(str(location)):
                    list(streams.chunks(str(location)))
        except DataError as error:
            raise StageFailed(f"stage shards-pretrain failed: {error}", DataError.__name__, files=error.files) from None
        raise Interrupted("the test needs no model")

    def night(expected: type[Exception], *, slot: datetime | None = None) -> str:
        out.seek(out.truncate(0))
        with pytest.raises(expected):
            nightly.run_night(settings, store, Console(file=out, width=200), engine="none", slot=slot)
        return out.getvalue()

    monkeypatch.setattr(nightly, "run_pipeline", shards)
    settings, out, nights = inbox(tmp_path, a="1", c="3"), io.StringIO(), Nights(store.root, "quickstart")
    packed = gzip.compress(b'{"text": "2"}\n')
    bad = {name: tmp_path / "inbox" / f"{name}.gz" for name in ("b.jsonl", "d.jsonl")}
    for path in bad.values():
        path.write_bytes(packed[:-9])
    bad["d.jsonl"].write_bytes(b"\0" * 600)
    said = night(Interrupted)
    assert said.count("the night goes on without it") == 2 and "b.jsonl.gz is truncated" in said
    assert read == ["a, b.jsonl, c, d.jsonl", "a, c, d.jsonl", "a, c"]
    [first] = nights.all()
    assert [Path(file["location"]).name for file in first.left_out] == ["b.jsonl.gz", "d.jsonl.gz"]
    with nights.lock():
        first.end_try("kept", "", closed=True)
    nothing = nightly.run_night(settings, store, Console(file=out), engine="none")
    assert nothing.outcome == "nothing-new" and nothing.reason.endswith(
        "all 4 files have been read by a night before; left out, damaged until replaced: b.jsonl.gz, d.jsonl.gz"
    )
    assert len(read) == 3
    frozen, _ = night_plan.choose_inputs(
        settings.model_copy(update={"reading": settings.reading.model_copy(update={"max_line_bytes": 9999})}),
        store, nights, None,
    )  # fmt: skip
    assert frozen is not None and len(frozen.files["pretrain"]) == 4, "other settings may read them"
    bad["b.jsonl"].write_bytes(packed)
    assert "1 new: b.jsonl.gz" in night(Interrupted) and read[3:] == ["a, b.jsonl, c"], "without a champion it reads all"


def test_a_night_whose_only_new_file_is_damaged_fails_once(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from ttrain.flows import nightly

    settings, nights = inbox(tmp_path, a="1"), Nights(store.root, "quickstart")
    with nights.lock():
        nights.begin(list_of(settings, store), None).end_try("kept", "", closed=True)
    settings = inbox(tmp_path, a="1", b="2")
    path = str(tmp_path / "inbox/b.jsonl")

    def fails(*_: object, **__: object) -> None:
        raise StageFailed(f"stage shards-pretrain failed: {path} is binary", DataError.__name__, files=[path])

    monkeypatch.setattr(nightly, "run_pipeline", fails)
    with pytest.raises(StageFailed, match="is binary"):
        nightly.run_night(settings, store, Console(file=io.StringIO()), engine="none")
    assert (nights.all()[0].outcome, nights.all()[0].is_open) == ("failed", False)
    result = nightly.run_night(settings, store, Console(file=io.StringIO()), engine="none")
    assert result.outcome == "nothing-new" and "left out, damaged until replaced: b.jsonl" in result.reason


@pytest.mark.parametrize("has_new_chats", [False, True])
def test_a_night_of_known_documents_is_closed_as_nothing_new_or_learns_its_new_chats(
    tmp_path: Path, store: ArtifactStore, champion: Champion, monkeypatch: pytest.MonkeyPatch, has_new_chats: bool
) -> None:
    from rich.console import Console

    from ttrain.flows import nightly

    runs: list[set[str]] = []

    def names_of(recipe: Any, settings: Settings, _: object) -> list[str]:
        names: list[str] = []
        recipe(lambda stage, **inputs: names.append(stage.name) or stage.name, settings)
        return names

    def finds_nothing(_: str, settings: Settings, __: Any, stages: list[str], *___: object, **____: object) -> None:
        runs.append(set(stages))
        if "shards-pretrain" in runs[-1]:
            raise NothingNew("data.pretrain: 9 of 9 rows are near-duplicates")
        raise Interrupted("the test needs no model")

    monkeypatch.setattr(nightly, "plan", names_of)
    monkeypatch.setattr(nightly, "run_pipeline", finds_nothing)
    monkeypatch.setattr(night_plan, "current_champion", lambda settings, store: champion)
    settings, out, known = inbox(tmp_path, a="1"), io.StringIO(), Nights(store.root, "quickstart")
    with known.lock():
        known.begin(list_of(settings, store, champion), None).end_try("kept", "", closed=True)
    settings = inbox(tmp_path, a="1", copied="1 again", **({"chats": "new"} if has_new_chats else {}))
    if has_new_chats:
        with pytest.raises(Interrupted):
            nightly.run_night(settings, store, Console(file=out, width=200), engine="none")
        assert len(runs) == 2 and "sft" in runs[1] and "pretrain" not in runs[1]
        assert out.getvalue().count("near-duplicates; the new chats are learnt") == 1 and known.all()[0].is_open
        return
    result = nightly.run_night(settings, store, Console(file=out, width=200), engine="none")
    assert (result.outcome, result.night) == ("nothing-new", "night-000002") and len(runs) == 1
    assert out.getvalue().count("nothing new: data.pretrain: 9 of 9 rows are near-duplicates") == 1
    assert nightly.run_night(settings, store, Console(file=out), engine="none").reason.startswith("nothing new: all")
    assert len(runs) == 1, "the files count as read"


def test_a_wrong_setting_is_no_failed_try_and_a_retry_of_its_slot_runs(tmp_path: Path, store: ArtifactStore) -> None:
    from rich.console import Console

    from ttrain.flows.nightly import run_night

    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    wrong = settings.model_copy(update={"model": settings.model.model_copy(update={"kind": "lama"})})
    due = datetime.fromtimestamp(time.time() - 1, UTC)
    for slot in (due, None):
        with pytest.raises(UsageError, match=r"model\.kind is 'lama'.*did you mean llama"):
            run_night(wrong, store, Console(file=out), engine="none", slot=slot)
    again = run_night(wrong, store, Console(file=out), engine="none", slot=due + timedelta(days=1))
    assert (again.outcome, again.night) == ("skipped", "night-000001")
    assert again.reason.startswith("night-000001 is still refused: model.kind is 'lama'")
    assert "night-000001 is still refused" in (store.root / "nightly/quickstart/skipped.jsonl").read_text()
    [night] = Nights(store.root, "quickstart").all()
    assert (night.outcome, night.is_open, night.failures, len(night.data["tries"])) == ("refused", True, 0, 3)
    assert "night-000001 was refused, which does not count as a failed attempt; correct the settings" in " ".join(
        out.getvalue().split()
    )
    frozen, reason = night_plan.choose_inputs(settings, store, Nights(store.root, "quickstart"), night)
    assert frozen is not None
    assert frozen.settings["model"]["kind"] == settings.model.kind and "with the current settings" in reason


def test_too_few_rows_are_no_failed_try_and_give_the_list_up(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from ttrain.flows import nightly

    def refuse(*_: object, **options: object) -> None:
        raise TooFewRows("pretrain.tokens_per_step is 64000, but the training data gives 5 rows")

    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    monkeypatch.setattr(nightly, "run_pipeline", refuse)  # the stages before it take half a minute
    due = datetime.fromtimestamp(time.time() - 1, UTC)
    for slot in (due, None):
        with pytest.raises(TooFewRows):
            nightly.run_night(settings, store, Console(file=out), engine="none", slot=slot)
    again = nightly.run_night(settings, store, Console(file=out), engine="none", slot=due + timedelta(days=1))
    assert again.outcome == "skipped" and "is still refused: pretrain.tokens_per_step is 64000" in again.reason
    for night in Nights(store.root, "quickstart").all():
        assert (night.outcome, night.is_open, night.failures, len(night.data["tries"])) == ("refused", False, 0, 1)
    assert "was refused, which does not count as a failed attempt; the next night takes these files" in " ".join(
        out.getvalue().split()
    )


@pytest.mark.soak
def test_a_night_with_too_few_rows_trains_nothing_and_the_next_one_reads_what_came_meanwhile(tmp_path: Path) -> None:
    from rich.console import Console
    from support.pipeline_home import Cli, write_corpus

    from ttrain.config.loading import load
    from ttrain.flows.nightly import run_night

    cli = Cli(tmp_path / "home", tmp_path / "data")
    write_corpus(cli.data)
    comes_later = (cli.data / "docs-2.jsonl").rename(tmp_path / "later.jsonl")
    large = load([*cli.settings[2:], "pretrain.tokens_per_step=64000"], files=[cli.data / "tiny.yaml"]).settings
    store, out = ArtifactStore(cli.home), io.StringIO()
    for names in ("docs-1.jsonl", "docs-1.jsonl, docs-2.jsonl"):
        with pytest.raises(TooFewRows, match=r"pretrain\.tokens_per_step is 64000, 1000 rows of 64 tokens, but"):
            run_night(large, store, Console(file=out), engine="none")
        night = Nights(cli.home, "tiny-test").all()[0]
        assert (night.outcome, night.is_open, night.failures) == ("refused", False, 0)
        assert records.shortened_names(file["location"] for file in night.frozen.files["pretrain"]) == names
        comes_later = comes_later.rename(cli.data / "docs-2.jsonl")
    assert not (cli.home / "work" / "pretrain").exists(), "nothing began to train"


def test_a_file_s_name_is_nothing_that_a_terminal_obeys(store: ArtifactStore, known: Nights) -> None:
    from rich.console import Console

    from ttrain.flows import nightly
    from ttrain.pipeline.labels import NO_LABELS

    out = io.StringIO()
    running = nightly.NightRun(
        Settings(), store, Console(file=out), known, None, engine="none", in_flow=False, labels=NO_LABELS
    )
    running.say("1 new: a\x1b[2J[red].jsonl")
    assert out.getvalue() == "1 new: a\\x1b[2J[red].jsonl\n"
