"""Make sets of shards from files: any number of workers encode blocks, which are then assembled."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from concurrent import futures
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ttrain.config import Reading
from ttrain.core.files import read_json
from ttrain.core.machine import SAFE_PATH
from ttrain.data import blocks, contamination, shard_worker
from ttrain.data.assembly import ShardSetResult, assemble
from ttrain.data.blocks import Block, BlockRecipe
from ttrain.data.built_blocks import BuiltBlock, DataFile, FilesByRole, Pool, Table
from ttrain.data.contamination import OverlapCheck, TextMatch
from ttrain.data.near_duplicates import EarlierSet, NearDuplicateSearch, SimilarityRule
from ttrain.errors import StageFailed

Progress = Callable[[int, int], None]  # gets the rows so far, and the blocks


def build(
    output: Path,
    files: FilesByRole,
    recipe: BlockRecipe,
    reading: Reading,
    *,
    block_bytes: int,
    pool: Pool,
    weights: Sequence[float] = (),
    against: OverlapCheck | None = None,
    earlier: Sequence[EarlierSet] = (),
    earlier_heldout: Table | None = None,
    progress: Progress = lambda rows, block_count: None,
) -> ShardSetResult:
    """Make `train/` and `heldout/` under `output` from the files of the roles "train" and, if given, "heldout".

    `against` has the evaluation items that training documents are checked against, `earlier` the sets of shards whose
    documents count as near-duplicates' originals, `earlier_heldout` the content hashes of rows that are not to be learnt.
    Complete blocks that exist already are reused, so a run that was killed resumes. Raises DataError for a file that cannot
    be read.
    """
    maker = _BlockMaker(output, files, reading, block_bytes, pool, progress)
    built_blocks = maker.make_all(recipe)
    overlaps = (against, maker.scan(built_blocks, recipe, against)) if against else None
    near = None
    if recipe.kind == "documents" and reading.near_duplicates:
        rule = SimilarityRule(reading.near_duplicates)
        near = NearDuplicateSearch(output, built_blocks, recipe, rule, earlier, pool)
    return assemble(output, files, built_blocks, recipe, reading, weights, overlaps, near, earlier_heldout)


def make_all(
    output: Path,
    files: FilesByRole,
    recipe: BlockRecipe,
    reading: Reading,
    *,
    block_bytes: int,
    pool: Pool,
    progress: Progress = lambda rows, block_count: None,
) -> list[BuiltBlock]:
    """Make or reuse every block of the files."""
    return _BlockMaker(output, files, reading, block_bytes, pool, progress).make_all(recipe)


@dataclass(frozen=True)
class _BlockMaker:
    """Makes or reuses the blocks of files."""

    output: Path
    files: FilesByRole
    reading: Reading
    block_bytes: int
    pool: Pool
    progress: Progress

    def make_all(self, recipe: BlockRecipe) -> list[BuiltBlock]:
        """The blocks of both roles."""
        reading, built_blocks = self.reading, list[BuiltBlock]()
        if "heldout" in self.files:
            recipe = replace(recipe, heldout_fraction=0.0)
            built_blocks += self.make_role("heldout", replace(recipe, heldout_fraction=1.0, keep_below=None))
        kept_back = {row[:2].tobytes() for block in built_blocks for row in block.rows}
        limit = reading.limit * reading.rounds if reading.limit else None
        enough: Callable[[BuiltBlock], bool] | None = None
        if limit and reading.sample == "reservoir":
            draws = self.draws(recipe, kept_back)
            recipe = replace(recipe, keep_below=int(draws[limit - 1]) + 1 if len(draws) > limit else None)
        elif limit:
            rows, seen = 0, set[bytes]()  # that are not held out, so far

            def enough(block: BuiltBlock) -> bool:
                nonlocal rows
                keys = [key for row in block.rows if (key := row[:2].tobytes()) not in kept_back]
                rows += len(keys)
                if reading.deduplicate:
                    seen.update(keys)
                return (len(seen) if reading.deduplicate else rows) >= limit

        return built_blocks + self.make_role("train", recipe, enough)

    def make_role(
        self, role: str, recipe: BlockRecipe, enough: Callable[[BuiltBlock], bool] | None = None
    ) -> list[BuiltBlock]:
        """The blocks of a role's files, in order."""
        files = self.files[role]
        built_blocks: list[BuiltBlock] = []
        rows = 0
        lines: Counter[int] = Counter()
        tasks = ((block, recipe, str(self.output)) for block in self.cut(role, recipe))
        with contextlib.closing(self.pool.map(blocks.make, tasks)) as results:
            for number, directory, encoded in results:
                block = _open(role, number, files[number], Path(directory), encoded, lines[number])
                lines[number] += block.manifest["lines"]
                built_blocks.append(block)
                rows += len(block.rows)
                self.progress(rows, len(built_blocks))
                if enough and enough(block):
                    break
        return built_blocks

    def scan(self, built_blocks: Sequence[BuiltBlock], recipe: BlockRecipe, against: OverlapCheck) -> list[list[TextMatch]]:
        """What the rows of each block for training have of the items; the blocks are read again."""
        count = sum(block.role == "train" for block in built_blocks)
        blocks_read = itertools.islice(self.cut("train", recipe), count)
        tasks = ((block, recipe, against.texts, against.share) for block in blocks_read)
        with contextlib.closing(self.pool.map(contamination.scan, tasks)) as results:
            matches = list(results)
        return [*([[]] * (len(built_blocks) - count)), *matches]

    def cut(self, role: str, recipe: BlockRecipe) -> Iterator[Block]:
        """The blocks of the role's files."""
        for number, file in enumerate(self.files[role]):
            yield from blocks.cut(file.location, number, self.block_bytes, recipe)

    def draws(self, recipe: BlockRecipe, kept_back: Set[bytes]) -> npt.NDArray[np.uint64]:
        """Sorted draws of all good rows that are not held out; of equal rows only one, if duplicates are dropped."""
        tasks = ((block, recipe) for block in self.cut("train", recipe))
        with contextlib.closing(self.pool.map(blocks.scan, tasks)) as results:
            draws = np.concatenate([np.zeros(0, np.uint64), *results])
        if kept_back:
            hashes = (np.frombuffer(key, np.uint64).astype(">u8").tobytes() for key in kept_back)
            draws = draws[~np.isin(draws, np.array([blocks.draw(key, recipe.seed) for key in hashes], np.uint64))]
        return np.unique(draws) if self.reading.deduplicate else np.sort(draws)


def _open(role: str, file: int, source: DataFile, directory: Path, encoded: bool, lines: int) -> BuiltBlock:
    rows = np.fromfile(directory / blocks.ROWS, ">u8").astype(np.uint64).reshape(-1, 4)
    return BuiltBlock(role, file, source, directory, encoded, read_json(directory / blocks.MANIFEST), rows, lines)


TASKS_AHEAD = 8  # a worker's, done but for one, behind a slow one such as the first of a process; results are small
# One thread a process: two threads of fastokens in one process took 1.33 CPU seconds for what one thread does in 0.64. Its
# threads beside rayon's are set by `encoder`, also in the workers of a Dask cluster, which do not get this environment.
ENVIRONMENT = {
    **SAFE_PATH,  # multiprocessing starts `python -c`, which imports from the directory that it is in
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


class Here:
    """One after the other, in this process."""

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]:
        for task in tasks:
            yield function(*task)


class Processes:
    """`workers` processes of this machine, for many calls of `map`; they end with this one.

    They start with the second task, or when `begin` is called: a process takes 0.4 s until it can work.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._executors: list[Executor] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)  # waits for the blocks in work: half a second
        self._executors = []

    def begin(self) -> list[Executor]:
        """Start the workers, if they do not run yet."""
        if not self._executors:
            context = multiprocessing.get_context("spawn")
            processes = ProcessPoolExecutor(self.workers, context, shard_worker.start, (os.getpid(),))
            environment = dict(os.environ)
            os.environ.update(ENVIRONMENT)  # read by the libraries when the children start
            resource_tracker.ensure_running()  # which unblocks the signal
            blocked_signals = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # for a worker's life: it inherits
            try:  # the mask, and would show a traceback while it loads
                for _ in range(self.workers):  # each task starts one
                    processes.submit(shard_worker.begin)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked_signals)
            for name in ENVIRONMENT.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
            self._executors = [processes]
        return self._executors

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]:
        """Results in order. Raises StageFailed where a worker was killed; what it finished before is kept."""
        first = list(itertools.islice(tasks, 2))
        if self.workers == 1 or (len(first) < 2 and not self._executors):
            yield from Here().map(function, itertools.chain(first, tasks))
            return
        waiting: deque[Future[Any]] = deque()
        try:
            for task in itertools.chain(first, tasks):
                waiting.append(self.begin()[0].submit(function, *task))
                while waiting and (waiting[0].done() or len(waiting) >= self.workers * TASKS_AHEAD):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            self.__exit__()
            raise StageFailed(
                "a worker that makes shards was killed (out of memory?); the finished shards are kept: run the same command "
                f"again, with runtime.workers={max(1, self.workers // 2)} if it happens twice"
            ) from None
        finally:  # none may still write when the caller goes on
            futures.wait([future for future in waiting if not future.cancel()])
