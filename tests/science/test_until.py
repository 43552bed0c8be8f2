"""Ablations that add seeds: only where they are needed, no longer than asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from speedrun.errors import ConfigError
from speedrun.science import ablate as module
from speedrun.science.ablate import ablate
from speedrun.science.compare import Entry
from speedrun.science.jobs import Job, RunSet
from speedrun.science.results import Ablation, read_result
from speedrun.science.until import Until
from tests.conftest import TINY

EFFECTS = {"model.softcap=9.0": 0.3, "model.softcap=8.0": 0.0, "model.softcap=7.0": -0.2}


def test_the_words_of_until() -> None:
    assert Until.parse([]) is None
    assert Until.parse(["decided"]) == Until("decided")
    assert Until.parse(["2h"]) == Until("2h", seconds=7200.0)
    assert Until.parse(["12 seeds"]) == Until("12 seeds", seeds=12)
    assert Until.parse(["12"]) == Until("12", seeds=12)
    both = Until.parse(["decided", "30m", "4 seeds", "9 seeds"])
    assert both == Until("decided or 30m or 4 seeds or 9 seeds", 1800.0, 4)
    for bad, why in (("soon", "write decided"), ("1 seed", "at least 2"), ("0s", "a time of 0")):
        with pytest.raises(ConfigError, match=why):
            Until.parse([bad])


class Made:
    """Runs that are drawn instead of trained; remembers which were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, noise: float = 0.004, pause: float = 0.0):
        self.asked: list[tuple[str, int]] = []
        self._noise, self._pause = noise, pause
        monkeypatch.setattr(RunSet, "run_until", self.run_until)

    def run_until(
        self, jobs: Sequence[Job], _say: object, deadline: float | None = None
    ) -> list[Entry | None]:
        return [self._entry(job, deadline) for job in jobs]

    def _entry(self, job: Job, deadline: float | None) -> Entry | None:
        if deadline is not None and time.monotonic() >= deadline:
            return None
        time.sleep(self._pause)
        label = job.label.removeprefix("modern").strip()
        self.asked.append((label, job.seed))
        draw = np.random.default_rng([job.seed, *label.encode()])
        loss = 3.0 + EFFECTS.get(label, 0.0) + self._noise * draw.standard_normal()
        return Entry(recipe=job.label, seed=job.seed, run=f"{label}-{job.seed}", val_loss=loss)


def go(tiny_dataset: Path, out: Path, until: str, **how: float) -> Ablation:
    words = [*TINY, f"data.dir={tiny_dataset}"]
    return ablate(recipe="modern", track="nano", until=Until.parse([until]), out=out, say=print,
                  switches=list(EFFECTS), overrides=words, jobs_at_once=1, **how)  # type: ignore[arg-type]  # fmt: skip


def test_seeds_are_added_to_what_is_undecided(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)
    found = go(tiny_dataset, tmp_path, "decided")
    verdicts = {effect.switch: effect.verdict for effect in found.effects}
    assert verdicts == dict(zip(EFFECTS, ("helps", "equal", "hurts"), strict=True))
    seeds = {label: [seed for name, seed in made.asked if name == label] for label in EFFECTS}
    for effect in found.effects:
        assert effect.n == len(seeds[effect.switch])
        assert seeds[effect.switch] == list(range(effect.n or 0))
        assert effect.low is not None
        assert effect.high is not None
        assert effect.low < EFFECTS[effect.switch] < effect.high
    helps, equal, hurts = (effect.n or 0 for effect in found.effects)
    assert helps < equal > hurts
    assert [seed for name, seed in made.asked if not name] == list(range(equal))
    assert (found.stopped, found.until, found.seeds) == ("decided", "decided", equal)
    assert read_result(tmp_path / "ablation.json") == found


def test_a_number_of_seeds_and_a_time_are_limits(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch, noise=5.0)
    found = go(tiny_dataset, tmp_path, "3 seeds")
    assert (found.stopped, found.seeds, len(made.asked)) == ("seeds", 3, 12)
    assert {effect.verdict for effect in found.effects} == {"undecided"}
    made = Made(monkeypatch, noise=5.0, pause=0.02)
    begun = time.monotonic()
    found = go(tiny_dataset, tmp_path, "1s")
    assert found.stopped == "time"
    assert 1.0 <= time.monotonic() - begun < 20
    assert 0.5 < (found.seconds or 0) < 20


def test_a_diverged_run_settles_nothing_and_ends(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)
    monkeypatch.setitem(EFFECTS, "model.softcap=8.0", float("nan"))
    found = go(tiny_dataset, tmp_path, "decided")
    lost = found.effects[1]
    assert (lost.verdict, lost.effect, lost.n) == ("undecided", None, 1)
    assert "without a loss" in lost.note
    assert found.stopped == "decided"
    assert len(made.asked) < 40


def test_margins_that_cannot_be_are_refused(tiny_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a loss in nats"):
        go(tiny_dataset, tmp_path, "decided", margin=0.0)
    assert module.MARGIN == 0.01
