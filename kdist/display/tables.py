"""Tables that fit the terminal: names are never cut short, whatever its width."""

from __future__ import annotations

import dataclasses
import io
import textwrap
from collections.abc import Sequence

import rich.box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

GAP = 2
"""Spaces between columns; the box draws one of them."""
LEAST_PROSE = 24
"""Columns that a sentence gets at least."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: Its head.
        right: Whether its entries are aligned to the right, as numbers are.
        prose: Whether its entries are sentences, which may go on in the next line. All others stand
            in one line.
    """

    title: str
    right: bool = False
    prose: bool = False

    def width(self, entries: Sequence[str]) -> int:
        """Characters that the column needs."""
        longest = max(map(len, [self.title, *entries]))
        return min(longest, LEAST_PROSE) if self.prose else longest


def number(title: str) -> Column:
    """A column of numbers."""
    return Column(title, right=True)


def table(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> RenderableType:
    """A table no wider than `width`.

    Where the columns have no room beside each other, each row becomes a block: its first entry on
    a line, the others behind their titles below it.

    Args:
        title: Stands above it.
        columns: The columns; the first one names a row.
        rows: Entries, one per column.
        width: Of the terminal, in characters.

    Example:
        >>> print_it = rich.console.Console().print
        >>> print_it(table("cuts", [Column("weight"), number("bytes")], [("up", "64")], 80))
    """
    needed = sum(c.width([row[i] for row in rows]) + GAP for i, c in enumerate(columns)) - GAP
    if needed > width:
        return _blocks(title, columns, rows, width)
    made = Table(title=title, box=rich.box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0))
    made.title_justify, made.show_edge, made.pad_edge = "left", False, False
    for column in columns:
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.prose,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def _blocks(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> Group:
    lines = [Text(title, style="table.title")]
    for name, *entries in rows:
        lines.append(Text(name, overflow="fold"))
        text = "; ".join(f"{c.title} {entry}" for c, entry in zip(columns[1:], entries) if entry)
        wrapped = textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
        lines += map(Text, wrapped)
    return Group(*lines)


def as_text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int = 200,
    total: Sequence[str] | None = None,
) -> str:
    """A table as plain text, for what `print` is to show: brackets in names are no markup.

    Args:
        columns: The columns.
        rows: Entries, one per column.
        width: In characters, at most.
        total: A row below a line of its own.
    """
    made = Table(box=rich.box.SIMPLE)
    for column in columns:
        made.add_column(
            column.title, justify="right" if column.right else "left", no_wrap=not column.prose
        )
    for row in rows:
        made.add_row(*map(Text, row))
    if total is not None:
        made.add_section()
        made.add_row(*map(Text, total))
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(made)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().split("\n"))


def print_prose(console: Console, text: str) -> None:
    """Prints text as it is: brackets are no markup, and no number is coloured."""
    console.print(text, markup=False, highlight=False)


def readable(nbytes: float) -> str:
    """Bytes for people: 1536 is "1.5 KB" (1 KB = 1024 bytes)."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1024 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
