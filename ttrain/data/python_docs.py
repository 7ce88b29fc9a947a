"""The quickstart's data, without a network: what the Python that runs this says about itself, as JSONL.

Three data sets, each with a held-out part:

    pretrain    docstrings and the language reference; a share of it may be source code
    sft         questions about functions, classes and modules, answered from signatures and docstrings
    lora        letters of the European alphabets as Unicode describes them: U+00E9, its name, case and UTF-8 bytes.
                SFT has nothing like it, the form of an answer is learnable in a few hundred rows, and the letters
                asked for in the held-out rows are others than those of the training rows (and so are their capitals).

Documents and chats are split by module, topics by topic, so that the held-out part asks about unseen code. Twins such
as `heapq` and `_heapq` count as one module; what is left of repetition is removed by word 8-grams. With neither, 21 %
of the held-out docstrings stood in the training part word for word; with the twins together 6 % still did.

Every choice hangs on the sha256 of a name, never on a random state, on set order or on what happens to be imported:
one Python writes the same bytes wherever and whenever it is asked to.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from ttrain.errors import UsageError

HELDOUT_FLOOR_BYTES = 100_000
HELDOUT_FLOOR_ROWS = 100
DOCUMENT_BYTES = 2_000  # about three rows of 256 tokens; longer texts are cut between paragraphs
ANSWER_CHARACTERS = 600
NGRAM_WORDS = 8
MOST_SHARED = 0.5  # of the 8-grams; a docstring above it counts as a copy

# Not the library itself, or (pydoc_data) read elsewhere.
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
SKIPPED_FOLDERS |= {"idlelib", "turtledemo", "lib-dynload"}
SKIPPED_EXTENSIONS = {"_tkinter", "readline"}  # their import reaches for a display or the terminal

# Modules that repeat one another's documentation under names that do not show it.
TWINS = {"collections_abc": "collections", "weakrefset": "weakref", "strptime": "time", "thread": "threading"}
TWINS |= {"threading_local": "threading", "elementtree": "xml", "pyexpat": "xml", "lsprof": "profile"}
TWINS |= {"cProfile": "profile", "sre_compile": "re", "sre_parse": "re", "sre_constants": "re", "sre": "re"}
TWINS |= dict.fromkeys(("posix", "nt", "posixpath", "ntpath", "genericpath"), "os")
TWINS |= dict.fromkeys(("md5", "sha1", "sha2", "sha3", "sha256", "sha512", "blake2"), "hashlib")


@dataclass(frozen=True)
class Item:
    """Something documented: an object of a module, or one paragraph of a topic of the reference."""

    origin: str  # "docstring" or "reference"
    module: str  # dotted; for the reference the topic
    qualname: str  # within the module; empty for the module itself
    kind: str  # module, class, function, method, attribute or topic
    signature: str  # "(text, width=70)", or empty where none is known
    doc: str
    bases: tuple[str, ...] = ()
    members: tuple[str, ...] = ()  # public methods of a class, public functions and classes of a module

    @property
    def name(self) -> str:
        """As a program would write it."""
        builtin = self.module == "builtins" and self.qualname != ""
        return self.qualname if builtin else f"{self.module}.{self.qualname}".strip(".")

    @property
    def group(self) -> str:
        """What is split as one: the top-level module with its twins, or the topic."""
        return group_of(self.module) if self.origin == "docstring" else f"topic {self.module}"

    @property
    def public(self) -> bool:
        return self.origin == "docstring" and not any(part.startswith("_") for part in self.name.split("."))


class Turn(NamedTuple):
    """One question with its answer; `follow_up` asks the same where the object was named before."""

    question: str
    follow_up: str
    answer: str


def build(
    output: Path,
    *,
    document_bytes: int,
    chat_rows: int,
    domain_rows: int,
    heldout_fraction: float,
    source_code_fraction: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write the six files under `output`; returns rows and UTF-8 bytes of each, and what was removed.

    `document_bytes` bounds training and held-out documents together; `source_code_fraction` of them is source code, all
    of it in the training part. `chat_rows` and `domain_rows` bound the training rows. The held-out part is
    `heldout_fraction` of each, at least 100 kB of documents and 100 rows. `progress` gets files done and files in all.
    """
    if not 0 < heldout_fraction < 1 or not 0 <= source_code_fraction <= 1:
        raise UsageError(
            f"heldout_fraction is {heldout_fraction} and source_code_fraction is {source_code_fraction}, "
            "but they must lie within 0 and 1; try 0.06 and 0.0"
        )
    output.mkdir(parents=True, exist_ok=True)
    items, code, unreadable_files = read_python(progress, with_code=source_code_fraction > 0)
    items, exact = drop_exact(items)
    train, heldout, near = split(items, heldout_fraction)
    heldout_documents = pack_documents(heldout)
    room = max(0, document_bytes - count_bytes(heldout_documents))
    code_bytes = min(room, round(document_bytes * source_code_fraction))
    documents = take_bytes(pack_documents(train), room - code_bytes)
    documents += take_bytes(clean_code(code, train, heldout), code_bytes)
    documents.sort(key=lambda row: order(row["text"]))
    chats, heldout_chats = make_chats(train, heldout, chat_rows, heldout_fraction)
    letters, heldout_letters = make_letters(domain_rows, heldout_fraction)
    return {
        "pretrain": write(output / "pretrain.jsonl", documents),
        "pretrain_heldout": write(output / "pretrain_heldout.jsonl", heldout_documents),
        "sft": write(output / "sft.jsonl", chats),
        "sft_heldout": write(output / "sft_heldout.jsonl", heldout_chats),
        "lora": write(output / "lora.jsonl", letters),
        "lora_heldout": write(output / "lora_heldout.jsonl", heldout_letters),
        "removed": {"exact_duplicates": exact, "near_duplicates": near, "unreadable_files": unreadable_files},
    }


# ---------------------------------------------------------------------------------------------- reading


def read_python(progress: Callable[[int, int], None], with_code: bool) -> tuple[list[Item], dict[str, list[str]], int]:
    """All items, the source code in pieces per module, and the number of files that could not be parsed."""
    root = Path(sysconfig.get_path("stdlib"))
    files = list(source_files(root))
    if not files:
        raise UsageError(f"{root} has no modules of the standard library to read; data.pretrain needs files of your own")
    items: dict[tuple[str, str], Item] = {}
    code: dict[str, list[str]] = {}
    unreadable = 0
    for done, path in enumerate(files, 1):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        try:
            source = importlib.util.decode_source(path.read_bytes())
            with warnings.catch_warnings(action="ignore"):  # a stray backslash is an error under -W error
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            unreadable += 1
        else:
            for item in items_of(tree, module):
                items.setdefault((item.module, item.qualname), item)
            if with_code:
                code[module] = list(code_pieces(tree, source))
        progress(done, len(files))
    for item in runtime_items():
        items.setdefault((item.module, item.qualname), item)
    return reference_items(root) + [item for item in items.values() if len(item.doc.split()) >= 3], code, unreadable


def source_files(root: Path) -> Iterator[Path]:
    """Files of the standard library proper, in sorted order: no sitecustomize, no build configuration, no tests."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            top = path.relative_to(root).parts[0].removesuffix(".py")
            if top in sys.stdlib_module_names:
                yield path


def items_of(tree: ast.Module, module: str) -> Iterator[Item]:
    """The module, its classes, functions and methods, with or without docstring, in source order."""
    members = tuple(name for name in definitions(tree) if not name.startswith("_"))
    yield Item("docstring", module, "", "module", "", clean(ast.get_docstring(tree, clean=False)), members=members)
    yield from members_of(tree, module, "")


def definitions(parent: ast.AST) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes of a body by name, those under `if` and `try` among them; of several the first."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = {}
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.If | ast.Try):
            for name, inner in definitions(node).items():
                found.setdefault(name, inner)
    return found


def members_of(parent: ast.AST, module: str, prefix: str) -> Iterator[Item]:
    for name, node in definitions(parent).items():
        qualname, doc = prefix + name, clean(ast.get_docstring(node, clean=False))
        if isinstance(node, ast.ClassDef):
            methods = definitions(node)
            start = methods.get("__init__")
            signature = signature_of(start, bound=True) if isinstance(start, ast.FunctionDef) else ""
            public = tuple(method for method in methods if not method.startswith("_"))
            bases = tuple(ast.unparse(base) for base in node.bases)
            yield Item("docstring", module, qualname, "class", signature, doc, bases, public)
            yield from members_of(node, module, qualname + ".")
        elif doc:
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
            if decorators & {"property", "cached_property", "setter", "deleter"}:
                yield Item("docstring", module, qualname, "attribute", "", doc)
            else:
                yield Item("docstring", module, qualname, "method" if prefix else "function", signature_of(node), doc)


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool = False) -> str:
    """Parameters as in the source; without the first one where `bound`."""
    parameters = ast.unparse(node.args)
    if bound:
        parameters = re.sub(r"^\w+(, /)?(, )?", "", parameters)
    return f"({parameters})"


def clean(doc: str | None) -> str:
    """A docstring without its indentation."""
    return plain(inspect.cleandoc(doc or "")).strip()


def plain(text: str) -> str:
    """Without addresses, control characters, halves of surrogate pairs and blanks at line ends."""
    text = re.sub(r"(?<= at )0x[0-9a-fA-F]+", "0x...", text.encode("utf-8", "ignore").decode())
    return re.sub(r"[^\S\n]+(?=\n|$)", "", re.sub(r"[^\n -\U0010ffff]|[\x7f-\x9f]", "", text))


def print_runtime_docs(skipped: list[str]) -> None:
    """Print what the C modules document, as JSON rows: module, qualname, kind, signature, docstring.

    Runs in a Python of its own, sent there as source text: it sees no patches, no shadowing files, no site-packages,
    and a module's import cannot reach the process that asks.
    """
    import importlib
    import json
    import sys
    import types

    rows = []

    def add(module: str, qualname: str, kind: str, thing: object) -> None:
        doc = getattr(thing, "__doc__", None)
        if isinstance(doc, str):
            rows.append([module, qualname, kind, getattr(thing, "__text_signature__", None) or "", doc])

    callables = (types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
    for module_name in sorted(sys.stdlib_module_names - set(skipped)):
        try:
            spec = importlib.util.find_spec(module_name)
            if spec is None or not (spec.origin == "built-in" or type(spec.loader).__name__ == "ExtensionFileLoader"):
                continue
            module = importlib.import_module(module_name)
        except (ImportError, ValueError):
            continue  # left out of this Python, or without the library it wraps
        add(module_name, "", "module", module)
        for name, thing in sorted(vars(module).items()):
            home = getattr(thing, "__module__", None) or module_name
            if home == "builtins" != module_name:  # an alias such as os.error for OSError
                continue
            if isinstance(thing, types.BuiltinFunctionType):
                add(home, name, "function", thing)
            elif isinstance(thing, type):
                add(home, name, "class", thing)
                for part, member in sorted(vars(thing).items()):
                    if isinstance(member, (*callables, staticmethod)):
                        add(home, f"{name}.{part}", "method", getattr(thing, part))
                    elif isinstance(member, types.GetSetDescriptorType | types.MemberDescriptorType):
                        add(home, f"{name}.{part}", "attribute", member)
    sys.stdout.write(json.dumps(rows))


def runtime_items() -> list[Item]:
    """Built-ins and C modules; `posix` goes by the name of `os`, from where it is used."""
    program = f"from __future__ import annotations\nimport importlib.util\n{inspect.getsource(print_runtime_docs)}\n"
    program += f"print_runtime_docs({sorted(SKIPPED_EXTENSIONS)!r})"
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", program]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, encoding="ascii").stdout)
    items = []
    for module, qualname, kind, raw_signature, doc in rows:
        signature = "" if "<" in raw_signature else re.sub(r"^\(\$\w+(, /)?(, )?", "(", raw_signature)
        home = "os" if module in ("posix", "nt") else module
        items.append(Item("docstring", home, qualname, kind, signature, clean(doc)))
    return items


def reference_items(root: Path) -> list[Item]:
    """The language reference by paragraphs, the longest topic first: short topics are mostly excerpts of long ones."""
    path = root / "pydoc_data" / "topics.py"
    if not path.is_file():
        return []
    tree = ast.parse(path.read_bytes())
    topics: dict[str, str] = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    order = sorted(topics, key=lambda topic: (-len(topics[topic]), topic))
    return [
        Item("reference", topic, str(number), "topic", "", paragraph)
        for topic in order
        for number, paragraph in enumerate(clean_paragraphs(topics[topic]))
    ]


def clean_paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n{2,}", plain(text)) if part.strip()]


def code_pieces(tree: ast.Module, source: str) -> Iterator[str]:
    """Top-level functions and classes with their decorators."""
    lines = source.split("\n")  # as ast counts them: splitlines would cut at form feeds too
    for node in definitions(tree).values():
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        yield from pack("\n".join(lines[first - 1 : node.end_lineno]).split("\n\n"), DOCUMENT_BYTES)


# ---------------------------------------------------------------------------------------------- split and duplicates


def order(text: str) -> bytes:
    """The place of a name in a shuffled list."""
    return sha256(text.encode()).digest()


def pick(text: str, choices: int) -> int:
    """A number below `choices` that hangs on the text only."""
    return int.from_bytes(order(text)[:8], "big") % choices


def group_of(module: str) -> str:
    """The top-level module without the marks of a C or Python twin: `_heapq` is `heapq`, `_pydecimal` is `decimal`."""
    top = re.sub(r"^_(py)?_*", "", module.partition(".")[0])
    return TWINS.get(top, top)


def drop_exact(items: list[Item]) -> tuple[list[Item], int]:
    """Each documentation once, blanks aside; the first in the order of topics, then of hashed modules, stays."""
    items = sorted(items, key=lambda item: b"" if item.origin == "reference" else order(item.group))
    first: dict[str, Item] = {}
    for item in items:
        first.setdefault(" ".join(item.doc.split()), item)
    return list(first.values()), len(items) - len(first)


def shingles(text: str) -> set[str]:
    """Word 8-grams, without case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[start : start + NGRAM_WORDS]) for start in range(len(words) - NGRAM_WORDS + 1)}


def is_copy(grams: set[str], known: Collection[str]) -> bool:
    """Whether more than half of the 8-grams are known."""
    return sum(gram in known for gram in grams) > MOST_SHARED * len(grams)


def split(items: list[Item], heldout_fraction: float) -> tuple[list[Item], list[Item], int]:
    """Training items, held-out items, and how many near duplicates were removed on either side.

    A held-out item goes if more than half of it stands in other modules; what is left of a module decides whether the
    module is held out, so the floor holds after removal. A training item goes if more than half of it is held out.
    """
    grams = {item: shingles(item.doc) for item in items}
    owners: dict[str, str] = {}
    for item, found in grams.items():
        for gram in found:
            if owners.setdefault(gram, item.group) != item.group:
                owners[gram] = ""
    shared = {gram for gram, owner in owners.items() if not owner}
    own = [item for item in items if not is_copy(grams[item], shared)]
    groups = choose_groups(own, heldout_fraction)
    heldout = [item for item in own if item.group in groups]
    known = {gram for item in heldout for gram in grams[item]}
    candidates = [item for item in items if item.group not in groups]
    train = [item for item in candidates if not is_copy(grams[item], known)]
    return train, heldout, len(items) - len(train) - len(heldout)


def choose_groups(items: list[Item], heldout_fraction: float) -> set[str]:
    """Whole groups in hashed order until fraction and floor are reached; none larger than a quarter of the aim."""
    group_bytes: Counter[str] = Counter()
    for item in items:
        group_bytes[item.group] += len(item.doc.encode())
    aim = max(1.05 * HELDOUT_FLOOR_BYTES, heldout_fraction * group_bytes.total())  # cuts lose a few blank lines
    chosen: set[str] = set()
    total = 0
    for group in sorted(group_bytes, key=order):
        if total < aim and group_bytes[group] <= aim / 4:
            chosen.add(group)
            total += group_bytes[group]
    if total < HELDOUT_FLOOR_BYTES:
        raise UsageError(
            f"only {total} bytes of this Python's documentation can be held out, but {HELDOUT_FLOOR_BYTES} are needed; "
            "use a complete Python, or set data.pretrain to files of your own"
        )
    return chosen


# ---------------------------------------------------------------------------------------------- documents


def pack(parts: Iterable[str], most_bytes: int) -> Iterator[str]:
    """Neighbours joined by blank lines, up to `most_bytes`; a part that is larger stands alone."""
    held: list[str] = []
    size = 0
    for part in parts:
        length = len(part.encode()) + 2
        if held and size + length > most_bytes:
            yield "\n\n".join(held)
            held, size = [], 0
        held.append(part)
        size += length
    if held:
        yield "\n\n".join(held)


def pack_documents(items: list[Item]) -> list[dict[str, Any]]:
    """A document per docstring, without the name it belongs to, and a few per topic; shuffled by hash.

    Names and signatures as headings made text that is harder to learn: 2.08 bits per byte on held-out documents after
    1.1 M tokens against 2.01 for docstrings alone (1 M parameters, vocabulary 2048); xz -9e takes 2.14 and 2.28.
    """
    parts: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for item in items:
        own = item.qualname if item.origin == "docstring" else ""
        parts[item.origin, item.module, own] += item.doc.split("\n\n")
    return shuffled(
        (text, f"{origin}:{module}") for (origin, module, _), texts in parts.items() for text in pack(texts, DOCUMENT_BYTES)
    )


def shuffled(pieces: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Text and source as rows in the order of their hashes, each text once, blanks aside."""
    first: dict[str, tuple[str, str]] = {}
    for text, source in pieces:
        first.setdefault(" ".join(text.split()), (text, source))
    return [{"text": text, "source": source} for text, source in sorted(first.values(), key=lambda one: order(one[0]))]


def clean_code(code: dict[str, list[str]], train: list[Item], heldout: list[Item]) -> list[dict[str, Any]]:
    """Source of training modules, shuffled by hash; what shares a single 8-gram with held-out text stays out."""
    known = {gram for item in heldout for gram in shingles(item.doc)}
    groups = {item.group for item in train}
    return shuffled(
        (plain(piece), f"code:{module}")
        for module, pieces in code.items()
        for piece in (pieces if group_of(module) in groups else [])
        if known.isdisjoint(shingles(piece))
    )


def count_bytes(rows: Iterable[dict[str, Any]]) -> int:
    """UTF-8 bytes of the text that a model sees."""
    texts = (text for row in rows for text in ([row["text"]] if "text" in row else [m["content"] for m in row["messages"]]))
    return sum(len(text.encode()) for text in texts)


def take_bytes(rows: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """The head of the rows that fits."""
    taken = []
    for row in rows:
        most_bytes -= count_bytes([row])
        if most_bytes < 0:
            break
        taken.append(row)
    return taken


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, int]:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return {"rows": len(rows), "bytes": count_bytes(rows)}


# ---------------------------------------------------------------------------------------------- chats


SYSTEMS = (
    "You answer questions about the Python standard library.",
    "You are a helpful assistant who knows Python well. Answer briefly.",
    "Answer from the documentation, in as few words as you can.",
    "You are a reference for Python programmers.",
)


def make_chats(train: list[Item], heldout: list[Item], rows: int, fraction: float) -> tuple[list[dict[str, Any]], ...]:
    """Training and held-out rows; a held-out row with an answer that a training row gives as well is left out."""
    chats = list(chats_about(train, rows))
    given = {message["content"] for row in chats for message in row["messages"] if message["role"] == "assistant"}
    fresh = (
        row
        for row in chats_about(heldout, sys.maxsize)
        if given.isdisjoint(message["content"] for message in row["messages"] if message["role"] == "assistant")
    )
    return chats, [row for row, _ in zip(fresh, range(max(HELDOUT_FLOOR_ROWS, round(rows * fraction))), strict=False)]


def chats_about(items: list[Item], rows: int) -> Iterator[dict[str, Any]]:
    """Up to `rows` chats: every form of question about every public item, in the order of their hashes."""
    public = [item for item in items if item.public]
    homes = Counter(item.qualname for item in public if item.kind in ("function", "class"))
    unique = {name for name, count in homes.items() if count == 1}
    candidates = [(order(f"{item.name}#{form}"), item, form) for item in public for form in range(len(FORMS))]
    for _, item, form in sorted(candidates, key=lambda candidate: candidate[0]):
        turn = FORMS[form](item, unique)
        if rows and turn and len(turn.answer) <= ANSWER_CHARACTERS:
            rows -= 1
            yield {"messages": messages_of(item, form, turn, unique), "source": f"docstring:{item.module}"}


def messages_of(item: Item, form: int, turn: Turn, unique: set[str]) -> list[dict[str, str]]:
    """Three in ten rows start with a system turn, one in five asks a second question about the same object."""
    key = f"{item.name}#{form}"
    messages = [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    if pick(key + " system", 10) < 3:
        messages.insert(0, {"role": "system", "content": SYSTEMS[pick(key, len(SYSTEMS))]})
    if pick(key + " second", 5) == 0:
        turns = [FORMS[(form + step) % len(FORMS)](item, unique) for step in range(1, len(FORMS))]
        fits = [other for other in turns if other and len(other.answer) <= ANSWER_CHARACTERS and other.answer != turn.answer]
        if fits:
            other = fits[pick(key + " which", len(fits))]
            messages += [{"role": "user", "content": other.follow_up}, {"role": "assistant", "content": other.answer}]
    return messages


def summary_of(doc: str) -> str:
    """The first paragraph on one line, cut after a sentence; empty where it only leads to what follows."""
    text = " ".join(doc.partition("\n\n")[0].split())
    if len(text) > ANSWER_CHARACTERS:
        text = text[:ANSWER_CHARACTERS].rpartition(". ")[0]
        text += "." if text else ""
    return "" if text.endswith((":", "::")) or len(text.split()) < 3 else text


def parameters_of(item: Item) -> list[tuple[str, str]] | None:
    """Names with their defaults as source text, without `self` and `cls`; None where the signature is unknown."""
    try:
        function = ast.parse(f"def f{item.signature}: pass").body[0]
    except SyntaxError:
        return None
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    found = list(zip([arg.arg for arg in plain], defaults, strict=True))
    found += [(f"*{arguments.vararg.arg}", None)] if arguments.vararg else []
    found += zip([arg.arg for arg in arguments.kwonlyargs], arguments.kw_defaults, strict=True)
    found += [(f"**{arguments.kwarg.arg}", None)] if arguments.kwarg else []
    first = 1 if found and found[0][0] in ("self", "cls") else 0
    return [(name, ast.unparse(default) if default else "") for name, default in found[first:]]


def listed(words: Iterable[str]) -> str:
    """`a`, `b` and `c`."""
    *head, last = [f"`{word}`" for word in words]
    return f"{', '.join(head)} and {last}" if head else last


def ask_purpose(item: Item, unique: set[str]) -> Turn | None:
    summary = summary_of(item.doc)
    question = {
        "module": "What is the module `{}` for?",
        "class": "What is the class `{}`?",
        "attribute": "What is `{}`?",
    }
    asked = question.get(item.kind, "What does `{}` do?").format(item.name)
    return Turn(asked, "And what is it for?", summary) if summary else None


def ask_first_line(item: Item, unique: set[str]) -> Turn | None:
    line = item.doc.partition("\n")[0]
    question = f"Give the first line of the documentation of `{item.name}`."
    return Turn(question, "Now give the first line of its documentation.", line) if len(line.split()) >= 3 else None


def ask_signature(item: Item, unique: set[str]) -> Turn | None:
    if parameters_of(item) is None:
        return None
    return Turn(f"Write the signature of `{item.name}`.", "Write its signature.", f"`{item.name}{item.signature}`")


def ask_arguments(item: Item, unique: set[str]) -> Turn | None:
    parameters = parameters_of(item)
    if parameters is None:
        return None
    answer = f"`{item.name}` takes {listed(name for name, _ in parameters) if parameters else 'no arguments'}."
    return Turn(f"What arguments does `{item.name}` take?", "What arguments does it take?", answer)


def ask_default(item: Item, unique: set[str]) -> Turn | None:
    optional = [(name, default) for name, default in parameters_of(item) or [] if default]
    if not optional:
        return None
    name, default = optional[pick(item.name, len(optional))]
    answer = f"The default of `{name}` in `{item.name}` is `{default}`."
    return Turn(f"What is the default of `{name}` in `{item.name}`?", f"And the default of `{name}`?", answer)


def ask_optional(item: Item, unique: set[str]) -> Turn | None:
    parameters = parameters_of(item)
    if not parameters:
        return None
    optional = [name for name, default in parameters if default]
    subject = listed(optional) if optional else "no argument"
    answer = f"In `{item.name}`, {subject} {'have' if len(optional) > 1 else 'has'} a default."
    return Turn(f"Which arguments of `{item.name}` have a default?", "Which of its arguments have a default?", answer)


def ask_module(item: Item, unique: set[str]) -> Turn | None:
    if item.qualname not in unique:
        return None
    answer = f"The {item.kind} `{item.qualname}` is in the module `{item.module}`."
    return Turn(f"Which module has the {item.kind} `{item.qualname}`?", "Which module is it in?", answer)


def ask_kind(item: Item, unique: set[str]) -> Turn | None:
    owner = item.qualname.rpartition(".")[0]
    if item.kind == "module":
        return None
    home = f"of the class `{owner}`" if owner else f"of the module `{item.module}`"
    article = "an" if item.kind == "attribute" else "a"
    answer = f"`{item.name}` is {article} {item.kind} {home}."
    return Turn(f"Is `{item.name}` a class, a function, a method or an attribute?", "What kind of object is it?", answer)


def ask_members(item: Item, unique: set[str]) -> Turn | None:
    if not item.members:
        return None
    what, are = ("methods", "public methods") if item.kind == "class" else ("functions and classes", "contents")
    answer = f"`{item.name}` defines {listed(item.members)}."
    return Turn(f"Which public {what} does `{item.name}` define?", f"List its {are}.", answer)


def ask_bases(item: Item, unique: set[str]) -> Turn | None:
    if not item.bases:
        return None
    answer = f"`{item.name}` inherits from {listed(item.bases)}."
    return Turn(f"What does the class `{item.name}` inherit from?", "What does it inherit from?", answer)


FORMS: tuple[Callable[[Item, set[str]], Turn | None], ...] = (
    ask_purpose,
    ask_first_line,
    ask_signature,
    ask_arguments,
    ask_default,
    ask_optional,
    ask_module,
    ask_kind,
    ask_members,
    ask_bases,
)


# ---------------------------------------------------------------------------------------------- letters


ALPHABETS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN")
LETTER_QUESTIONS = ("Describe the letter {letter}.", "Which letter is {code}?", "Describe {name}.")


def make_letters(rows: int, fraction: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows; a letter and its capital, 3 in 4 characters of the answer alike, stay together."""
    pairs: dict[str, list[str]] = defaultdict(list)
    for letter in map(chr, range(0xC0, 0x2000)):
        if unicodedata.category(letter) in ("Lu", "Ll") and unicodedata.name(letter).startswith(ALPHABETS):
            pairs[letter.upper()].append(letter)
    train: list[str] = []
    heldout: list[str] = []
    heldout_rows = max(HELDOUT_FLOOR_ROWS, round(rows * fraction))
    for pair in sorted(pairs, key=order):
        (train if len(heldout) >= heldout_rows else heldout).extend(pairs[pair])
    train, heldout = sorted(train[:rows], key=order), sorted(heldout[:heldout_rows], key=order)
    return [letter_row(letter) for letter in train], [letter_row(letter) for letter in heldout]


def letter_row(letter: str) -> dict[str, Any]:
    """Code point, name, script, case, counterpart and bytes of a letter, asked for in one of three ways."""
    name, code = unicodedata.name(letter), f"U+{ord(letter):04X}"
    case, other, change = ("small", "capital", letter.upper()) if letter.islower() else ("capital", "small", letter.lower())
    answer = f"{letter} is {code}, {name}: a {case} letter of the {name.partition(' ')[0].capitalize()} script. "
    if len(change) == 1 and change != letter:
        answer += f"Its {other} letter is {change}, U+{ord(change):04X}. "
    answer += f"In UTF-8 it is {letter.encode().hex(' ').upper()}."
    question = LETTER_QUESTIONS[pick(name, len(LETTER_QUESTIONS))].format(letter=letter, code=code, name=name)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "source": f"letter:{code}"}
