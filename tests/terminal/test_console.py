"""What somebody else wrote never steers the terminal it is shown on."""

from __future__ import annotations

import errno
import os
import pty
import sys
from pathlib import Path

import pytest

from speedrun import cli
from speedrun.commands.data import inspect_command
from speedrun.data.build import build_dataset
from speedrun.terminal.console import MOST, as_written, print_table, printable, sentence

RED = "\x1b[31mred"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("naïve\tcafé\n 漢字 👩‍👩‍👧 a\u00a0b", None),
        (RED, r"\x1b[31mred"),
        ("a\rb\x00\x07\x7f\x9b", r"a\rb\x00\x07\x7f\x9b"),
        ("left\u202eright\u2028", r"left\u202eright\u2028"),
        ("half \ud83d", r"half \ud83d"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)


def test_a_message_says_its_beginning_and_its_end() -> None:
    long = f"model.layers = {'9' * 50_000} cannot be used: it must be 1 or more"
    shown = sentence(long)
    assert len(shown) < MOST + 50
    assert shown.startswith("model.layers = 999")
    assert shown.endswith("cannot be used: it must be 1 or more")
    assert "characters ..." in shown
    assert sentence("a short one") == "a short one"
    assert sentence("no file 'a\n\x1b\u00a0b'") == r"no file 'a\n\x1b\xa0b'"


def test_text_is_exact_in_a_pipe_and_harmless_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert as_written(RED) == RED
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert as_written(RED) == r"\x1b[31mred"
        monkeypatch.undo()
    os.close(ours)


def test_documents_names_and_tables_are_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"{name}\x1b[2J.txt").write_text(f"{name} {RED}\n" * 40)
    build_dataset([str(tmp_path / "*.txt")], tmp_path / "data", "byte", val_fraction=0.3)
    inspect_command(tmp_path / "data", 2)
    print_table(("name",), [(RED,)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[31mred" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", RED], r"recipe '\x1b[31mred' is not known"),
        (["sample", RED], r"run folder \x1b[31mred does not exist"),
        (["sample", "x" * 5000], "File name too long"),
        (["train", "x" * 5000], "is not known; nearest"),
        (["report", "y" * 300], "File name too long"),
    ],
)
def test_errors_are_short_and_written_out(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["speedrun", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert "\x1b" not in error
    assert len(error) < MOST + 200
    assert error.startswith("speedrun: ")


def test_an_error_of_the_system_that_names_no_file_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(OSError, match="input/output error"):
        cli.main()
