"""One checkpoint written so that it is whole or not there, and what a full or failing disk means for the run."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from ttrain.core.files import fsync, remove_tree, write_json
from ttrain.errors import ArtifactError
from ttrain.train.checkpoint_format import OPTIMIZER, STATE, read, signed, step_of
from ttrain.train.snapshots import Snapshot, needed_bytes
from ttrain.train.tensor_files import by_file, naming, tensor_parts, write

NICENESS = 10  # of 19


def write_checkpoint(
    directory: Path, snapshot: Snapshot, metric: float | None, *, files: Mapping[str, bytes], weights_file: str
) -> None:
    """Write `directory/step-N`, durably: its files, `state.json`, the name. Raises OSError, which names the file.

    What killed writers left in the directory is cleared away, or given its name where it is whole.
    """
    if not directory.exists():
        directory.mkdir(parents=True)
        fsync(directory.parent)
    _sweep(directory, weights_file)
    temporary = directory / f".writing-{snapshot.step:08d}"
    try:
        temporary.mkdir()
        written = {name: write(temporary / name, [data]) for name, data in files.items()}
        for name, tensors in by_file(snapshot.weights, weights_file).items():
            written[name] = write(temporary / name, tensor_parts(tensors, {"format": "pt"}))
        written[OPTIMIZER] = write(temporary / OPTIMIZER, tensor_parts(snapshot.optimizer))
        with naming(temporary / STATE):
            write_json(
                temporary / STATE, signed({**snapshot.state, "step": snapshot.step, "metric": metric, "files": written})
            )
        _give_name(temporary)
    except BaseException:
        if not (temporary / STATE).exists():  # else it is whole, and is found
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_trash(directory: Path) -> None:
    """End the removals that were begun."""
    for trash in directory.glob(".trash-*"):
        shutil.rmtree(trash, ignore_errors=True)


def not_written(directory: Path, snapshot: Snapshot, error: OSError, whole: int | None) -> str:
    """What could not be written and why, which step's checkpoint is whole, and what to do."""
    said = f"cannot write the checkpoint of step {snapshot.step}: {error.filename or directory}: {error.strerror or error}; "
    if whole is None:
        said += "there is no other, and the same command begins at the start"
    else:
        said += f"the checkpoint of step {whole} is whole, and the same command continues from it"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{said}. It needs {needed_bytes(snapshot) / 1e6:.0f} MB, and {_free(directory)}: make room, set "
            f"runtime.keep_checkpoints=1, or set TTRAIN_HOME to a larger disk"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{said}. Make the directory writable, or set TTRAIN_HOME to one that is"
    return f"{said}. Look whether the disk is failing (`dmesg` may say), or set TTRAIN_HOME to another one"


def _free(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / 1e6:.0f} MB are free"
    except OSError as error:
        return f"how much is free cannot be told ({error.strerror})"


def give_way() -> None:
    """The writer thread works when training leaves a core some time; when training waits for it, it has one.

    Linux keeps a niceness per thread; elsewhere it is the whole process's, and stays.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where a sandbox forbids it, the writer is only less polite
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _sweep(directory: Path, weights_file: str) -> None:
    for temporary in directory.glob(".writing-*"):
        if (temporary / STATE).exists():
            try:
                read(temporary, weights_file)
                _give_name(temporary)
            except ArtifactError:
                pass
        remove_tree(temporary)
    remove_trash(directory)
    for pointer in directory.glob(".*.tmp"):
        pointer.unlink(missing_ok=True)


def _give_name(temporary: Path) -> None:
    """To a whole checkpoint; one of the same step is put in the trash, but not before."""
    final = temporary.with_name(f"step-{step_of(temporary):08d}")
    if final.exists():
        final.rename(final.with_name(f".trash-{final.name}-{time.time_ns()}"))
    temporary.rename(final)
    with naming(final.parent):
        fsync(final.parent)
