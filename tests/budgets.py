"""Check the statements of each package against `budgets.json`, as `make lint` does; `make budgets` records them.

A package within its budget may grow up to it, one that is over its budget may only shrink. Statements are counted, without
docstrings, since long lines do not hide them.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("budgets.json")
Budgets = Mapping[
    str, Mapping[str, int]
]  # by package: "budget", and "now", its statements when they were recorded
UNLISTED = {"budget": 0, "now": 0}


def count_statements(root: Path) -> Counter[str]:
    """Statements by package: `ttrain/data` and so on, `ttrain` for its loose modules, `flows`, `tasks`."""
    counts: Counter[str] = Counter()
    for top in ("ttrain", "flows", "tasks"):
        for path in (root / top).rglob("*.py"):
            package = "/".join(path.relative_to(root).parent.parts[: 2 if top == "ttrain" else 1])
            counts[package] += sum(
                map(_is_statement, ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            )
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
        f"{name} has {count} statements and may have {most(budgets, name)}; remove {count - most(budgets, name)}"
        for name, count in sorted(counts.items())
        if count > most(budgets, name)
    ]


def recorded(budgets: Budgets, counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The budgets with the present counts, none of them above what its package may have."""
    entries = {}
    for name in sorted({*budgets, *counts}):
        now = min(counts.get(name, 0), most(budgets, name))
        entries[name] = {"budget": budgets.get(name, UNLISTED)["budget"], "now": now}
    return {name: entry for name, entry in entries.items() if any(entry.values())}


if __name__ == "__main__":
    budgets, counts = (
        json.loads(FILE.read_text(encoding="utf-8")),
        count_statements(FILE.parents[1]),
    )
    present, problems = recorded(budgets, counts), grown(budgets, counts)
    if "--write" in sys.argv:
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in present.items()
        )
        FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    elif present != budgets:
        problems.append(
            "tests/budgets.json is not up to date; run `make budgets`, and commit the file with your change"
        )
    sys.exit("\n".join(problems) or 0)
