"""Going on with a run: from which checkpoint, and whether it is still the same run.

A resumed run continues exactly what was begun, so what would make it another run (config, dataset,
tokenizer, code) is named and refused. A longer run is the same run as long as every step already
done would have had the same schedules.
"""

from __future__ import annotations

import json

from speedrun.config.files import flatten
from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.model.window import window_at
from speedrun.train import checkpoint
from speedrun.train.log import Display
from speedrun.train.run import RunFolder
from speedrun.train.setup import Parts, learning_rate_multiplier, momentum_at

START = -1  # in place of a checkpoint's step: there is none yet
# Where the data lies is not what it holds, and rounding may differ with threads; steps have rules.
MAY_DIFFER = ("data.dir", "train.threads", "train.steps")


def find_step(run: RunFolder, display: Display) -> int:
    """The step of the newest whole checkpoint; START for a run stopped before its first."""
    found, skipped = checkpoint.latest(run.checkpoints)
    for sentence in skipped:
        display.note(f"passed over: {sentence}")
    if found is not None:
        return found.step
    if skipped:
        raise RunError(
            f"{run.path} has no whole checkpoint to resume from; put an undamaged copy into "
            f"{run.checkpoints}, or start a new run"
        )
    display.note("no checkpoint yet: starting from step 0")
    return START


def refuse_changes(
    run: RunFolder, config: Config, parts: Parts, found: checkpoint.Checkpoint, code: str
) -> None:
    """One sentence that names every difference to the run that left the checkpoint."""
    old = run.load_config()
    changes = [
        f"the {key.partition('_')[0]} has fingerprint {value[:12]} and had {found.meta[key][:12]}"
        for key, value in parts.identity.items()
        if found.meta[key] != value
    ]
    before = dict(flatten(old.model_dump()))
    changes += [
        f"{key} is {value!r} and was {before[key]!r}"
        for key, value in flatten(config.model_dump())
        if before[key] != value and key not in MAY_DIFFER
    ]
    changes += _code_changes(run, code)
    if config.steps < found.step:
        changes.append(f"train.steps is {config.steps} and {found.step} steps are done")
    else:
        differing = _first_difference(old, config, 0, found.step)
        if differing is not None:
            changes.append(
                f"train.steps is {config.steps} and was {old.steps}, which gives step {differing} "
                f"of the {found.step} steps done other schedules than it had"
            )
    if changes:
        raise RunError(
            f"{run.path} cannot be resumed as it was: {'; '.join(changes)}; undo that, or add "
            "--force to go on all the same"
        )


def _code_changes(run: RunFolder, code: str) -> list[str]:
    try:
        then = str(json.loads(run.environment.read_bytes())["code_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ["environment.json does not say with which code it was run"]
    return [] if then == code else [f"the code has hash {code[:12]} and had {then[:12]}"]


def extension(old: Config, new: Config, step: int) -> str:
    """What a different number of steps changes, as a sentence; empty if it is the same."""
    if old.steps == new.steps:
        return ""
    lengths = f"train.steps goes from {old.steps} to {new.steps}"
    first = _first_difference(old, new, step, min(old.steps, new.steps))
    if first is None:
        return f"{lengths}; the schedules of the steps planned before stay as they were"
    was, now = _settings(old, first), _settings(new, first)
    names = ("learning rate multiplier", "momentum", "window")
    changes = [
        f"{name} {after} instead of {before}"
        for name, before, after in zip(names, was, now, strict=True)
        if before != after
    ]
    return f"{lengths}; schedules differ from step {first} on: {', '.join(changes)} there"


def _settings(config: Config, at: int) -> tuple[float, float, int | None]:
    return learning_rate_multiplier(config, at), momentum_at(config, at), window_at(config, at)


def _first_difference(old: Config, new: Config, start: int, stop: int) -> int | None:
    """The first step at which two lengths of the same run have different schedules."""
    if old.steps == new.steps:
        return None
    return next((at for at in range(start, stop) if _settings(old, at) != _settings(new, at)), None)
