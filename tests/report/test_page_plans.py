"""What a page says of GPUs that are not here."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import pytest

from speedrun.config.resolve import resolve
from speedrun.plan.chips import Node
from speedrun.plan.predict import plan
from speedrun.report.page import page_data
from speedrun.report.page.plans import KINDS, MACHINES, kind_of
from speedrun.train.estimate import vocab_size_of
from tests.report.made import made_config, made_run


def test_one_configuration_is_planned_on_several_machines(tmp_path: Path) -> None:
    config = made_config("batch.tokens=65536")
    found = page_data([made_run(tmp_path / "a", config)])["plans"]
    assert [one["machine"] for one in found] == [Node.parse(name).name for name in MACHINES]
    for one, name in zip(found, MACHINES, strict=True):
        expected = plan(config, vocab_size_of(config), Node.parse(name))
        assert one["step"] == pytest.approx(expected.step)
        assert one["run"] == pytest.approx(config.steps * expected.step)
        assert (one["memory"], one["fits"]) == (expected.memory_bytes, expected.fits)
        assert sum(share for _, share in one["parts"]) == pytest.approx(1)
        assert {kind for kind, _ in one["parts"]} <= set(KINDS)
    assert [one["group"] for one in found] == [0] * len(MACHINES)


def test_several_are_planned_on_one_machine(tmp_path: Path) -> None:
    configs = [made_config(recipe="one"), made_config("train.steps=41", recipe="two")]
    runs = [made_run(tmp_path / config.recipe, config) for config in configs]
    found = page_data(runs)["plans"]
    assert [(one["group"], one["machine"]) for one in found] == [(0, "8 x H100"), (1, "8 x H100")]
    # Four rows are not for eight GPUs: then all are planned on one.
    small = made_config("batch.length=2048", recipe="three")
    runs.append(made_run(tmp_path / "three", small))
    found = page_data(runs)["plans"]
    assert [(one["group"], one["machine"]) for one in found] == [(n, "1 x H100") for n in range(3)]


def test_what_cannot_be_planned_is_left_out(tmp_path: Path) -> None:
    """A batch of 8 rows is not for 16 GPUs, a text may be elsewhere, and no code is executed."""
    three = made_config("batch.length=256", "batch.tokens=768")  # rows, for one GPU and no more
    found = page_data([made_run(tmp_path / "three", three)])["plans"]
    assert [one["machine"] for one in found] == ["1 x H100", "1 x RTX4090"]
    gone = made_config(f"data.dir={tmp_path / 'gone'}")
    assert page_data([made_run(tmp_path / "gone-run", gone)])["plans"] == []
    public = made_config(f"data.dir={tmp_path / 'fineweb10B'}", "batch.tokens=65536")
    found = page_data([made_run(tmp_path / "public", public)])["plans"]
    assert found[0]["step"] == plan(public, 50_257, Node.parse("8xH100")).step
    (tmp_path / "mine.py").write_text(
        "import os\nos.environ['SPEEDRUN_EXECUTED'] = '1'\n"
        "def mlp(inner, layer):\n    return inner\n"
    )
    own = made_config(f"custom.mlp.use={tmp_path / 'mine.py'}:mlp")
    assert page_data([made_run(tmp_path / "own", own)])["plans"] == []
    assert "SPEEDRUN_EXECUTED" not in os.environ


@pytest.mark.parametrize("recipe", ["baseline", "record-03", "record-18", "best"])
def test_every_part_is_drawn_as_something(recipe: str) -> None:
    config = resolve(recipe, "small").config
    parts = plan(config, 50_257, Node.parse("8xH100")).parts
    kinds = {part: kind_of(part) for part in parts}
    assert set(chain(kinds.values())) == set(KINDS)
    assert kinds["products of the head"] == "matrix products"
    assert kinds["loss"] == "loss"
