"""Checkpoints: Hugging Face directories that also hold what a run needs to continue bit for bit."""
# `checkpoints/step-00000100/` has the weights (safetensors, fp32), the files that `from_pretrained`
# needs, `optimizer.safetensors`, and `state.json`, written last, with position, counters,
# validation loss and the digests of itself and of every file. A background thread writes it from a
# snapshot in memory, under a temporary name, with fsync and a rename. The files `latest`, `best`
# and, after training, `final` name a step for people and tools; nothing here relies on them.

import contextlib
import errno
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

from ttrain.core.files import fsync, read_json, read_object, remove_tree, write_json
from ttrain.core.text import format_size
from ttrain.errors import ArtifactError
from ttrain.train.checkpoint_format import (
    OPTIMIZER,
    STATE,
    WEIGHTS,
    by_file,
    is_unnamed,
    list_checkpoints,
    logged_metric,
    read,
    step_of,
    tensor_parts,
    with_digest,
    write,
)
from ttrain.train.snapshots import Snapshot, SnapshotBuffers, needed_bytes

__all__ = ["WEIGHTS", "Checkpoints", "Snapshot", "SnapshotBuffers", "read"]

LATEST = "latest"
BEST = "best"
FINAL = "final"

UNDER_WAY = 2  # snapshots that may exist at once: one being written, one that waits

NICENESS = 10  # of 19

log = logging.getLogger("ttrain")


class Checkpoints:
    """The checkpoints of one run, written by one process.

    Retained: the `keep` newest, every `keep_every` steps (0: none), the steps in `permanent`, the
    best.
    """

    def __init__(
        self,
        directory: Path,
        *,
        files: Callable[[], Mapping[str, bytes]],
        weights_file: str = WEIGHTS,
        keep: int = 2,
        keep_every: int = 0,
        permanent: frozenset[int] = frozenset(),
    ) -> None:
        self.directory = directory
        self.files = files
        self._weights_file = weights_file
        self._keep = keep
        self._keep_every = keep_every
        self._permanent = permanent
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=lower_priority
        )
        self.pending: deque[Future[None]] = deque()
        self._damaged: set[Path] = set()  # skipped by newest() or best()
        self._durable: int | None = None  # step of the last one that was written

    def save(self, snapshot: Snapshot, *, metric: float | None = None) -> None:
        """Write a checkpoint in the background, then release the snapshot.

        `metric`: the validation loss; None or a non-finite number is never the best. Waits while
        two snapshots are written. Raises ArtifactError if an earlier write failed.
        """
        try:
            self.wait(but=UNDER_WAY - 1)
        except BaseException:
            snapshot.release()
            raise
        finite = metric if metric is not None and math.isfinite(metric) else None
        self.pending.append(self._pool.submit(self._save, snapshot, finite))

    def wait(self, but: int = 0) -> None:
        """Wait until at most `but` writes are pending. Raises ArtifactError if one failed."""
        while len(self.pending) > but or (self.pending and self.pending[0].done()):
            wait_for([self.pending[0]])
            self.pending.popleft().result()

    def close(self) -> None:
        """End the writer thread, after its last write."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def newest(self) -> Snapshot | None:
        """The newest checkpoint whose digests match, or None; damaged ones are logged and skipped.

        Raises ArtifactError if all are damaged: training must not silently restart.
        """
        snapshot, damaged = self._first_whole(
            reversed(list_checkpoints(self.directory)), "the one before it"
        )
        if snapshot:
            return snapshot
        if not damaged and (self.directory / LATEST).exists():
            damaged = [f"the one that {self.directory / LATEST} names is gone"]
        if damaged:
            raise ArtifactError(
                f"every checkpoint in {self.directory} is damaged: {'; '.join(damaged)}; "
                f"restore one, or delete the directory to train from the start"
            )
        return None

    def best(self) -> Snapshot | None:
        """The undamaged checkpoint with the smallest metric, the earlier of equals, or None.

        Waits for this process's writer; no other process may be writing.
        """
        self.wait()
        ranked = self._ranked()
        pointed = self._pointed_best()
        if pointed is not None and all(step != pointed for _, step, _ in ranked):
            log.warning(
                "the best checkpoint, of step %d, is gone or damaged; trying the next best", pointed
            )
        return self._first_whole((path for _, _, path in ranked), "the next best")[0]

    def _first_whole(self, paths: Iterable[Path], other: str) -> tuple[Snapshot | None, list[str]]:
        problems = list[str]()
        for path in paths:
            try:
                return read(path, self._weights_file), problems
            except ArtifactError as error:
                log.warning("%s; trying %s", error, other)
                self._damaged.add(path)
                problems.append(str(error))
        return None, problems

    def begin(self) -> None:
        """Remove the `final` pointer, since training continues."""
        (self.directory / FINAL).unlink(missing_ok=True)

    def end(self, step: int) -> None:
        """Write the `final` pointer: the trained model has the weights of this step."""
        self.wait()
        # The writer of the newest may have been killed.
        if self._durable is None and list_checkpoints(self.directory):
            self._clear_interrupted_writes()
            newest = list_checkpoints(self.directory)[-1]
            self._update_pointers(step_of(newest), logged_metric(newest))
            self._prune()
        write_json(self.directory / FINAL, {"step": step})

    def keep(self, step: int) -> None:
        """Never prune the checkpoint of this step during this run."""
        self._permanent = self._permanent | {step}

    def forget_after(self, step: int) -> None:
        """Remove checkpoints after this step, left by a run with another number of steps."""
        self.wait()
        for path in list_checkpoints(self.directory):
            if step_of(path) > step:
                remove_tree(path)

    # --- in the writer thread ---

    def _save(self, snapshot: Snapshot, metric: float | None) -> None:
        try:
            self._write(snapshot, metric)
            self._durable = snapshot.step
            self._damaged.discard(self.directory / f"step-{snapshot.step:08d}")
            self._update_pointers(snapshot.step, metric)
            self._prune()
        except OSError as error:
            raise ArtifactError(self._failure_message(snapshot, error)) from error
        finally:
            snapshot.release()

    def _write(self, snapshot: Snapshot, metric: float | None) -> None:
        files = self.files()
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            fsync(self.directory.parent)
        self._clear_interrupted_writes()
        temporary = self.directory / f".writing-{snapshot.step:08d}"
        try:
            temporary.mkdir()
            written = {name: write(temporary / name, [data]) for name, data in files.items()}
            for name, tensors in by_file(snapshot.weights, self._weights_file).items():
                written[name] = write(temporary / name, tensor_parts(tensors, {"format": "pt"}))
            written[OPTIMIZER] = write(temporary / OPTIMIZER, tensor_parts(snapshot.optimizer))
            state = {**snapshot.state, "step": snapshot.step, "metric": metric, "files": written}
            write_json(temporary / STATE, with_digest(state))
            _publish(temporary)
        except BaseException:
            if not (temporary / STATE).exists():  # else it is complete, and is listed
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _clear_interrupted_writes(self) -> None:
        for temporary in self.directory.glob(".writing-*"):
            if (temporary / STATE).exists():
                with contextlib.suppress(ArtifactError):
                    read(temporary, self._weights_file)
                    _publish(temporary)
            remove_tree(temporary)
        remove_trash(self.directory)
        for pointer in self.directory.glob(".*.tmp"):
            pointer.unlink(missing_ok=True)

    def _failure_message(self, snapshot: Snapshot, error: OSError) -> str:
        message = (
            f"cannot write the checkpoint of step {snapshot.step}: "
            f"{error.filename or self.directory}: {error.strerror or error}; "
        )
        steps = [step_of(path) for path in self._intact() if not is_unnamed(path)]
        intact = max(
            (step for step in steps if step != snapshot.step or step == self._durable),
            default=None,
        )
        if intact is None:
            message += "there is no other checkpoint, so the same command starts from the beginning"
        else:
            message += (
                f"the checkpoint of step {intact} is intact, and the same command continues from it"
            )
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = format_size(shutil.disk_usage(self.directory).free)
            return (
                f"{message}. It needs {format_size(needed_bytes(snapshot))}, and {free} are free: "
                "make room, set runtime.keep_checkpoints=1, or set TTRAIN_HOME to a larger disk"
            )
        return (
            f"{message}. Check whether the disk is failing (see `dmesg`), "
            f"or set TTRAIN_HOME to another one"
        )

    def _update_pointers(self, step: int, metric: float | None) -> None:
        write_json(self.directory / LATEST, {"step": step, "metric": metric})
        ranked = self._ranked()
        if ranked and read_json(self.directory / BEST) != (
            best := {"step": ranked[0][1], "metric": ranked[0][0]}
        ):
            write_json(self.directory / BEST, best)

    def _prune(self) -> None:
        ranked = self._ranked()
        steps = [step_of(path) for path in self._intact()]
        retained_steps = {*sorted({*steps})[-self._keep :], *(self._permanent & {*steps})}
        retained_steps |= {step for _, step, _ in ranked[:1]}
        if self._keep_every:
            retained_steps |= {step for step in steps if step % self._keep_every == 0}
        for path in list_checkpoints(self.directory):
            if step_of(path) not in retained_steps:
                remove_tree(path)
        remove_trash(self.directory)

    # --- lookup ---

    def _intact(self) -> list[Path]:
        return [path for path in list_checkpoints(self.directory) if path not in self._damaged]

    def _ranked(self) -> list[tuple[float, int, Path]]:
        """(metric, step, path) of the checkpoints that have a metric, the best first."""
        measured = [(logged_metric(path), step_of(path), path) for path in self._intact()]
        return sorted((metric, step, path) for metric, step, path in measured if metric is not None)

    def _pointed_best(self) -> int | None:
        path = self.directory / BEST
        if not path.exists():
            return None
        step = read_object(path).get("step")
        if type(step) is not int:
            log.warning("the file %s is damaged; searching the checkpoints for the best", path)
            return None
        return step


def remove_trash(directory: Path) -> None:
    """Finish interrupted removals."""
    for trash in directory.glob(".trash-*"):
        shutil.rmtree(trash, ignore_errors=True)


def lower_priority() -> None:
    """Lower the writer thread's priority, so that it runs when training leaves a core idle.

    Only Linux keeps a niceness per thread; elsewhere nothing changes.
    """
    if sys.platform == "linux":
        # Where a sandbox forbids it, the writer keeps its priority.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _publish(temporary: Path) -> None:
    # Only now, when the new checkpoint is complete, an older one of its step becomes trash.
    final = temporary.with_name(f"step-{step_of(temporary):08d}")
    if final.exists():
        final.rename(final.with_name(f".trash-{final.name}-{time.time_ns()}"))
    temporary.rename(final)
    fsync(final.parent)
