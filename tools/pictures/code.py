"""What pictures and pages say about the code, looked up in the code itself.

A function is named as `speedrun.train.trainer:Trainer.step`. One that was renamed or moved, or that
is no longer called where a picture says so, is an error when the picture is drawn.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import speedrun

PACKAGE = Path(speedrun.__file__).parent


def find(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    found: Any = reduce(getattr, path.split("."), importlib.import_module(module))
    assert callable(found), f"{name} is no function or class"
    function: Callable[..., Any] = inspect.unwrap(found)
    return function


def file_of(name: str) -> str:
    """The file of a function, from the package on: train/trainer.py."""
    source = inspect.getsourcefile(find(name))
    assert source is not None, f"{name} has no file"
    return Path(source).relative_to(PACKAGE).as_posix()


def calls(name: str) -> list[str]:
    """What a function calls, as written there, in the order in which it is done."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(find(name))))
    return [ast.unparse(call.func) for call in _calls(tree)]


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """An argument is worked out before the call that it is for."""
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call):
        yield node


def check_order(name: str, wanted: Sequence[str]) -> None:
    """The function makes these calls, in this order, others between them or not."""
    made = calls(name)
    rest = iter(made)
    missing = [call for call in wanted if call not in rest]
    assert not missing, f"{name} does not call {missing[0]} in the place the picture shows: {made}"


# A quoted piece of code in a page: the file and the function it is from, then a fence of `py`.
QUOTE = re.compile(r"<!-- (\S+): (\S+) -->\n```py\n(.*?)^```", re.MULTILINE | re.DOTALL)


def wrong_quotes(page: str) -> list[str]:
    """Quoted pieces that are not in the function that they are said to be from, line by line."""
    wrong = []
    for file, function, quoted in QUOTE.findall(page):
        module = "speedrun." + file.removesuffix(".py").replace("/", ".")
        source = textwrap.dedent(inspect.getsource(find(f"{module}:{function}")))
        lines = [line.strip() for line in source.splitlines()]
        piece = [line.strip() for line in quoted.splitlines()]
        starts = range(len(lines) - len(piece) + 1)
        if not any(lines[start : start + len(piece)] == piece for start in starts):
            wrong.append(f"{file}: {function}: {quoted}")
    return wrong
