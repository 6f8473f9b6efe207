"""How the command line shows things (tables, JSON lines, a bar), and with how many threads it computes."""

import contextlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from quantlab.errors import InputError

LARGEST_THREADS = 4096


def fix_threads() -> None:
    """One thread unless OMP_NUM_THREADS says otherwise: states are small, and more threads wait for each other."""
    import torch

    text = os.environ.get("OMP_NUM_THREADS", "")
    outermost = text.partition(",")[0].strip() or "1"  # its value may be a list, one number a nesting level
    if not outermost.isdecimal() or not 1 <= int(outermost) <= LARGEST_THREADS:
        raise InputError("OMP_NUM_THREADS", text, f"a number of threads from 1 to {LARGEST_THREADS}")
    torch.set_num_threads(int(outermost))


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Any]:
    """A bar on a terminal; silence elsewhere (the result follows)."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


def print_json(rows: list[dict[str, Any]]) -> None:
    """One JSON object a line; NaN and Inf as text."""
    from quantlab.records import encode

    for row in rows:
        print(json.dumps(encode(row)))


def print_table(
    title: str,
    rows: list[dict[str, Any]],
    columns: list[str],
    names: dict[str, str] | None = None,
    right: Iterable[str] = (),
    *narrow: list[str],
) -> None:
    """``rows`` as a table, as wide as it needs; on a narrow terminal, one block a row.

    names: of the columns.  right: columns of text that are aligned like numbers.  narrow: selections of the columns,
    widest first; the first that fits is shown where all columns do not, and a line says what is left out.
    """
    from rich.console import Console
    from rich.measure import Measurement

    labels, console = names or {}, Console()
    for kept in (columns, *narrow):
        table = _table(title, rows, kept, labels, set(right))
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        if not _is_terminal():
            # A pipe has no width: give every column the room it needs.
            Console(width=max(80, needed)).print(table)
            return
        if needed <= console.width:
            console.print(table)
            hidden = [labels.get(column, column) for column in columns if column not in kept]
            if hidden:
                print_wrapped(f"Not shown for want of width: {', '.join(hidden)}.")
            return
    # Numbers broken over lines cannot be read; a block a row fits everywhere.
    width = max(len(labels.get(column, column)) for column in columns)
    print(title)
    for row in rows:
        print()
        for column in columns:
            print(f"  {labels.get(column, column):<{width}}  {text_of(row.get(column))}")


def _table(
    title: str, rows: list[dict[str, Any]], columns: list[str], labels: dict[str, str], right: set[str]
):
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        number = all(isinstance(row.get(column), (int, float, type(None))) for row in rows)
        justify = "right" if number or column in right else "left"
        table.add_column(labels.get(column, column), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(text_of(row.get(column)) for column in columns))
    return table


def print_wrapped(text: str) -> None:
    """A line of words, broken at the terminal's width; whole on a pipe."""
    if not _is_terminal():
        print(text)
        return
    width = max(40, min(shutil.get_terminal_size().columns, 140))
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False))


def print_sections(sections: list[tuple[str, list[tuple[str, str]]]]) -> None:
    """Titled lines of label and text, broken at the terminal's width; a pipe is 100 wide."""
    width = min(shutil.get_terminal_size().columns, 140) if _is_terminal() else 100
    indent = 2 + max(len(label) for _, lines in sections for label, _ in lines) + 2
    for number, (title, lines) in enumerate(sections):
        if number:
            print()
        print(title)
        for label, text in lines:
            head = f"  {label}".ljust(indent)
            print(
                textwrap.fill(
                    text,
                    max(width, indent + 20),
                    initial_indent=head,
                    subsequent_indent=" " * indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )


def text_of(value: Any) -> str:
    """A cell: three digits of a number, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return (
            f"{value:,.0f}" if abs(value) >= 1e4 and value == value and abs(value) < 1e12 else f"{value:.3g}"
        )
    if isinstance(value, list):
        return f"[{', '.join(text_of(v) for v in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{k} {text_of(v)}" for k, v in value.items() if v is not None)
    return str(value)


def _is_terminal() -> bool:
    """Python has no standard output at all where the shell closed it."""
    return sys.stdout is not None and sys.stdout.isatty()
