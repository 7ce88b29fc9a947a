"""The Modelfile with which Ollama runs a GGUF file, from the chat template.

https://docs.ollama.com/modelfile, https://pkg.go.dev/text/template. Loads transformers if called.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Turn = Mapping[str, str]
Render = Callable[[Sequence[Turn], bool], str]  # messages, with a generation prompt

TURNS = [
    {"role": "system", "content": "[s-0]"},
    {"role": "user", "content": "[u-1]"},
    {"role": "assistant", "content": "[a-2]"},
    {"role": "user", "content": "[u-3]"},
]
# Conversations on which a format has to render the text of its template.
CONVERSATIONS = (
    TURNS,
    [{"role": "user", "content": "你好\n\n  1 + 1?"}, *TURNS[2:]],
    [{"role": "user", "content": " Only one. "}],
)


@dataclass(frozen=True)
class ChatFormat:
    """A chat template that puts a fixed text before and after the content of each role.

    begin       before the first turn: the token that begins a text, which programs add themselves
    around      (before, after) by role
    answer      the generation prompt
    system      what the template says where a chat has no system turn
    """

    begin: str
    around: Mapping[str, tuple[str, str]]
    answer: str
    system: str

    def render(self, turns: Sequence[Turn]) -> str:
        """The text of a chat with a generation prompt."""
        if self.system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system}, *turns]
        texts = [turn["content"].join(self.around[turn["role"]]) for turn in turns]
        return "".join([self.begin, *texts, self.answer])

    def go_template(self) -> str:
        """The format as Ollama's template; the beginning is added by Ollama."""
        lines = ["{{- range .Messages }}"]
        test = "if"
        for role, (before, after) in self.around.items():
            lines.append(f'{{{{- {test} eq .Role "{role}" }}}}')
            lines += [_literal(before), "{{- .Content }}", _literal(after)]
            test = "else if"
        return "\n".join(filter(None, [*lines, "{{- end }}", "{{- end }}", _literal(self.answer)]))


def chat_format(render: Render, bos: str) -> ChatFormat | None:
    """Read the format off renderings; None for a template that is not of this form.

    The result renders three conversations to the same text as the template.
    """
    try:
        system, user, answer, _ = (turn["content"] for turn in TURNS)
        whole = render(TURNS, True)
        begin = bos if bos and whole.startswith(bos) else ""
        before_system, rest = whole.removeprefix(begin).split(system)
        between, rest = rest.split(user)  # system and user
        before_answer, rest = rest.split(answer)
        before_user, prompt = rest.split(TURNS[3]["content"])
        after_user = render(TURNS[:2], False).split(user)[1]
        after_answer = render(TURNS[:3], False).split(answer)[1]
        before_user = before_user.removeprefix(after_answer)
        after_system = between.removesuffix(before_user)
        alone = render(TURNS[1:2], True).removeprefix(begin).split(user)[0]
        read = ChatFormat(
            begin,
            {
                "system": (before_system, after_system),
                "user": (before_user, after_user),
                "assistant": (before_answer.removeprefix(after_user), after_answer),
            },
            prompt.removeprefix(after_user),
            alone.removesuffix(before_user).removeprefix(before_system).removesuffix(after_system),
        )
        is_equal = all(read.render(turns) == render(turns, True) for turns in CONVERSATIONS)
    except Exception:  # a template may refuse any conversation with any error
        return None
    return read if is_equal else None


def _literal(text: str) -> str:
    # As a string of Go, since white space beside an action of a template is trimmed.
    return f"{{{{- {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def renderer(directory: Path) -> Render:
    """The rendering of a tokenizer directory's chat template, by transformers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return lambda turns, prompt: str(
        tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=prompt
        )
    )


def modelfile(file: str, model: Any, render: Render | None) -> str:
    """The Modelfile of a GGUF file beside it, of a `LoadedModel`.

    Without a chat template, or with one that is not of this form, Ollama continues texts.
    """
    chat = chat_format(render, model.encoder.tokens["bos_token"]) if render else None
    stops = [json.dumps(model.encoder.spelling(number)) for number in model.stop_ids]
    lines = [f"FROM ./{file}", f"PARAMETER num_ctx {model.max_length}"]
    lines += [f"PARAMETER stop {stop}" for stop in stops]
    lines.append(f'TEMPLATE """{chat.go_template() if chat else "{{ .Prompt }}"}"""')
    if chat and chat.system:
        lines.append(f'SYSTEM """{chat.system}"""')
    return "\n".join([*lines, ""])
