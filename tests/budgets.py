"""Check the statements of each package against `budgets.json`; `make budgets` records them.

A package within its budget may grow up to it, one that is over its budget may only shrink.
Statements are counted, without docstrings, since long lines do not hide them.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("budgets.json")
# By package: "budget", and "now", its statements when they were recorded.
Budgets = Mapping[str, Mapping[str, int]]
UNLISTED = {"budget": 0, "now": 0}


def count_statements(root: Path) -> Counter[str]:
    """Statements by package: `ttrain/data`, `ttrain` for its loose modules, `flows`, `tasks`."""
    counts: Counter[str] = Counter()
    for top in ("ttrain", "flows", "tasks"):
        for path in (root / top).rglob("*.py"):
            package = "/".join(path.relative_to(root).parent.parts[: 2 if top == "ttrain" else 1])
            tree = ast.parse(path.read_text(encoding="utf-8"))
            counts[package] += sum(map(_is_statement, ast.walk(tree)))
    return counts


def _is_statement(node: ast.AST) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not is_docstring


def most(budgets: Budgets, package: str) -> int:
    """How many statements a package may have."""
    return max(budgets.get(package, UNLISTED).values())


def grown(budgets: Budgets, counts: Mapping[str, int]) -> list[str]:
    """A line for each package that has more statements than it may have."""
    return [
        f"{name} has {count} statements and may have {limit}; remove {count - limit}"
        for name, count in sorted(counts.items())
        if count > (limit := most(budgets, name))
    ]


def recorded(budgets: Budgets, counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The budgets with the present counts, none of them above what its package may have."""
    entries = {}
    for name in sorted({*budgets, *counts}):
        now = min(counts.get(name, 0), most(budgets, name))
        entries[name] = {"budget": budgets.get(name, UNLISTED)["budget"], "now": now}
    return {name: entry for name, entry in entries.items() if any(entry.values())}


if __name__ == "__main__":
    budgets = json.loads(FILE.read_text(encoding="utf-8"))
    counts = count_statements(FILE.parents[1])
    present = recorded(budgets, counts)
    problems = grown(budgets, counts)
    if "--write" in sys.argv:
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in present.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    elif present != budgets:
        problems.append("tests/budgets.json is not up to date; run `make budgets` and commit it")
    sys.exit("\n".join(problems) or 0)
