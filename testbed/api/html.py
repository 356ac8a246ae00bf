"""How results show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table_html(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; all texts are escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
