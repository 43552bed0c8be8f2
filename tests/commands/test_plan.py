"""`speedrun plan`, as it is called."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from speedrun.commands.plan import plan_command
from speedrun.errors import ConfigError, SpeedrunError
from speedrun.plan.predict import duration


def call(**words: Any) -> None:
    usual: dict[str, Any] = {
        "recipe": "record-18", "track": "small", "overrides": [], "on": "8xH100",
        "leave_out": None, "as_json": False,
    }  # fmt: skip
    plan_command(**{**usual, **words})


def test_a_plan_says_time_memory_and_where_they_go(capsys: pytest.CaptureFixture[str]) -> None:
    call()
    text = capsys.readouterr().out
    assert text.startswith("record-18 on small, planned for 8 x H100\n")
    for part in ("step ", "MFU", "products of the head", "activations", "1 forward pass a step"):
        assert part in text
    assert re.search(r"a record is off by [\d.]+% on average and [\d.]+% at the most\.", text)
    assert "nothing was measured" not in text
    call(on="2xA100")
    assert "On 2 x A100 nothing was measured" in capsys.readouterr().out


def test_a_plan_is_one_object_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    call(as_json=True, on="A100", overrides=["train.steps=10"])
    found = json.loads(capsys.readouterr().out)
    wanted = {"step_ms", "train_seconds", "memory_mib", "tokens_per_second", "mfu", "parts"}
    assert wanted <= found.keys()
    assert found["steps"] == 10


def test_what_would_fit_is_said_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    call(on="RTX4090")
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "machine.recompute=true, which takes" in text
    call(on="RTX4090", overrides=["machine.recompute=true"])
    assert "DOES NOT FIT" not in capsys.readouterr().out
    wide = ["model.width=1536", "model.heads=12"]
    call(on="RTX4090", overrides=wide)
    word = re.search(r"batch\.length=\d+", capsys.readouterr().out)
    assert word
    call(on="RTX4090", overrides=[*wide, word[0]])
    assert "DOES NOT FIT" not in capsys.readouterr().out


def test_what_cannot_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    call(on="RTX4090", overrides=["model.layers=64", "model.width=4096", "model.heads=32"])
    assert "make model.width or model.layers smaller" in capsys.readouterr().out


def test_a_record_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    call(recipe="record-12", leave_out=12)
    text = capsys.readouterr().out
    assert re.search(r"Fitted without record 12, whose published step takes 161\.\d ms", text)


def test_other_texts_and_tracks_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    call(recipe="best", track="nano", on="H100")
    assert "best on nano" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"on": "8xTPU"}, "'8xTPU' is no machine that is known"),
        ({"on": "3xH100"}, "must divide by the 3 ranks"),
        ({"leave_out": 3}, "--leave-out 3 cannot be used: .* records 4 to 18"),
        ({"recipe": "recrd-18"}, "nearest"),
        ({"overrides": ["model.width=0"]}, "model.width = 0"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(words: dict[str, Any], said: str) -> None:
    with pytest.raises(SpeedrunError, match=said):
        call(**words)


def test_own_code_that_cannot_be_counted_is_said(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(
        'extends = "modern"\n[optimizer.hidden]\nuse = "torch.optim:SGD"\nargs = { lr = 0.1 }\n'
    )
    call(recipe=str(tmp_path / "mine.toml"))
    assert "What torch.optim:SGD computes is not known" in capsys.readouterr().out


def test_durations_have_two_units() -> None:
    found = [duration(s) for s in (0.94, 59.94, 61, 3599.4, 3600, 90_061)]
    assert found == ["0.9 s", "59.9 s", "1 min 1 s", "59 min 59 s", "1 h 0 min", "25 h 1 min"]


def test_refusals_are_config_errors() -> None:
    with pytest.raises(ConfigError):
        call(on="")
