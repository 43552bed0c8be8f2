"""Ablations that add seeds: only where they are needed, no longer than asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from speedrun.commands.race import print_ablation, print_race
from speedrun.errors import ConfigError
from speedrun.science import ablate as module
from speedrun.science import children
from speedrun.science.ablate import ablate
from speedrun.science.compare import Entry
from speedrun.science.jobs import Job, RunSet
from speedrun.science.race import race
from speedrun.science.results import Ablation, Race, read_result
from speedrun.science.sequential import COARSE
from speedrun.science.until import Until
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.train.children import QuickChild

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
        # No validations to see a crossing that nobody asks for.
        assert (job.config.train.stop, job.config.train.target) == ("steps", 0)
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
    made = Made(monkeypatch, noise=0.008)
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
    own = found.losses["modern"]
    for effect in found.effects:
        switched = found.losses[effect.switch].items()
        gaps = [(loss or 0) - (own[seed] or 0) for seed, loss in switched]
        assert effect.effect == pytest.approx(sum(gaps) / len(gaps))
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
    assert found.stopped == "stuck"
    assert len(made.asked) < 40


def test_a_real_run_that_diverges_is_no_failure(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(children, "Child", QuickChild)
    words = [*TINY, "train.steps=40", f"data.dir={tiny_dataset}"]
    found = ablate(recipe="modern", track="nano", until=Until.parse(["2 seeds"]), out=tmp_path,
                   say=print, switches=["optimizer.hidden.lr=1e37"], overrides=words)  # fmt: skip
    (lost,) = found.effects
    assert (lost.verdict, lost.effect) == ("undecided", None)
    assert lost.note == "1 of 1 pairs have a run without a loss"
    assert found.stopped == "stuck"
    print_ablation(found)
    assert "no further seed would settle: optimizer.hidden.lr=1e37" in capsys.readouterr().out
    again = race(recipes=["modern"], track="nano", seeds=1, out=tmp_path / "race", say=print,
                 overrides=[*words, "optimizer.hidden.lr=1e37", "train.target=1.0"])  # fmt: skip
    print_race(again)
    assert "reached by 0 of 1" in capsys.readouterr().out


def raced(
    monkeypatch: pytest.MonkeyPatch, tiny_dataset: Path, out: Path, until: Sequence[str],
    steps: Mapping[str, float], cell: int, margin: float | None = None,
) -> Race:  # fmt: skip
    """Two recipes whose runs cross the target at such steps, in such cells."""

    def run_until(
        _: object, jobs: Sequence[Job], say: object, deadline: float | None = None
    ) -> list[Entry | None]:
        assert deadline is None or say
        entries: list[Entry | None] = []
        for job in jobs:
            noise = 0.001 * np.random.default_rng([job.seed, len(job.label)]).standard_normal()
            at = steps[job.label] * math.exp(noise)
            RunFolder(out / f"{job.label}-{job.seed}").create(job.config, {"cpu": "x"})
            entries.append(Entry(
                recipe=job.label, seed=job.seed, run=f"{job.label}-{job.seed}",
                steps_to_target=at, tokens_to_target=round(256 * at), cell_steps=cell,
            ))  # fmt: skip
        return [None] * len(jobs) if 0 in steps.values() else entries

    monkeypatch.setattr(RunSet, "run_until", run_until)
    words = [*TINY, f"data.dir={tiny_dataset}", "train.target=1.0"]
    return race(recipes=[*steps], track="nano", until=Until.parse(until), out=out, say=print,
                overrides=words, jobs_at_once=1, margin=margin)  # fmt: skip


def test_a_watched_race_knows_the_width_of_its_cells(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The same crossings, 4% apart, in cells of 1, 12 and 100 steps."""
    steps = {"modern": 237.0, "record-03": 246.5}
    go_on = partial(raced, monkeypatch, tiny_dataset, steps=steps, until=["decided"])
    fine = go_on(tmp_path / "fine", cell=1)
    assert (fine.stopped, fine.effects[0].verdict) == ("decided", "helps")
    low, high = fine.effects[0].low, fine.effects[0].high
    assert low is not None
    assert high is not None
    assert 2 * 1 / 246.5 < high - low < 0.02  # two cells of a step
    middle = go_on(tmp_path / "middle", cell=2, margin=0.08)
    assert middle.effects[0].verdict == "helps"
    coarse = go_on(tmp_path / "coarse", cell=100)
    assert (coarse.stopped, coarse.effects[0].verdict) == ("stuck", "undecided")
    print_race(coarse)
    shown = capsys.readouterr().out
    assert COARSE in shown
    assert "no further seed would settle: record-03" in shown


def test_equal_recipes_end_a_race(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    steps = {"modern": 237.0, "record-03": 237.2}
    found = raced(monkeypatch, tiny_dataset, tmp_path, ["decided"], steps, cell=2)
    assert (found.stopped, found.effects[0].verdict, found.margin) == ("decided", "equal", 0.05)
    assert found.effects[0].n == 6
    print_race(found)
    assert "equal within 5%" in capsys.readouterr().out


def test_a_race_that_runs_out_of_time_before_it_has_begun(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    steps = {"modern": 237.0, "record-03": 0.0}
    found = raced(monkeypatch, tiny_dataset, tmp_path, ["0.01s"], steps, cell=2)
    assert found.stopped == "time"
    print_race(found)
    assert "out of time, undecided: record-03; the same command goes on" in capsys.readouterr().out


def test_a_time_is_shared_by_tracks_and_begins_with_the_seeds() -> None:
    until = Until.parse(["2h", "12 seeds"])
    assert until is not None
    half = until.each_of(2)
    assert (half.seconds, half.seeds, half.text) == (3600.0, 12, until.text)
    assert Until().each_of(3) == Until()
    assert half.from_now().begun >= half.begun


def test_margins_that_cannot_be_are_refused(tiny_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a loss in nats"):
        go(tiny_dataset, tmp_path, "decided", margin=0.0)
    for margin, until, why in ((0.1, None, "is for --until"), (1.5, Until(), "a share of tokens")):
        with pytest.raises(ConfigError, match=why):
            race(recipes=["modern"], track="nano", until=until, margin=margin, out=tmp_path,
                 say=print)  # fmt: skip
    assert module.MARGIN == 0.01
