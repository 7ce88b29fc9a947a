"""The Modelfile with which Ollama runs a GGUF file, from the chat template.

https://docs.ollama.com/modelfile, https://pkg.go.dev/text/template. Loads transformers if called.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Turn = Mapping[str, str]
Render = Callable[[Sequence[Turn], bool], str]  # messages, with a generation prompt

ROLES = ("system", "user", "assistant")
SYSTEM, FIRST, ANSWER, SECOND = "[s-0]", "[u-1]", "[a-2]", "[u-3]"  # contents that are looked for


@dataclass(frozen=True)
class ChatFormat:
    """A chat template that puts a fixed text before and after the content of each role.

    begin       before the first turn: the token that begins a text, which programs add themselves
    answer      the generation prompt
    system      what the template says where a chat has no system turn
    """

    begin: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    answer: str
    system: str = field(default="")

    def render(self, turns: Sequence[Turn]) -> str:
        """The text of a chat with a generation prompt."""
        if self.system and (not turns or turns[0]["role"] != "system"):
            turns = [{"role": "system", "content": self.system}, *turns]
        parts = (
            self.before[turn["role"]] + turn["content"] + self.after[turn["role"]] for turn in turns
        )
        return self.begin + "".join(parts) + self.answer

    def go_template(self) -> str:
        """The format as Ollama's template; the beginning is added by Ollama."""
        lines = ["{{- range .Messages }}"]
        for number, role in enumerate(ROLES):
            test = "else if" if number else "if"
            lines.append(f'{{{{- {test} eq .Role "{role}" }}}}')
            lines.append(_literal(self.before[role]) + "{{- .Content }}")
            lines.append(_literal(self.after[role]))
        lines += ["{{- end }}", "{{- end }}", _literal(self.answer)]
        return "\n".join(line for line in lines if line)


def chat_format(render: Render, bos: str) -> ChatFormat | None:
    """Read the format off renderings; None for a template that is not of this form.

    The result renders three conversations to the same text as the template.
    """
    try:
        format_ = _read_off(render, bos)
        return format_ if format_ and _is_equal(format_, render) else None
    except Exception:  # a template may refuse any conversation with any error
        return None


def _read_off(render: Render, bos: str) -> ChatFormat | None:
    turns = _turns(SYSTEM, FIRST, ANSWER, SECOND)
    whole = render(turns, True)
    begin = bos if bos and whole.startswith(bos) else ""
    head, rest = whole.removeprefix(begin).split(SYSTEM)
    system_user, rest = rest.split(FIRST)
    user_answer, rest = rest.split(ANSWER)
    answer_user, prompt = rest.split(SECOND)
    after_answer = render(turns[:3], False).split(ANSWER)[1]
    after_user = render(turns[:2], False).split(FIRST)[1]
    before_user = answer_user.removeprefix(after_answer)
    before = {"system": head, "user": before_user, "assistant": user_answer[len(after_user) :]}
    after = {
        "system": system_user.removesuffix(before_user),
        "user": after_user,
        "assistant": after_answer,
    }
    alone = render(turns[1:2], True).removeprefix(begin).split(FIRST)[0]
    system = alone.removesuffix(before_user).removeprefix(head).removesuffix(after["system"])
    return ChatFormat(begin, before, after, prompt[len(after_user) :], system)


def _is_equal(format_: ChatFormat, render: Render) -> bool:
    conversations = (
        _turns("Be brief.", "你好\n\n  1 + 1?", "2", "Why?"),
        _turns("", "Hello", "Hi!\n", "x")[1:],
        _turns("", "Only one")[1:],
    )
    return all(format_.render(turns) == render(turns, True) for turns in conversations)


def _turns(*contents: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user")
    return [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]


def _literal(text: str) -> str:
    # As a string of Go, since white space beside an action of a template is trimmed.
    return f"{{{{- {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def renderer(directory: Path) -> Render:
    """The rendering of a tokenizer directory's chat template, by transformers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)

    def render(turns: Sequence[Turn], prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    return render


def modelfile(file: str, model: Any, render: Render | None) -> str:
    """The Modelfile of a GGUF file beside it, of a `LoadedModel`.

    Without a chat template, or with one that is not of this form, Ollama continues texts.
    """
    chat = chat_format(render, model.encoder.tokens["bos_token"]) if render else None
    stops = [model.encoder.spelling(number) for number in model.stop_ids]
    lines = [f"FROM ./{file}", f"PARAMETER num_ctx {model.max_length}"]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    lines.append(f'TEMPLATE """{chat.go_template() if chat else "{{ .Prompt }}"}"""')
    if chat and chat.system:
        lines.append(f'SYSTEM """{chat.system}"""')
    return "\n".join(lines) + "\n"
