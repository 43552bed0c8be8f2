"""A local leaderboard: sets of runs that kept a track's rules, and refused ones that did not.

The rules are the speedrun's: the mean final loss is at or below the target at p < alpha; all runs
stop at the same step, chosen before they ran; same recipe, data and code; every seed once. A run
is held to its track (`track.py`), and its records and weights to each other (`records.py`, which
says what neither can see). The test split is looked at when all rules hold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from speedrun.config.experiment import CODE_AND_DATA, PLACE, SEED, all_differences, experiment_hash
from speedrun.config.files import built_in, names
from speedrun.config.own_code import own_code, with_code
from speedrun.config.resolve import override_words, resolve
from speedrun.config.schema import Config
from speedrun.data.stream import ProgressCallback
from speedrun.data.validation import FIRST
from speedrun.errors import ConfigError, RunError, SpeedrunError
from speedrun.files import finite, write_json
from speedrun.science import records
from speedrun.science.records import Again, Broken, Records
from speedrun.science.track import setting_broken, text_of
from speedrun.science.verify import Verdict, verify
from speedrun.train.environment import code_hash
from speedrun.train.evaluate import tested
from speedrun.train.run import RunFolder, given_once
from speedrun.train.summary import read_json, validated

LEVEL = 0.01
ALIKE = 1e-4  # nats by which two runs' first losses differ at least, if their seeds do
OLDER = "made by a version that did not write down whether config, code and length stayed the same"
RULES = {
    "whole records": "a run's folder holds config, environment, metrics, result and last weights, "
    "none of them damaged",
    "one track": "all runs are of one track, with its target",
    "the track's own": "text, split, tokenizer, validation and target are the track's, stated or "
    "by default; the recipe, sizes, batch, steps and machine are free",
    "the track's text": "a run is trained and validated on the very dataset that its track's "
    "corpus makes, by fingerprint, whatever folder it lies in; that of public shards is trusted, "
    "for no hash of them is known",
    "same recipe": "all runs have the same config, code of their own included by its hash, but for "
    "the seed and the folders of data and code",
    "same data": "all runs are trained and validated on the same dataset",
    "same code": "all runs are made by the same code",
    "same stop": "all runs stop at the same step, chosen before they ran, and come to it",
    "not forced": "no run was ever resumed with --force",
    "adds up": "metrics are there for every step, as they were written, and config, metrics, "
    "checkpoint and result agree",
    "every seed once": "n runs have the seeds 0 to n - 1, none twice and none left out, for the "
    "best of many prove nothing; none is a copy of another",
    "own machine": "a run has the machine to itself, for its seconds are compared",
    "one machine": "all runs are made on the same kind of machine, each from its start to its end, "
    "for their seconds have one mean",
    "significant": "the mean final loss, as found where the runs are submitted, is at or below the "
    "target at p < {alpha}",
    "test once": "the test of a run is looked at once, for its last weights",
    "weights": f"a run's last weights have the losses it states, within {records.WITHIN:g} nats, "
    "for machines round differently",
}


# What somebody can do whose runs break a rule.
TO_DO = {
    "whole records": "submit the folder as training left it, or train again",
    "one track": "submit the runs of one track with a target",
    "the track's own": "train without that override, or on a track file of your own",
    "the track's text": "train on the dataset that the track builds by itself",
    "same recipe": "train the runs with one command but for --seed",
    "same data": "train all of them where the dataset is the same",
    "same code": "train all of them with one version of the code",
    "same stop": "let every run end as it was begun: resume it, or train it again",
    "not forced": "train it again from the start",
    "adds up": "submit the folder as training left it, or train again",
    "every seed once": "train the seeds from 0 on, each once, and submit all of them",
    "own machine": "train again without --jobs",
    "one machine": "train all of them on one machine",
    "significant": "more seeds make a claim that is true significant",
    "test once": "train again, and test it when it has ended",
    "weights": "submit where the runs were made, or train again",
}


class Submission(BaseModel, frozen=True):
    track: str
    recipe: str
    target: float
    n: int
    mean: float
    std: float | None
    p: float
    alpha: float
    steps: int
    tokens: int
    train_seconds: float
    wall_seconds: float
    params: int
    machine: str
    dataset_fingerprint: str
    code_sha256: str
    config_sha256: str  # of the experiment without the seed
    seeds: tuple[int, ...]
    date: str
    # Entries made before these were kept do not have them.
    test_mean: float | None = None  # the same weights on the test split
    python: str | None = None  # of which a track of its library's text is made
    evaluated: bool = False  # the weights gave the losses again where the runs were submitted
    unchecked: str = "submitted by a version with fewer rules"  # or why else; empty: checked
    shards_sha256: str | None = None  # of public shards, which are trusted
    judged_on: str | None = None  # tokens and rows of the validation
    own_code: tuple[str, ...] = ()  # of users' own that the runs were made with, by name and hash
    changes: tuple[str, ...] | None = None  # from the recipe of that name; None: there is none here

    @property
    def identity(self) -> tuple[Any, ...]:
        """Entries that agree in it are the same runs, submitted again."""
        return (self.track, self.recipe, self.code_sha256, self.dataset_fingerprint,
                self.shards_sha256, self.config_sha256, self.machine, self.seeds)  # fmt: skip


class Leaderboard(BaseModel):
    entries: tuple[Submission, ...]


def _refuse(rule: str, found: str, **values: Any) -> RunError:
    text = RULES[rule].format(**values)
    return RunError(f"refused by the rule '{text}': {found}; {TO_DO[rule]}")


def _quietly(*_: object) -> None: ...


def check(paths: Sequence[Path], alpha: float, progress: ProgressCallback = _quietly) -> Submission:
    """The entry these runs make, or the first rule they break; what costs most comes last."""
    given_once(paths)
    runs = [_read(path) for path in paths]
    for run in runs:
        if broken := records.broken(run):
            raise _refuse(*broken)
    _check_set(runs)
    if broken := setting_broken(runs[0]):
        raise _refuse(*broken)
    if alpha > LEVEL:
        raise _refuse("significant", f"--alpha {alpha} is weaker", alpha=LEVEL)
    first, target = runs[0], runs[0].config.train.target
    verdict = _significant([run.summary.loss for run in runs], target, alpha)
    text = text_of(runs, progress)
    if isinstance(text, Broken):
        raise _refuse(*text)
    tests: list[float | None] = []
    if not text.unchecked:
        found = [_again(run) for run in runs]
        verdict = _significant([one.loss for one in found], target, alpha)
        tests = [_test_of(run, one) for run, one in zip(runs, found, strict=True)]
    losses = [test for test in tests if test is not None]
    place = first.environment
    own = {
        "train_seconds": fmean(run.summary.train_seconds for run in runs),
        "wall_seconds": fmean(run.summary.wall_seconds for run in runs),
        "machine": f"{place.gpu or place.cpu}, {place.cores} cores",
        "code_sha256": place.code_sha256,
        "config_sha256": experiment_hash(first.config, but=(SEED,)),
        "seeds": sorted(run.summary.seed for run in runs),
        "date": time.strftime("%Y-%m-%d"),
        "test_mean": fmean(losses) if len(losses) == len(runs) else None,
        "python": place.python,
        "evaluated": not text.unchecked,
        "unchecked": text.unchecked or _unchecked(runs),
        "shards_sha256": text.shards,
        "judged_on": _judged_on(first),
        "own_code": [f"{table} {text}" for table, text in own_code(first.config).items()],
        "changes": _changes(first.config),
    }
    # The rest is the first run's, which it shares with the others, and the verdict's, by name.
    return Submission.model_validate(first.summary.as_dict() | vars(verdict) | own)


def _unchecked(runs: Sequence[Records]) -> str:
    """Why an entry is listed apart though its losses were found again."""
    if not all(run.told for run in runs):
        return OLDER
    here, there = code_hash(), runs[0].environment.code_sha256 or ""
    return "" if there == here else f"made by other code ({there[:12]}) than submitted it"


def _changes(config: Config) -> tuple[str, ...] | None:
    """What its config has that the recipe of its name has not; None for a recipe of one's own."""
    if config.recipe not in built_in("recipe") or config.track not in names("track"):
        return None
    try:
        own = resolve(config.recipe, config.track).config
    except ConfigError as error:
        return (f"another recipe, for {error}",)
    nowhere = with_code(config, {table: {"place": ""} for table in config.used_code()})
    return tuple(override_words(own, nowhere, but=(*PLACE, SEED)).values())


def _significant(losses: Sequence[float], target: float, alpha: float) -> Verdict:
    verdict = verify(losses, target, alpha=alpha)
    if not verdict.holds:
        p = "undefined" if verdict.p is None else f"{verdict.p:.3g}"
        raise _refuse("significant", f"n = {verdict.n}, mean {verdict.mean}, p {p}", alpha=alpha)
    return verdict


def _again(run: Records) -> Again:
    found = records.losses_again(run)
    if isinstance(found, Broken):
        raise _refuse(*found)
    return found


def _test_of(run: Records, found: Again) -> float | None:
    """As found again where it was looked at before; else this is the look; None: it has no test."""
    if found.test is not None:
        return found.test
    first = tested(run.run)
    return first.loss if first else None


def _read(path: Path) -> Records:
    try:
        return records.read(RunFolder(path))
    except SpeedrunError as error:
        raise _refuse("whole records", str(error)) from None


def _check_set(runs: Sequence[Records]) -> None:
    """What the runs must share, and what they must not."""
    first = runs[0].config
    tracks = sorted({run.config.track for run in runs})
    if len(tracks) > 1 or not first.train.target:
        raise _refuse("one track", ", ".join(tracks))
    if len(steps := {run.summary.steps for run in runs}) > 1:
        raise _refuse("same stop", f"found {', '.join(map(str, sorted(steps)))}")
    for run in runs:
        path = run.run.path
        if run.config.machine.jobs > 1:
            raise _refuse("own machine", f"{path} was one of {run.config.machine.jobs} at a time")
        for key, value, changed in all_differences(first, run.config, (SEED, *CODE_AND_DATA)):
            raise _refuse("same recipe", f"{key} is {changed!r} in {path}, not {value!r}")
        for key, value in run.environment.machine.items():
            if value != (other := runs[0].environment.machine[key]):
                raise _refuse("one machine", f"{key} is {value!r} in {path}, not {other!r}")
        for before in run.environment.earlier:
            other = {key: before.get(key) for key, value in run.environment.machine.items()
                     if before.get(key) != value}  # fmt: skip
            raise _refuse("one machine", f"{path} was made in part with {other}")
    codes = [run.environment.code_sha256 or "unknown" for run in runs]
    for rule, values in (
        ("same recipe", {run.config.recipe for run in runs}),
        ("same data", {run.summary.dataset_fingerprint[:12] for run in runs}),
        ("same code", {code[:12] for code in codes}),
    ):
        if len(values) > 1 or "unknown" in values:
            raise _refuse(rule, f"found {', '.join(map(str, sorted(values)))}")
    seeds = sorted(run.summary.seed for run in runs)
    if seeds != [*range(len(runs))]:
        raise _refuse("every seed once", f"found {', '.join(map(str, seeds))}")
    for one, other in combinations(runs, 2):
        if same := _copied(one, other):
            raise _refuse("every seed once", f"{one.run.path} and {other.run.path} have {same}")


def _judged_on(run: Records) -> str:
    """Rows that are not the first of the text are other rows where they have another length."""
    tokens, how = f"{run.summary.val_tokens:,} tokens", run.config.validation.rows
    return (
        f"the first {tokens}"
        if how == FIRST
        else (f"{tokens} in rows of {run.config.batch.length}, {how}")
    )


def _copied(one: Records, other: Records) -> str:
    """What two runs share that runs of different seeds never do; nothing for honest ones."""
    if one.summary.metrics_sha256 == other.summary.metrics_sha256:
        return "the same metrics"
    if one.saved.weights == other.saved.weights:
        return "the same weights"
    if one.summary.val_loss is not None and one.summary.val_loss == other.summary.val_loss:
        return f"the same loss, {one.summary.val_loss}"
    # A seed once more with another microbatch, say, rounds differently and is the same run.
    pairs = zip(one.first_losses, other.first_losses, strict=False)
    if all(abs(a - b) < ALIKE for a, b in pairs):
        return f"the same training losses in the first {records.FEW} steps"
    return ""


def read(file: Path) -> tuple[Submission, ...]:
    if not file.exists():
        return ()
    found = read_json(file, ConfigError)
    return validated(Leaderboard, found, file, "a leaderboard", ConfigError).entries


def submit(
    paths: Sequence[Path], file: Path, alpha: float, progress: ProgressCallback = _quietly
) -> Submission:
    """Check the runs and add their entry; the same entry is not added twice."""
    entry = check(paths, alpha, progress)
    kept = [other for other in read(file) if other.identity != entry.identity]
    entries = sorted(
        [*kept, entry], key=lambda one: (one.track, one.dataset_fingerprint, one.train_seconds)
    )
    board = finite(Leaderboard(entries=tuple(entries)).model_dump(mode="json"))
    validated(Leaderboard, board, file, "a leaderboard", ConfigError)  # it can be read again
    write_json(file, board)
    return entry
