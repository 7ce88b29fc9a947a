"""Chats with and without calls of functions."""

from __future__ import annotations

from typing import Any

from ttrain.data.chat_templates import Message
from ttrain.data.records import Conversation


def chat(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A row of these turns, with a question before and an answer after them."""
    return {"messages": [{"role": "user", "content": "Hi"}, *turns, {"role": "assistant", "content": "Hello"}], **more}


ADD = {"type": "function", "function": {"name": "add", "description": "à + b", "parameters": {}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
SYSTEM = (
    "You may call these functions; put each call as JSON between <tool_call> and </tool_call>.\n<tools>\n"
    '{"type": "function", "function": {"name": "add", "description": "à + b", "parameters": {}}}\n{"name": "sub"}\n</tools>'
)
TALK = Conversation((
    Message("system", f"Be kind.\n\n{SYSTEM}"), Message("user", "1+é?"), Message("assistant", f"Well.\n{CALLED}\n{CALLED}"),
    Message("tool", "2"), Message("assistant", "2."),
))  # fmt: skip
