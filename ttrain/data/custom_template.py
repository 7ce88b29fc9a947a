"""Chat templates as Jinja, of existing tokenizers too; no content can inject a special token.

A conversation is rendered as it is, and with marks around the contents, which show where they are;
a template that changes contents is refused. Live is an answer with what the template writes before
it behind the generation prompt, up to the end of the template's own `{% generation %}`, or else to
the first special token after the answer.
"""

import bisect
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ttrain.core.files import JsonDict
from ttrain.data.chat_templates import Message, Messages, is_live
from ttrain.errors import DataError

# The texts of a turn, in the order in which a template writes them.
KEYS = ("reasoning_content", "content")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write the date, by calling `strftime_now`. Rows must not depend on it, so the date
# is fixed. The empty expression keeps a newline at the beginning of a template.
FIXED_DATE = {
    "%Y": "2025",
    "%y": "25",
    "%m": "01",
    "%d": "01",
    "%B": "January",
    "%b": "Jan",
    "%A": "Wednesday",
    "%a": "Wed",
    "%H": "00",
    "%M": "00",
    "%S": "00",
}
FIXED_DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace({name!r}, {value!r})" for name, value in FIXED_DATE.items())
    + " }}{% endmacro %}{{ '' }}"
)
NO_END = (
    "no special token ends the answers that are learnt, so that a model would not learn to stop"
)
DEPENDS_ON_CONTENTS = "what it writes around the turns depends on their contents"
REFUSED = "the tokenizer's own chat template cannot be used"
ERROR_CHARACTERS = 200
Span = tuple[int, int]


class TemplateRefused(DataError):
    """The tokenizer's own template cannot render a conversation as it is.

    `reason` has no part of the conversation; `shown` may have one.
    """

    def __init__(self, reason: str, shown: str = "") -> None:
        super().__init__(
            f"tokenizer.template is 'own', but {REFUSED}: {shown or reason}; "
            "set tokenizer.template=ttrain for the template of ttrain"
        )
        self.reason = f"{REFUSED}: {reason}"


class Rendering(NamedTuple):
    """A conversation as one text; spans are (start, end) in its characters.

    contents    the texts of the turns, in which no special token counts
    live        what the loss counts
    """

    text: str
    contents: list[Span]
    live: list[Span]


class Piece(NamedTuple):
    """Where a text has the content or the reasoning of a turn."""

    turn: int
    key: str
    start: int
    end: int


class JinjaTemplate:
    """Renders conversations by the template of a tokenizer.

    end         the special token that ends an answer
    lead        what the template writes between a generation prompt and an answer
    """

    def __init__(
        self, jinja: str, tokens: Mapping[str, str], special_tokens: Iterable[str]
    ) -> None:
        """Raises DataError if the template cannot render a question with its answer and end."""
        self._tokens = tokens
        self._jinja = FIXED_DATE_MACRO + jinja
        self._reads_reasoning = KEYS[0] in jinja
        self._has_generation = GENERATION.search(jinja) is not None
        self._mark = f"\ue000{secrets.randbits(64)}:"  # so that no text holds a mark
        self._marked = re.compile(rf"{self._mark}(\d+)\ue001(.*?){self._mark}\ue002", re.DOTALL)
        # Of special tokens that begin alike the longest is found.
        specials = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)))
        self._prompt_end = self.lead = ""
        self.end = self._mark  # until it is known
        question = Message("user", "q")
        rendering = self.render((question, Message("assistant", "a")))
        answer_start, answer_end = rendering.contents[-1]
        end = rendering.live[0][1] if rendering.live else answer_end
        token = self._special.search(rendering.text, answer_end, end)
        if token is None:
            raise TemplateRefused(NO_END)
        self.end = token.group()
        prompt = self.render((question,), prompt=True)
        self._prompt_end = prompt.text[prompt.contents[0][1] :]
        before = rendering.text[rendering.contents[0][1] : answer_start]
        self.lead = (
            before.removeprefix(self._prompt_end) if before.startswith(self._prompt_end) else ""
        )

    def render(self, messages: Messages, *, prompt: bool = False) -> Rendering:
        """Render a conversation; `prompt`: up to the beginning of the next answer.

        Raises DataError if the template refuses it.
        """
        turns: list[JsonDict] = []
        for message in messages:
            turn = {"role": message.role, "content": message.content}
            if self._reads_reasoning and message.thought:
                turn["content"] = message.content[message.thought :]
                turn[KEYS[0]] = message.reasoning
            turns.append(turn)
        text, blocks = self._render(turns, prompt=prompt)
        pieces = self._pieces(turns, text, prompt=prompt)
        live: list[Span] = []
        begin = 0
        for earlier, piece, later in zip(pieces, pieces[1:], pieces[2:], strict=False):
            message = messages[piece.turn]
            if piece.turn != earlier.turn:
                lead = self._lead_in(text[earlier.end : piece.start])
                if piece.turn > earlier.turn + 1:
                    lead = lead.rpartition(self.end)[2]  # behind a blank turn, which has no piece
                begin = piece.start - len(lead)
            if prompt or piece.turn == later.turn or not is_live(message):
                continue
            if message.masked and piece.key != KEYS[1]:  # nothing but blanks behind the reasoning
                continue
            if message.masked:
                begin = piece.start + (0 if self._reads_reasoning else message.masked)
            if not self._has_generation:
                token = self._special.search(text, piece.end, later.start)
                if token is None:
                    raise TemplateRefused(NO_END)
                live.append((begin, token.end()))
                continue
            block = bisect.bisect_right(blocks, (piece.start, math.inf)) - 1
            if (
                block >= 0 and blocks[block][1] >= piece.end
            ):  # else `{% generation %}` leaves it out
                live.append((begin, blocks[block][1]))
        return Rendering(text, [(piece.start, piece.end) for piece in pieces[1:-1]], live)

    def _pieces(self, turns: list[JsonDict], text: str, *, prompt: bool) -> list[Piece]:
        # Rendered with marks around the contents, the turns show what is written between them.
        marked = [turn.copy() for turn in turns]
        contents: dict[int, str] = {}
        for number, turn in enumerate(marked):
            for place, key in enumerate(KEYS, start=2 * number):
                if turn.get(key, "").strip():
                    contents[place] = turn[key]
                    turn[key] = f"{self._mark}{place}\ue001{turn[key]}{self._mark}\ue002"
        rendered, _ = self._render(marked, prompt=prompt)
        # An empty content, and then the place and the text of each, with what follows it.
        parts = ["-2", "", *self._marked.split(rendered)]
        found = [*zip(map(int, parts[::3]), parts[1::3], parts[2::3], strict=True)]
        copies = Counter(place for place, _, _ in found)
        unchanged = Counter((place, content) for place, content, _ in found)
        for place, content in contents.items():
            # A template may leave out the reasoning of earlier answers.
            is_left_out = KEYS[place % 2] == KEYS[0] and not copies[place]
            times = unchanged[place, content]
            if not is_left_out and (times != 1 or copies[place] != 1):
                role = f"role '{turns[place // 2]['role']}'"
                raise TemplateRefused(
                    f"it changes or repeats a content ({role} {times} times)",
                    f"it changes the content {content[:60]!r} or repeats it ({role} {times} times)",
                )
        pieces: list[Piece] = []
        start = 0
        for place, content, following in found:
            # Some templates leave out white space at the ends of a content.
            least = text.find(content.strip(), start) + len(content.strip())
            most = least + len(content) - len(content.rstrip())
            ends = (end for end in range(most, least - 1, -1) if text.startswith(following, end))
            end = next(ends, len(text))
            written = text[start:end]
            if written not in content or written.strip() != content.strip():
                raise TemplateRefused(DEPENDS_ON_CONTENTS)
            pieces.append(Piece(place // 2, KEYS[place % 2], start, end))
            start = end + len(following)
        if start != len(text):
            raise TemplateRefused(DEPENDS_ON_CONTENTS)
        if [piece.turn for piece in pieces] != sorted(piece.turn for piece in pieces):
            raise TemplateRefused("it does not write each content behind that of the previous turn")
        return [*pieces, Piece(len(turns), "", len(text), len(text))]

    def _lead_in(self, before: str) -> str:
        # Where the prompt does not end as that of a first question (after some results of calls, or
        # if the last question gets an instruction), the lead of a first answer is searched for.
        if self._prompt_end.strip() and self._prompt_end in before:
            return before.rpartition(self._prompt_end)[2]
        return (
            self.lead + before.rpartition(self.lead)[2] if self.lead and self.lead in before else ""
        )

    def _render(self, turns: list[JsonDict], *, prompt: bool) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), blocks = render_jinja_template(
                [turns],
                chat_template=self._jinja,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self._has_generation,
                **self._tokens,
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(turn["role"] for turn in turns)
            reason = str(error)[:ERROR_CHARACTERS]
            raise TemplateRefused(f"it does not render the turns {roles}: {reason}") from None
        return str(text), blocks[0] if blocks else []
