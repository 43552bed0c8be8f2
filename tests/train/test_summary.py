"""summary.json and environment.json: written as they were stated, read with a sentence if ill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from speedrun.errors import RunError
from speedrun.train.summary import Environment, Summary
from tests.report.made import made_summary


def test_a_summary_holds_what_was_stated_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary = made_summary(tokens_to_target=4096, target=3.28)
    summary.write(path)
    assert Summary.read(path) == summary
    keys = list(json.loads(path.read_text()))
    assert keys == [key for key in Summary.model_fields if key in keys]
    assert "peak_reserved_bytes" not in keys  # only a GPU has it
    assert Summary.read(tmp_path / "none.json") is None


def test_a_loss_that_is_not_finite_is_null_and_still_counts(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    made_summary(val_loss=math.nan, val_bpb=math.inf).write(path)
    assert json.loads(path.read_text())["val_loss"] is None
    found = Summary.read(path)
    assert found is not None
    assert (found.val_loss, found.val_bpb) == (None, None)
    assert math.isnan(found.loss)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": "ten"}, "steps is 'ten', but input should be a valid integer"),
        ({"val_loss": "low"}, "val_loss is 'low', but"),
        ({"stopped_early": None}, "stopped_early is None, but"),
    ],
)
def test_wrong_types_are_named(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(made_summary().as_dict() | change))
    with pytest.raises(RunError, match=rf"summary.json is not a run's summary: {sentence}.*delete"):
        Summary.read(path)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b"5", b'{"recipe": "modern"}'])
def test_damage_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file.json").write_bytes(data)
    with pytest.raises(RunError, match=r"file.json") as caught:
        Summary.read(tmp_path / "file.json")
    assert "\n" not in str(caught.value)


def test_an_environment_keeps_all_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    path.write_text('{"python": "3.11", "code_sha256": "c", "variables": {"A": "1"}}')
    found = Environment.read(path)
    assert found is not None
    assert (found.code_sha256, found.cores) == ("c", None)
    assert found.recorded == json.loads(path.read_text())
    path.write_text("[]")
    with pytest.raises(RunError, match="no JSON object"):
        Environment.read(path)
    assert Environment.read(tmp_path / "none.json") is None


@pytest.mark.parametrize("number", ["1e300", "-1e41", "1" + 60 * "0"])
def test_a_number_that_no_run_has_is_refused(tmp_path: Path, number: str) -> None:
    """Its square is none: `verify` ended in an OverflowError."""
    path = tmp_path / "summary.json"
    made_summary().write(path)
    path.write_text(path.read_text().replace('"val_loss": 3.0', f'"val_loss": {number}'))
    with pytest.raises(RunError, match=r"a number in it is beyond 1e\+40; delete it"):
        Summary.read(path)
