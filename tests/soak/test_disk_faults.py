"""Full disks, disks that fail at any call, kills at any moment: nothing complete is lost."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import checkpoints, is_snapshot, names, snapshot, steps, write
from support.kill_points import intercepted, killed_everywhere
from support.pipeline_home import Cli, write_corpus

from ttrain.errors import ArtifactError

SYSTEM_CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace")
INTACT = (
    r"checkpoint of step 12: (\S+): .*; the checkpoint of step (8|12) is intact, .*"
    "It needs .* MB, and .* are free.*runtime.keep_checkpoints=1.*TTRAIN_HOME"
)
# A stage of a second; the others are made in the same way.
ALONE = ("--engine", "none", "tracking.enabled=false")
TOKENIZER = ("pipeline", "run", "full", "--until", "tokenizer", *ALONE)

# In a mount namespace of its own: a home on a disk of so many kilobytes; then of 64 MB; then one
# that cannot be written.
DISK = """
set -u
mount -t tmpfs -o size=$1k none "$TTRAIN_HOME" || exit 99
shift
"$@" > small.txt 2>&1; echo "small $?"
mount -o remount,size=64m "$TTRAIN_HOME"
"$@" > large.txt 2>&1; echo "large $?"
mount -o remount,ro "$TTRAIN_HOME"
"$@" > cached.txt 2>&1; echo "cached $?"
"$@" tokenizer.vocab_size=390 > refused.txt 2>&1; echo "refused $?"
"$1" -P -c 'from ttrain.cli.main import main; main()' artifacts verify; echo "verify $?"
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    write(directory, 4, 8, metrics={4: 0.5})
    return directory


def save_next(directory: Path) -> str | None:
    """The error of saving step 12, or None."""
    try:
        write(directory, 12, metrics={12: 0.1})
    except ArtifactError as error:
        return str(error)
    return None


def save_next_on_a_disk(directory: Path, full_at: int = 0, lasting: bool = False) -> Any:
    """The error on a disk that is full at that call (and after it), and the number of calls."""
    calls = [0]

    def fail(number: int) -> None:
        calls.append(number)
        if full_at and (number == full_at or (lasting and number > full_at)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with intercepted(SYSTEM_CALLS, fail, writing=True):
        error = save_next(directory)
    return error, calls[-1]


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are some thousands of syncs; a kill leaves the system what it was given."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, saved: Path, lasting: bool
) -> None:
    whole = shutil.copytree(saved, tmp_path / "all")
    error, count = save_next_on_a_disk(whole)
    assert error is None
    assert names(whole) == ["best", "latest", "step-00000008", "step-00000012"]
    # Three files, the state, two pointers, two names, their directories
    assert count >= 30
    errors = []
    for at in range(1, count + 1):
        directory = shutil.copytree(saved, tmp_path / str(at))
        error, _ = save_next_on_a_disk(directory, at, lasting)
        errors.append(error)
        newest = checkpoints(directory).newest()
        assert newest is not None and is_snapshot(newest, newest.step)
        if error is None:
            assert newest.step == 12, "what is not said has not happened"
        else:
            message = re.search(INTACT, error)
            assert message and message[1].startswith(str(directory))
            assert os.strerror(errno.ENOSPC) in error
            assert newest.step in (8, 12) and newest.step >= int(message[2])
        best = checkpoints(directory).best()
        assert best is not None and best.step == (12 if newest.step == 12 else 4)
        write(directory, 12, 16, metrics={12: 0.1})  # the disk is well again
        assert names(directory) == ["best", "latest", "step-00000012", "step-00000016"]
    assert errors[0] is not None
    # All but the removal of what is in the trash
    assert sum(error is not None for error in errors) > count - 12


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="which file is synced is unknown")
def test_bytes_are_synced_first(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shutil.copytree(saved, tmp_path / "checkpoints")
    calls: list[str] = []
    sync = os.fsync
    rename = os.rename

    def record_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        size = path.stat().st_size if path.is_file() else "/"
        calls.append(f"sync {re.sub('[.][0-9]+[.]tmp', '', path.name)} {size}")
        sync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        calls.append(f"rename {source.name} {re.sub('-[0-9]+$', '', target.name)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    assert save_next(directory) is None
    sizes = {path.name: path.stat().st_size for path in (directory / "step-00000012").iterdir()}
    count = len(sizes)
    state = f"sync .state.json {sizes.pop('state.json')}"
    assert {*calls[: count - 1]} == {f"sync {name} {size}" for name, size in sizes.items()}
    new = "sync .writing-00000012 /"
    moved = "rename .writing-00000012 step"
    assert calls[count - 1 : count + 3] == [state, new, moved, "sync checkpoints /"]
    pointers = [call.split()[1] for call in calls[count + 3 : -1 : 2]]
    assert pointers == [".latest", ".best"]
    assert calls[-1] == "rename step-00000004 .trash-step-00000004"


@pytest.mark.soak
@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize(
    ("before", "wanted", "is_damaged"),
    [(8, 12, False), (4, 8, True), (8, 8, False)],
    ids=["the next step", "a damaged step again", "an intact step again"],
)
def test_a_process_killed_at_any_call_of_a_write_leaves_a_whole_newest(
    tmp_path: Path, saved: Path, before: int, wanted: int, is_damaged: bool
) -> None:
    template = shutil.copytree(saved, tmp_path / "template")
    if is_damaged:
        (template / "step-00000008" / "config.json").unlink()
    calls = (*SYSTEM_CALLS, "unlink", "rmdir")
    count = killed_everywhere(
        template, tmp_path, calls, lambda directory: write(directory, wanted, metrics={wanted: 0.1})
    )
    assert count > 30, "every file, rename and removal is a point to die at"
    newest_steps = []
    for number in range(1, count + 1):
        directory = tmp_path / str(number)
        ours = checkpoints(directory)
        newest = ours.newest()
        best = ours.best()
        assert newest is not None and best is not None and is_snapshot(newest, newest.step)
        assert best.step in ({wanted} if newest.step > before else {4, wanted})
        newest_steps.append(newest.step)
        ours.save(snapshot(20), metric=0.3)
        ours.close()
        assert steps(directory) == [newest.step, 20]
        assert not [name for name in names(directory) if name.startswith(".")]
    assert {*newest_steps} == {before, wanted}
    assert newest_steps == sorted(newest_steps), "once the new one is there, it stays"


def own_mounts() -> list[str]:
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        with contextlib.suppress(OSError):
            if not subprocess.call([*command, "mount", "-t", "tmpfs", "none", "/mnt"]):
                return command
    pytest.skip("this machine lets no process mount a disk of its own")


@pytest.mark.soak
def test_a_full_disk_ends_a_run_in_order_and_with_room_it_goes_on(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    cli = Cli(tmp_path / "home", tmp_path / "data")
    cli.home.mkdir()
    command = [*own_mounts(), "sh", "-c", DISK, "sh", "4", *cli.command(*TOKENIZER)]
    output = subprocess.check_output(command, env=cli.environment, cwd=cli.data, text=True)
    texts = {path.stem: path.read_text() for path in cli.data.glob("*.txt")}
    codes = {name: int(code) for name, code in re.findall(r"^(\w+) (\d+)$", output, re.MULTILINE)}
    assert "Traceback" not in "".join(texts.values())
    expected = {"small": 1, "large": 0, "cached": 0, "refused": 2, "verify": 0}
    assert codes == expected, texts
    assert os.strerror(errno.ENOSPC) in texts["small"]
    assert "cached" in texts["cached"]
    assert "set TTRAIN_HOME" in texts["refused"]
