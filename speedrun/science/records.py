"""Whether what a run wrote down is whole, hangs together and is borne out by its weights.

A run's result is `summary.json`, and everybody can edit a file. So the leaderboard believes none of
it by itself: the summary must follow from the metrics, the metrics from the config, and the loss
from the weights. These are the rules that need no other run; `leaderboard.py` has those over a set
of runs, and the text of all of them.

What this cannot see, for all that is written down was written by the one who is checked:
- Every hash is a plain SHA-256, so who edits a file can seal it again. Who rewrites a checkpoint
  with its hashes can begin from other weights, such as those of a longer run or of another seed;
  with rows of metrics rewritten too, no step need ever have been made. Only training again would
  tell.
- Seconds, machine and Python are a run's own word, and so are the summary's speed, memory, device,
  threads, torch, ranks and bits per byte. Seconds are held to each other, not to a clock: whoever
  divides all of them by two is twice as fast.
- A dataset too large to be hashed at every start is known by its manifest (`data/find.py`): its
  shards can be others while a run is made.
- Losses on the way are a run's own word: only the last weights are there to be evaluated.
- Machines round differently, so weights may miss the loss that a run states by WITHIN, 0.002 nats:
  that much can be taken off in every file. What the board tests and shows is the loss found here;
  where the text is not here no loss is found at all, and the entry says so.
- What was made besides and not shown: other recipes, lengths, copies of a folder that were looked
  at, seeds after n until p was small enough. A test.json that was deleted was never there.
- `batch.length` is the recipe's, and rows of another length are other rows of the validation text,
  unless the track takes the first of it. So the board gives each length a table of its own.
- Code of a user's own, in place of a block or an optimizer, runs while it is checked, and could do
  anything. It is held to look at no later token (`model/trial.py`) and to be the same in all runs;
  the board names it with its hash, and somebody has to read it.
- The corpus of a built-in track is this machine's Python library as it is; an edited one has
  another fingerprint, and so a table of its own. Public shards are trusted (`track.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from speedrun.config.own_code import own_code, say_own_code
from speedrun.config.schema import Config
from speedrun.data.splits import TEST, VAL
from speedrun.errors import RunError, SpeedrunError
from speedrun.science.rows import FACTS, Begun, Said, Trained, read_rows, wrong_rows
from speedrun.train import checkpoint
from speedrun.train.estimate import without_storage
from speedrun.train.evaluate import Tested, evaluate, read_test, tested
from speedrun.train.run import RunFolder
from speedrun.train.summary import Environment, Summary, validated

WITHIN = 2e-3  # nats: CPUs of different makes, and GPUs, round differently
# What evaluating raises, besides our own, where weights, config and dataset are not of one run.
UNFIT = (RuntimeError, SafetensorError, OSError, KeyError)
TABLE = "embedding.weight"  # a row for each token, among the weights
FEW = 10  # first steps, whose losses tell seeds apart
LONG = 200  # characters, for a name


class Broken(NamedTuple):
    """A rule of the leaderboard's, by name, and what was found."""

    rule: str
    found: str


class _SavedProgress(BaseModel, strict=True):
    seconds: float
    val_loss: float | None
    forced: list[str]


class Saved(Said, frozen=True, strict=True):
    """What the last checkpoint says of itself."""

    step: int
    dataset_fingerprint: str
    sha256: dict[str, str]
    progress: _SavedProgress

    @property
    def weights(self) -> str:
        return self.sha256.get(checkpoint.MODEL, "")


@dataclass(frozen=True)
class Records:
    """All that a run wrote down but for its metrics."""

    run: RunFolder
    config: Config
    summary: Summary
    environment: Environment
    saved: Saved
    forced: list[str]  # by forced.json, the summary or the checkpoint
    rows: int  # of the table of tokens in the checkpoint
    test: Tested | None  # what was seen of the test

    @property
    def params(self) -> int:
        """Of the config's model with as many rows as the table has, which may be padded."""
        model = without_storage(self.config, self.rows)
        return sum(parameter.numel() for parameter in model.parameters())

    @property
    def first_losses(self) -> list[float]:
        """Of training, which a seed decides; a loss that was not finite counts as 0."""
        rows = [row for row in read_rows(self.run) if isinstance(row, Trained)]
        return [row.loss or 0.0 for row in rows[:FEW]]

    @property
    def starts(self) -> list[Begun]:
        return [row for row in read_rows(self.run) if isinstance(row, Begun)]

    @property
    def told(self) -> bool:
        """Whether every start and the checkpoint say what the run was; else it is not known."""
        return all(one.whole for one in (self.saved, *self.starts))


def read(run: RunFolder) -> Records:
    """A RunError says in a sentence which file is missing or damaged."""
    try:
        summary = run.read_summary()
        if summary is None:
            begun = run.config.exists()
            what = "has not finished" if begun else "is not a run folder"
            do = f"`speedrun train --resume --run {run.path}` goes on" if begun else "name another"
            raise RunError(f"{run.path} {what}: it has no summary.json; {do}")
        _check_stated(run, summary)
        config, place = run.load_config(), Environment.read(run.environment)
        if place is None:
            raise RunError(
                f"{run.path} has no environment.json: restore it from a copy, or make the run again"
            )
        found, damaged = checkpoint.latest(run.checkpoints)
        if damaged or found is None:
            raise RunError(
                damaged[0] if damaged else f"{run.path} has no checkpoint: train it to its end"
            )
        saved = validated(
            Saved, found.meta, found.folder / checkpoint.META, "a checkpoint's record"
        )
        forced = [*summary.forced, *run.read_forced(), *saved.progress.forced]
        with safe_open(found.folder / checkpoint.MODEL, "pt") as weights:
            rows = weights.get_slice(TABLE).get_shape()[0]
        test = read_test(run)
    except (SafetensorError, IndexError) as error:
        raise RunError(
            f"the last weights of {run.path} cannot be read: {error}; make the run again"
        ) from None
    except OSError as error:
        raise RunError(
            f"{run.path} cannot be read: {error.strerror}; see who may read it"
        ) from None
    return Records(run, config, summary, place, saved, forced, rows, test)


def _check_stated(run: RunFolder, summary: Summary) -> None:
    """JSON has no NaN and no infinity, though Python reads them; a name fits into a table."""
    for key, value in summary:
        if isinstance(value, float) and not math.isfinite(value):
            raise RunError(
                f"{run.summary} states {key} = {value}, which is no number: make the run again"
            )
    for key, name in (("recipe", summary.recipe), ("track", summary.track)):
        if not name.isprintable() or len(name) >= LONG:
            raise RunError(
                f"{run.summary} states {key} = {name!r}, which is no name: make the run again"
            )


def broken(records: Records) -> Broken | None:
    """The first rule that a run's records break, of those that cost no evaluation."""
    path, summary = records.run.path, records.summary
    if summary.stopped_early or summary.exit_code:
        return Broken("same stop", f"{path} was stopped before its end")
    if records.config.train.stop != "steps":
        return Broken("same stop", "train.stop = 'target' lets each run choose its own end")
    return next(problems(records), None)


def problems(records: Records) -> Iterator[Broken]:
    """One for each rule, but for those about a run's end, that its records break."""
    path, steps = records.run.path, records.config.steps
    if records.forced:
        yield Broken("not forced", f"{path}, {records.forced[0]}")
    for problem in _contradictions(records):
        yield Broken("adds up", f"{path}: {problem}")
        return  # what follows reads rows that are whole
    for row in records.starts:
        if row.train_steps not in (None, steps):
            then = f"was to end at step {row.train_steps} when it stood at {row.step}"
            yield Broken("same stop", f"{path} {then}, and ends at {steps}")
            break
    for look in records.test.all if records.test else ():
        if look.weights_sha256 != records.saved.weights:
            yield Broken("test once", f"{path} was tested with other weights, of step {look.step}")
            break


class Again(NamedTuple):
    """Losses of the last weights, found here; None: the test has not been looked at."""

    loss: float
    test: float | None


def losses_again(records: Records) -> Again | Broken:
    """Evaluate the last weights on the validation text again: seconds a run, so this comes last.

    A test that was made before is made again too, for the board shows it. The first is `tested`'s.
    What counts are the losses that are found here: those stated may be a tolerance lower.
    """
    run, summary, again = records.run, records.summary, None
    try:
        result = evaluate(run, VAL)
        before = tested(run) if run.test.exists() else None
        if before:
            again = evaluate(run, TEST)
    except SpeedrunError as error:
        return Broken("weights", f"{run.path} cannot be evaluated here: {error}")
    except UNFIT as error:
        return Broken("weights", unfit(run, error))
    if result is None or result.tokens != summary.val_tokens:
        tokens = result.tokens if result else 0
        return Broken("weights", f"{run.path} is validated on {tokens:,} tokens here")
    pairs = [("validation", result.loss, "summary", summary.loss)]
    if before and again:
        pairs.append(("test", again.loss, "test", before.loss))
    for what, found, name, stated in pairs:
        if not abs(found - stated) <= WITHIN:  # NaN is not within anything
            loss = f"{found:.4f}, and {name}.json states {stated:.4f}"
            return Broken("weights", f"the weights of {run.path} have a {what} loss of {loss}")
    return Again(result.loss, again.loss if again else None)


def unfit(run: RunFolder, error: Exception) -> str:
    """A sentence for what torch and safetensors say of weights that are not the config's."""
    reason = " ".join(str(error).split())[:200]
    return f"the weights of {run.path} do not fit its records: {reason}"


def _contradictions(records: Records) -> Iterator[str]:
    """What does not add up: summary with config and checkpoint, then with the metrics."""
    config, summary, saved = records.config, records.summary, records.saved
    code = records.environment.code_sha256
    for name, stated, other, where in (
        ("recipe", summary.recipe, config.recipe, "config.toml"),
        ("track", summary.track, config.track, "config.toml"),
        ("seed", summary.seed, config.train.seed, "config.toml"),
        ("target", summary.target, config.train.target or None, "config.toml"),
        ("steps", summary.steps, config.steps, "config.toml"),
        ("tokens", summary.tokens, config.steps * config.batch.tokens, "config.toml"),
        ("own_code", summary.own_code, own_code(config), "config.toml"),
        ("steps", summary.steps, saved.step, "the last checkpoint"),
        ("val_loss", summary.val_loss, saved.progress.val_loss, "the last checkpoint"),
        ("train_seconds", summary.train_seconds, saved.progress.seconds, "the last checkpoint"),
        ("dataset_fingerprint", summary.dataset_fingerprint, saved.dataset_fingerprint,
         "the last checkpoint"),
    ):  # fmt: skip
        if stated != other:
            yield f"{name} is {stated!r} by summary.json and {other!r} by {where}"
    if file := saved.denied_by(config, code):
        yield f"the last checkpoint was made with another {FACTS[file]} than {file} has"
    say_own_code(config)  # what follows builds the model and asks the schedule
    if summary.params != records.params:
        yield (
            f"params is {summary.params!r} by summary.json and {records.params!r} by the model of "
            "config.toml"
        )
    digest = records.run.metrics_digest() if records.run.metrics.is_file() else None
    if digest is None:
        yield "metrics.jsonl is missing, or has no row of the run's end"
    elif digest != summary.metrics_sha256:
        yield "metrics.jsonl does not have the SHA-256 that summary.json states"
    try:
        rows = read_rows(records.run)
    except RunError as error:
        yield str(error)
    else:
        yield from wrong_rows(rows, config, code, summary)
