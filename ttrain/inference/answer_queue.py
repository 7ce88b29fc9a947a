"""Answers the requests of the endpoint, one at a time, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from weakref import WeakKeyDictionary

from ttrain.core.text import first_line
from ttrain.errors import TTrainError
from ttrain.inference.generate import KVCache, TextStream, generate
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling

KEPT_MODELS = 2  # in memory: two that are compared
# (index of the answer, its new text, finish reason: "stop", "length", or None before the end)
Piece = tuple[int, str, str | None]


@dataclass(eq=False)
class Order:
    """The answers of one request, and their pieces so far."""

    model: LoadedModel
    sampling: Sampling  # each answer has its own max_tokens
    stops: Sequence[str]
    answers: list[Answer] = field(default_factory=list)
    has_ended: bool = False
    _pieces: asyncio.Queue[Piece | TTrainError] = field(default_factory=asyncio.Queue)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    @property
    def is_done(self) -> bool:
        """Whether the request or all of its answers have ended."""
        return self.has_ended or all(answer.has_ended for answer in self.answers)

    def send(self, piece: Piece | TTrainError) -> None:
        """Pass a piece on from the thread that generates."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces until all answers have ended. Raises errors of the generation."""
        unfinished = len(self.answers)
        try:
            while unfinished:
                piece = await self._pieces.get()
                if isinstance(piece, TTrainError):
                    raise piece
                unfinished -= piece[2] is not None
                yield piece
        finally:
            self.has_ended = True


@dataclass(eq=False)
class Answer:
    """One answer: a row of a batch."""

    order: Order
    index: int
    prompt: Sequence[int]
    max_tokens: int
    number: int
    stream: TextStream
    has_ended: bool = False
    _unsent: str = ""

    def add(self, ids: list[int]) -> None:
        """Take the tokens so far."""
        self._unsent += self.stream.add(ids)
        self._send("length" if len(ids) == self.max_tokens else None)

    def end(self) -> None:
        """End at a stop token."""
        self._unsent += self.stream.end()
        self._send("stop")

    def _send(self, reason: str | None) -> None:
        # Send text up to a stop sequence; hold back a tail that may be the start of one.
        stops = self.order.stops
        positions = [self._unsent.find(stop) for stop in stops if stop in self._unsent]
        if positions:
            self._unsent = self._unsent[: min(positions)]
            reason = "stop"
        held_back = 0 if reason or not stops else max(map(len, stops)) - 1
        end = max(0, len(self._unsent) - held_back)
        text = self._unsent[:end]
        self._unsent = self._unsent[end:]
        self.has_ended = reason is not None
        if text or reason:
            self.order.send((self.index, text, reason))


class AnswerQueue:
    """Loads models and generates the answers of one request after the other."""

    def __init__(self, load: Callable[[str], LoadedModel], max_requests: int) -> None:
        self.max_requests = max_requests
        self._load = load
        self._models: dict[str, LoadedModel] = {}
        self._kv_caches = WeakKeyDictionary[LoadedModel, KVCache]()
        self._orders: list[Order] = []
        self._thread = ThreadPoolExecutor(1, "answers")

    async def model(self, name: str) -> LoadedModel:
        """The model of that name, loaded on its first request."""
        if name in self._models:
            return self._models[name]
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.open, name)

    def open(self, name: str) -> LoadedModel:
        """Load a model; if KEPT_MODELS are loaded, unload the one that was loaded first."""
        if name not in self._models:
            model = self._load(name)  # first, so that an unknown name unloads nothing
            while len(self._models) >= KEPT_MODELS:
                self._models.pop(next(iter(self._models)))
            self._models[name] = model
        return self._models[name]

    @property
    def requests(self) -> int:
        """Number of requests that are answered or wait."""
        self._orders = [order for order in self._orders if not order.is_done]
        return len(self._orders)

    def submit(self, order: Order) -> None:
        """Queue the order's answers; consecutive answers to the same prompt form one batch."""
        self._orders.append(order)
        for _, answers in groupby(order.answers, key=lambda answer: id(answer.prompt)):
            self._thread.submit(self._generate, order, list(answers))

    def close(self) -> None:
        """End all answers where they are."""
        for order in self._orders:
            order.has_ended = True
        self._thread.shutdown(cancel_futures=True)

    def _generate(self, order: Order, batch: list[Answer]) -> None:
        def take(answers: dict[int, list[int]]) -> list[int]:
            for row, answer in enumerate(batch):
                if row in answers:
                    answer.add(answers[row])
                elif not answer.has_ended:
                    answer.end()
            return [row for row in answers if batch[row].has_ended or order.has_ended]

        if order.has_ended:
            return
        try:
            generate(
                order.model,
                [answer.prompt for answer in batch],
                order.sampling.replaced({"max_tokens": batch[0].max_tokens}),
                numbers=[answer.number for answer in batch],
                on_tokens=take,
                kv_cache=self._kv_caches.setdefault(order.model, KVCache(order.model))
                if len(batch) == 1
                else None,
            )
        except Exception as error:  # of any kind, such as CUDA's: the next request may be smaller
            order.has_ended = True
            order.send(TTrainError(f"the answer could not be computed: {first_line(error)}"))
