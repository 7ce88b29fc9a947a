"""What an answer must not hold: tokens and names that begin and end turns. Where it does, the model goes on with the
conversation by itself, or has not learnt where its turn ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ttrain.data import chat
from ttrain.data.chat_templates import Message, Segment
from ttrain.data.encoder import Encoder
from ttrain.errors import DataError

# A special token that is spelt, as a model of another template does: <|im_start|>, <｜User｜>, [INST], <s>.
SPELT = re.compile(r"<\|\w{1,32}\|>|<｜[^<>｜\s]{1,32}｜>|\[/?INST\]|</?s>")
# A line that begins as somebody's turn does, whatever the template.
TURN = re.compile(r"^[ \t]*(?:\#+ *)?(?:user|human|assistant|用户|助手)[ \t]*[:：]", re.IGNORECASE | re.MULTILINE)
SIGN = re.compile(r"[^\w\s]")
PROBE = ("18446744073709551557", "18446744073709551533", "18446744073709551521")  # no template writes these by itself


def found(encoder: Encoder, ids: Sequence[int], text: str) -> list[str]:
    """The markers in an answer, given as its ids and its text, each as a person would name it; [] for one that is clean."""
    special = _special_ids(encoder)
    seen = [f"token {number}" for number in ids if number in special or number >= len(encoder)]
    seen += SPELT.findall(text) + [match.group().strip() for match in TURN.finditer(text)]
    seen += [name for name in headers(encoder) if name in text]
    return list(dict.fromkeys(seen))


@lru_cache(maxsize=4)
def headers(encoder: Encoder) -> tuple[str, ...]:
    """What the chat template writes in plain text before a turn, such as `User：`. A mere word, such as ChatML's `user`, is
    none: every text may hold it, and the special token before it is looked for anyway."""
    first, answer, second = PROBE
    try:
        segments = chat.template_of(encoder).segments(
            (Message("user", first), Message("assistant", answer), Message("user", second))
        )
    except DataError:  # no such conversation with this template
        return ()
    after = segments[[segment.content for segment in segments].index(first) + 1 :]  # before it a template may greet
    lines = (line.strip() for segment in after for line in _plain(encoder, segment).splitlines())
    return tuple(dict.fromkeys(line for line in lines if SIGN.search(line)))


@lru_cache(maxsize=4)
def _special_ids(encoder: Encoder) -> frozenset[int]:
    """Asked for once: a tokenizer makes a list of all its added tokens each time."""
    return encoder.special_ids()


def _plain(encoder: Encoder, segment: Segment) -> str:
    """A piece of a template without its special tokens; "" for what the turns say."""
    if isinstance(segment.content, str):
        return "" if segment.content in PROBE else segment.content
    return encoder.decode(segment.content)
