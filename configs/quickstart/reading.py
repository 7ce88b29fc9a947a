"""Read the documentation of this Python: the library's sources, its C modules, the language reference."""

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
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

# Not the library itself, or (pydoc_data) read elsewhere.
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}

SKIPPED_FOLDERS |= {"idlelib", "turtledemo", "lib-dynload"}

SKIPPED_EXTENSIONS = {"_tkinter", "readline"}  # importing them accesses a display or the terminal


def read_python() -> tuple[list[DocumentedItem], int]:
    """All items, and the number of files that could not be parsed."""
    root = Path(sysconfig.get_path("stdlib"))
    items: dict[tuple[str, str], DocumentedItem] = {}
    unreadable = 0
    for path in source_files(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        try:
            source = importlib.util.decode_source(path.read_bytes())
            with warnings.catch_warnings(
                action="ignore"
            ):  # a stray backslash is an error under -W error
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            unreadable += 1
        else:
            for item in items_of(tree, module):
                items.setdefault((item.module, item.qualname), item)
    for item in runtime_items():
        items.setdefault((item.module, item.qualname), item)
    return reference_items(root) + [
        item for item in items.values() if len(item.doc.split()) >= 3
    ], unreadable


def source_files(root: Path) -> Iterator[Path]:
    """Files of the standard library proper, in sorted order: no sitecustomize, no build configuration, no tests."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            top = path.relative_to(root).parts[0].removesuffix(".py")
            if top in sys.stdlib_module_names:
                yield path


def items_of(tree: ast.Module, module: str) -> Iterator[DocumentedItem]:
    """The module, its classes, functions and methods, with or without docstring, in source order."""
    members = tuple(name for name in definitions(tree) if not name.startswith("_"))
    yield DocumentedItem(
        "docstring",
        module,
        "",
        "module",
        "",
        clean(ast.get_docstring(tree, clean=False)),
        members=members,
    )
    yield from members_of(tree, module, "")


def definitions(
    parent: ast.AST,
) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes of a body by name, including those under `if` and `try`; the first of each name."""
    nodes_by_name: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = {}
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            nodes_by_name.setdefault(node.name, node)
        elif isinstance(node, ast.If | ast.Try):
            for name, inner in definitions(node).items():
                nodes_by_name.setdefault(name, inner)
    return nodes_by_name


def members_of(parent: ast.AST, module: str, prefix: str) -> Iterator[DocumentedItem]:
    for name, node in definitions(parent).items():
        qualname, doc = prefix + name, clean(ast.get_docstring(node, clean=False))
        if isinstance(node, ast.ClassDef):
            methods = definitions(node)
            start = methods.get("__init__")
            signature = (
                signature_of(start, bound=True) if isinstance(start, ast.FunctionDef) else ""
            )
            public = tuple(method for method in methods if not method.startswith("_"))
            bases = tuple(ast.unparse(base) for base in node.bases)
            yield DocumentedItem(
                "docstring", module, qualname, "class", signature, doc, bases, public
            )
            yield from members_of(node, module, qualname + ".")
        elif doc:
            decorators = {
                ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list
            }
            if decorators & {"property", "cached_property", "setter", "deleter"}:
                yield DocumentedItem("docstring", module, qualname, "attribute", "", doc)
            else:
                yield DocumentedItem(
                    "docstring",
                    module,
                    qualname,
                    "method" if prefix else "function",
                    signature_of(node),
                    doc,
                )


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool = False) -> str:
    """Parameters as in the source; without the first one if `bound`."""
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

    Runs in a separate Python, which gets this function as source text: it has no patches, no shadowing files, no
    site-packages, and importing a module there cannot affect this process.
    """
    import importlib
    import json
    import sys
    import types

    rows = []

    def add(module: str, qualname: str, kind: str, thing: object) -> None:
        doc = getattr(thing, "__doc__", None)
        if isinstance(doc, str):
            rows.append(
                [module, qualname, kind, getattr(thing, "__text_signature__", None) or "", doc]
            )

    callables = (
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.ClassMethodDescriptorType,
    )
    for module_name in sorted(sys.stdlib_module_names - set(skipped)):
        try:
            spec = importlib.util.find_spec(module_name)
            if spec is None or not (
                spec.origin == "built-in" or type(spec.loader).__name__ == "ExtensionFileLoader"
            ):
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
                for member_name, member in sorted(vars(thing).items()):
                    if isinstance(member, (*callables, staticmethod)):
                        add(home, f"{name}.{member_name}", "method", getattr(thing, member_name))
                    elif isinstance(
                        member, types.GetSetDescriptorType | types.MemberDescriptorType
                    ):
                        add(home, f"{name}.{member_name}", "attribute", member)
    sys.stdout.write(json.dumps(rows))


def runtime_items() -> list[DocumentedItem]:
    """Items of built-ins and C modules; `posix` is named `os`, through which it is used."""
    program = f"from __future__ import annotations\nimport importlib.util\n{inspect.getsource(print_runtime_docs)}\n"
    program += f"print_runtime_docs({sorted(SKIPPED_EXTENSIONS)!r})"
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", program]
    rows = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, encoding="ascii").stdout
    )
    items = []
    for module, qualname, kind, raw_signature, doc in rows:
        signature = (
            "" if "<" in raw_signature else re.sub(r"^\(\$\w+(, /)?(, )?", "(", raw_signature)
        )
        home = "os" if module in ("posix", "nt") else module
        items.append(DocumentedItem("docstring", home, qualname, kind, signature, clean(doc)))
    return items


def reference_items(root: Path) -> list[DocumentedItem]:
    """The language reference by paragraphs, the longest topic first: short topics are mostly excerpts of long ones."""
    path = root / "pydoc_data" / "topics.py"
    if not path.is_file():
        return []
    tree = ast.parse(path.read_bytes())
    topics: dict[str, str] = next(
        ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
    )
    order = sorted(topics, key=lambda topic: (-len(topics[topic]), topic))
    return [
        DocumentedItem("reference", topic, str(number), "topic", "", paragraph)
        for topic in order
        for number, paragraph in enumerate(clean_paragraphs(topics[topic]))
    ]


def clean_paragraphs(text: str) -> list[str]:
    return [
        paragraph.strip("\n") for paragraph in re.split(r"\n{2,}", plain(text)) if paragraph.strip()
    ]


# Modules that repeat another module's documentation under an unrelated name.
TWINS = {
    "collections_abc": "collections",
    "weakrefset": "weakref",
    "strptime": "time",
    "thread": "threading",
}

TWINS |= {
    "threading_local": "threading",
    "elementtree": "xml",
    "pyexpat": "xml",
    "lsprof": "profile",
}

TWINS |= {
    "cProfile": "profile",
    "sre_compile": "re",
    "sre_parse": "re",
    "sre_constants": "re",
    "sre": "re",
}

TWINS |= dict.fromkeys(("posix", "nt", "posixpath", "ntpath", "genericpath"), "os")

TWINS |= dict.fromkeys(("md5", "sha1", "sha2", "sha3", "sha256", "sha512", "blake2"), "hashlib")


@dataclass(frozen=True)
class DocumentedItem:
    """A documented object of a module, or one paragraph of a topic of the language reference."""

    origin: str  # "docstring" or "reference"
    module: str  # dotted; for the reference the topic
    qualname: str  # within the module; empty for the module itself
    kind: str  # module, class, function, method, attribute or topic
    signature: str  # "(text, width=70)", or empty where none is known
    doc: str
    bases: tuple[str, ...] = ()
    members: tuple[
        str, ...
    ] = ()  # public methods of a class, public functions and classes of a module

    @property
    def name(self) -> str:
        """The name as a program would write it."""
        builtin = self.module == "builtins" and self.qualname != ""
        return self.qualname if builtin else f"{self.module}.{self.qualname}".strip(".")

    @property
    def group(self) -> str:
        """The unit of the held-out split: the top-level module with its twins, or the topic."""
        return group_of(self.module) if self.origin == "docstring" else f"topic {self.module}"

    @property
    def public(self) -> bool:
        return self.origin == "docstring" and not any(
            name_part.startswith("_") for name_part in self.name.split(".")
        )


def group_of(module: str) -> str:
    """The top-level module without the marks of a C or Python twin: `_heapq` is `heapq`, `_pydecimal` is `decimal`."""
    top = re.sub(r"^_(py)?_*", "", module.partition(".")[0])
    return TWINS.get(top, top)


def order(text: str) -> bytes:
    """Sort key of a name in a shuffled list."""
    return sha256(text.encode()).digest()


def pick(text: str, choices: int) -> int:
    """A number below `choices` that depends on the text only."""
    return int.from_bytes(order(text)[:8], "big") % choices
