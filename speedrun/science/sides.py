"""Runs side by side: in what they differ, what came of it, and what must not be compared.

Runs of one recipe and track that are the same experiment but for the seed, on the same data, are
one side; where all are, each run is a side of its own. Means, intervals and ratios are those of
`compare.py` and `stats.py`. A number is put beside another only where both answer one question:
losses on one text and the same rows of it, costs to one target, seconds on one machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from speedrun.config.experiment import (
    LENGTH,
    PLACE,
    SEED,
    STOP,
    all_values,
    differences,
    experiment,
    experiment_hash,
)
from speedrun.config.resolve import override_words, resolve, toml_text
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.science.compare import METRICS, Entry, Row, statistics
from speedrun.science.side import Run, Side, read_run
from speedrun.science.stats import paired_difference, ratio_of_means, summarize
from speedrun.train.run import given_once

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Kind = Literal["last loss", "loss", "target", "time", "target time", "fact"]
AT_COMMON = "loss_at_common"
# What is shown of each side, in this order, and what it takes to compare it.
RESULTS: Mapping[str, Kind] = {
    "val_loss": "last loss",
    AT_COMMON: "loss",
    "val_bpb": "last loss",
    "tokens_to_target": "target",
    "seconds_to_target": "target time",
    "tokens": "fact",
    "train_seconds": "time",
    "tokens_per_second": "time",
    "peak_memory_bytes": "fact",
    "params": "fact",
}
WITHOUT_RATIO = ("val_loss", AT_COMMON, "val_bpb")  # a loss has no natural zero
MOST_SWITCHES = 6  # of an ablation that is proposed: each takes its own runs
ROWS = ("validation.tokens", "validation.rows", "batch.length")  # which rows are validated


@dataclass(frozen=True)
class Result:
    """One number of every side; difference and ratio are to the first side."""

    metric: str
    values: tuple[tuple[float | None, ...], ...]  # by side and run
    rows: tuple[Row, ...]
    differences: tuple[dict[str, float | None] | None, ...]  # None: not to be compared
    at: str = ""  # where the sides are compared


@dataclass(frozen=True)
class Comparison:
    sides: tuple[Side, ...]
    experiment: Mapping[str, tuple[str, ...]]  # by key, the value of each side
    place: Mapping[str, tuple[str, ...]]  # data, code and machine
    results: tuple[Result, ...]
    forbidden: tuple[str, ...]  # what must not be compared, and why
    notes: tuple[str, ...]
    command: str  # that would decide it; empty: none can
    kinds: Mapping[Kind, bool] = field(default_factory=dict)  # which may be compared


def compare_runs(paths: Sequence[Path]) -> Comparison:
    if len(paths) < 2:
        raise ConfigError(
            f"compare needs two run folders, and {len(paths)} is given; `speedrun runs` lists them"
        )
    given_once(paths)
    sides = _sides([read_run(path) for path in paths])
    reasons = _reasons(sides)
    may: dict[Kind, bool] = {
        "loss": not any(kind == "loss" for kind, _ in reasons),
        "time": not any(kind == "time" for kind, _ in reasons),
        "fact": True,
    }
    may["last loss"] = may["loss"] and not any(kind == "last loss" for kind, _ in reasons)
    may["target"] = may["loss"] and not any(kind == "target" for kind, _ in reasons)
    may["target time"] = may["target"] and may["time"]
    results = [_result(metric, sides, may[kind]) for metric, kind in RESULTS.items()]
    return Comparison(
        sides,
        _experiment(sides),
        _place(sides),
        tuple(one for one in results if any(value is not None for v in one.values for value in v)),
        tuple(sentence for _, sentence in reasons),
        tuple(_notes(sides)),
        deciding_command(sides),
        may,
    )


def _sides(runs: Sequence[Run]) -> tuple[Side, ...]:
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        config = run.config
        key = (config.recipe, config.track, experiment_hash(config, but=(SEED, STOP)))
        groups.setdefault((*key, run.dataset or ""), []).append(run)
    found = [*groups.values()]
    if len(found) == 1:
        found = [[run] for run in found[0]]
    named = [LETTERS[n] if n < len(LETTERS) else f"#{n + 1}" for n in range(len(found))]
    return tuple(Side(name, tuple(group)) for name, group in zip(named, found, strict=True))


def _experiment(sides: Sequence[Side]) -> dict[str, tuple[str, ...]]:
    """Values of the config that differ, the machine's apart, and the names of the files."""
    tables = [
        {"recipe": side.config.recipe, "track": side.config.track}
        | experiment(side.config, but=(SEED,))
        for side in sides
    ]
    keys = dict.fromkeys(key for table in tables for key in table)
    return _differing({key: [_shown(table.get(key)) for table in tables] for key in keys})


def _shown(value: Any) -> str:
    """Without the digits that only a computer needs."""
    return f"{value:.9g}" if isinstance(value, float) else _text(value)


def _text(value: Any) -> str:
    """As an override would write it, a plain word without its quotes."""
    bare = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value)
    return str(value) if bare and value not in ("true", "false", "inf", "nan") else toml_text(value)


def _place(sides: Sequence[Side]) -> dict[str, tuple[str, ...]]:
    """Data, code and machine, where they are not the same."""

    def said(of: Callable[[Run], Any]) -> list[str]:
        found = [list(dict.fromkeys(str(of(run)) for run in side.runs)) for side in sides]
        return [", ".join("unknown" if one == "None" else one for one in ones) for ones in found]

    def recorded(key: str) -> Callable[[Run], Any]:
        return lambda run: getattr(run.environment, key) if run.environment else None

    def stated(key: str) -> Callable[[Run], Any]:
        return lambda run: getattr(run.summary, key) if run.summary else None

    def of_machine(key: str) -> Callable[[Run], Any]:
        return lambda run: getattr(run.config.machine, key)

    texts = {
        "seeds": said(lambda run: run.config.train.seed),
        "dataset": said(lambda run: run.config.data.dir or ", ".join(run.config.data.sources)),
        "dataset fingerprint": said(lambda run: run.dataset and run.dataset[:12]),
        "code": said(lambda run: (recorded("code_sha256")(run) or "unknown")[:12]),
        **{key: said(recorded(key)) for key in ("cpu", "cores", "threads", "gpu", "kernels")},
        **{key: said(recorded(key)) for key in ("torch", "python")},
        **{key: said(stated(key)) for key in ("device", "world_size")},
        **{
            f"machine.{key}": said(of_machine(key))
            for key in type(sides[0].config.machine).model_fields
        },
    }
    return _differing(texts)


def _differing(texts: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(found) for key, found in texts.items() if len(set(found)) > 1}


def _reasons(sides: Sequence[Side]) -> list[tuple[str, str]]:
    """What must not be compared: its kind, and a sentence."""
    runs = [run for side in sides for run in side.runs]
    found = []
    texts = {run.dataset for run in runs}
    if len(texts) > 1:
        known = None not in texts
        what = "they are of different texts or tokenizers" if known else "the text is not recorded"
        found.append(("loss", f"losses and costs to the target: {what}; `speedrun eval A B TEXT` "
                              "puts two runs on one text"))  # fmt: skip
    rows = [key for key in ROWS if len({all_values(run.config)[key] for run in runs}) > 1]
    if rows:
        found.append(("loss", "losses and costs to the target: they are of different rows of the "
                              f"validation text ({', '.join(rows)})"))  # fmt: skip
    if len({run.entry.get("tokens") for run in runs}) > 1:
        # The table has a row of them where runs were validated after equal numbers of tokens.
        equal = not found and _common_tokens(sides)
        there = "; those after equal ones are in the table" if equal else ""
        found.append(
            ("last loss", f"last losses: they are after different numbers of tokens{there}")
        )
    if len({run.config.train.target for run in runs}) > 1:
        targets = ", ".join(f"{side.name} {side.config.train.target:g}" for side in sides)
        found.append(("target", f"costs to the target: there are several ({targets})"))
    machines = [run.environment.machine if run.environment else None for run in runs]
    places = [(run.summary.device, run.summary.world_size) for run in runs if run.summary]
    if None in machines:
        found.append(("time", "seconds: a run does not say on which machine it was made"))
    elif any(one != machines[0] for one in machines) or len(set(places)) > 1:
        found.append(("time", "seconds and tokens/s: they are of different machines, or of "
                              "different use of one (see below what differs)"))  # fmt: skip
    elif any(run.config.machine.jobs > 1 for run in runs):
        found.append(("time", "seconds and tokens/s: runs shared the machine with others "
                              "(machine.jobs); --jobs 1 measures them"))  # fmt: skip
    if any(run.environment and run.environment.earlier for run in runs):
        found.append(("time", "seconds and tokens/s: a run was resumed on another machine"))
    return found


def _notes(sides: Sequence[Side]) -> list[str]:
    said = []
    runs = [run for side in sides for run in side.runs]
    one = [side.name for side in sides if len(side.runs) == 1]
    same = len({experiment_hash(run.config, but=(SEED, STOP)) for run in runs}) == 1
    if same and len({run.config.train.seed for run in runs}) > 1:
        said.append("these are the same experiment with other seeds: what differs is chance")
    elif one:
        who = "each side has" if len(one) == len(sides) else f"{', '.join(one)} has"
        said.append(f"{who} one seed, which proves nothing: a difference may be chance")
    for side in sides:
        for run in side.runs:
            where = f"{run.folder.path} ({side.name})"
            if run.summary is None:
                said.append(f"{where} has no result yet: its last validation is shown")
            elif run.summary.stopped_early:
                said.append(
                    f"{where} stopped at step {run.summary.steps:,} of {run.config.steps:,}"
                )
            if run.summary and run.summary.forced:
                said.append(f"{where} was resumed with --force: {run.summary.forced[0]}")
    if any(run.config.train.stop == "target" and run.summary and run.summary.reached_target
           for run in runs):  # fmt: skip
        said.append("a run that stops at its target ends right below it: its last loss says little")
    return said


def _result(metric: str, sides: Sequence[Side], may: bool) -> Result:
    at = ""
    if metric == AT_COMMON:
        common = _common_tokens(sides)
        at = f"{common:,} tokens" if common else ""
        values = [[run.losses.get(common) if common else None for run in s.runs] for s in sides]
    else:
        values = [[run.entry.get(metric) for run in side.runs] for side in sides]
    rows = _rows(metric, sides, values, may)
    differences = [None, *(_difference(metric, values, rows, n, sides, may)
                           for n in range(1, len(sides)))]  # fmt: skip
    return Result(metric, tuple(map(tuple, values)), rows, tuple(differences), at)


def _rows(
    metric: str, sides: Sequence[Side], values: Sequence[Sequence[float | None]], may: bool
) -> tuple[Row, ...]:
    """Means with their intervals, and ratios to the first side where they mean something."""
    order = [side.name for side in sides]
    if metric in METRICS:
        entries = [
            Entry(recipe=side.name, seed=run.config.train.seed,
                  **{key: run.entry.get(key) for key in Entry.model_fields if key in run.entry
                     and key not in ("recipe", "seed")})
            for side in sides
            for run in side.runs
        ]  # fmt: skip
        found = statistics(order, entries, [metric])
        rows = [found[name][metric] for name in order]
        return tuple(row if may else _without_ratio(row) for row in rows)
    rows = []
    first = [value for value in values[0] if value is not None]
    for n, each in enumerate(values):
        known = [float(value) for value in each if value is not None]
        if not known or len(known) < len(each):
            rows.append(Row(len(known), len(each)))
            continue
        row = Row(of=len(each), **vars(summarize(known)))
        whole = len(first) == len(values[0]) and any(first)
        if n and may and whole and metric not in WITHOUT_RATIO:
            ratio = ratio_of_means(known, first)
            row = Row(**{**vars(row), "ratio": ratio.ratio, "ratio_low": ratio.low,
                         "ratio_high": ratio.high, "ratio_method": "Welch"})  # fmt: skip
        rows.append(row)
    return tuple(rows)


def _without_ratio(row: Row) -> Row:
    none = dict.fromkeys(("ratio", "ratio_low", "ratio_high", "ratio_method"))
    return Row(**{**vars(row), **none})


def _difference(
    metric: str,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[Row],
    n: int,
    sides: Sequence[Side],
    may: bool,
) -> dict[str, float | None] | None:
    """To the first side; of losses with an interval and a p-value where seeds are in pairs."""
    mean, first = rows[n].mean, rows[0].mean
    if not may or mean is None or first is None:
        return None
    found: dict[str, float | None] = {"mean": mean - first}
    seeds = sides[n].seeds
    if metric in WITHOUT_RATIO and len(seeds) > 1 and seeds == sides[0].seeds:
        treated, control = ([float(v or 0.0) for v in values[k]] for k in (n, 0))
        pairs = paired_difference(treated, control)
        found |= {"low": pairs.low, "high": pairs.high, "p": pairs.p}
    return found


def _common_tokens(sides: Sequence[Side]) -> int:
    """The most tokens after which every run was validated; 0: there are none."""
    tokens = [set(run.losses) for side in sides for run in side.runs]
    return max(set.intersection(*tokens), default=0)


def deciding_command(sides: Sequence[Side]) -> str:
    """A race or an ablation that would tell the first two sides apart; empty: none would."""
    if len(sides) < 2:
        return ""
    one, other = sides[0].config, sides[1].config
    changed = differences(one, other, but=(SEED, STOP))
    if one.track != other.track or (one.recipe == other.recipe and not changed):
        return ""
    if one.data.dir != other.data.dir or one.data.sources != other.data.sources:
        return ""
    apart = {key for key, _, _ in changed}
    kept = [word for key, word in _overrides(one).items() if key not in apart]
    sets = [part for word in kept for part in ("--set", word)]
    if one.recipe == other.recipe:
        switches = [*override_words(one, other, but=(*PLACE, SEED, STOP, LENGTH)).values()]
        if not 0 < len(switches) <= MOST_SWITCHES:
            return ""
        words = ["ablate", one.recipe, "--track", one.track, "--seeds", "5"]
        words += [part for word in switches for part in ("--switch", word)]
    else:
        words = ["race", one.recipe, other.recipe, "--track", one.track, "--seeds", "3"]
    return shlex.join(["speedrun", *words, *sets])


def _overrides(config: Config) -> dict[str, str]:
    """What a run sets beside its recipe and track, as `key=value` by key."""
    try:
        plain = resolve(config.recipe, config.track).config
    except ConfigError:  # files of the user's, known by their names alone
        return {}
    kept = [key for key in PLACE if key != "data.dir"]
    return override_words(plain, config, but=(*kept, SEED, STOP))
