"""The turns of a chat."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

# Around the reasoning, as Qwen3 and DeepSeek-R1 write it.
THINK, END_OF_THINK = "<think>\n", "\n</think>\n\n"


@dataclass(frozen=True)
class Message:
    """One turn; calls and functions are part of its text (`ttrain.data.tools`).

    in_loss             whether an assistant's turn is trained on, not only context
    thought             characters at the beginning of the content that are reasoning, with its tags
    thought_in_loss     whether the reasoning is trained on
    """

    role: str  # one of jinja_templates.ROLES
    content: str
    in_loss: bool = True
    thought: int = 0
    thought_in_loss: bool = True

    @property
    def reasoning(self) -> str:
        """The reasoning without its tags."""
        return self.content[len(THINK) : self.thought - len(END_OF_THINK)] if self.thought else ""

    @property
    def masked(self) -> int:
        """Characters at the beginning of an answer that are not trained on."""
        return 0 if self.thought_in_loss else self.thought

    def identity(self) -> list[object]:
        """The fields that identify the turn's content, as JSON."""
        return [self.role, self.content] if self.in_loss else [self.role, self.content, 0]

    def to_json(self) -> dict[str, Any]:
        """The turn in the `messages` format; `weight` is 0 if it is not trained on."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if not self.in_loss:
            turn["weight"] = 0
        if self.thought:
            turn |= {"thought": self.thought, "thought_in_loss": self.thought_in_loss}
        return turn

    @classmethod
    def from_json(cls, turn: Mapping[str, Any]) -> Self:
        """The turn that `to_json` wrote."""
        return cls(
            turn["role"],
            turn["content"],
            turn.get("weight") != 0,
            turn.get("thought", 0),
            turn.get("thought_in_loss", True),
        )


Messages = tuple[Message, ...]


def is_live(turn: Message) -> bool:
    """Whether the loss counts the turn."""
    return turn.role == "assistant" and turn.in_loss and bool(turn.content.strip())
