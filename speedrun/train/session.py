"""One run from start to summary: folder, data, parts, warm-up, loop, checkpoint, result."""

from __future__ import annotations

import resource
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.hardware import matmul_flops
from speedrun.train import checkpoint
from speedrun.train.environment import environment
from speedrun.train.estimate import flops_per_token
from speedrun.train.keeper import NEVER, Every, Keeper
from speedrun.train.log import Display, Log, Sink
from speedrun.train.loop import Progress, forward_backward, train
from speedrun.train.recovery import restore
from speedrun.train.resume import START, extension, find_step, refuse_changes
from speedrun.train.run import RunFolder
from speedrun.train.setup import Parts, prepare, share_gradients
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
    with ExitStack() as stack:
        with world.together():
            stack.enter_context(run.locked(world.first))
            step = find_step(run, display) if options.resume and world.first else START
        step = world.from_first(step)
        with world.together():
            found = _read_checkpoint(run, step)
            progress = Progress(**found.meta["progress"]) if found else Progress()
            parts = prepare(config, dataset, world, progress.batch)
            stack.enter_context(parts.loader)
        with world.together():
            sinks = _open_folder(run, config, parts, found, options, display) if world.first else []
        parts = share_gradients(parts)
        if found:
            restore(parts, found)
        if options.warmup:
            warm_up(config, parts)
        world.barrier()  # ranks that share cores measure their peaks at the same time
        peak = sum(world.gather(matmul_flops(device=world.device, dtype=parts.dtype)))
        flops = flops_per_token(config, parts.model)
        log = Log(config, sinks, display, progress, flops, peak, world.device)
        for note in parts.notes:
            log.note(note)
        log.event("resume" if found else "start", step=progress.step, peak_flops=peak,
                  **parts.identity)  # fmt: skip
        scores = {row["step"]: row["loss"] for row in run.read_metrics("val") if row["loss"]}
        keeper = Keeper(
            run.checkpoints, options.checkpoint_every, options.keep, log.event,
            writes=world.first, scores=scores,
        )  # fmt: skip
        with Controls(options.time_limit) as controls, closing(keeper):
            code = train(config, parts, progress, log, keeper, controls)
        summary = summarize(config, parts, progress, code)
        log.event("end", step=progress.step, code=code)
        if keeper.failure:
            raise RunError(
                f"the run came to step {progress.step}, but {keeper.failure}; make room and "
                f"continue from the older one with `speedrun train --resume --run {run.path}`"
            )
        if world.first:
            run.write_summary(summary)
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


def _read_checkpoint(run: RunFolder, step: int) -> checkpoint.Checkpoint | None:
    """The checkpoint that rank 0 has found whole."""
    if step == START:
        return None
    return checkpoint.read(checkpoint.folder_of(run.checkpoints, step), verify=False)


def _open_folder(
    run: RunFolder, config: Config, parts: Parts, found: checkpoint.Checkpoint | None,
    options: Options, display: Display,
) -> list[Sink]:  # fmt: skip
    """Begin the run's folder, or take it back to the checkpoint; gives where records go."""
    here = environment(parts.world.device)
    if not options.resume:
        run.refuse_if_taken()
    elif found and not options.force:
        refuse_changes(run, config, parts, found, here["code_sha256"])
    sinks = open_sinks(options.log, run.path)
    if parts.tokenizer is not None:
        parts.tokenizer.save(run.tokenizer)
    if found is None:
        run.create(config, here)
    else:
        longer = extension(run.load_config(), config, found.step)
        if longer:
            display.note(longer)
        run.truncate_metrics(found.step, found.meta["progress"]["val_step"])
        run.describe(config, here)
    return [run, *sinks]


def peak_memory(world: World) -> dict[str, int]:
    """The most that any rank has used: allocated and reserved on a GPU, resident on a CPU."""
    if world.device.type == "cuda":
        peaks = {
            "peak_memory_bytes": torch.cuda.max_memory_allocated(world.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(world.device),
        }
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peaks = {"peak_memory_bytes": peak if sys.platform == "darwin" else 1024 * peak}
    return {key: round(max(world.gather(value))) for key, value in peaks.items()}


def summarize(config: Config, parts: Parts, progress: Progress, code: int) -> dict[str, Any]:
    tokens = progress.step * config.batch.tokens
    manifest = parts.dataset.manifest
    return {
        "recipe": config.recipe,
        "track": config.track,
        "params": sum(p.numel() for p in parts.model.parameters()),
        "steps": progress.step,
        "tokens": tokens,
        "train_seconds": progress.seconds,
        "wall_seconds": progress.wall,
        "val_loss": progress.val_loss,
        "val_bpb": progress.val_bpb,
        "val_tokens": config.validation.tokens,
        "target": config.train.target or None,
        "reached_target": progress.tokens_to_target is not None,
        "tokens_to_target": progress.tokens_to_target,
        "seconds_to_target": progress.seconds_to_target,
        "wall_seconds_to_target": progress.wall_seconds_to_target,
        "tokens_per_second": tokens / progress.seconds if progress.seconds else 0.0,
        **peak_memory(parts.world),
        "corpus_sha256": manifest.source_fingerprint if manifest else parts.dataset.fingerprint,
        "dataset_fingerprint": parts.dataset.fingerprint,
        "seed": config.train.seed,
        "world_size": parts.world.size,
        "device": str(parts.world.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rewinds": progress.rewinds,
        "stopped_early": code != 0,
        "exit_code": code,
    }
