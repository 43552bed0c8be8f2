"""What `speedrun` says when it is given no verb, a wrong one, or a verb without what it needs."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from speedrun.cli import app
from speedrun.cli.verbs import FIRST_STEPS, GROUPS, leave_closed_pipe, start_screen
from speedrun.commands.train import train_command
from speedrun.config.files import names
from speedrun.data.verify import verify
from speedrun.terminal.curve import draw
from tests.cli.calling import Call
from tests.report.made import made_config, made_run

VERBS = [verb for verbs in GROUPS.values() for verb in verbs]


def test_every_verb_stands_in_one_group() -> None:
    assert sorted(VERBS) == sorted(get_command(app).commands)  # type: ignore[attr-defined]


def test_without_a_verb_it_says_where_to_start(call: Call) -> None:
    said = call(COLUMNS="100")
    assert (said.code, said.err) == (0, "")
    for verb in VERBS:
        assert f"  {verb} " in said.out
    for command, _ in FIRST_STEPS:
        assert command in said.out
    assert set("".join(said.out.split())) < set(map(chr, range(33, 127)))


def test_first_steps_name_verbs_and_recipes_there_are() -> None:
    words = [word for command, _ in FIRST_STEPS for word in command.split()]
    assert {"best", "record-02"} <= set(words) & set(names("recipe"))
    assert {command.split()[1] for command, _ in FIRST_STEPS} <= set(VERBS)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_start_screen_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    longest = max(len(command) for command, _ in FIRST_STEPS) + 2  # is never broken
    assert max(map(len, start_screen().splitlines())) <= max(width, longest)


def test_help_has_the_verbs_in_groups(call: Call) -> None:
    out = call("--help").out
    places = [out.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    assert all(f"\n  {verb} " in out for verb in VERBS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], ["no verb 'trian'", "did you mean 'train'?", "`speedrun` lists them"]),
        (["build"], ["did you mean `speedrun data build`?"]),
        (["best"], ["did you mean `speedrun train best`?"]),
        (["zzzzz"], ["no verb 'zzzzz'; `speedrun` lists them"]),
        (["data", "biuld"], ["speedrun data has no verb", "'build'", "`speedrun data --help`"]),
        (["train", "best", "--sed", "1"], ["speedrun train", "'--sed'", "did you mean --seed?"]),
        (["sample"], ["speedrun sample needs RUN", "for example: speedrun sample"]),
        (["data", "build", "x"], ["needs --out", "for example:"]),
        (["train", "best", "--steps", "1.5"], ["--steps '1.5'", "not a whole number"]),
        (["verify", "--alpha=x"], ["--alpha 'x'", "not a number"]),
        (["sample", "x", "--top-p", "3"], ["--top-p '3'", "less than or equal to 1"]),
        (["train", "best", "--seed"], ["--seed needs a value"]),
        (["doctor", "now"], ["speedrun doctor", "now", "`speedrun doctor --help`"]),
        (["train", "best", "--steps", "9" * 5000 + "x"], ["(5,003 characters)"]),
        (["race", "best", "data.dir=a b"], ["'data.dir=a b' is no recipe: write --set 'data.dir="]),
        (["race", "best", "data.dir=/x/y"], ["write --set data.dir=/x/y "]),
        (["ablate", "best", "--set", "a.b=1", "data.dir=x"], ["write --set data.dir=x "]),
        (["tune", "best", "--budget", "2", "data.dir=x"], ["write --set data.dir=x "]),
        (["race", "best", "--steps", "5"], ["no option '--steps'; write --budget N; "]),
        (["ablate", "best", "--steps=5"], ["no option '--steps'; write --set train.steps=N; "]),
        (["tune", "best", "--steps", "5"], ["no option '--steps'; write --set train.steps=N; "]),
    ],
)
def test_misuse_is_one_sentence(call: Call, words: list[str], expected: list[str]) -> None:
    said = call(*words)
    said.sentence(2, *expected)
    assert said.err.startswith("speedrun: usage error: ")
    assert len(said.err) < 400


def test_a_path_with_a_line_end_stays_one_line(call: Call, tmp_path: Path) -> None:
    call("sample", tmp_path / "a\nb\x1b[31m").sentence(1, "a\\nb\\x1b[31m")


def test_a_page_cannot_be_a_folder(call: Call, tmp_path: Path) -> None:
    made_run(tmp_path / "run", made_config())
    with contextlib.chdir(tmp_path):
        call("report", tmp_path / "run", "--out", ".").sentence(2, "cannot write .", "folder")


def test_the_curve_where_there_is_no_braille(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [(0.0, 4.0), (10.0, 1.0), (20.0, 2.0)]
    for encoding, marks in (("utf-8", "\u2800\u2801"), ("ascii", "*"), ("latin-1", "*")):
        text = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", text)
        drawn = draw(points, 2.0)
        assert drawn.encode(encoding)
        assert any(mark in drawn for mark in marks)


def test_progress_that_nobody_reads_is_not_damage(tiny_dataset: Path) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        verify(tiny_dataset, progress=closed)


def test_an_interrupted_verb_says_so(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{train_command.__module__}.train_command", stop)
    said = call("train", "best")
    assert (said.code, said.err) == (130, "speedrun: interrupted\n")


def test_a_pipe_that_closes_ends_it_without_a_word() -> None:
    """In a process of its own, whose output is the system's; and which does not load torch."""
    code = (
        "import sys; sys.argv = ['speedrun', 'recipes']\n"
        "from speedrun.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_large_text_into_a_closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves nothing in the buffer that could be flushed again."""
    reader, writer = os.pipe()
    os.close(reader)
    out = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(BrokenPipeError):
        out.write("x" * (1 << 20))
    with pytest.raises(SystemExit) as ended:
        leave_closed_pipe()
    assert ended.value.code == 141
    out.close()


def test_a_fault_of_ours_keeps_its_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that is not our output, and a file that nobody named."""
    faults: dict[OSError, type[Exception]] = {
        BrokenPipeError(errno.EPIPE, "Broken pipe"): RuntimeError,
        PermissionError(errno.EACCES, "Permission denied", "/none/of/ours"): PermissionError,
    }
    for fault, kind in faults.items():

        def fail(*_: object, fault: OSError = fault) -> None:
            raise fault

        monkeypatch.setattr(f"{train_command.__module__}.train_command", fail)
        with pytest.raises(kind) as raised:
            call("train", "best")
        assert fault in (raised.value, raised.value.__cause__)
    call("train", "/none/of/ours").sentence(1, "Permission denied; check the path")
