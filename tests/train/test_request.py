"""A request is the words of the command line, there and back."""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speedrun import cli
from speedrun.errors import ConfigError
from speedrun.train.request import Interval, Request, parse_seconds


def read(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Request:
    """What the command line makes of these words."""
    found: list[Request] = []
    monkeypatch.setattr("speedrun.commands.train.train_command", found.append)
    done = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found[0]


def test_the_defaults_of_the_command_line_are_the_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read(["train", "best"], monkeypatch) == Request(recipe="best", overrides=[])


@pytest.mark.parametrize(
    "request_",
    [
        Request(recipe="best", overrides=[]),
        Request(
            recipe="mine.toml", overrides=["model.layers=2", "train.target=4.0"], track="small",
            seed=3, steps=20, checkpoint_every=Interval(steps=5), keep=7, time_limit=90.0,
            stop_after=12,
            log=("tensorboard", "wandb"), sample_tokens=0,
        ),
        Request(overrides=[], resume=True, force=True, checkpoint_every=Interval(seconds=30.0)),
    ],
)  # fmt: skip
def test_a_rank_is_started_with_the_same_request(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Request(**{**vars(request_), "ranks": 4, "max_restarts": 2})
    again = read(started.words_of_a_rank(Path("runs/a")), monkeypatch)
    assert again == Request(**{**vars(request_), "folder": Path("runs/a")})


OF_THE_PARENT = {"ranks", "max_restarts", "dry_run", "folder"}  # a rank has none, or is given one
NO_OPTION = {"warm_up"}  # for callers in Python


@pytest.mark.parametrize("field", fields(Request), ids=lambda field: field.name)
def test_no_field_is_lost_on_the_way_to_a_rank(field: Field[Any]) -> None:
    """A new option must be given to the ranks as well, or be listed above."""
    changed: Any = {bool: not field.default, str: "other", tuple: ("one",)}.get(
        type(field.default), 77
    )
    changed = Interval(steps=7) if field.name == "checkpoint_every" else changed
    plain, other = Request(recipe="best"), Request(**{"recipe": "best", field.name: changed})
    same = plain.words_of_a_rank(Path("run")) == other.words_of_a_rank(Path("run"))
    assert same == (field.name in OF_THE_PARENT | NO_OPTION)


def test_times_and_intervals_are_read_or_refused() -> None:
    assert (parse_seconds("90s", ""), parse_seconds("1.5h", "")) == (90, 5400)
    assert Interval.parse("") == Interval()
    assert Interval.parse("50") == Interval(steps=50)
    assert Interval.parse("5m") == Interval(seconds=300)
    for wrong in ("0", "-5", "5x", "five", "1.5", "²", "٣", "1.2.3s"):
        with pytest.raises(ConfigError, match=r"--checkpoint-every .* cannot be used"):
            Interval.parse(wrong)
    with pytest.raises(ConfigError, match=r"--time-limit 'soon' cannot be used: write a time"):
        parse_seconds("soon", "--time-limit")
