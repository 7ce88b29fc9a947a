"""Where blocks are made: in this process, or in several on this machine."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ttrain.core.parent_process import end_with_parent
from ttrain.errors import StageFailed

TASKS_AHEAD = 2  # a worker's: one in work, one waiting, so that memory does not grow with the input
# One thread a process: two threads of fastokens in one process took 1.33 CPU seconds for what one thread does in 0.64.
ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class Here:
    """One after the other, in this process."""

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]:
        for task in tasks:
            yield function(*task)


class Processes:
    """`workers` processes of this machine, for many calls of `map`. They end with this process, whatever ends it.

    They start with the second task, or when `begin` is called: a worker takes half a second until it can work.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)  # waits for the blocks in work: half a second
            self._pool = None

    def begin(self) -> ProcessPoolExecutor:
        """Start the workers, if they do not run yet."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_start, initargs=(os.getpid(),))
            old = {name: os.environ.get(name) for name in ENVIRONMENT}
            os.environ.update(ENVIRONMENT)  # read by the libraries when the children start; each task starts one
            for _ in range(self.workers):
                self._pool.submit(_start_with)
            for name, value in old.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        return self._pool

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]:
        """Results in order. Raises StageFailed where a worker was killed; what it finished before is kept."""
        first = list(itertools.islice(tasks, 2))
        if self.workers == 1 or (len(first) < 2 and self._pool is None):
            yield from Here().map(function, itertools.chain(first, tasks))
            return
        waiting: deque[Future[Any]] = deque()
        try:
            pool = self.begin()
            for task in itertools.chain(first, tasks):
                waiting.append(pool.submit(function, *task))
                if len(waiting) >= self.workers * TASKS_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            self._pool = None
            raise StageFailed(
                "a worker that makes shards was killed (out of memory?); the finished shards are kept: run the same command "
                f"again, with runtime.workers={max(1, self.workers // 2)} if it happens twice"
            ) from None
        finally:  # none may still write when the caller goes on
            futures.wait([future for future in waiting if not future.cancel()])


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end_with_parent(parent)
    _start_with()


def _start_with() -> None:
    """Import what the work needs."""
    import ttrain.data.blocks  # noqa: F401
