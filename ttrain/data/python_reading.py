"""Reads what this Python says about itself: the library's sources, its C modules, the language reference."""

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
from collections.abc import Callable, Iterator
from pathlib import Path

from ttrain.data.python_items import Item
from ttrain.errors import UsageError

# Not the library itself, or (pydoc_data) read elsewhere.
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
SKIPPED_FOLDERS |= {"idlelib", "turtledemo", "lib-dynload"}
SKIPPED_EXTENSIONS = {"_tkinter", "readline"}  # their import reaches for a display or the terminal


def read_python(progress: Callable[[int, int], None], with_code: bool) -> tuple[list[Item], dict[str, list[str]], int]:
    """All items, the source code by modules, and the number of files that could not be parsed."""
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
        yield "\n".join(lines[first - 1 : node.end_lineno])
