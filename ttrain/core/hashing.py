"""The ingredients of a stage's key: canonical JSON, digests of files and code."""

import ast
import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from ttrain.core.files import PRIVATE_FILE, read_object, write_bytes

PACKAGE = "ttrain"
PACKAGE_DIRECTORY = Path(__file__).parents[1]

# Packages that cannot shape a stage's result: they load settings (which are in the key themselves),
# store, track, report or orchestrate. Then the few modules of other packages that only watch or
# hand over.
NON_RESULT_PACKAGES = (
    "cli",
    "config",
    "core",
    "engine",
    "errors",
    "flows",
    "lineage",
    "reports",
    "store",
    "tracking",
)
NON_RESULT_MODULES = (
    "tasks.common.callbacks",
    "tasks.common.job",
    "tasks.common.tuning",
    "train.callbacks",
    "train.guards",
    "train.monitor",
    "train.periodic_evaluation",
)
NON_RESULT_NAMES = frozenset(
    f"{PACKAGE}.{name}" for name in (*NON_RESULT_PACKAGES, *NON_RESULT_MODULES)
)
# Packages whose submodules shape results.
CONTAINER_PACKAGES = frozenset({PACKAGE, f"{PACKAGE}.tasks", f"{PACKAGE}.tasks.common"})

# A file that changed within the clock's granularity may change again under the same times: do not
# remember it yet. With a boot a change whose mtime was put back counts, too.
RACY_SECONDS = 2.0
MOST_ENTRIES = 100_000  # 15 MB; the oldest are forgotten
# Until 3.11.8 CPython counts the depth of every syntax tree under construction in one variable of
# the interpreter, so that two threads at once end in "SystemError: AST constructor recursion depth
# mismatch" (python/cpython#106905).
_PARSING = threading.Lock()
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def canonical_json(value: object) -> bytes:
    """One spelling per value: sorted keys, no spaces, UTF-8. NaN is refused."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode("utf-8")


def digest_of(value: object) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DigestCache:
    """Digests of files and modules by path, size, mtime, ctime and inode; a hit costs a stat.

    With `boot`, the id of the running system, a digest is valid until a restart, since a rotting
    file keeps its times; the device is compared, too. Threads and processes may share a cache.
    """

    def __init__(self, path: Path, *, boot: str = "") -> None:
        self._path = path
        self._boot = boot
        self._learnt: dict[str, list[Any]] = {}
        self._saving = threading.Lock()
        self._entries = self._saved()

    def file(self, path: Path) -> str:
        """sha256 of a file, cached or computed. Raises OSError."""
        return str(self._remembered("file", path, sha256_file))

    def learn(self, path: Path, digest: str, stat: os.stat_result) -> None:
        """Cache the sha256 of a file that the caller read, with its stat from before."""
        self._learn(self._name("file", path), stat, digest)

    def module(self, path: Path, name: str) -> tuple[str, list[str]]:
        """(digest of a module's syntax tree, modules of ttrain that it imports)."""
        entry = self._remembered("code", path, lambda source: _read_module(source, name))
        return entry[0], list(entry[1])

    def save(self) -> None:
        """Write the cache. A read-only home only costs the next run some hashing."""
        with self._saving:
            learnt = dict(self._learnt)  # at once, while other threads learn more
            if not learnt:
                return
            earlier = {name: entry for name, entry in self._saved().items() if name not in learnt}
            newest = [*{**earlier, **learnt}.items()][-MOST_ENTRIES:]
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                mode = PRIVATE_FILE if self._boot else 0o666
                write_bytes(self._path, json.dumps(dict(newest)).encode(), mode, durable=False)
                for name in learnt:
                    self._learnt.pop(name)

    def _saved(self) -> dict[str, list[Any]]:
        return {
            name: entry
            for name, entry in read_object(self._path).items()
            if isinstance(entry, list) and len(entry) == 5 + bool(self._boot)
        }

    def _remembered(self, kind: str, path: Path, compute: Callable[[Path], Any]) -> Any:
        stat = path.stat()
        name = self._name(kind, path)
        *known, value = self._entries.get(name, (None,))
        if known != self._stamp_of(stat):
            value = compute(path)
            self._learn(name, stat, value)
        return value

    def _learn(self, name: str, stat: os.stat_result, value: Any) -> None:
        times = (stat.st_mtime, stat.st_ctime) if self._boot else (stat.st_mtime,)
        if all(abs(time.time() - at) > RACY_SECONDS for at in times):
            self._entries[name] = self._learnt[name] = [*self._stamp_of(stat), value]

    def _name(self, kind: str, path: Path) -> str:
        return f"{kind}{self._boot and '@'}{self._boot}:{path.absolute()}"

    def _stamp_of(self, stat: os.stat_result) -> list[int]:
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        return [*stamp, stat.st_dev] if self._boot else stamp


def code_digests(module: str, cache: DigestCache) -> dict[str, str]:
    """Digests of `module` and of every module of ttrain that it imports, by name.

    Comments, layout and docstrings do not count; imports in functions and C sources of the same
    name do.
    """
    digests: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if (
            name in digests
            or name in CONTAINER_PACKAGES
            or not NON_RESULT_NAMES.isdisjoint(_with_parents(name))
        ):
            continue
        # Last, since it asks the file system: most names come up a dozen times.
        if path := _module_path(name):
            digests[name], imports = cache.module(path, name)
            waiting.extend(imports)
            for suffix in (".c", ".h"):
                if (source := path.with_suffix(suffix)).is_file():
                    digests[f"{name}{suffix}"] = cache.file(source)
    return dict(sorted(digests.items()))


def _module_path(name: str) -> Path | None:
    stem = PACKAGE_DIRECTORY.joinpath(*name.split(".")[1:])
    paths = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((path for path in paths if path.is_file()), None)


def _read_module(path: Path, name: str) -> list[Any]:
    source = path.read_text(encoding="utf-8")
    with _PARSING:
        tree = ast.parse(source, filename=str(path))
    imports = sorted(
        set(_imports(tree, name if path.name == "__init__.py" else name.rpartition(".")[0]))
    )
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return [hashlib.sha256(ast.unparse(tree).encode()).hexdigest(), imports]


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from _with_parents(base)
            for alias in node.names:
                if base.partition(".")[0] == PACKAGE and _module_path(f"{base}.{alias.name}"):
                    yield f"{base}.{alias.name}"


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".") if name.partition(".")[0] == PACKAGE else []
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
