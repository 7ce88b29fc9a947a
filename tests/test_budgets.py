"""What a package may have: up to its budget, or less than before where it is over."""

from __future__ import annotations

from pathlib import Path

from budgets import count_statements, grown, recorded

BUDGETS = {"ttrain/data": {"budget": 10, "now": 20}, "ttrain/store": {"budget": 10, "now": 5}}


def test_a_package_grows_up_to_its_budget_and_only_shrinks_where_it_is_over() -> None:
    assert grown(BUDGETS, {"ttrain/data": 20, "ttrain/store": 10}) == []
    assert grown(BUDGETS, {"ttrain/data": 21, "ttrain/store": 5}) == [
        "ttrain/data has 21 statements and may have 20; remove 1"
    ]
    assert len(grown(BUDGETS, {"ttrain/store": 11, "ttrain/new": 1})) == 2
    lower = recorded(BUDGETS, {"ttrain/data": 19})
    assert grown(lower, {"ttrain/data": 20}), "what was removed once does not come back"


def test_statements_are_counted_by_package_without_docstrings(tmp_path: Path) -> None:
    for name in ("ttrain/api.py", "ttrain/data/chats/a.py", "flows/full.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""A module."""\n\nif True:\n    x = 1; y = 2\n', encoding="utf-8")
    assert count_statements(tmp_path) == {"ttrain": 3, "ttrain/data": 3, "flows": 3}
