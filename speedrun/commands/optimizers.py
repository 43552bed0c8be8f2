"""docs/OPTIMIZERS.md, made of the files of the ladder alone: `speedrun ladder --write`.

Every number of ours is computed from the losses in these files. What others found is typed in below
as they published it, with the source.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from speedrun.commands.rungs import (
    beaten,
    crossing_text,
    memory_text,
    ratio_text,
    rule_text,
    seconds_text,
    state_text,
)
from speedrun.science.compare import shares_within
from speedrun.science.rungs import Ladder, Verdicts
from speedrun.terminal.console import printable

WIDTH = 98
FACTORS = (1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0)  # of the profile's table
# Steps to a loss of 3.28 with 0.1 billion parameters on the public optimizer track of the NanoGPT
# speedrun, by what our entries are nearest to; its Adam is called undertuned there.
PUBLIC = {
    "adamw": ("Adam", 5625),
    "shampoo": ("Shampoo, power -1/4", 4100),
    "muon": ("Muon, tuned", 3250),
    "normuon": ("NorMuon", 3250),
    "soap": ("SOAP on a sphere", 3040),
    "soap-muon": ("SOAP-Muon, row floor, cautious decay", 2690),
}

ABOUT = """\
Which optimizer needs the fewest steps? One small GPT, one text, one batch and one validation for
all; free are the algorithm, its numbers, the schedule and the initial weights. The result is a
number of steps with the schedule finished, by the rule of the public optimizer track with a
spread that was measured here. Each entry's two rates were tuned in the same number of trials, on
code; the prose is held out. Everything on this page but what others found is printed by `speedrun
ladder --write` from the losses in [results](results), and a test prints it again.

These are models of half a million parameters trained for a minute. They say what an optimizer
does to a small, young model, not what it will do to a large one: the gain of the best over AdamW
is known to shrink with size.
"""
HOW = """\
**Result.** A length passes if (target - mean) x sqrt(n) >= 3.09 sigma over its n seeds, each run
to the end of its own schedule; the result is the shortest length of the grid (each {grid:.0%}
longer) that passes while the next shorter one does not. All seeds of an entry are run at the same
lengths, so no run is stopped where it happens to look good. Sigma is the standard deviation of a
final loss between seeds, pooled over all lengths of all entries, each around its own mean; with
fewer than 30 degrees of freedom Student's t takes the place of 3.09.

**Crossing.** For each seed, where its final losses cross the target between two neighbouring
lengths; the mean over seeds, its 95% interval with the width of the cell in it, and the ratio to
`adamw`, seed by seed (Fieller).

**Decided pairs.** The last column names rows that need more steps: differences of the logarithm
of the crossing, seed by seed, the rest of the spread pooled over the entries of a text, p-values
corrected over all pairs of that text (Holm) and decided at 0.05. What is not named is not
decided, which does not mean equal.

**Tuning.** The rate of the hidden matrices from 1/6 to 6 times what the recipe states and the
head's from 1/4 to 4 times, on a seed and validation rows that no row of the table is judged by,
at the track's own length. All other numbers are the recipe's. Only the hidden matrices go by the
entry's optimizer; table, head and scalars by the same AdamW in all.

**Seconds** are the training time of runs of the stated length, one at a time on the whole
machine, taking turns. **State** is what all optimizers of a run keep beside the weights, as a
checkpoint holds it, **memory** the most the process had.
"""
OTHERS = """\
Wen, Hall, Ma and Liang (arXiv 2509.02046) tuned eleven optimizers alike, from 0.1 to 1.2 billion
parameters and 1 to 8 times Chinchilla's tokens: the best matrix optimizers (Muon, SOAP, Kron)
need about 1/1.4 = 0.71 of AdamW's steps at 0.1 billion and 1/1.1 = 0.91 at 1.2 billion; tuning
the peak rate alone makes the usual AdamW baseline up to twice as fast. The public optimizer track
(0.1 billion parameters, FineWeb, a batch of 524,288 tokens) counts steps to a loss of 3.28; what
stands there is nearest to our entries as follows. Its Adam was one run, called undertuned, so the
ratios are those to a weak rival.
"""
AGAIN = """\
A row again, alone, in minutes; the rows that are there stay, and a command that was killed goes
on:

```
speedrun ladder muon adamw --out races/again
```

With other seeds, after the same tuning; and your own, from a file beside a recipe (an example is
in [own-optimizer.md](own-optimizer.md)), beside the two that matter:

```
speedrun ladder muon --first-seed 100 --out races/other-seeds
speedrun ladder mine.toml muon adamw --out races/mine
```

The whole table, with the packages that some rows take (`pip install 'speedrun[optimizers]'`),
takes a night on two cores. The seconds are measured afterwards, with nothing else on the machine,
and the last command writes this page:

```
speedrun ladder
speedrun ladder --clock 3
speedrun ladder --out docs/results --write docs/OPTIMIZERS.md
```

A recipe that changes anything but what is free is refused with a sentence that names it.
`speedrun tracks show optimizer` shows the track.
"""


def document(tables: Sequence[Ladder], picture: Path | None) -> str:
    """The page of these tables, each of a text."""
    parts = ["# Optimizers, raced", ABOUT.rstrip()]
    if not tables:
        return "\n\n".join([*parts, AGAIN.rstrip()]) + "\n"
    for table in tables:
        parts += [f"## {table.track}", *_text(table)]
    parts += ["## Near the best on every text", *_profile(tables, picture)]
    parts += ["## What the entries are", *_entries(tables)]
    parts += ["## What others found", OTHERS.rstrip(), _others(tables)]
    parts += ["## How it is measured", HOW.format(grid=tables[0].grid - 1).rstrip()]
    parts += ["## Again, and yours", AGAIN.rstrip(), "## Made with", *map(_made, tables)]
    return "\n\n".join(parts) + "\n"


def _text(table: Ladder) -> list[str]:
    verdicts = Verdicts(table)
    numbers = {name: number for number, name in enumerate(verdicts.results, 1)}
    rows = []
    for name, result in verdicts.results.items():
        rung = table.rung(name)
        assert rung is not None
        steps = f"**{result.steps:,}**" if result.steps else result.why_not or "open"
        rows.append((
            str(numbers[name]), f"`{name}`", steps, crossing_text(result.crossing),
            ratio_text(result.crossing), seconds_text(rung, result), state_text(rung),
            memory_text(rung), beaten(result, numbers),
        ))  # fmt: skip
    rule = rule_text(verdicts.sigma, len(table.seeds))
    said = (
        f"Steps to end below {table.target}, {len(table.seeds)} seeds ({table.seeds[0]} to "
        f"{table.seeds[-1]}). The rule: {rule}. Of {len(verdicts.pairs)} pairs "
        f"{sum(pair.fewer is not None for pair in verdicts.pairs)} are decided."
    )
    head = ("", "entry", "steps", "crossing [95%]", f"of {verdicts.rival}'s [95%]", "seconds",
            "state", "memory", "fewer than")  # fmt: skip
    return [_wrapped(said), _markdown(head, rows)]


def profile(tables: Sequence[Ladder]) -> dict[str, list[tuple[float, float]]]:
    """By entry: on which share of the texts its crossing is within a factor of the best's."""
    found = [
        {name: result.crossing.mean for name, result in Verdicts(table).results.items()
         if result.crossing.mean}
        for table in tables
    ]  # fmt: skip
    names = dict.fromkeys(name for table in tables for name in Verdicts(table).results)
    shares = shares_within([*names], found)
    return dict(sorted(shares.items(), key=lambda item: [-len(item[1]), [f for f, _ in item[1]]]))


def _profile(tables: Sequence[Ladder], picture: Path | None) -> list[str]:
    said = ("The share of texts on which an entry needs at most so many times the steps of the "
            f"best (its crossing), over {', '.join(table.track for table in tables)}.")  # fmt: skip
    rows = [
        (f"`{name}`", *(
            f"{max((share for factor, share in points if factor <= most + 5e-4), default=0.0):.2f}"
            for most in FACTORS
        ))
        for name, points in profile(tables).items()
    ]  # fmt: skip
    shown = [f"![Steps of each optimizer over those of the best, a dot for each text]({picture})"]
    head = ("entry", *(f"x {factor:g}" for factor in FACTORS))
    return [_wrapped(said), *(shown if picture else []), _markdown(head, rows)]


def _entries(tables: Sequence[Ladder]) -> list[str]:
    said = ("Rates as the runs had them, and the loss in tuning before and after. A rate at the "
            "end of its range is marked *: a wider search might find a better one.")  # fmt: skip
    rows = []
    for rung in tables[0].rungs:
        tuned = rung.tuned
        values = "-" if tuned is None else ", ".join(
            f"{key.removeprefix('optimizer.')} {value:g}{'*' if key in tuned.edges else ''}"
            for key, value in tuned.values.items()
        )  # fmt: skip
        loss = "-" if tuned is None else f"{_loss(tuned.before)} -> {_loss(tuned.loss)}"
        why = printable(rung.why).replace("|", "\\|")
        rows.append((f"`{rung.recipe}`", why, f"`{rung.optimizer}`", values, loss))
    return [_wrapped(said), _markdown(("entry", "", "hidden matrices by", "tuned", "loss"), rows)]


def _others(tables: Sequence[Ladder]) -> str:
    results = [Verdicts(table).results for table in tables]
    rows = []
    for name in dict.fromkeys((*PUBLIC, *(name for found in results for name in found))):
        theirs, steps = PUBLIC.get(name, ("-", None))
        ours = [ratio_text(found[name].crossing) if name in found else "-" for found in results]
        ratio = f"{steps / PUBLIC['adamw'][1]:.2f}" if steps else "-"
        rows.append((f"`{name}`", *ours, theirs, f"{steps:,}" if steps else "-", ratio))
    head = ("entry", *(f"{table.track}: of adamw's" for table in tables), "public track", "steps",
            "of Adam's")  # fmt: skip
    return _markdown(head, rows)


def _made(table: Ladder) -> str:
    codes = sorted({rung.code_sha256[:12] for rung in table.rungs if rung.code_sha256})
    packages = sorted({one for rung in table.rungs for one in rung.packages.values()})
    budgets = sorted({rung.tuned.budget for rung in table.rungs if rung.tuned})
    machine = ", ".join(f"{key} {value}" for key, value in table.machine.items() if value)
    said = (
        f"`{table.track}`: {len(table.rungs)} entries, tuned with "
        f"{', '.join(budgets) or 'nothing'} each; {machine}; code "
        f"{', '.join(codes) or 'unknown'}; dataset {table.dataset_fingerprint[:12]}; "
        f"packages {', '.join(packages) or 'none'}. Commands:"
    )
    return "\n".join([_wrapped(said), "", "```", *table.commands, "```"])


def _loss(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.4f}"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(re.sub(r" +\|", " |", f"| {' | '.join(line)} |") for line in lines)
