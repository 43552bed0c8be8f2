"""The fuzzer itself: what is wrong is seen, named by its case, kept and repeated."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import mutate, runner
from tests.fuzz.outcome import Command, Outcome, Said, _changed, _wrong, files_of
from tests.fuzz.runner import Runner

FINE = Command(["report", "x"])


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (Said(0, "done", ""), ""),
        (Said(2, "", "speedrun: usage error: no such thing\n"), ""),
        (Said(1, "", ""), "0 sentences in 0 lines of stderr"),
        (Said(1, "", "speedrun: error: a\nspeedrun: error: b\n"), "2 sentences in 2 lines"),
        (Said(3, "", "speedrun: error: a\n"), "exit code 3"),
        (Said(1, "", f"speedrun: error: {'a' * 2000}\n"), "longer than"),
        (Said(1, "", "speedrun: error: \x1b[2J\n"), "a terminal acts on"),
        (Said(0, "", "x.py:1: RuntimeWarning: overflow\n"), "warning"),
        (Said(0, "", "", 'Traceback\n  File "/a/speedrun/b.py", line 7, in c\nKeyError: 1\n'),
         "traceback: KeyError b.py, line 7, in c"),
    ],
)  # fmt: skip
def test_what_a_command_says(said: Said, wrong: str) -> None:
    found = _wrong(FINE, said)
    assert found.startswith(wrong) if wrong in ("", "exit code 3") else wrong in found
    assert bool(found) == bool(wrong)


def test_what_a_command_leaves(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("a")
    before, command = files_of(tmp_path), Command(["x"], writes=["out"])

    def wrong(code: int) -> str:
        return _changed(command, Said(code, "", ""), before, files_of(tmp_path))

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "page").write_text("b")
    assert wrong(0) == ""
    assert wrong(1) == "page was written by a failure"
    (tmp_path / "out" / "page").rename(tmp_path / "out" / "page.tmp")
    assert wrong(0) == "page.tmp was left half-written"
    (tmp_path / "out" / "page.tmp").unlink()
    (tmp_path / "input").write_text("ab")
    assert wrong(0) == "input was changed, an input"


class Planted:
    """A target whose cases go wrong."""

    name, share, batch = "planted", 1.0, 5

    def __init__(self, how: str) -> None:
        self.how = how

    @contextmanager
    def session(self, scratch: Path) -> Iterator[Planted]:
        (scratch / "stderr").touch()
        os.dup2(os.open(scratch / "stderr", os.O_RDWR | os.O_APPEND), 2)
        yield self

    def make(self, rng: Random, folder: Path) -> str:
        (folder / "input").write_text(f"{rng.random()}")
        return self.how

    def judge(self, made: str, _: Path) -> Outcome:
        if made == "killed":
            os.abort()
        if made == "hung":
            time.sleep(100)
        return Outcome("fault", "told")


@pytest.mark.parametrize(
    ("how", "named"), [("told", "told"), ("killed", "killed by SIGABRT"), ("hung", "hung for 1 s")]
)
def test_a_fault_is_named_kept_and_repeated(
    how: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runner, "PATIENCE", 1.0)
    found = Runner(1, tmp_path / "kept", tmp_path / "scratch", 1)
    found.repeat(Planted(how), 3)
    assert [*found.faults.values()] == [["planted:3"]]
    assert next(iter(found.faults)).startswith(f"planted: {named}")
    assert found.tallies["planted"].faults == 1
    assert (tmp_path / "kept" / "planted-1-3" / "input").read_text() == str(
        Random("planted 1 3").random()
    )
    assert 'make fuzz SEED=1 ARGS="planted:3"' in capsys.readouterr().out
    assert not any((tmp_path / "scratch").iterdir())


def test_cases_follow_from_their_seed() -> None:
    def drawn(seed: int) -> list[object]:
        rng = Random(seed)
        data = b'{"a": [1, 2, {"b": "c"}], "d": null}'
        return [(mutate.spoil_bytes(rng, data), mutate.spoil_json(rng, data)) for _ in range(50)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(map(repr, drawn(1)))) > 45
