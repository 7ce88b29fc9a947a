"""Check the statements of each package against `budgets.json`; `make budgets` records them.

A package within its budget may grow up to it, one that is over its budget may only shrink.
Statements are counted, without docstrings, since long lines do not hide them.
"""

import ast
import json
import sys
from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_name("budgets.json")
TOPS = {"ttrain": 2, "flows": 1, "tasks": 1}  # and how many parts of a path name a package
UNLISTED = {"budget": 0, "now": 0}


def count_statements(root: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for top, depth in TOPS.items():
        for path in (root / top).rglob("*.py"):
            package = "/".join(path.relative_to(root).parent.parts[:depth])
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                counts[package] += isinstance(node, ast.stmt) and not is_docstring
    return counts


if __name__ == "__main__":
    budgets = json.loads(FILE.read_text(encoding="utf-8"))
    counts = count_statements(FILE.parents[1])
    present = {}
    problems = []
    for name in sorted({*budgets, *counts}):
        entry = budgets.get(name, UNLISTED)
        limit = max(entry.values())
        if counts[name] > limit:
            excess = f"has {counts[name]} statements and may have {limit}"
            problems.append(f"{name} {excess}; remove {counts[name] - limit}")
        if entry["budget"] or counts[name]:
            present[name] = {"budget": entry["budget"], "now": min(counts[name], limit)}
    if "--write" in sys.argv:
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in present.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    elif present != budgets:
        problems.append("tests/budgets.json is not up to date; run `make budgets` and commit it")
    sys.exit("\n".join(problems) or 0)
