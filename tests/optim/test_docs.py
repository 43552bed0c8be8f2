"""docs/muon.md: its table of arguments is the signature."""

import ast
import inspect
import re
from pathlib import Path

from speedrun.optim import Muon

PAGE = (Path(__file__).parents[2] / "docs" / "muon.md").read_text()


def test_the_table_lists_every_argument_with_its_default() -> None:
    table = PAGE.partition("\n## Arguments\n")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE))
    arguments = inspect.signature(Muon).parameters
    assert list(listed) == list(arguments)
    for name, argument in arguments.items():
        if argument.default is not inspect.Parameter.empty:
            assert ast.literal_eval(listed[name]) == argument.default, name
