"""Processes of this machine that call a function many times; results come in order."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, resource_tracker
from typing import Any, Protocol

from ttrain.core.machine import SAFE_PATH
from ttrain.core.signals import end_with_parent
from ttrain.errors import StageFailed

# Tasks of a worker, done but for one, behind a slow one such as the first of a process.
TASKS_AHEAD = 8
# One thread a process: two threads of fastokens in one process took 1.33 CPU seconds for what one
# does in 0.64. Its threads beside rayon's are set by `encoder`, also for the workers of a Dask
# cluster, which do not get this environment.
ENVIRONMENT = {
    **SAFE_PATH,  # multiprocessing starts `python -c`, which imports from the directory it is in
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


Tasks = Iterator[tuple[Any, ...]]  # the arguments of each call


class Pool(Protocol):
    """Calls a function with many tuples of arguments; results in order."""

    def map(self, function: Callable[..., Any], tasks: Tasks) -> Generator[Any]: ...


class Processes:
    """`workers` processes for many calls of `map`; one worker is this process itself.

    They start with the second task, or by `begin`, in 0.4 s, and end with this process.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._executor: futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        if self._executor:
            self._executor.shutdown(
                cancel_futures=True
            )  # waits for the blocks in work: half a second
        self._executor = None

    def begin(self) -> futures.ProcessPoolExecutor:
        """Start the workers, if they do not run yet."""
        if self._executor is None:
            self._executor = futures.ProcessPoolExecutor(
                self.workers, get_context("spawn"), _start, (os.getpid(),)
            )
            environment = dict(os.environ)
            os.environ.update(ENVIRONMENT)  # read by the libraries when the children start
            resource_tracker.ensure_running()  # which unblocks the signal
            # The parent alone answers Ctrl-C: a worker inherits the mask for its life, and would
            # show a traceback while it loads.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                for _ in range(self.workers):  # each task starts one
                    self._executor.submit(os.getpid)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for name in ENVIRONMENT.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
        return self._executor

    def map(self, function: Callable[..., Any], tasks: Tasks) -> Generator[Any]:
        """Results in order. Raises StageFailed if a worker was killed."""
        first = list(itertools.islice(tasks, 2))
        tasks = itertools.chain(first, tasks)
        if self.workers == 1 or (len(first) < 2 and self._executor is None):
            yield from itertools.starmap(function, tasks)
            return
        executor = self.begin()
        most_ahead = self.workers * TASKS_AHEAD
        waiting: deque[futures.Future[Any]] = deque()
        try:
            for task in tasks:
                waiting.append(executor.submit(function, *task))
                while waiting and (waiting[0].done() or len(waiting) >= most_ahead):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            self.__exit__()
            raise StageFailed(
                "a worker that makes shards was killed (out of memory?); the finished shards are "
                "kept: run the same command again, with "
                f"runtime.workers={max(1, self.workers // 2)} if it happens twice"
            ) from None
        finally:  # none may still write when the caller goes on
            futures.wait([future for future in waiting if not future.cancel()])


def _start(parent: int) -> None:
    end_with_parent(parent)
    importlib.import_module("ttrain.data.blocks")
