"""Where blocks are made: in this process, or in several on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ttrain.errors import StageFailed
from ttrain.parent import end_with_parent

TASKS_AHEAD = 2  # a worker's: one in work, one waiting, so that memory does not grow with the input
# One thread a process: two threads of fastokens in one process took 1.33 CPU seconds for what one thread does in 0.64.
ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class Here:
    """One after the other, in this process."""

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]:
        for task in tasks:
            yield function(*task)


class Processes:
    """`workers` processes of this machine, started with the first task. They end with this process, whatever ends it."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]:
        """Results in order. Raises StageFailed where a worker was killed; what it finished before is kept."""
        first = list(_take(tasks, 2))
        if len(first) < 2 or self.workers == 1:
            yield from Here().map(function, iter([*first]))
            yield from Here().map(function, tasks)
            return
        old = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)  # read by the libraries when the children start
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_start, initargs=(os.getpid(),))
        waiting: deque[Future[Any]] = deque()
        try:
            for task in [*first]:
                waiting.append(pool.submit(function, *task))
            for task in tasks:
                waiting.append(pool.submit(function, *task))
                if len(waiting) >= self.workers * TASKS_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise StageFailed(
                "a worker that makes shards was killed (out of memory?); the finished shards are kept: run the same command "
                f"again, with runtime.workers={max(1, self.workers // 2)} if it happens twice"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)  # waits for the blocks in work: half a second
            for name, value in old.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _take(tasks: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        for task in tasks:
            yield task
            break


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end_with_parent(parent)
