"""Checkpoints: Hugging Face directories that also hold all that a run needs to continue bit for bit.

`checkpoints/step-00000100/` = weights (safetensors, fp32) with the files that make it open with `from_pretrained`,
`optimizer.safetensors`, and `state.json`, written last, with position, counters, the validation loss where there is one, its
own digest and that of every other file. It is written under a temporary name, fsynced and renamed, in a background
thread, from a snapshot in memory. Beside the directories lie `latest`, `best` and, once training has ended, `final`, which
name a step for people and tools and are believed by nobody here.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

from ttrain.core.files import read_json, remove_tree, write_json
from ttrain.errors import ArtifactError
from ttrain.train.checkpoint_format import OPTIMIZER, STATE, WEIGHTS, found, is_unnamed, logged_metric, read, step_of
from ttrain.train.checkpoint_writer import give_way, not_written, remove_trash, write_checkpoint
from ttrain.train.snapshots import Snapshot, SnapshotBuffers, copy_tensors, needed_bytes
from ttrain.train.tensor_files import naming

__all__ = [
    "OPTIMIZER",
    "STATE",
    "WEIGHTS",
    "Checkpoints",
    "Snapshot",
    "SnapshotBuffers",
    "copy_tensors",
    "needed_bytes",
    "read",
]

LATEST, BEST, FINAL = "latest", "best", "final"
UNDER_WAY = 2  # snapshots that may exist at once: one being written, one that waits
log = logging.getLogger("ttrain")


class Checkpoints:
    """The checkpoints of one run, all of which one process writes.

    These stay: the `keep` newest, every `keep_every` steps (0: none), the steps in `permanent`, the best.
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
        self.waited_seconds = 0.0  # that the trainer waited for the writer
        self._files, self._weights_file = files, weights_file
        self._keep, self._keep_every, self._permanent = keep, keep_every, permanent
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=give_way)
        self._pending: deque[Future[None]] = deque()
        self._damaged: set[Path] = set()  # passed over by newest() or best()
        self._durable: int | None = None  # step of the last one that was written

    def save(self, snapshot: Snapshot, *, metric: float | None = None) -> None:
        """Write in the background, and release the snapshot then.

        `metric` is the validation loss at this step; None or a number that is not finite is never the best.
        Waits where two snapshots are under way already. Raises ArtifactError where an earlier write failed.
        """
        try:
            self._finish(but=UNDER_WAY - 1)
        except BaseException:
            snapshot.release()
            raise
        finite = metric if metric is not None and math.isfinite(metric) else None
        self._pending.append(self._pool.submit(self._save, snapshot, finite))

    def wait(self) -> None:
        """Until nothing is being written. Raises ArtifactError where a write failed."""
        self._finish(but=0)

    def close(self) -> None:
        """End the writer thread, after its last write."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def newest(self) -> Snapshot | None:
        """The newest checkpoint whose every byte verifies; a damaged one is named and passed over. None where there is none.

        Raises ArtifactError where there are some and all are damaged: training must not begin anew in silence.
        """
        damaged = []
        for path in reversed(found(self.directory)):
            try:
                return read(path, self._weights_file)
            except ArtifactError as error:
                log.warning("%s; the one before it is tried", error)
                self._damaged.add(path)
                damaged.append(str(error))
        if not damaged and (self.directory / LATEST).exists():
            damaged = [f"the one that {self.directory / LATEST} names is gone"]
        if damaged:
            raise ArtifactError(
                f"no checkpoint in {self.directory} is whole: {'; '.join(damaged)}; "
                f"put one back, or delete the directory to train from the start"
            )
        return None

    def best(self) -> Snapshot | None:
        """The checkpoint with the smallest logged metric of those that verify, the earlier of equals. None without any.

        Waits for the writer. Another process must know that nothing is being written.
        """
        self.wait()
        ranked = self._ranked()
        pointed = self._pointed_best()
        if pointed is not None and all(step != pointed for _, step, _ in ranked):
            log.warning("the best checkpoint, of step %d, is gone or damaged; the next best is tried", pointed)
        for _, _, path in ranked:
            try:
                return read(path, self._weights_file)
            except ArtifactError as error:
                log.warning("%s; the next best is tried", error)
                self._damaged.add(path)
        return None

    def begin(self) -> None:
        """A training goes on here: what it leaves is not known yet."""
        (self.directory / FINAL).unlink(missing_ok=True)

    def end(self, step: int) -> None:
        """The training has ended, and its model has the weights of this step. Waits for the writer."""
        self.wait()
        with naming(self.directory / FINAL):
            write_json(self.directory / FINAL, {"step": step})

    def keep(self, step: int) -> None:
        """Never remove the checkpoint of this step while this run lasts, be it written already or not."""
        self._permanent = self._permanent | {step}

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints that a run with another count of steps left beyond this one."""
        self.wait()
        for path in found(self.directory):
            if step_of(path) > step:
                remove_tree(path)

    def _finish(self, but: int) -> None:
        """Wait until so many writes are under way, and raise what those that ended raised."""
        while len(self._pending) > but or (self._pending and self._pending[0].done()):
            began = time.monotonic()
            wait_for([self._pending[0]])
            self.waited_seconds += time.monotonic() - began
            self._pending.popleft().result()

    # --- in the writer thread ---------------------------------------------------------------------------------------------

    def _save(self, snapshot: Snapshot, metric: float | None) -> None:
        try:
            write_checkpoint(self.directory, snapshot, metric, files=self._files(), weights_file=self._weights_file)
            self._durable = snapshot.step
            self._damaged.discard(self.directory / f"step-{snapshot.step:08d}")
            self._point(snapshot.step, metric)
            self._prune()
        except OSError as error:
            raise ArtifactError(not_written(self.directory, snapshot, error, self._whole_beside(snapshot.step))) from error
        finally:
            snapshot.release()

    def _point(self, step: int, metric: float | None) -> None:
        with naming(self.directory / LATEST):
            write_json(self.directory / LATEST, {"step": step, "metric": metric})
        ranked = self._ranked()
        if ranked and read_json(self.directory / BEST) != (best := {"step": ranked[0][1], "metric": ranked[0][0]}):
            with naming(self.directory / BEST):
                write_json(self.directory / BEST, best)

    def _prune(self) -> None:
        """Remove what need not stay, damaged ones too, once the newest is durable."""
        ranked = self._ranked()
        steps = [step_of(path) for path in found(self.directory) if path not in self._damaged]
        kept = kept_steps(
            steps,
            keep=self._keep,
            keep_every=self._keep_every,
            permanent=self._permanent,
            best=ranked[0][1] if ranked else None,
        )
        for path in found(self.directory):
            if step_of(path) not in kept:
                remove_tree(path)
        remove_trash(self.directory)

    # --- what is there ----------------------------------------------------------------------------------------------------

    def _whole_beside(self, step: int) -> int | None:
        """The newest checkpoint but the one that is being written, unless that one is durable already."""
        steps = [step_of(path) for path in found(self.directory) if path not in self._damaged and not is_unnamed(path)]
        return max((other for other in steps if other != step or other == self._durable), default=None)

    def _ranked(self) -> list[tuple[float, int, Path]]:
        """(metric, step, path) of the checkpoints that have a metric, the best first."""
        measured = [
            (logged_metric(path), step_of(path), path) for path in found(self.directory) if path not in self._damaged
        ]
        return sorted((metric, step, path) for metric, step, path in measured if metric is not None)

    def _pointed_best(self) -> int | None:
        """The step that `best` names; None where there is no such file, and with a warning where it is damaged."""
        path = self.directory / BEST
        if not path.exists():
            return None
        pointer = read_json(path)
        step: Any = pointer.get("step") if isinstance(pointer, dict) else None
        if type(step) is not int:
            log.warning("the file %s is damaged; the best is sought among the checkpoints", path)
            return None
        return step


def kept_steps(
    steps: Collection[int], *, keep: int, keep_every: int, permanent: Collection[int], best: int | None
) -> frozenset[int]:
    """Those that stay: the newest, those of the cadence, the permanent ones, the best."""
    newest = sorted({*steps})[-keep:]
    return frozenset(
        step
        for step in steps
        if step in newest or step in permanent or step == best or (keep_every > 0 and step % keep_every == 0)
    )
