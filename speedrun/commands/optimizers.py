"""docs/OPTIMIZERS.md, made of the files of the ladder alone: `speedrun ladder --write`.

Every number of ours is computed from the losses in these files. What others found is typed in below
as they published it, with the source.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from speedrun.commands.rungs import (
    beaten,
    crossing_text,
    memory_text,
    own_spread,
    ratio_text,
    rule_text,
    seconds_text,
    state_text,
)
from speedrun.config.files import optimizers
from speedrun.science.compare import shares_within
from speedrun.science.rungs import Ladder, Result, Verdicts
from speedrun.science.spread import Spread
from speedrun.science.tune import FURTHER_SEEDS, MOMENTA, RATES
from speedrun.terminal.console import printable

WIDTH = 98
TRACKS = ("optimizer", "optimizer-prose")
FACTORS = (1.05, 1.1, 1.2, 1.5, 2.0)  # of the profile's table; below them all is chance
# Steps to a loss of 3.28 with 0.1 billion parameters on the public optimizer track of the NanoGPT
# speedrun, by what our entries are nearest to; its Adam is called undertuned there.
ADAM = "adamw"
# The standard deviation between searches, simulated by tests/integration/test_tuning_luck.py.
LUCK = "1 to 2% of its steps"
PUBLIC = {
    ADAM: ("Adam", 5625),
    "shampoo": ("Shampoo, power -1/4", 4100),
    "muon": ("Muon, tuned", 3250),
    "normuon": ("NorMuon", 3250),
    "kron": ("PSGD Kron on a sphere", 3375),
    "soap": ("SOAP on a sphere", 3040),
    "soap-muon": ("SOAP-Muon, row floor, cautious decay", 2690),
}

ABOUT = """\
Which optimizer needs the fewest steps? One small GPT, one batch and one validation for all; free
are the algorithm, its numbers, the schedule and the initial weights. The result is a number of
steps with the schedule finished, by the rule of the public optimizer track with a spread that was
measured here. {tuned} Everything on this page but what others found is printed by `speedrun ladder
--write` from the losses of all runs.

These are models of half a million parameters trained for a minute. They say what an optimizer
does to a small, young model, not what it will do to a large one: the gain of the best over AdamW
is known to shrink with size.
"""
TABLE = """\
**steps**: the shortest runs that end below the target by the rule. **of {rival}'s**: where its
losses cross the target, as a share of {rival}'s [95% interval, of this ratio alone].
**fewer than**: rows that are decided to need more steps, corrected for the number of pairs; what is
not named is not decided, which does not mean equal. All of it holds for the tuned values: another
search of the same budget would have found others, and a row with them moves by {luck}.
**seconds**: of a run of so many steps on {first}, alone on the machine. **state**: what all
optimizers of a run keep beside the weights; **memory**: the most that the process had.
**at 0.1B**: the steps of what is nearest to it on the public optimizer track, over those of Adam
there.
"""
HOW = """\
**Steps.** A length passes if (target - mean) x sqrt(n) >= 3.09 sigma over its n seeds, each run to
the end of its own schedule; the result is the shortest length of the grid (each {grid:.0%} longer)
that passes while the next shorter one does not. All seeds of an entry are run at the same lengths,
and each to its end. Which lengths are run follows from the losses of those before; in simulations
that moves a crossing by less than 0.1%. Sigma is the standard deviation of a final loss between
seeds, as the track states it{sigma}. An entry that is noisier than that is judged too kindly by it.

**Crossing.** For each seed, where a straight line through its final losses over the logarithm of
the steps meets the target; the slope is common to the seeds of an entry. The mean over seeds with
its 95% interval, and the ratio to `{rival}`, seed by seed (Fieller).

**Decided pairs.** Differences of the logarithm of the crossing, seed by seed; their spread is
pooled over the entries of a text, or that of the pair where it is larger; p-values are corrected
over all pairs of that text (Holm) and decided at 0.05. So a pair may be decided beside few rows and
open beside many; steps and crossings are the same alone and in company.

**Tuning.** {tuning} Seeds and validation rows are others than those that rows are judged by, the
length is the track's own. All other numbers are the recipe's, as its authors or the public track
have them. Only the hidden matrices go by the entry's optimizer; table, head and scalars go by AdamW
in all, the head with a rate of the entry's own.

**Seconds** are the training time of runs of the stated length, one at a time on the whole
machine, taking turns. **State** is counted as a checkpoint holds it.
"""
OTHERS = """\
Wen, Hall, Ma and Liang (arXiv 2509.02046) tuned eleven optimizers alike, from 0.1 to 1.2 billion
parameters and 1 to 8 times Chinchilla's tokens: the best matrix optimizers (Muon, SOAP, Kron)
need about 1/1.4 = 0.71 of AdamW's steps at 0.1 billion and 1/1.1 = 0.91 at 1.2 billion; tuning
the peak rate alone makes the usual AdamW baseline up to twice as fast. The public optimizer track
(0.1 billion parameters, FineWeb, a batch of 524,288 tokens) counts steps to a loss of 3.28; what
stands there is nearest to our entries as follows. Its Adam was one run, called undertuned, so the
ratios are those to a weak rival. Zhao, Morwani, Brandfonbrener, Vyas and Kakade (arXiv 2407.07972)
found Adam, Adafactor and Lion to end alike once tuned, from 0.15 to 1.2 billion parameters.
"""
AGAIN = """\
A row again, alone and with other seeds, and on one text only; it takes about a quarter of an hour a
text on two cores, and a command that was killed goes on:

```
speedrun ladder muon adamw --first-seed 100 --out races/other-seeds
speedrun ladder soap --first-seed 200 --track optimizer --out races/soap
```

Your own, from a file beside a recipe (an example is in [own-optimizer.md](own-optimizer.md)),
beside those that matter. It gets as many trials as they had, whose rates were found before:

```
speedrun ladder mine.toml muon soap adamw --track optimizer --out races/mine
```

The whole table, with the packages that some rows take (`pip install 'speedrun[optimizers]'`),
takes a night on two cores; `--retune` searches all rates again. The spread and the seconds are
measured apart, the seconds with nothing else on the machine, and the last command writes this
page:

```
speedrun ladder
speedrun ladder adamw muon lion --spread 24
speedrun ladder --clock 3
speedrun ladder --out docs/results --write docs/OPTIMIZERS.md
```

A recipe that changes anything but what is free is refused with a sentence that names it.
`speedrun tracks show optimizer` shows the track and what it fixes. A text or a length of your own
is a track in a file that `extends = "optimizer"` and sets `train.target`; beside that it states
`sigma`, as `speedrun ladder adamw muon --spread 24 --track yours.toml` has measured it.
"""


def document(tables: Sequence[Ladder], spreads: Sequence[Spread], picture: Path | None) -> str:
    """The page of these tables, each of a text, and of the spreads that their rules go by."""
    verdicts = [Verdicts(table) for table in tables]
    rival = verdicts[0].rival
    about = _reflowed(TABLE.format(rival=rival, first=tables[0].track, luck=LUCK))
    how = HOW.format(
        grid=tables[0].grid - 1, rival=rival, sigma=_measured(spreads), tuning=_searched(tables[0])
    )
    parts = ["# Optimizers, raced", _reflowed(ABOUT.format(tuned=_tuned(tables)))]
    parts += [_table(verdicts), *_missing(tables), about]
    parts += [_rule(found) for found in verdicts]
    parts += ["## Near the best everywhere", *_profile(verdicts, picture)]
    parts += ["## Crossings", *(part for found in verdicts for part in _crossings(found))]
    parts += ["## What the entries are", *_entries(tables)]
    parts += ["## What others found", OTHERS.rstrip(), _others(verdicts)]
    parts += ["## How it is measured", _reflowed(how)]
    parts += ["## Again, and yours", AGAIN.rstrip(), "## Made with", *map(_made, tables)]
    return "\n\n".join(parts) + "\n"


def _tuned(tables: Sequence[Ladder]) -> str:
    """How the entries came to their values."""
    budgets = {rung.tuned.budget for rung in tables[0].rungs if rung.tuned}
    if not budgets:
        return "Entries have the values that their recipes state; nothing was tuned here."
    held_out = [table.track for table in tables if not table.tuned_here]
    rest = f"; {' and '.join(held_out)} is held out" if held_out else ""
    on = next((rung.tuned.track for rung in tables[0].rungs if rung.tuned), "")
    finalists = max(rung.tuned.finalists for rung in tables[0].rungs if rung.tuned)
    again = f", the best {finalists} run with {FURTHER_SEEDS} further seeds" if finalists else ""
    return f"Each entry was tuned in {' or '.join(sorted(budgets))}{again}, on {on}{rest}."


def _searched(table: Ladder) -> str:
    keys = {
        one.partition("=")[0].removeprefix("optimizer.")
        for rung in table.rungs if rung.tuned for one in rung.tuned.over
    }  # fmt: skip
    if not keys:
        return "None."
    rates, head = RATES["hidden"], RATES["head"]
    low, high = MOMENTA
    return (
        f"The rate of the hidden matrices from 1/{rates} to {rates} times a first guess, "
        f"the head's from 1/{head} to {head} times, and the momentum, or first beta, from {low:g} "
        f"to {high:g}, where its recipe states one."
    )


def _missing(tables: Sequence[Ladder]) -> list[str]:
    """Which rows of the whole table are not here, where some of it is."""
    made = {table.track: {rung.recipe for rung in table.rungs} for table in tables}
    if not made.keys() & {*TRACKS}:
        return []
    lacking = {track: [one for one in optimizers() if one not in made.get(track, ())]
               for track in TRACKS}  # fmt: skip
    said = [
        f"{', '.join(f'`{one}`' for one in names) if track in made else 'every entry'} on `{track}`"
        for track, names in lacking.items() if names
    ]  # fmt: skip
    if not said:
        return []
    return [_wrapped(f"Of the whole table these rows are not made yet: {'; '.join(said)}.")]


def numbers_of(verdicts: Sequence[Verdicts]) -> dict[str, int]:
    """The rows of a page by name, from 1 on: in the order of the first text."""
    names = dict.fromkeys(name for found in verdicts for name in found.results)
    return {name: number for number, name in enumerate(names, 1)}


def _table(verdicts: Sequence[Verdicts]) -> str:
    numbers, rows = numbers_of(verdicts), []
    first = verdicts[0]
    for name, number in numbers.items():
        cells = [str(number), f"`{name}`"]
        for found in verdicts:
            result = found.results.get(name)
            cells += [
                _steps(result), ratio_text(result.crossing) if result else "-",
                beaten(result, numbers) if result else "",
            ]  # fmt: skip
        rung, result = first.ladder.rung(name), first.results.get(name)
        cells += ["-"] * 3 if rung is None or result is None else [
            seconds_text(rung, result), state_text(rung), memory_text(rung)
        ]  # fmt: skip
        theirs = PUBLIC.get(name)
        rows.append((*cells, f"{theirs[1] / PUBLIC[ADAM][1]:.2f}" if theirs else "-"))
    texts = [
        (f"{found.ladder.track}: steps", f"of {found.rival}'s", "fewer than") for found in verdicts
    ]
    head = ("", "entry", *(one for text in texts for one in text), "seconds", "state", "memory",
            "at 0.1B")  # fmt: skip
    return _markdown(head, rows)


def _steps(result: Result | None) -> str:
    if result is None:
        return "-"
    why = f" ({result.why_not})" if result.why_not else ""
    return f"**{result.steps:,}**{why}" if result.steps else result.why_not


def _rule(found: Verdicts) -> str:
    table = found.ladder
    decided = sum(pair.fewer is not None for pair in found.pairs)
    return _wrapped(
        f"`{table.track}`: a target of {table.target}, seeds {table.seeds[0]} to "
        f"{table.seeds[-1]}; the rule is {rule_text(table)}. Of {len(found.pairs)} pairs {decided} "
        "are decided."
    )


def _measured(spreads: Sequence[Spread]) -> str:
    """Where sigma comes from, if that is there."""
    found = [
        f"{sum(map(len, one.losses.values()))} runs of {', '.join(one.losses)} on {one.track} "
        f"({one.sigma.value:.4f} with {one.sigma.df} degrees of freedom)"
        for one in sorted(spreads, key=lambda one: one.track)
        if one.sigma
    ]
    if not found:
        return ""
    return f": it was measured once, in {' and '.join(found)}, each with a seed of its own"


def _crossings(found: Verdicts) -> list[str]:
    rows = []
    for name, result in found.results.items():
        rung = found.ladder.rung(name)
        assert rung is not None
        rows.append((f"`{name}`", crossing_text(result.crossing), own_spread(found, name),
                     str(sum(map(len, rung.losses.values()))),
                     seconds_text(rung, result)))  # fmt: skip
    spread = f"{found.spread.value:.4f}" if found.spread else "unknown"
    said = (
        f"On `{found.ladder.track}`: the steps at which the seeds cross the target, the standard "
        f"deviation between the seeds of a length (over all rows {spread}, where the track states "
        f"{found.ladder.sigma:g}), the number of runs, and the seconds of one of the stated length."
    )
    head = ("entry", "crossing [95%]", "spread", "runs", "seconds")
    return [_wrapped(said), _markdown(head, rows)]


def cases(verdicts: Sequence[Verdicts]) -> list[tuple[str, dict[str, float]]]:
    """Of every text and seed: the text, and the steps of each entry that has a figure."""
    return [
        (found.ladder.track,
         {name: steps for name in found.results
          if (steps := found.crossings[name][at].steps_to_target)})
        for found in verdicts
        for at in range(len(found.ladder.seeds))
    ]  # fmt: skip


def profile(verdicts: Sequence[Verdicts]) -> dict[str, list[tuple[float, float]]]:
    """By entry, the best first: points of a factor and the share of cases within it of the best."""
    steps = [by_name for _, by_name in cases(verdicts)]
    shares = shares_within([*numbers_of(verdicts)], steps)
    return dict(sorted(shares.items(), key=lambda item: [-len(item[1]), _mean_factor(item[1])]))


def _mean_factor(points: Sequence[tuple[float, float]]) -> float:
    return fmean(factor for factor, _ in points) if points else 0.0


def _profile(verdicts: Sequence[Verdicts], picture: Path | None) -> list[str]:
    texts = ", ".join(found.ladder.track for found in verdicts)
    said = ("The share of cases, each a text and a seed, in which an entry's crossing is at most "
            f"so many times that of the best of the case; texts: {texts}. Seeds of one text are "
            "alike, so these are fewer cases than they seem.")  # fmt: skip
    rows = [
        (f"`{name}`", *(
            f"{max((share for factor, share in points if factor <= most + 5e-4), default=0.0):.1f}"
            for most in FACTORS
        ))
        for name, points in profile(verdicts).items()
    ]  # fmt: skip
    shown = [f"![For each optimizer: in which share of the cases it is near the best]({picture})"]
    head = ("entry", *(f"x {factor:g}" for factor in FACTORS))
    return [_wrapped(said), *(shown if picture else []), _markdown(head, rows)]


def _entries(tables: Sequence[Ladder]) -> list[str]:
    said = ("Rates as the runs had them, and the loss in tuning before and after. A rate at the "
            "end of its range is marked *: a wider search might find a better one.")  # fmt: skip
    rows = []
    for rung in tables[0].rungs:
        tuned = rung.tuned
        values = "-" if tuned is None else ", ".join(
            f"{key.removeprefix('optimizer.')} {value:.4g}{'*' if key in tuned.edges else ''}"
            for key, value in tuned.values.items()
        )  # fmt: skip
        over = "-" if tuned is None else ", ".join(
            one.partition("=")[2].removesuffix(":log") for one in tuned.over
        )  # fmt: skip
        loss = "-" if tuned is None else f"{_loss(tuned.before)} -> {_loss(tuned.loss)}"
        why = printable(rung.why).replace("|", "\\|")
        rows.append((f"`{rung.recipe}`", why, f"`{rung.optimizer}`", values, over, loss))
    head = ("entry", "", "hidden matrices by", "tuned", "searched in", "loss")
    return [_wrapped(said), _markdown(head, rows)]


def _others(verdicts: Sequence[Verdicts]) -> str:
    rows = []
    for name in numbers_of(verdicts):
        theirs, steps = PUBLIC.get(name, ("-", None))
        ours = [
            ratio_text(found.results[name].crossing) if name in found.results else "-"
            for found in verdicts
        ]
        ratio = f"{steps / PUBLIC[ADAM][1]:.2f}" if steps else "-"
        rows.append((f"`{name}`", *ours, theirs, f"{steps:,}" if steps else "-", ratio))
    texts = [f"{found.ladder.track}: of {found.rival}'s" for found in verdicts]
    return _markdown(("entry", *texts, "public track", "steps", "of Adam's"), rows)


def _made(table: Ladder) -> str:
    codes = sorted({rung.code_sha256[:12] for rung in table.rungs if rung.code_sha256})
    packages = sorted({one for rung in table.rungs for one in rung.packages.values()})
    budgets = sorted({rung.tuned.budget for rung in table.rungs if rung.tuned})
    by_machine: dict[str, list[str]] = {}
    for rung in table.rungs:
        by_machine.setdefault(_machine(rung.machine), []).append(f"`{rung.recipe}`")
    if len(by_machine) == 1:
        made_on = f"all on {next(iter(by_machine))}"
    else:
        made_on = "; ".join(f"{', '.join(names)} on {one}" for one, names in by_machine.items())
    clock = f" Seconds and memory: on {_machine(table.clock)}." if table.clock else ""
    said = (
        f"`{table.track}`: {len(table.rungs)} entries, tuned with "
        f"{', '.join(budgets) or 'nothing'} each; {made_on}; code "
        f"{', '.join(codes) or 'unknown'}; dataset {table.dataset_fingerprint[:12]}; "
        f"packages {', '.join(packages) or 'none'}.{clock} Commands:"
    )
    return "\n".join([_wrapped(said), "", "```", *table.commands, "```"])


def _machine(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items() if value) or "unknown"


def _loss(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.4f}"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def _reflowed(text: str) -> str:
    """Paragraphs, each wrapped anew after something was put into it."""
    paragraphs = (" ".join(part.split()) for part in text.strip().split("\n\n"))
    return "\n\n".join(map(_wrapped, paragraphs))


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(re.sub(r" +\|", " |", f"| {' | '.join(line)} |") for line in lines)
