"""Lines of metrics.jsonl: what is no record of a run is left out, so that no reader meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speedrun.report.page import page_data
from speedrun.train.metrics import read_row
from speedrun.train.run import RunFolder
from tests.report.made import made_config, made_run

VAL: dict[str, Any] = {"kind": "val", "step": 4, "tokens": 8, "seconds": 0.5, "loss": 3.0}


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": 3}, {"kind": ["val"]}, {"step": "4"}, {"step": [4]}, {"step": None}, {"step": -1},
        {"step": 4.0}, {"step": True}, {"loss": "3"}, {"loss": {}}, {"loss": True},
        {"step": float("nan")}, {"loss": 10**400}, {"tokens": [8]},
        {"bits_per_byte": "1"}, {"seconds": -(10**41)},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_is_no_record(changed: dict[str, Any]) -> None:
    assert read_row(json.dumps(VAL).encode()) == VAL
    assert read_row(json.dumps(VAL | changed).encode()) is None


@pytest.mark.parametrize("gone", ["kind", "step", "tokens", "loss"])
def test_a_missing_value_is_no_record(gone: str) -> None:
    assert read_row(json.dumps({k: v for k, v in VAL.items() if k != gone}).encode()) is None


def test_what_needs_no_numbers_has_none() -> None:
    assert read_row(json.dumps(VAL | {"loss": float("nan")}).encode()) == VAL | {"loss": None}
    for row in ({"kind": "sample", "text": "a"}, VAL | {"loss": None}, {"kind": "mine", "a": []}):
        assert read_row(json.dumps(row).encode()) == row


def test_every_reader_passes_over_what_is_no_record(tmp_path: Path) -> None:
    """A step that is a list ended a resume, a loss that is a text ended a page."""
    run = made_run(tmp_path / "run", made_config())
    honest, page = run.validation_losses(), page_data([run])
    spoilt: list[dict[str, Any]] = [
        {"step": [1]},
        {"loss": "x"},
        {"loss": {}},
        {"tokens": None, "step": "0"},
        {"kind": 7},
    ]
    with run.metrics.open("a") as file:
        for kind in ("val", "train", "peak"):
            for change in spoilt:
                row = {"kind": kind, "step": 1, "tokens": 2, "seconds": 1.0, "loss": 1.0}
                file.write(json.dumps(row | change) + "\n")
    folder = RunFolder(run.path)
    assert folder.validation_losses() == honest
    assert page_data([folder])["runs"][0]["val"] == page["runs"][0]["val"]
    folder.truncate_metrics(40, 40)
    assert len(folder.read_metrics("val")) == len(honest)


def test_a_resume_forgets_only_what_it_does_again(tmp_path: Path) -> None:
    """A gradient of 1e30, which 32 bits hold, is a record; what is none is kept as it stands."""
    run = RunFolder(tmp_path)
    kept = [
        json.dumps({"kind": "train", "step": step, "tokens": 8, "seconds": 0.5, "loss": 3.0} | more)
        for step, more in ((1, {"grad_norm": 1e30}), (2, {"grad_norm": 3.4e38}), (3, {}))
    ]
    odd = ["written by hand", json.dumps(VAL | {"loss": 1e300})]
    beyond = kept[2].replace('"step": 3', '"step": 4')
    run.metrics.write_text("\n".join([*kept[:2], odd[0], kept[2], odd[1], beyond, kept[0][:9]]))
    assert [row["step"] for row in run.read_metrics("train")] == [1, 2, 3, 4]
    run.truncate_metrics(3, 3)
    assert run.metrics.read_text().splitlines() == [*kept[:2], odd[0], kept[2], odd[1]]
    assert run.metrics.read_text().endswith("\n")
