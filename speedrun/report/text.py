"""Tables for the terminal; plain aligned text when piped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speedrun.config.files import Kind, chain, names
from speedrun.config.resolve import Resolved, difference, resolve


def console() -> Console:
    """Piped output is not wrapped to a terminal that is not there."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=160)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    table = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console().print(table)


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"


def list_files(kind: Kind) -> None:
    rows = []
    for name in names(kind):
        last = chain(kind, name)[-1]
        rows.append((name, last.notes.get("extends", ""), last.notes.get("why", "")))
    print_table((kind, "extends", "why"), rows)


def show_file(kind: Kind, name: str) -> None:
    layers = chain(kind, name)
    for layer in layers:
        if layer.notes.get("why"):
            console().print(f"{layer.name}: {layer.notes['why']}")
    resolved = _alone(kind, name)
    rows = [
        (key, value_text(value), origin)
        for key, value, origin in resolved.rows()
        if origin != "default"
    ]
    print_table(("key", "value", "set by"), rows)


def show_history(kind: Kind, name: str) -> None:
    """Each file of the chain: why it is there and what it changed."""
    values: dict[str, Any] = {}
    for layer in chain(kind, name):
        minutes = layer.notes.get("published_minutes")
        seed = layer.notes.get("seed")
        notes = [f"published: {minutes} minutes"] if minutes else []
        notes += [f"described by seed {seed}"] if seed else []
        console().print(f"\n{layer.name}  {layer.notes.get('why', '')}", soft_wrap=True)
        for note in notes:
            console().print(f"  ({note})")
        for key, value in layer.values.items():
            before = f"{value_text(values[key])} -> " if key in values else ""
            console().print(f"  {key} = {before}{value_text(value)}", soft_wrap=True)
        values |= layer.values


def diff_files(kind: Kind, first: str, second: str) -> None:
    rows = [
        (key, value_text(left), value_text(right))
        for key, left, right in difference(_alone(kind, first).config, _alone(kind, second).config)
    ]
    if rows:
        print_table(("key", first, second), rows)
    else:
        console().print(f"{first} and {second} resolve to the same values")


def _alone(kind: Kind, name: str) -> Resolved:
    return resolve(recipe=name) if kind == "recipe" else resolve(track=name)
