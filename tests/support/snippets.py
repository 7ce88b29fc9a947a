"""Snippets of README, docs and artifacts/README: fenced blocks, docs/examples, their commands."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from support.paths import ROOT

DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = ("README.md", *DOCS, "artifacts/README.md")
EXAMPLES = {"docs/examples/ttrain.sbatch": "sh", "docs/examples/job.yaml": "yaml"}
FENCED = re.compile(r"(?ms)^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$")
SHELL = ("console", "sh")
OUTPUT = {"", "text"}  # of commands, lists of files; of such a block only its commands are tried


class Snippet(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    name: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def snippets(*languages: str) -> list[Snippet]:
    found = [Snippet(name, 1, EXAMPLES[name], (ROOT / name).read_text()) for name in EXAMPLES]
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in FENCED.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(Snippet(page, line, match["language"], match["text"]))
    return [snippet for snippet in found if not languages or snippet.language in languages]


def shell_lines(snippet: Snippet) -> Iterator[str]:
    """The lines that a shell would run: of a console those behind a prompt, else all that hold a
    command of ttrain."""
    text = snippet.text.replace("\\\n", " ")
    for line in text.splitlines():
        if snippet.language == "console":
            if line.startswith("$ "):
                yield line[2:]
        elif snippet.language in SHELL or line.startswith("ttrain ") or "; ttrain " in line:
            yield line


def commands(*pages: str) -> list[Command]:
    return [
        Command(snippet.name, words)
        for snippet in snippets(*SHELL, *OUTPUT)
        if not pages or snippet.page in pages
        for line in shell_lines(snippet)
        for words in _calls(line)
    ]


def _calls(line: str) -> Iterator[tuple[str, ...]]:
    while nested := re.search(r"\$\(([^()]*)\)", line):
        yield from _calls(nested[1])
        line = line.replace(nested[0], "NESTED")
    quoted = re.search(r'bash -c "exec (.*)"', line)
    if quoted:
        line = quoted[1].replace("\\$", "$")
    line = re.sub(r"\$\w*NODES", "2", line)
    line = re.sub(r"\$\w+", "1", line)
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words: list[str] | None = None
    for word in (*reader, ";"):
        if set(word) <= set("();<>|&"):
            if words:  # not the folder of `cd ttrain`
                yield tuple(words)
            words = None
        elif words is not None:
            words.append(word)
        elif word == "ttrain":
            words = []
