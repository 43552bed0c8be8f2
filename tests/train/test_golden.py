"""Golden losses: the first 20 of every shipped recipe, on a tiny track, as they have always been.

A change that moves them changes what a recipe means. When that is intended, write them anew with

    python -m tests.train.test_golden

and say in the change why they moved. CPUs round differently, hence the tolerance (1.3e-5 is the
most that AVX-512, AVX2, SSE and the kernels switched off were apart); on one machine two runs are
equal bit for bit, which `test_run.py` asserts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from tests.conftest import TINY, make_tiny_dataset
from tests.train.heard import losses, train

GOLDEN = Path(__file__).with_name("golden.json")
TOLERANCE = 1e-4
# Its norm has next to no eps, so while the projections are still zero the scale of the stream that
# the mixing weights set has no effect: their gradient in the second step is 7e-9 of rounding, and
# Adam makes a whole step of its sign.
DECIDED_BY_ROUNDING = {"record-09": 1e-2}
RECIPES = sorted(
    path.stem for path in (Path(__file__).parents[2] / "speedrun/config/recipes").glob("*.toml")
)
# Four layers for the recipes whose halves mirror each other, rows that hold the widest window.
SIZES = (
    "model.layers=4", "batch.length=512", "batch.tokens=512", "validation.every=20",
    "train.steps=20",
)  # fmt: skip


def losses_of(config: Config, folder: Path) -> list[float]:
    train(config, folder)
    return losses(folder)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_losses_are_the_golden_ones(
    recipe: str, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert recipe in golden, f"{recipe} has no golden losses: see the top of this file"
    found = losses_of(tiny(*SIZES, recipe=recipe), tmp_path / "run")
    assert len(found) == 20
    assert found == pytest.approx(golden[recipe], abs=DECIDED_BY_ROUNDING.get(recipe, TOLERANCE))


def test_every_golden_recipe_is_shipped() -> None:
    assert sorted(json.loads(GOLDEN.read_text())) == RECIPES


def write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = make_tiny_dataset(Path(folder))
        words = [*TINY, f"data.dir={dataset}", *SIZES]
        golden = {
            recipe: losses_of(resolve(recipe, "nano", words).config, Path(folder) / recipe)
            for recipe in RECIPES
        }
    rows = (
        f'  "{recipe}": [{", ".join(f"{loss:.5f}" for loss in values)}]'
        for recipe, values in golden.items()
    )
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    write()
    print(f"wrote {GOLDEN}")
