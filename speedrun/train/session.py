"""One run from start to summary: folder, data, parts, warm-up, loop, checkpoint, result."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speedrun.config.files import flatten
from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.hardware import matmul_flops
from speedrun.model.window import window_at
from speedrun.train import checkpoint
from speedrun.train.clock import Clock
from speedrun.train.environment import environment
from speedrun.train.estimate import flops_per_token
from speedrun.train.keeper import NEVER, Every, Keeper
from speedrun.train.log import Display, Log, Sink
from speedrun.train.loop import Progress, forward_backward, train
from speedrun.train.run import RunFolder
from speedrun.train.setup import Parts, learning_rate_multiplier, momentum_at, prepare
from speedrun.train.signals import Controls
from speedrun.train.sinks import open_sinks
from speedrun.train.world import World


@dataclass(frozen=True)
class Options:
    """How to run, as against what: none of it changes the result."""

    resume: bool = False
    force: bool = False  # resume although code, data or config differ
    checkpoint_every: Every = NEVER
    keep: int = 2
    time_limit: float | None = None
    log: tuple[str, ...] = ()
    warmup: bool = True


def run_training(
    config: Config, run: RunFolder, dataset: Path, display: Display, world: World, options: Options
) -> tuple[dict[str, Any], int]:
    """Train to the end or a requested stop; leaves a checkpoint, gives (summary, exit code)."""
    found = _find_checkpoint(run, display) if options.resume else None
    progress = Progress(**found.meta["progress"]) if found else Progress()
    parts = prepare(config, dataset, world, progress.batch)
    with parts.loader, run.locked(world.first):
        sinks: list[Sink] = []
        if world.first:
            _open_folder(run, config, parts, found, progress, options)
            sinks = [run, *open_sinks(options.log, run.path)]
        if found:
            parts.model.load_state_dict(found.model())
            parts.optimizer.import_state(found.optimizer())
        if options.warmup:
            warm_up(config, parts)
        peak = matmul_flops(device=world.device, dtype=parts.dtype)
        log = Log(config, sinks, display, progress, flops_per_token(config, parts.model), peak)
        for note in parts.notes:
            log.note(note)
        log.event("resume" if found else "start", step=progress.step, peak_flops=peak,
                  **parts.identity)  # fmt: skip
        keeper = Keeper(
            run.checkpoints, options.checkpoint_every, options.keep, log.event, writes=world.first
        )
        try:
            with Controls(options.time_limit) as controls:
                code = train(config, parts, progress, log, keeper, controls)
        finally:
            keeper.close()
        summary = summarize(config, parts, progress, stopped=code != 0)
        if world.first:
            run.write_summary(summary)
        log.event("end", step=progress.step, code=code)
    return summary, code


def warm_up(config: Config, parts: Parts) -> None:
    """One pass over made-up tokens: compiles, allocates, and finds what cannot work, off the clock.

    No weight, moment or random number is touched, so a run is the same with and without it.
    """
    rows = config.batch.tokens // config.batch.length // parts.world.size
    batch = parts.dummy_batch(rows)
    parts.set_schedule(0)
    forward_backward(parts, batch)
    parts.optimizer.zero_grad(set_to_none=True)


def _find_checkpoint(run: RunFolder, display: Display) -> checkpoint.Checkpoint:
    found, skipped = checkpoint.latest(run.checkpoints)
    for sentence in skipped:
        display.note(f"passed over: {sentence}")
    if found is None:
        raise RunError(f"{run.path} has no whole checkpoint to resume from")
    return found


def _open_folder(
    run: RunFolder, config: Config, parts: Parts, found: checkpoint.Checkpoint | None,
    progress: Progress, options: Options,
) -> None:  # fmt: skip
    here = environment(parts.world.device)
    if found is None:
        run.create(config)
        if parts.tokenizer is not None:
            parts.tokenizer.save(run.tokenizer)
    else:
        changes = _changes(run, config, parts, found, here["code_sha256"])
        changes += _schedule_changes(run.load_config(), config, progress.step)
        if changes and not options.force:
            raise RunError(
                f"{run.path} cannot be resumed as it was: {'; '.join(changes)}; undo that, or add "
                "--force to go on all the same"
            )
        run.config.write_text(run.config_text(config), encoding="utf-8")
        run.truncate_metrics(progress.step, progress.val_step)
    run.environment.write_text(json.dumps(here, indent=2) + "\n", encoding="utf-8")


def _changes(
    run: RunFolder, config: Config, parts: Parts, found: checkpoint.Checkpoint, code: str
) -> list[str]:
    """What differs between the run that left the checkpoint and the one that would go on."""
    changes = [
        f"the {key.partition('_')[0]} has fingerprint {value[:12]} and had {found.meta[key][:12]}"
        for key, value in parts.identity.items()
        if found.meta[key] != value
    ]
    before = dict(flatten(run.load_config().model_dump()))
    changes += [
        f"{key} is {value!r} and was {before[key]!r}"
        for key, value in flatten(config.model_dump())
        if before[key] != value and key not in ("data.dir", "train.steps", "train.threads")
    ]
    try:
        then = json.loads(run.environment.read_text())["code_sha256"]
    except (OSError, ValueError, KeyError):
        then = code
    if then != code:
        changes.append(f"the code has hash {code[:12]} and had {then[:12]}")
    return changes


def _schedule_changes(old: Config, new: Config, step: int) -> list[str]:
    """A run may be made longer as long as the steps already done would have been the same."""

    def settings(config: Config, at: int) -> tuple[float, float, int | None]:
        return (
            learning_rate_multiplier(config, at),
            momentum_at(config, at),
            window_at(config, at),
        )

    if new.steps < step:
        return [f"train.steps is {new.steps} and {step} steps are done"]
    for at in range(step if old.steps != new.steps else 0):
        if settings(old, at) != settings(new, at):
            return [
                f"train.steps is {new.steps} and was {old.steps}, which gives step {at} other "
                "schedules than it had"
            ]
    return []


def peak_memory(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        return {
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_memory_bytes": peak if sys.platform == "darwin" else 1024 * peak}


def summarize(config: Config, parts: Parts, progress: Progress, stopped: bool) -> dict[str, Any]:
    tokens = progress.step * config.batch.tokens
    manifest = parts.dataset.manifest
    return {
        "recipe": config.recipe,
        "track": config.track,
        "params": sum(p.numel() for p in parts.model.parameters()),
        "steps": progress.step,
        "tokens": tokens,
        "train_seconds": progress.seconds,
        "wall_seconds": Clock.wall(),
        "val_loss": progress.val_loss,
        "val_bpb": progress.val_bpb,
        "val_tokens": config.validation.tokens,
        "target": config.train.target or None,
        "reached_target": progress.tokens_to_target is not None,
        "tokens_to_target": progress.tokens_to_target,
        "seconds_to_target": progress.seconds_to_target,
        "wall_seconds_to_target": progress.wall_seconds_to_target,
        "tokens_per_second": tokens / progress.seconds if progress.seconds else 0.0,
        **peak_memory(parts.world.device),
        "corpus_sha256": manifest.source_fingerprint if manifest else parts.dataset.fingerprint,
        "dataset_fingerprint": parts.dataset.fingerprint,
        "seed": config.train.seed,
        "world_size": parts.world.size,
        "device": str(parts.world.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rewinds": progress.rewinds,
        "stopped_early": stopped,
    }
