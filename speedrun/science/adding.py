"""Seeds one at a time, where they are still needed, until what is compared is decided.

Every variant is compared with the first, seed by seed. After each seed the bets of `sequential.py`
say what is decided; those variants get no further seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from speedrun.science.bets import fewest_pairs
from speedrun.science.compare import Entry
from speedrun.science.jobs import RunSet, plan_jobs
from speedrun.science.results import Effect
from speedrun.science.sequential import Decision, decide, needs_more
from speedrun.science.share import Share
from speedrun.science.stats import EPSILON
from speedrun.science.until import Until

Runs = dict[str, dict[int, Entry]]  # by label and seed


def last_loss(entry: Entry) -> float:
    return math.nan if entry.val_loss is None else entry.val_loss


def log_tokens(entry: Entry) -> float:
    """Differences of it are ratios of tokens to target."""
    return math.log(entry.tokens_to_target) if entry.tokens_to_target else math.nan


@dataclass(frozen=True)
class Figure:
    """What of a run is judged, half the width of what it is known to, and a word for it."""

    of: Callable[[Entry], float]
    half_cell: Callable[[Entry], float]
    word: str


def _half_resolution(entry: Entry) -> float:
    """Losses are computed in 32 bits."""
    return EPSILON / 2 * abs(last_loss(entry))


def _half_cell(entry: Entry) -> float:
    """Half the cell between two validations, as a part of the logarithm."""
    if not entry.cell_steps or not entry.steps_to_target:
        return 0.0
    return math.atanh(min(0.99, entry.cell_steps / entry.steps_to_target / 2))


LOSS = Figure(last_loss, _half_resolution, "a loss")
TOKENS = Figure(log_tokens, _half_cell, "a crossing of the target")


@dataclass(frozen=True)
class Adding:
    made: RunSet
    share: Share
    variants: Mapping[str, tuple[str, Sequence[str]]]  # by label: recipe and overrides
    track: str
    figure: Figure  # whose differences are judged
    alpha: float
    margin: float | None  # differences within it are equal

    @property
    def first(self) -> str:
        return next(iter(self.variants))

    def run(
        self, until: Until, say: Callable[[str], None]
    ) -> tuple[dict[str, Decision], Runs, str]:
        """Decisions, runs, and what ended it: decided, stuck, seeds or time."""
        runs: Runs = {label: {} for label in self.variants}
        compared = len(self.variants) - 1
        least = fewest_pairs(self.alpha, compared, equal=self.margin is not None)
        if until.seeds is not None and until.seeds < least:
            say(f"{until.seeds} seeds will leave all undecided: with {compared} to decide, one "
                f"takes {least} at least")  # fmt: skip
        for seed in count():
            decisions = self._decide(runs)
            wanted = needs_more(decisions)
            if seed:
                whole = all(seed - 1 in runs[label] for label in wanted)
                say(self._so_far(decisions, seed if whole else seed - 1))
            if not wanted:
                stuck = any(found.verdict == "undecided" for found in decisions.values())
                return decisions, runs, "stuck" if stuck else "decided"
            if seed == until.seeds or until.over:
                return decisions, runs, "seeds" if seed == until.seeds else "time"
            chosen = {label: self.variants[label] for label in (self.first, *wanted)}
            jobs = [self.share.of(job) for job in plan_jobs(chosen, self.track, [seed])]
            for entry in self.made.run_until(jobs, say, until.deadline):
                if entry is not None:
                    runs[entry.recipe][seed] = entry
        raise AssertionError("seeds do not end")

    def _decide(self, runs: Runs) -> dict[str, Decision]:
        """Of every variant, from the seeds that it and the first both have, in their order."""
        control, figure = runs[self.first], self.figure
        family, cells = {}, {}
        for label in self.variants:
            if label != self.first:
                seeds = sorted(runs[label].keys() & control.keys())
                pairs = [(runs[label][seed], control[seed]) for seed in seeds]
                family[label] = [figure.of(one) - figure.of(other) for one, other in pairs]
                cells[label] = [figure.half_cell(one) + figure.half_cell(other)
                                for one, other in pairs]  # fmt: skip
        return decide(family, self.alpha, self.margin, cells=cells, figure=figure.word)

    def _so_far(self, decisions: Mapping[str, Decision], seeds: int) -> str:
        verdicts: dict[str, list[str]] = {}
        for label, found in decisions.items():
            verdicts.setdefault(found.verdict, []).append(self._short(label))
        told = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in verdicts.items())
        return f"after {seeds} seed{'s' if seeds > 1 else ''}: {told}"

    def _short(self, label: str) -> str:
        return label.removeprefix(f"{self.first} ")

    def effects(self, decisions: Mapping[str, Decision], metric: str) -> tuple[Effect, ...]:
        return tuple(
            Effect(
                switch=self._short(label), metric=metric, n=found.n, of=found.n,
                effect=found.mean, low=found.low, high=found.high, p=found.p,
                p_holm=found.p_adjusted, p_equal=found.p_equal_adjusted,
                decided=found.verdict != "undecided", verdict=found.verdict, note=found.note,
            )
            for label, found in decisions.items()
        )  # fmt: skip
