"""Short runs one after another on all cores, or one a core at the same time on one thread each?

What counts is runs per hour, each with the start of its process, its validations and its files. A
turn is one run that has all cores to itself and then, or before, as many at once as there are
cores. `gain_of_steps` leaves the starts out: it is what the gain of longer runs comes down to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from speedrun.bench.step import nano_config
from speedrun.bench.timing import Figures, seconds_of
from speedrun.data.find import find_dataset
from speedrun.errors import RunError
from speedrun.limits import cores
from speedrun.science.children import Children
from speedrun.train.run import RunFolder

STEPS = 20
SMALL = ("model.width=128", "model.heads=2", "batch.length=256", "batch.tokens=2048",
         "attention.window_end=256")  # fmt: skip
CASES: Mapping[str, tuple[str, Sequence[str]]] = {
    "best": ("best", ()),
    "record_18": ("record-18", ()),
    "small": ("best", SMALL),
}


def measure_race(
    rounds: int = 3,
    names: Sequence[str] = tuple(CASES),
    overrides: Sequence[str] = (f"train.steps={STEPS}",),
    at_once: int = 0,
) -> Figures:
    """`gain`: runs per hour side by side over those one after another, of the case with least."""
    at_once = at_once or cores()
    figures: Figures = {"cores": cores(), "at_once": at_once}
    for name in names:
        recipe, words = CASES[name]
        figures |= {
            f"{key}_{name}": value
            for key, value in _case(recipe, (*words, *overrides), rounds, at_once).items()
        }
    return figures | {"gain": min(float(figures[f"gain_{name}"]) for name in names)}


def _case(recipe: str, words: Sequence[str], rounds: int, at_once: int) -> dict[str, float]:
    find_dataset(nano_config(recipe, words))  # built before any run asks for it
    seconds: dict[int, list[float]] = {1: [], at_once: []}
    rates: dict[int, list[float]] = {1: [], at_once: []}  # tokens per second of training, in all
    for turn in range(rounds):
        for count in (1, at_once) if turn % 2 else (at_once, 1):
            with tempfile.TemporaryDirectory() as root:
                folders = [Path(root) / str(number) for number in range(count)]
                turn_of = partial(_runs, recipe, (*words, f"machine.jobs={count}"), folders)
                seconds[count].append(seconds_of(turn_of))
                found = [RunFolder(folder).read_summary() for folder in folders]
                rates[count].append(sum(one.tokens_per_second for one in found if one))
    gains = [
        at_once * alone / together
        for alone, together in zip(seconds[1], seconds[at_once], strict=True)
    ]
    return {
        "runs_per_hour_one": 3600 / median(seconds[1]),
        "runs_per_hour_side_by_side": 3600 * at_once / median(seconds[at_once]),
        "gain": median(gains),
        "least_gain": min(gains),
        "most_gain": max(gains),
        "gain_of_steps": median(
            together / alone for alone, together in zip(rates[1], rates[at_once], strict=True)
        ),
    }


def _runs(recipe: str, words: Sequence[str], folders: Sequence[Path]) -> None:
    """Start a run in each folder at the same time and wait for all, as a race does."""
    with Children() as children:
        for number, folder in enumerate(folders):
            own = ["--run", str(folder), "--sample-tokens", "0"]
            children.start(number, ["train", recipe, *words, *own])
        while children.running:
            _, child = children.wait()
            if child.poll() != 0:
                raise RunError(
                    f"a run of the bench failed: {child.last_words()}; mend that and measure again"
                )
