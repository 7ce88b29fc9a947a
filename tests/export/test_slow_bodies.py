"""Requests whose bodies arrive slowly, or all at once."""

from __future__ import annotations

import asyncio
from typing import Any

from ttrain.export.requests import LimitedRequests

CHAT = "/v1/chat/completions"


class SlowBodies:
    """Requests to `LimitedRequests` whose clients send the first bytes of a body, and no more."""

    def __init__(self, **limits: Any) -> None:
        self.app = LimitedRequests(self._answer, (CHAT,), **limits)
        self.answers: list[int] = []

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (await receive())["body"]})

    async def post(self, beginning: bytes, *, is_whole: bool = False) -> None:
        messages = iter([{"type": "http.request", "body": beginning, "more_body": not is_whole}])

        async def receive() -> Any:
            message = next(messages, None)
            return message or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            self.answers += [message["status"]] if "status" in message else []

        await self.app({"type": "http", "method": "POST", "path": CHAT}, receive, send)


def test_bodies_that_do_not_arrive_keep_no_other_request_waiting_and_are_refused_in_time() -> None:
    async def scenario() -> list[int]:
        server = SlowBodies(max_requests=1, body_seconds=0.1)
        waiting = [asyncio.create_task(server.post(b"")) for _ in range(8)]
        await asyncio.sleep(0)
        await server.post(b"{}", is_whole=True)
        await asyncio.wait_for(asyncio.gather(*waiting), 10)
        await server.post(b"{}", is_whole=True)
        return server.answers

    assert asyncio.run(scenario()) == [200, *[408] * 8, 200]


def test_all_bodies_that_arrive_together_have_a_bound_too() -> None:
    async def scenario() -> list[int]:
        server = SlowBodies(max_requests=8, body_seconds=0.1, max_held_bytes=100)
        waiting = [asyncio.create_task(server.post(b"x" * 40)) for _ in range(3)]
        await asyncio.wait_for(asyncio.gather(*waiting), 10)
        await server.post(b"x" * 90, is_whole=True)
        return server.answers

    assert asyncio.run(scenario()) == [429, 408, 408, 200]
