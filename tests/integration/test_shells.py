"""Completion in real shells: installed by the documented line, asked by the Tab key."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

BIN = Path(sys.executable).parent
INTERACTIVE = {
    "bash": ["bash", "--noprofile", "-i"],
    "zsh": ["zsh", "-i"],
    "fish": ["fish", "-i"],
}


def typed(shell: str, home: Path, keys: str, expected: str) -> str:
    """What the terminal shows after `keys`, once `expected` is there."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(home)
        os.environ |= {"HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb"}
        os.execvp(shell, INTERACTIVE[shell])
    shown, end = "", time.monotonic() + PATIENCE / 4
    while time.monotonic() < end and expected not in shown:
        if select.select([terminal], [], [], 2.0)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
        elif keys:  # it waits to be told; fish forgets what is typed before
            os.write(terminal, keys.encode())
            keys = ""
    os.write(terminal, b"\x03\nexit\n")
    os.close(terminal)
    os.waitpid(child, 0)
    return shown


@pytest.mark.parametrize("shell", INTERACTIVE)
def test_tab_goes_on(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"NOT TESTED: completion in {shell}, which is not installed here")
    home = {**os.environ, "HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"}
    install = "speedrun --install-completion; true"  # not the last word, lest it replace the shell
    done = subprocess.run([shell, "-c", install], env=home, capture_output=True, text=True)
    assert f"{shell} completion installed" in done.stdout, done.stderr
    wanted = {
        "speedrun train best model.lay\t3": "model.layers=3",  # without a space
        f"{BIN}/speedrun doct\t": "speedrun doctor ",
        "speedrun train best model.norm=lay\t": "model.norm=layer ",
        "speedrun sample runs/er\t": r"runs/erst\ ü ",
    }
    (tmp_path / "runs/erst ü").mkdir(parents=True)
    (tmp_path / "runs/erst ü/config.toml").touch()
    for keys, expected in wanted.items():
        assert expected in typed(shell, tmp_path, keys, expected)
