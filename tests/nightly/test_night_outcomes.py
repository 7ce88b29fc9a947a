"""How a night ends where it trains nothing: no news, damaged files, wrong settings, deadlines."""

import gzip
import io
import time
from collections.abc import Callable
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
from ttrain.nightly import records
from ttrain.nightly.records import Champion, NightRecord, Nights
from ttrain.store.artifacts import ArtifactStore

DUE = datetime.fromtimestamp(time.time() - 1, UTC)
TOMORROW = DUE + timedelta(days=1)
LEFT_OUT = "left out, damaged until replaced: "


class Runner:
    """Runs nights of a home; `output` is what they printed."""

    def __init__(self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.monkeypatch = store, monkeypatch
        self.nights = Nights(store.root, "quickstart")
        self._file = io.StringIO()

    def run(self, settings: Settings, slot: datetime | None = None) -> nightly.NightResult:
        console = Console(file=self._file, width=200)
        return nightly.run_night(settings, self.store, console, nightly.RunOptions("none"), slot)

    def replace_stages(self, run_stages: Callable[..., None]) -> None:
        self.monkeypatch.setattr(nightly, "run_pipeline", run_stages)

    def add_kept(self, settings: Settings, champion: Champion | None = None) -> None:
        """A night that has read all files."""
        with self.nights.lock():
            night = self.nights.begin(list_of(settings, self.store, champion), None)
            night.end_try("kept", "", closed=True)

    @property
    def output(self) -> str:
        return self._file.getvalue()

    @property
    def newest(self) -> NightRecord:
        return next(self.nights.newest_first())


@pytest.fixture
def runner(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(store, monkeypatch)


def train_nothing(*_: object) -> None:
    raise Interrupted("the test needs no model")


def test_a_night_without_news_only_leaves_a_record(tmp_path: Path, runner: Runner) -> None:
    settings = inbox(tmp_path, a="1")
    runner.add_kept(settings)
    result, root = runner.run(settings), runner.store.root
    assert (result.outcome, result.night) == ("nothing-new", "night-000002")
    assert "all 3" in runner.output
    assert not (root / "mlflow").exists() and not (root / "runs").exists()
    with runner.nights.lock():
        assert runner.run(settings).outcome == "skipped"


def test_after_a_deadline_the_next_slot_has_the_same_keys(tmp_path: Path, runner: Runner) -> None:
    """Same keys, thus checkpoints, though a file came and a setting changed meanwhile."""
    planned: list[Any] = []

    def stop(plan: Any, _: object, options: Any, *__: object) -> None:
        assert options.stop_at <= time.time()
        planned.append((plan.settings, {stage.name: stage.key for stage in plan}))
        raise Interrupted("stage pretrain: stopped by a signal")  # all that a stage knows

    runner.replace_stages(stop)
    settings, late = inbox(tmp_path, a="1"), {"deadline_hours": 1e-9}
    for section, slot in ((late, DUE), ({**late, "replay": 0.5, "epochs": 3}, TOMORROW)):
        now = Settings.model_validate({**settings.model_dump(), "nightly": section})
        result = runner.run(now, slot)
        assert (result.outcome, result.night) == ("unfinished", "night-000001")
        assert "deadline" in result.reason
        inbox(tmp_path, a="1", later="2")
    [night] = runner.nights.newest_first()
    assert night.is_open and night.failures == 0
    reason = "stage pretrain: deadline reached"
    outcomes = [(attempt["outcome"], attempt["reason"]) for attempt in night.data["attempts"]]
    assert outcomes == [("unfinished", reason)] * 2
    continued = f"goes on (unfinished: {reason}); with the settings that it began with"
    assert " ".join(runner.output.split()).count(continued) == 1
    assert planned[0] == planned[1] and planned[0][1]["tokenizer"] is not None


def test_a_plan_says_that_a_night_was_killed(tmp_path: Path, runner: Runner) -> None:
    settings, store, nights = inbox(tmp_path, a="1"), runner.store, runner.nights
    with nights.lock():
        night = nights.begin(list_of(settings, store), None)
    assert "(running: " in night_plan.choose_inputs(settings, store, nights, night)[1]
    night.note_try(process=NONE_SUCH)
    assert "(crashed: " in night_plan.choose_inputs(settings, store, nights, night)[1]


def test_an_empty_folder_is_refused_without_a_champion(tmp_path: Path, runner: Runner) -> None:
    settings = inbox(tmp_path)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"data\.pretrain.*folder"):
            runner.run(settings)
    [night] = runner.nights.newest_first()
    assert (night.outcome, night.is_open) == ("refused", False), "several in a row are one record"
    settings = inbox(tmp_path, a="1")
    runner.add_kept(settings)
    (tmp_path / "inbox/a.jsonl").unlink()
    assert runner.run(settings).outcome == "nothing-new"


def test_an_unreadable_file_fails_a_night(tmp_path: Path, runner: Runner, monkeypatch: Any) -> None:
    settings, cache = inbox(tmp_path, a="1", b="2"), type(runner.store.cache)
    digest, closed = cache.file, tmp_path / "inbox" / "b.jsonl"

    def refuse(self: Any, path: Path, *rest: Any) -> Any:
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return digest(self, path, *rest)

    runner.replace_stages(train_nothing)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "file", refuse)
        with pytest.raises(CannotRead, match=rf"{closed}.*data\.pretrain.*denied"):
            runner.run(settings)
    [night] = runner.nights.newest_first()
    assert night.outcome == records.FAILED, "not refused: no setting has to be corrected"
    with pytest.raises(Interrupted):
        runner.run(settings)
    assert runner.newest.is_open and len(runner.newest.frozen.files["pretrain"]) == 2


def test_damaged_files_are_left_out_until_replaced(tmp_path: Path, runner: Runner) -> None:
    reads: list[str] = []

    def read_files(plan: Any, *_: object) -> None:
        locations = [str(location) for location in plan.settings.data.pretrain]
        reads.append(", ".join(Path(location).stem for location in locations))
        try:
            for location in locations:
                with streams.noting_faults(location):
                    list(streams.chunks(location))
        except DataError as error:
            message = f"stage shards-pretrain failed: {error}"
            raise StageFailed(message, DataError.__name__, files=error.files) from None
        train_nothing()

    runner.replace_stages(read_files)
    settings = inbox(tmp_path, a="1", c="3")
    truncated, binary = (tmp_path / "inbox" / f"{name}.jsonl.gz" for name in ("b", "d"))
    packed = gzip.compress(b'{"text": "2"}\n')
    truncated.write_bytes(packed[:-9])
    binary.write_bytes(b"\0" * 600)
    with pytest.raises(Interrupted):
        runner.run(settings)
    assert runner.output.count("goes on without it") == 2
    assert f"{truncated.name} is truncated" in runner.output
    assert reads == ["a, b.jsonl, c, d.jsonl", "a, c, d.jsonl", "a, c"]
    [first] = runner.nights.newest_first()
    left_out = [Path(file["location"]).name for file in first.left_out]
    assert left_out == [truncated.name, binary.name]
    with runner.nights.lock():
        first.end_try("kept", "", closed=True)
    result = runner.run(settings)
    assert result.outcome == "nothing-new" and "4 files" in result.reason
    assert result.reason.endswith(f"; {LEFT_OUT}{', '.join(left_out)}")
    assert len(reads) == 3
    changed = settings.replaced({"reading": {"max_line_bytes": 9999}})
    frozen, _ = night_plan.choose_inputs(changed, runner.store, runner.nights, None)
    assert frozen is not None and len(frozen.files["pretrain"]) == 4, "other settings may read them"
    truncated.write_bytes(packed)
    with pytest.raises(Interrupted):
        runner.run(settings)
    assert f"1 new: {truncated.name}" in runner.output
    assert reads[3:] == ["a, b.jsonl, c"], "without a champion it reads all"


def test_a_night_whose_only_new_file_is_damaged_fails_once(tmp_path: Path, runner: Runner) -> None:
    runner.add_kept(inbox(tmp_path, a="1"))
    settings, path = inbox(tmp_path, a="1", b="2"), str(tmp_path / "inbox/b.jsonl")

    def fail(*_: object) -> None:
        raise StageFailed(f"{path} is binary", DataError.__name__, files=[path])

    runner.replace_stages(fail)
    with pytest.raises(StageFailed, match="binary"):
        runner.run(settings)
    assert (runner.newest.outcome, runner.newest.is_open) == ("failed", False)
    result = runner.run(settings)
    assert result.outcome == "nothing-new" and f"{LEFT_OUT}b.jsonl" in result.reason


@pytest.mark.parametrize("has_new_chats", [False, True])
def test_a_night_of_known_documents_trains_on_new_chats_or_nothing(
    tmp_path: Path, runner: Runner, champion: Champion, monkeypatch: Any, has_new_chats: bool
) -> None:
    runs: list[set[str]] = []

    def find_nothing(planned: Any, *_: object) -> None:
        runs.append(set(planned.stages))
        if "shards-pretrain" in runs[-1]:
            raise NothingNew("data.pretrain: 9 of 9 rows are near-duplicates")
        train_nothing()

    monkeypatch.setattr(night_plan, "plan", lambda graph, *_: list(graph))
    monkeypatch.setattr(night_plan, "current_champion", lambda settings, store: champion)
    runner.replace_stages(find_nothing)
    runner.add_kept(inbox(tmp_path, a="1"), champion)
    chats = {"chats": "new"} if has_new_chats else {}
    settings = inbox(tmp_path, a="1", copied="1 again", **chats)
    if has_new_chats:
        with pytest.raises(Interrupted):
            runner.run(settings)
        assert len(runs) == 2 and "sft" in runs[1] and "pretrain" not in runs[1]
        assert runner.output.count("near-duplicates; the new chats") == 1 and runner.newest.is_open
        return
    result = runner.run(settings)
    assert (result.outcome, result.night) == ("nothing-new", "night-000002") and len(runs) == 1
    assert runner.output.count("nothing new: data.pretrain: 9 of 9 rows are near-duplicates") == 1
    assert runner.run(settings).reason.startswith("nothing new: all")
    assert len(runs) == 1, "the files count as read"


def test_a_wrong_setting_is_not_a_failed_try(tmp_path: Path, runner: Runner) -> None:
    settings = inbox(tmp_path, a="1")
    model = settings.model.model_copy(update={"kind": "lama"})
    wrong = settings.model_copy(update={"model": model})
    for slot in (DUE, None):
        with pytest.raises(UsageError, match=r"model\.kind.*'lama'.*llama"):
            runner.run(wrong, slot)
    result = runner.run(wrong, TOMORROW)
    assert (result.outcome, result.night) == ("skipped", "night-000001")
    refused = "night-000001 is still refused"
    assert result.reason.startswith(f"{refused}: model.kind is 'lama'")
    assert refused in (runner.nights.directory / "skipped.jsonl").read_text()
    [night] = runner.nights.newest_first()
    assert (night.outcome, night.is_open, night.failures) == ("refused", True, 0)
    assert len(night.data["attempts"]) == 3
    assert f"{night.name} was refused" in runner.output
    frozen, reason = night_plan.choose_inputs(settings, runner.store, runner.nights, night)
    assert frozen is not None and "current settings" in reason
    assert frozen.settings["model"]["kind"] == settings.model.kind


def test_too_few_rows_are_not_a_failed_try(tmp_path: Path, runner: Runner) -> None:
    message = "pretrain.tokens_per_step is 64000"

    def refuse(*_: object) -> None:
        raise TooFewRows(f"{message}, but the training data gives 5 rows")

    settings = inbox(tmp_path, a="1")
    runner.replace_stages(refuse)  # the stages before it take half a minute
    for slot in (DUE, None):
        with pytest.raises(TooFewRows):
            runner.run(settings, slot)
        inbox(tmp_path, later="2")
    result = runner.run(settings, TOMORROW)
    assert result.outcome == "skipped" and f"is still refused: {message}" in result.reason
    # the next one reads what came meanwhile
    for night, files in zip(runner.nights.newest_first(), (2, 2, 1), strict=True):
        assert (night.outcome, night.is_open, night.failures) == ("refused", False, 0)
        assert len(night.data["attempts"]) == 1
        assert len(night.frozen.files["pretrain"]) == files
    assert "takes these files" in runner.output


def test_control_characters_of_a_files_name_are_escaped(store: ArtifactStore) -> None:
    out, nights = io.StringIO(), Nights(store.root, "mine")
    console, options = Console(file=out), nightly.RunOptions("none")
    nightly.NightRun(Settings(), store, console, nights, None, options).say("a\x1b[2J[red].jsonl")
    assert out.getvalue() == "a\\x1b[2J[red].jsonl\n"
