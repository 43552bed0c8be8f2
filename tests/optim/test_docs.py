"""docs/muon.md: its code runs in order, and its table is the signature."""

import ast
import inspect
import re
import socket
from pathlib import Path

import pytest

from speedrun.optim import Muon

PAGE = (Path(__file__).parents[2] / "docs" / "muon.md").read_text()


def test_the_code_on_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for key, value in launched.items():
        monkeypatch.setenv(key, str(value))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


def test_the_table_lists_every_argument_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, flags=re.MULTILINE))
    arguments = inspect.signature(Muon).parameters
    assert list(listed) == list(arguments)
    for name, argument in arguments.items():
        if argument.default is not inspect.Parameter.empty:
            assert ast.literal_eval(listed[name]) == argument.default, name
