"""Lengths that end at the target: found by few runs, between neighbours, for every seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from speedrun.errors import ConfigError
from speedrun.science.compare import Entry
from speedrun.science.finish import GRID, SHORTEST, Search, _search
from speedrun.science.jobs import Job, RunSet
from speedrun.science.race import machine_of, profile, race
from speedrun.science.results import Race
from speedrun.science.space import Budget
from speedrun.train.run import RunFolder
from speedrun.train.summary import Environment
from tests.conftest import TINY
from tests.report.made import made_config


def entry(loss: float | None, seed: int = 0) -> Entry:
    return Entry(recipe="r", seed=seed, val_loss=loss)


@pytest.mark.parametrize("own", [20, 186, 4000])
@pytest.mark.parametrize("share", [0.06, 0.4, 1.0, 1.9])
@pytest.mark.parametrize("both", [False, True])
def test_a_search_ends_between_two_neighbours(own: int, share: float, both: bool) -> None:
    """A power law, whatever the place of its answer beside the recipe's own length."""
    true = max(2.5 * SHORTEST, own * share)

    def loss(steps: int) -> float:
        return 3.0 + 1.3 * math.pow(steps / true, -0.4)

    search = Search(own, 10 * own, target=4.3, guess=-3 if both else 0, both=both)
    while places := search.wanted():
        for place in places:
            search.runs[place] = entry(loss(search.steps(place)))
    found = search.result(batch_tokens=100)
    assert found is not None
    assert found.steps_to_target == pytest.approx(true, rel=0.02, abs=0.5)
    assert found.tokens_to_target == round(100 * (found.steps_to_target or 0))
    assert found.cell_steps is not None
    assert 1 <= found.cell_steps <= math.ceil(true * (GRID - 1)) + 1
    assert len(search.runs) <= 12


@pytest.mark.parametrize("own", [20, 37, 58, 100])
def test_short_lengths_are_found_between_their_neighbours(own: int) -> None:
    """Where lengths of the grid fall together, a place between two others is none of theirs."""
    for tenth in range(50, 200):
        true = tenth / 10

        def loss(steps: int, true: float = true) -> float:
            return 4.3 - 1.0 * math.log(steps / true)

        search = Search(own, 10 * own, target=4.3)
        while places := search.wanted():
            for place in places:
                search.runs[place] = entry(loss(search.steps(place)))
        found = search.result(1)
        assert found is not None, (own, true, sorted(search.runs))
        assert found.steps_to_target == pytest.approx(true, rel=0.02)


def test_a_budget_below_the_recipes_own_length_is_kept(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drawn(monkeypatch, tmp_path)
    words = [*(word for word in TINY if not word.startswith("train.steps")),
             f"data.dir={tiny_dataset}", "train.target=1.0"]  # fmt: skip
    found = race(recipes=["modern"], track="nano", seeds=2, finished=True, out=tmp_path, budget=50,
                 say=print, overrides=words, jobs_at_once=1)  # fmt: skip
    assert {steps for lengths in drawn.lengths.values() for steps in lengths} <= {46, 50}
    assert [one.tokens_to_target for one in found.entries] == [None, None]
    assert all(one.val_loss for one in found.entries)


def test_a_target_out_of_reach_is_not_found() -> None:
    search = Search(100, 400, target=1.0)
    while places := search.wanted():
        for place in places:
            search.runs[place] = entry(3.0)
    assert search.result(1) is None
    assert 300 < search.steps(max(search.runs)) <= 400
    easy = Search(100, 400, target=9.0)
    while places := easy.wanted():
        for place in places:
            easy.runs[place] = entry(3.0)
    assert easy.result(1) is None
    assert easy.steps(min(easy.runs)) < 2 * SHORTEST


def test_a_run_that_diverged_is_above_the_target() -> None:
    search = Search(100, 1000, target=4.0)
    for _ in range(30):
        for place in search.wanted():
            steps = search.steps(place)
            search.runs[place] = entry(None if steps < 130 else 5.0 - steps / 300)
    found = search.result(1)
    assert found is not None
    assert 290 <= (found.steps_to_target or 0) <= 310


def test_why_there_is_no_figure() -> None:
    def ended(loss: Callable[[int], float | None], most: int = 1000) -> Search:
        search = Search(100, most, target=4.0)
        for _ in range(40):
            for place in search.wanted():
                search.runs[place] = entry(loss(search.steps(place)))
        assert search.result(1) is None
        return search

    always = ended(lambda _: 3.0)
    assert always.why_not == "ends below the target with 4 steps, and with none fewer above it"
    assert ended(lambda _: 5.0, most=200).why_not.startswith("ends above the target with 1")
    lost = ended(lambda _: None)
    assert (lost.why_not, len(lost.runs)) == ("diverged at each of 4 lengths", 4)


def test_recipes_of_a_step_or_two_are_searched_from_the_shortest_on() -> None:
    for own in (1, 2, 3):
        job = cast(Job, SimpleNamespace(config=SimpleNamespace(steps=own)))
        for budget in (None, 4, 40):
            search = _search(job, 4.0, budget)
            for _ in range(40):
                for place in search.wanted():
                    search.runs[place] = entry(3.0 if search.steps(place) > 6 else 5.0)
            steps = [search.steps(place) for place in search.runs]
            assert min(steps) == SHORTEST
            if (budget or 4 * own) < 7:
                assert search.why_not == "ends above the target with 4 steps"
            else:
                found = search.result(1)
                assert found is not None
                assert 6 <= (found.steps_to_target or 0) <= 8


def test_a_budget_too_small_is_refused_before_anything_is_tuned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--budget 3 cannot be used with --finish"):
        race(recipes=["modern"], track="nano", finished=True, budget=3, tuned=Budget(trials=2),
             out=tmp_path / "race", say=print)  # fmt: skip
    assert not (tmp_path / "race").exists()


def test_a_shorter_run_that_reached_the_target_is_not_passed_over() -> None:
    """Where luck has it that the next longer one does not."""
    search = Search(100, 1000, target=4.0, both=True)
    luck = {100: 3.99, 110: 4.01}
    for _ in range(30):
        for place in search.wanted():
            steps = search.steps(place)
            search.runs[place] = entry(luck.get(steps, 4.0 - math.log(steps / 96)))
    found = search.result(1)
    assert found is not None
    assert 90 < (found.steps_to_target or 0) <= 100


class Drawn:
    """Runs that are drawn: a power law of their length, other noise for each seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.lengths: dict[tuple[str, int], list[int]] = {}
        self.jobs: list[Job] = []
        self._root = root
        monkeypatch.setattr(RunSet, "run_until", self.run_until)

    def run_until(
        self, jobs: Sequence[Job], _say: object, _deadline: float | None = None
    ) -> list[Entry | None]:
        return [self._entry(job) for job in jobs]

    def _entry(self, job: Job) -> Entry:
        self.jobs.append(job)
        steps, factor = job.config.steps, 400 if job.label.startswith("modern") else 200
        assert job.config.train.stop == "steps"
        assert job.config.train.target == 0  # no validations to see a crossing that is no figure
        self.lengths.setdefault((job.label, job.seed), []).append(steps)
        noise = 0.01 * np.random.default_rng([job.seed, steps, factor]).standard_normal()
        loss = 3.0 + 1.3 * (steps / factor) ** -0.4 + noise
        name = f"{job.label}-{job.seed}-{steps}"
        RunFolder(self._root / name).create(job.config, {"cpu": "x"})
        return Entry(recipe=job.label, seed=job.seed, run=name, val_loss=loss)


def test_a_finished_race(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drawn(monkeypatch, tmp_path)
    words = [*(word for word in TINY if not word.startswith("train.steps")),
             f"data.dir={tiny_dataset}", "train.target=4.3"]  # fmt: skip
    found = race(recipes=["modern", "record-03"], track="nano", seeds=3, finished=True,
                 out=tmp_path, say=print, overrides=words, jobs_at_once=1)  # fmt: skip
    assert found.finished
    rows = found.statistics()
    assert (rows["modern"]["steps_to_target"].mean or 0) == pytest.approx(400, rel=0.08)
    ratio = rows["record-03"]["tokens_to_target"]
    assert ratio.ratio is not None
    assert ratio.ratio_low is not None
    assert ratio.ratio_high is not None
    assert ratio.ratio_low < 0.5 < ratio.ratio_high
    assert 0.02 < ratio.ratio_high - ratio.ratio_low < 0.3
    assert all(len(lengths) <= 8 for lengths in drawn.lengths.values())
    assert all(len(drawn.lengths["modern", seed]) <= 4 for seed in (1, 2))
    for word, sentence in (
        ("train.steps=5", "sets train.steps"),
        ("train.seed=1", "sets train.seed"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            race(recipes=["modern"], track="nano", finished=True, out=tmp_path, say=print,
                 overrides=[*words, word])  # fmt: skip


def test_a_tuned_race_searches_on_other_seeds_and_rows_within_its_budget(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drawn(monkeypatch, tmp_path)
    words = [*(word for word in TINY if not word.startswith("train.steps")),
             f"data.dir={tiny_dataset}", "train.target=4.3"]  # fmt: skip
    for recipe in ("modern", "record-03"):  # as the runs would
        (tmp_path / "tuning" / recipe).mkdir(parents=True)
    found = race(recipes=["modern", "record-03"], track="nano", seeds=2, finished=True, budget=60,
                 tuned=Budget(trials=3), out=tmp_path, say=print, overrides=words,
                 jobs_at_once=1)  # fmt: skip
    assert found.order == ("modern-tuned", "record-03-tuned")
    searched = [job for job in drawn.jobs if " trial " in job.label]
    raced = [job for job in drawn.jobs if job not in searched]
    assert len(searched) == 6
    assert {job.seed for job in searched} == {1000}
    assert {job.config.validation.rows for job in searched} == {"between"}
    assert {job.config.validation.rows for job in raced} == {"spread"}
    assert {job.seed for job in raced} == {0, 1}
    assert max(job.config.steps for job in drawn.jobs) == 60


def test_seconds_of_other_machines_do_not_count(tmp_path: Path) -> None:
    from speedrun.science.race import _on_one_machine

    entries = []
    for seed, cpu in enumerate(("x", "x", "y")):
        place = {"cpu": cpu, "cores": 2, "threads": 2, "libraries": {"torch": "2"}}
        RunFolder(tmp_path / str(seed)).create(made_config(), place)
        entries.append(Entry(recipe="r", seed=seed, run=str(seed), tokens_to_target=5,
                             seconds_to_target=1.0, wall_seconds_to_target=2.0))  # fmt: skip
    kept, notes = _on_one_machine(entries, tmp_path)
    assert [one.seconds_to_target for one in kept] == [1.0, 1.0, None]
    assert [one.wall_seconds_to_target for one in kept] == [2.0, 2.0, None]
    assert [one.tokens_to_target for one in kept] == [5, 5, 5]
    assert "1 of 3 runs were made on another machine" in notes[0]
    kept, notes = _on_one_machine(entries[:2], tmp_path)
    assert (kept, notes) == (entries[:2], [])
    moved = Environment(cpu="x", earlier=[{"cpu": "y"}], recorded={})
    assert machine_of(moved) != machine_of(Environment(cpu="x", recorded={}))


def test_profiles_over_tracks() -> None:
    def made(track: str, **tokens: int | None) -> Race:
        return Race(track=track, entries=tuple(
            Entry(recipe=recipe, seed=0, tokens_to_target=count)
            for recipe, count in tokens.items()
        ))  # fmt: skip

    found = profile([made("a", x=100, y=200, z=None), made("b", x=300, y=100, z=100)])
    assert found == {
        "x": [(1.0, 0.5), (3.0, 1.0)], "y": [(1.0, 0.5), (2.0, 1.0)], "z": [(1.0, 0.5)]
    }  # fmt: skip
