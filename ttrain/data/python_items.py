"""What a Python documents, item by item, and the order that a name's hash gives it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

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


def group_of(module: str) -> str:
    """The top-level module without the marks of a C or Python twin: `_heapq` is `heapq`, `_pydecimal` is `decimal`."""
    top = re.sub(r"^_(py)?_*", "", module.partition(".")[0])
    return TWINS.get(top, top)


def order(text: str) -> bytes:
    """The place of a name in a shuffled list."""
    return sha256(text.encode()).digest()


def pick(text: str, choices: int) -> int:
    """A number below `choices` that hangs on the text only."""
    return int.from_bytes(order(text)[:8], "big") % choices
