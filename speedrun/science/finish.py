"""Tokens to target with the schedule finished: the shortest run whose last loss reaches the target.

The crossing of a longer run half-way is a cheaper figure and another one: rates still have to
decay, and rankings flip while they do. Here every run goes to the end of its own schedule. Lengths
lie on a grid, each a tenth longer than the one before. For each seed the grid is searched for two
neighbours of which the shorter ends above the target and the longer at or below it; between them
the loss is taken for a straight line over the logarithm of the length. Their distance is the cell
that goes into the interval, as for a crossing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from speedrun.science.compare import Entry
from speedrun.science.jobs import Job, RunSet, plan_jobs
from speedrun.science.share import Share

GRID = 1.1  # from one length to the next
FARTHEST = 10  # places that a search moves at a time where it has not seen both sides yet
USUAL_SLOPE = -0.5  # nats for a run e times as long, where nothing is known yet
SHORTEST = 4  # steps
GIVE_UP = 4  # lengths of a recipe that diverges at each of them
# What an entry says of the crossing within its own run, which is no figure here.
NO_CROSSING = dict.fromkeys(
    ("steps_to_target", "tokens_to_target", "cell_steps", "first_validation_tokens",
     "seconds_to_target", "wall_seconds_to_target")
)  # fmt: skip


@dataclass
class Search:
    """Of one recipe and seed, over places on the grid; place 0 is the recipe's own length."""

    own_steps: int
    most_steps: int
    target: float
    guess: int = 0
    both: bool = False  # look at two neighbours at once, where a guess is good
    grid: float = GRID
    runs: dict[int, Entry] = field(default_factory=dict)

    def steps(self, place: int) -> int:
        return max(1, round(self.own_steps * self.grid**place))

    def loss(self, place: int) -> float:
        found = self.runs[place].val_loss
        return math.inf if found is None else found

    def bracket(self) -> tuple[int, int] | None:
        """The nearest places seen so far with the target between their losses."""
        above = [place for place in self.runs if self.loss(place) > self.target]
        below = [place for place in self.runs if self.loss(place) <= self.target]
        pairs = [(a, b) for a in above for b in below if a < b]
        return min(pairs, key=lambda pair: (pair[1] - pair[0], pair)) if pairs else None

    @property
    def done(self) -> tuple[int, int] | None:
        """Neighbours around the target: no other length of the grid lies between them."""
        found = self.bracket()
        if found is None:
            return None
        lengths = {self.steps(place) for place in range(found[0], found[1] + 1)}
        return found if len(lengths) == 2 else None

    @property
    def why_not(self) -> str:
        """In a few words, of a search that has ended without two such neighbours."""
        losses = [self.loss(place) for place in self.runs]
        reached = [self.steps(place) for place in self.runs if self.loss(place) <= self.target]
        if not losses:
            return "may not be run at any length"
        if reached:
            return f"ends below the target with {min(reached)} steps, and with none fewer above it"
        if not any(map(math.isfinite, losses)):
            return f"diverged at each of {len(losses)} lengths"
        return f"ends above the target with {max(map(self.steps, self.runs))} steps"

    def wanted(self) -> list[int]:
        """Places to run next; none: found, given up, or beyond what may be run."""
        diverged = not any(math.isfinite(self.loss(place)) for place in self.runs)
        if self.done or (diverged and len(self.runs) >= GIVE_UP):
            return []
        if not self.runs:
            places = [self.guess, self.guess + 1] if self.both else [self.guess]
        elif pair := self.bracket():
            low, high = pair
            share = (self.loss(low) - self.target) / (self.loss(low) - self.loss(high))
            inside = low + share * (high - low) if math.isfinite(share) else low + 1
            ends = {self.steps(low), self.steps(high)}  # short lengths lie close together
            new = (place for place in range(low + 1, high) if self.steps(place) not in ends)
            places = [min(new, key=lambda place: abs(place - inside))]
        else:
            places = [self._outward()]
        fitting = [place for place in places
                   if SHORTEST <= self.steps(place) <= self.most_steps]  # fmt: skip
        known = {self.steps(place) for place in self.runs}
        return [place for place in fitting if self.steps(place) not in known]

    def _outward(self) -> int:
        """Towards the side that was not seen yet, by the slope between the last two lengths."""
        first, last = min(self.runs), max(self.runs)
        slope = USUAL_SLOPE
        steps = math.log(self.steps(last) / self.steps(first))
        if steps and math.isfinite(self.loss(first)):
            slope = min((self.loss(last) - self.loss(first)) / steps, USUAL_SLOPE / 5)
        reached = [place for place in self.runs if self.loss(place) <= self.target]
        edge = min(reached) if reached else last
        away = (self.target - self.loss(edge)) / slope / math.log(self.grid)
        outward = -1 if reached else 1
        far = min(FARTHEST, abs(round(away))) if math.isfinite(away) else 1
        place = edge + outward * max(1, far)
        while self.steps(place) == self.steps(edge):  # short lengths lie close together
            place += outward
        # The longest or shortest that may still be run, where the move leads beyond.
        while abs(place - edge) > 1 and not SHORTEST <= self.steps(place) <= self.most_steps:
            place -= outward
        return place

    def result(self, batch_tokens: int) -> Entry | None:
        """The entry of the longer neighbour with the crossing between the two; None: not found."""
        if not (found := self.done):
            return None
        low, high = found
        short, long = self.steps(low), self.steps(high)
        share = (self.loss(low) - self.target) / (self.loss(low) - self.loss(high))
        share = share if math.isfinite(share) else 1.0  # the shorter run diverged
        steps = short * (long / short) ** share
        crossing = {
            "steps_to_target": steps, "tokens_to_target": round(steps * batch_tokens),
            "cell_steps": long - short, "first_validation_tokens": long * batch_tokens,
        }  # fmt: skip
        return self.runs[high].model_copy(update=NO_CROSSING | crossing)

    def nearest(self) -> Entry | None:
        """The run with the lowest loss, without a figure."""
        best = min(self.runs, key=self.loss, default=None)
        return None if best is None else self.runs[best].model_copy(update=NO_CROSSING)


def finish(
    runs: RunSet,
    share: Share,
    variants: Mapping[str, tuple[str, Sequence[str]]],
    track: str,
    seeds: int,
    target: float,
    budget: int | None,
    say: Callable[[str], None],
) -> tuple[list[Entry], list[str]]:
    """An entry for every recipe and seed, and notes on those without a figure.

    The first seed finds the place, the others start there. Searches go on side by side, so that no
    core waits for another's decision.
    """
    first: dict[str, Job] = {job.label: job for job in plan_jobs(variants, track, [0])}
    searches = {(label, 0): _search(job, target, budget) for label, job in first.items()}
    run_searches(runs, share, variants, track, searches, say)
    later = {}
    for label, job in first.items():
        found = searches[label, 0].done
        for seed in range(1, seeds):
            later[label, seed] = _search(job, target, budget, found[0] if found else None)
    run_searches(runs, share, variants, track, later, say)
    entries, notes = [], []
    for (label, seed), search in (searches | later).items():
        result = search.result(first[label].config.batch.tokens)
        if result is None:
            notes.append(f"{label}, seed {seed}, has no figure: it {search.why_not}")
        entries.append(result or search.nearest() or Entry(recipe=label, seed=seed))
    return sorted(entries, key=lambda entry: entry.seed), notes


def _search(job: Job, target: float, budget: int | None, guess: int | None = None) -> Search:
    own, most = job.config.steps, budget or 4 * job.config.steps
    longest = math.floor(math.log(most / own) / math.log(GRID))
    start = min(0, longest) if guess is None else guess
    found = Search(own, max(most, SHORTEST), target, start, both=guess is not None)
    while found.steps(found.guess) < SHORTEST:
        found.guess += 1
    return found


def run_searches(
    runs: RunSet,
    share: Share,
    variants: Mapping[str, tuple[str, Sequence[str]]],
    track: str,
    searches: Mapping[tuple[str, int], Search],
    say: Callable[[str], None],
) -> None:
    """To their ends, all side by side."""
    while asked := [(key, place) for key, search in searches.items() for place in search.wanted()]:
        run_places(runs, share, variants, track, searches, asked, say)


def run_places(
    runs: RunSet,
    share: Share,
    variants: Mapping[str, tuple[str, Sequence[str]]],
    track: str,
    searches: Mapping[tuple[str, int], Search],
    asked: Sequence[tuple[tuple[str, int], int]],
    say: Callable[[str], None],
) -> None:
    """Run some places of some searches, which then know of it."""
    jobs = []
    for (label, seed), place in asked:
        recipe, words = variants[label]
        steps = searches[label, seed].steps(place)
        changed = {label: (recipe, (*words, f"train.steps={steps}"))}
        jobs += [share.of(job) for job in plan_jobs(changed, track, [seed])]
    for (key, place), entry in zip(asked, runs.run_all(jobs, say), strict=True):
        searches[key].runs[place] = entry
