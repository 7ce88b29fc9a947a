"""A disk that fails at any call, a full one, and kills at any moment: a whole checkpoint remains, and is found."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import checkpoints, is_snapshot, names, snapshot, steps, write
from support.kill_points import killed_everywhere

from ttrain.errors import ArtifactError

SYSTEM_CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace")


class FailingDisk:
    """Counts the system calls that write, and fails the one of a number: alone, or with all after it."""

    def __init__(self, at: int | None, error: int, *, lasting: bool) -> None:
        self.at, self.error, self.lasting, self.calls = at, error, lasting, 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[FailingDisk]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)  # there are some thousands of them
            for name in SYSTEM_CALLS:
                patch.setattr(os, name, self._failing(getattr(os, name)))
            opened, failing = io.open, self._failing(io.open)
            patch.setattr(
                io,
                "open",
                lambda path, mode="r", *a, **n: (opened if "r" in mode else failing)(
                    path, mode, *a, **n
                ),
            )
            yield self

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            if self.at is not None and (number >= self.at if self.lasting else number == self.at):
                raise OSError(self.error, os.strerror(self.error))
            return function(*arguments, **named)

        return call


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    write(directory, 4, 8, metrics={4: 0.5})
    return directory


def save_next(directory: Path) -> str | None:
    ours = checkpoints(directory)
    try:
        ours.save(snapshot(12), metric=0.1)
        ours.close()
    except ArtifactError as error:
        return str(error)
    return None


def calls_of_a_save(saved: Path, directory: Path) -> int:
    shutil.copytree(saved, directory)
    with FailingDisk(None, 0, lasting=False)() as disk:
        assert save_next(directory) is None
    assert names(directory) == ["best", "latest", "step-00000008", "step-00000012"]
    return disk.calls


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_disk_that_is_full_at_any_call_leaves_the_checkpoint_before_and_says_what_to_do(
    tmp_path: Path, saved: Path, lasting: bool
) -> None:
    calls = calls_of_a_save(saved, tmp_path / "all")
    assert calls >= 30, "three files, the state, two pointers, two names, their directories"
    raised = []
    for at in range(calls):
        directory = tmp_path / str(at)
        shutil.copytree(saved, directory)
        with FailingDisk(at, errno.ENOSPC, lasting=lasting)():
            said = save_next(directory)
        found = checkpoints(directory).newest()
        assert found is not None
        assert is_snapshot(found, found.step)
        assert found.step in (8, 12)
        raised.append(said is not None)
        if said is None:
            assert found.step == 12, "what is not said has not happened"
        else:
            whole = 12 if "of step 12 is intact" in said else 8
            assert f"cannot write the checkpoint of step 12: {directory}" in said
            assert (
                f"{os.strerror(errno.ENOSPC)}; the checkpoint of step {whole} is intact, and the same command"
                in said
            )
            assert re.search(
                "It needs .* MB, and .* are free: make room, set runtime.keep_checkpoints=1.*TTRAIN_HOME",
                said,
            )
            assert found.step >= whole
        best = checkpoints(directory).best()
        assert best is not None
        assert best.step == (12 if found.step == 12 else 4), (
            "the best is not removed before there is a better one"
        )
        with FailingDisk(None, 0, lasting=False)():  # the disk is well again
            write(directory, 12, 16, metrics={12: 0.1})
        assert names(directory) == ["best", "latest", "step-00000012", "step-00000016"]
    assert sum(raised) > calls - 12, "all but the removal of what is in the trash"
    assert raised[0]


def test_a_disk_that_fails_at_the_first_checkpoint_says_that_there_is_no_other(
    tmp_path: Path,
) -> None:
    with FailingDisk(6, errno.ENOSPC, lasting=True)():
        said = save_next(tmp_path / "checkpoints")
    assert said is not None
    assert "there is no other checkpoint, so the same command starts from the beginning" in said
    assert checkpoints(tmp_path / "checkpoints").newest() is None


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="the system does not tell which file is synced"
)
def test_a_checkpoint_gets_its_name_after_every_byte_is_synced_and_nothing_goes_before(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, done = tmp_path / "checkpoints", list[str]()
    shutil.copytree(saved, directory)
    sync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(
            f"sync {path.relative_to(tmp_path)} {path.stat().st_size if path.is_file() else '/'}"
        )
        sync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        done.append(
            f"rename {source.name} {re.sub(r'-[0-9]+$', '', target.name) if '.trash' in target.name else target.name}"
        )
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    assert save_next(directory) is None
    new, named = directory / "step-00000012", done.index("rename .writing-00000012 step-00000012")
    sizes = {path.name: path.stat().st_size for path in new.iterdir()}
    state = sizes.pop("state.json")
    synced = {f"sync checkpoints/.writing-00000012/{name} {size}" for name, size in sizes.items()}
    assert {*done[: len(sizes)]} == synced, "all files"
    assert re.fullmatch(
        rf"sync checkpoints/\.writing-00000012/\.state\.json\.\d+\.tmp {state}", done[len(sizes)]
    )
    assert done[len(sizes) + 1 : named] == ["sync checkpoints/.writing-00000012 /"], (
        "then the state, then their names"
    )
    assert done[named + 1] == "sync checkpoints /"
    assert done[-1] == "rename step-00000004 .trash-step-00000004"
    assert [line.split()[1].split("/")[-1].split(".")[1] for line in done[named + 2 : -1 : 2]] == [
        "latest",
        "best",
    ]


@pytest.mark.soak
def test_a_process_killed_at_any_call_of_a_write_leaves_a_whole_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # a kill leaves the system alone, and with it what it was given
    for scenario, before, wanted in (("next", 8, 12), ("again", 4, 8), ("whole again", 8, 8)):
        whole = tmp_path / scenario / "whole"
        write(whole, 4, 8, metrics={4: 0.5})
        if scenario == "again":  # the newest is damaged, so that the same step is written once more
            (whole / "step-00000008" / "config.json").unlink()

        def save(directory: Path, step: int = wanted) -> None:
            ours = checkpoints(directory)
            ours.save(snapshot(step), metric=0.1)
            ours.close()

        calls = killed_everywhere(
            whole, tmp_path / scenario, (*SYSTEM_CALLS, "unlink", "rmdir"), save
        )
        assert calls > 30, "every file, rename and removal is a point to die at"
        found = []
        for directory in (tmp_path / scenario / str(number) for number in range(1, calls + 1)):
            ours = checkpoints(directory)
            newest, best = ours.newest(), ours.best()
            assert newest is not None and best is not None
            assert is_snapshot(newest, newest.step)
            assert best.step in ({wanted} if newest.step > before else {4, wanted})
            found.append(newest.step)
            ours.save(snapshot(20), metric=0.3)
            ours.close()
            assert steps(directory) == [newest.step, 20]
            assert not [name for name in names(directory) if name.startswith(".")]
        assert {*found} == {before, wanted}
        assert found == sorted(found), "once the new one is there, it stays"
