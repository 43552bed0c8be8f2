"""Going on with a run: from which checkpoint, and whether it is still the same run.

A resumed run continues exactly what was begun, so what would make it another run (config, dataset,
tokenizer, code) is named and refused. A longer run is the same run as long as every step already
done would have had the same schedules; so is one that stopped at its target and goes on.

What a run was is said by its checkpoint, which holds hashes of config and code and the length of
the run: config.toml and environment.json are files that anybody can edit in between. Checkpoints of
older versions hold none of it; there the files are believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from speedrun.config.experiment import LENGTH, STOP, all_differences, differences, run_hash
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.train import checkpoint
from speedrun.train.log import Display
from speedrun.train.run import RunFolder
from speedrun.train.summary import Environment

START = -1  # in place of a checkpoint's step: there is none yet


def find_step(run: RunFolder, display: Display, force: bool) -> int:
    """The step of the newest whole checkpoint; START for a run stopped before its first.

    A run that came to a result saved its weights: where they are gone, something was lost.
    """
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
    if run.summary.exists() and not force:
        raise RunError(
            f"the checkpoints of {run.path} are gone, so it cannot go on; its records stay as they "
            "are: start a new run, or add --force to begin this one again with its records put "
            "aside"
        )
    display.note("no checkpoint yet: starting from step 0")
    return START


def config_before(run: RunFolder, found: checkpoint.Checkpoint) -> Config:
    """The run's config.toml, with the length that the run had when the checkpoint was made."""
    stored = run.load_config()
    train = stored.train.model_copy(update={"steps": found.meta.get("train_steps", stored.steps)})
    return stored.model_copy(update={"train": train})


def changes_forbidden(
    run: RunFolder,
    config: Config,
    identity: Mapping[str, Any],
    found: checkpoint.Checkpoint,
    code: str,
) -> list[str]:
    """Every difference to the run that left the checkpoint that makes it another run.

    `identity` is the trainer's, `code` is the hash of the code.
    """
    old = config_before(run, found)
    changes = [
        f"the {key.partition('_')[0]} has fingerprint {value[:12]} and had {found.meta[key][:12]}"
        for key, value in identity.items()
        if key.endswith("_fingerprint") and found.meta[key] != value
    ]
    then = found.meta.get("experiment_sha256")
    if then != run_hash(config):
        changes += [
            f"{key} is {now!r} and was {was!r}"
            for key, was, now in differences(old, config, but=(LENGTH, STOP))
        ]
        if then is not None and then != run_hash(old):
            changes.append(
                f"config.toml was edited since: it is not that of the checkpoint of step "
                f"{found.step}"
            )
    environment = Environment.read(run.environment)
    if environment is None or environment.code_sha256 is None:
        changes.append("environment.json does not say with which code it was run")
    else:
        made_by = {environment.code_sha256, found.meta.get("code_sha256", code)} - {code}
        changes += [f"the code has hash {code[:12]} and had {one[:12]}" for one in sorted(made_by)]
    if config.steps < found.step:
        changes.append(f"train.steps is {config.steps} and {found.step} steps are done")
    else:
        differing = _first_difference(old, config, 0, found.step)
        if differing is not None:
            changes.append(
                f"train.steps is {config.steps} and was {old.steps}, which gives step {differing} "
                f"of the {found.step} steps done other schedules than it had"
            )
    return changes


def changes_allowed(old: Config, new: Config, step: int) -> list[str]:
    """Sentences about what changes in a run resumed at `step` without making it another one."""
    machine = [
        f"{key} is {now!r} and was {was!r}: numbers may be rounded differently from here on"
        for key, was, now in all_differences(old, new)
        if key.startswith("machine.")
    ]
    if old.steps == new.steps:
        return machine
    lengths = f"train.steps goes from {old.steps} to {new.steps}"
    first = _first_difference(old, new, step, min(old.steps, new.steps))
    if first is None:
        return [*machine, f"{lengths}; the schedules of the steps planned before stay as they were"]
    was, now = asdict(settings_at(old, first)), asdict(settings_at(new, first))
    changes = [
        f"{name.replace('_', ' ')} {now[name]} instead of {was[name]}"
        for name in was
        if was[name] != now[name]
    ]
    differ = f"schedules differ from step {first} on: {', '.join(changes)} there"
    return [*machine, f"{lengths}; {differ}"]


def _first_difference(old: Config, new: Config, start: int, stop: int) -> int | None:
    """The first step at which two lengths of the same run have different schedules."""
    if old.steps == new.steps:
        return None
    steps = range(start, stop)
    return next((at for at in steps if settings_at(old, at) != settings_at(new, at)), None)
