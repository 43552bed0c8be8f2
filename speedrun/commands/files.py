"""`speedrun recipes` and `speedrun tracks`: list, show, trace and compare their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speedrun.config.experiment import all_differences
from speedrun.config.files import Kind, chain, names, optimizers
from speedrun.config.fixed import of_track
from speedrun.config.resolve import Resolved, resolve, toml_text
from speedrun.terminal.console import console, print_table, printable


def list_files(kind: Kind) -> None:
    _list(kind, kind, names(kind))
    if kind == "recipe":
        print()
        _list(kind, "optimizer", optimizers())
        console().print(
            "optimizers: rows of `speedrun ladder`, for the track optimizer", soft_wrap=True
        )


def _list(kind: Kind, heading: str, which: Sequence[str]) -> None:
    rows = []
    for name in which:
        last = chain(kind, name)[-1]
        rows.append((name, last.notes.get("extends", ""), last.notes.get("why", "")))
    print_table((heading, "extends", "why"), rows)


def show_file(kind: Kind, name: str) -> None:
    for layer in chain(kind, name):
        if layer.notes.get("why"):
            console().print(printable(f"{layer.name}: {layer.notes['why']}"))
    rows = ((key, toml_text(value), origin) for key, value, origin in _alone(kind, name).rows())
    print_table(("key", "value", "set by"), [row for row in rows if row[2] != "default"])
    if kind == "track":
        _show_rules(name)


def _show_rules(track: str) -> None:
    """What a track that races optimizers says beside the values it sets."""
    if fixed := of_track(track):
        console().print(f"\nfixed: {', '.join(fixed.fixed)}", soft_wrap=True)
        console().print(f"free: {fixed.free_text}", soft_wrap=True)
    notes = chain("track", track)[-1].notes
    if "sigma" in notes:
        console().print(f"sigma, the spread of a last loss between seeds: {notes['sigma']}")
    if "tuned_on" in notes:
        console().print(printable(f"rates are tuned on: {notes['tuned_on']}"))


def show_history(kind: Kind, name: str) -> None:
    """Each file of the chain: why it is there and what it changed."""
    values: dict[str, Any] = {}
    for layer in chain(kind, name):
        minutes = layer.notes.get("published_minutes")
        why = printable(f"{layer.name}  {layer.notes.get('why', '')}")
        console().print(f"\n{why}", soft_wrap=True)
        if minutes:
            console().print(f"  (published: {minutes} minutes)")
        for key, value in layer.values.items():
            before = f"{toml_text(values[key])} -> " if key in values else ""
            console().print(printable(f"  {key} = {before}{toml_text(value)}"), soft_wrap=True)
        values |= layer.values


def diff_files(kind: Kind, first: str, second: str) -> None:
    differences = all_differences(_alone(kind, first).config, _alone(kind, second).config)
    rows = [(key, toml_text(left), toml_text(right)) for key, left, right in differences]
    if rows:
        print_table(("key", first, second), rows)
    else:
        console().print(f"{first} and {second} resolve to the same values")


def _alone(kind: Kind, name: str) -> Resolved:
    return resolve(recipe=name) if kind == "recipe" else resolve(track=name)
