"""HTML tables for notebooks, in light or dark colours."""

from collections.abc import Iterable, Sequence
from html import escape

PLAIN = "color: inherit; background: none; text-align: left; white-space: nowrap"


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    lines = [_row("th", header), *(_row("td", row) for row in rows)]
    title = f'<caption style="{PLAIN}">{escape(caption)}</caption>' if caption else ""
    return f'<table style="color: inherit; background: none">{title}{"".join(lines)}</table>'


def _row(tag: str, cells: Sequence[object]) -> str:
    texts = (f'<{tag} style="{PLAIN}">{escape(str(cell))}</{tag}>' for cell in cells)
    return f"<tr>{''.join(texts)}</tr>"
