"""One run from its folder to its summary: lock, checkpoint, trainer, log, loop, result."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, cast

import torch

from speedrun.config.own_code import own_code
from speedrun.config.schema import Config
from speedrun.data.fit import Fitted, name_of
from speedrun.data.inspect import prompt_of
from speedrun.errors import ConfigError, RunError
from speedrun.hardware import peak_memory_bytes
from speedrun.optim.errors import OptimError
from speedrun.train import checkpoint
from speedrun.train.checkpoint_writer import CheckpointWriter
from speedrun.train.environment import environment, with_earlier
from speedrun.train.estimate import flops_per_token
from speedrun.train.guard import Sink
from speedrun.train.log import Display, Log
from speedrun.train.loop import train
from speedrun.train.progress import Progress
from speedrun.train.request import Request
from speedrun.train.resume import (
    START,
    changes_allowed,
    changes_forbidden,
    config_before,
    find_step,
)
from speedrun.train.run import RunFolder
from speedrun.train.signals import Controls
from speedrun.train.sinks import Loggers, Start, check_loggers
from speedrun.train.summary import Environment, Summary
from speedrun.train.trained_on import TrainedOn
from speedrun.train.trainer import Trainer
from speedrun.train.world import World

USUAL_THRESHOLD = (700, 10, 10)  # Python's own


def run_training(
    config: Config,
    run: RunFolder,
    dataset: Path,
    display: Display,
    world: World,
    request: Request,
    fitted: Fitted | None = None,
) -> tuple[Summary, int]:
    """Train to the end or a requested stop; leaves a checkpoint, gives (summary, exit code).

    What may fail by a user's mistake stands in `world.together()`, where no rank waits for another.
    """
    with ExitStack() as stack:
        step = START
        with world.together():
            if world.first:
                check_loggers(request.log)
                stack.enter_context(run.locked())
                if request.resume:
                    step = find_step(run, display, request.force)
                else:
                    run.refuse_if_taken()
        step = world.from_first(step)
        with world.together():
            found = None if step == START else run.checkpoint(step)
            progress = Progress(**found.meta["progress"]) if found else Progress()
            if request.stop_after is not None and progress.step >= request.stop_after:
                raise ConfigError(
                    f"--stop-after {request.stop_after} cannot be used: {progress.step} steps of "
                    f"{config.steps} are done; give more"
                )
            trainer = Trainer(config, world, dataset, progress, request.stop_after)
            stack.enter_context(trainer.loader)
        loggers = stack.enter_context(Loggers(display.note))
        sinks: Mapping[str, Sink] = {}
        with world.together():
            if world.first:
                sinks = _open_folder(run, trainer, found, request, display, loggers, fitted)
        trainer.share_gradients()
        if found:
            trainer.restore(found)
        if request.warm_up and trainer.needs_warm_up:
            trainer.warm_up()
        log = _open_log(trainer, sinks, display, resumed=found is not None)
        checkpoints = CheckpointWriter(
            run.checkpoints, request.checkpoint_every, request.keep, log.event,
            writes=world.first, val_losses=run.validation_losses(),
        )  # fmt: skip
        # What was imported and built stays; garbage of steps is looked for beside it, not in it.
        gc.freeze()
        gc.set_threshold(*USUAL_THRESHOLD)
        with Controls(request.time_limit) as controls, closing(checkpoints):
            try:
                code = train(trainer, log, checkpoints, controls)
            except OptimError as error:  # of an optimizer of somebody else's, on every rank
                with world.together():
                    raise RunError(f"step {progress.step}: {error}") from error
        summary = summarize(trainer, code)
        made = trainer.compilations.as_dict() if trainer.compiles else {}
        log.event("end", step=progress.step, code=code, peak_seconds=progress.peak_seconds, **made)
        if complaint := trainer.compilations.complaint:
            display.note(complaint)
        if checkpoints.failure:
            raise RunError(
                f"the run came to step {progress.step}, but {checkpoints.failure}; make room and "
                f"continue from the older one with `{run.resume_command}`"
            )
        if world.first:
            summary = summary.model_copy(update={"metrics_sha256": run.metrics_digest()})
            run.write_summary(summary)
        loggers.ended(code, summary.as_dict())
    return summary, code


def _open_folder(
    run: RunFolder,
    trainer: Trainer,
    found: checkpoint.Checkpoint | None,
    request: Request,
    display: Display,
    loggers: Loggers,
    fitted: Fitted | None,
) -> Mapping[str, Sink]:
    """Begin the run's folder, or take it back to the checkpoint; gives where records go."""
    config, here = trainer.config, environment(trainer.world.device, trainer.kernels)
    forced = (
        changes_forbidden(run, config, trainer.identity, found, here["code_sha256"])
        if found
        else []
    )
    if forced and not request.force:
        raise RunError(
            f"{run.path} cannot be resumed as it was: {'; '.join(forced)}; undo that, or add "
            "--force to go on all the same, which stays written in the run"
        )
    trainer.identity["code_sha256"] = here["code_sha256"]
    step = found.step if found else None
    records = len(run.read_metrics()) if found and request.log else 0
    opened = loggers.open(request.log, Start(run.path, config, step, records))
    if trainer.data.tokenizer is not None:
        trainer.data.tokenizer.save(run.tokenizer)
    for sentence in run.code_changed():
        display.note(sentence)
    run.keep_code(config)
    if found is None:
        run.create(config, here, _trained_on(trainer, fitted))
    else:
        for sentence in changes_allowed(config_before(run, found), config, found.step):
            display.note(sentence)
        run.truncate_metrics(found.step, found.meta["progress"]["val_step"])
        at_step = [f"at step {found.step}: {sentence}" for sentence in forced]
        # In the folder, and in every checkpoint from here on: neither alone can lose it.
        known = [*trainer.progress.forced, *run.read_forced(), *at_step]
        trainer.progress.forced = [*dict.fromkeys(known)]
        if trainer.progress.forced:
            run.write_forced(trainer.progress.forced)
        run.describe(config, with_earlier(here, Environment.read(run.environment)))
    return {"metrics": run, **opened}


def _here() -> str:
    with suppress(OSError):  # somebody deleted it
        return str(Path.cwd())
    return ""


def _trained_on(trainer: Trainer, fitted: Fitted | None) -> TrainedOn:
    config, data = trainer.config, trainer.data
    manifest = data.dataset.manifest
    return TrainedOn(
        name=name_of(config),
        sources=list(manifest.sources) if manifest else ["public shards"],
        usual_text=fitted is None or fitted.usual_text,
        shrunk={key: list(pair) for key, pair in (fitted.shrunk if fitted else {}).items()},
        prompt=prompt_of(data.dataset, data.tokenizer) if data.tokenizer else "",
        begun_in=_here(),
    )


def _open_log(
    trainer: Trainer, sinks: Mapping[str, Sink], display: Display, *, resumed: bool
) -> Log:
    """The log, with the first lines said."""
    log = Log(
        trainer.config,
        sinks,
        display,
        start_seconds=trainer.progress.seconds,
        flops_per_token=flops_per_token(trainer.config, trainer.model),
        device=trainer.world.device,
        last_step=trainer.last_step,
    )
    for note in trainer.notes:
        display.note(note)
    kind = "resume" if resumed else "start"
    totals = {
        f"{name}_{what}": getattr(trainer.data.dataset.split(name), what)
        for name in ("train", "val")
        for what in ("tokens", "documents", "bytes")
    }
    log.event(kind, step=trainer.progress.step, **trainer.identity, **totals)
    return log


def summarize(trainer: Trainer, code: int) -> Summary:
    """The result; all ranks call this, for the memory of the largest."""
    config, world, progress = trainer.config, trainer.world, trainer.progress
    dataset, tokens = trainer.data.dataset, progress.step * config.batch.tokens
    crossed, below = progress.crossed, progress.first_below
    peaks = {"peak_memory_bytes": peak_memory_bytes()}
    if world.device.type == "cuda":
        peaks = {
            "peak_memory_bytes": torch.cuda.max_memory_allocated(world.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(world.device),
        }
    summary = Summary(
        recipe=config.recipe,
        track=config.track,
        dataset=name_of(config),
        params=sum(p.numel() for p in trainer.model.parameters()),
        steps=progress.step,
        tokens=tokens,
        train_seconds=progress.seconds,
        wall_seconds=progress.wall,
        val_loss=progress.val_loss,
        val_bpb=progress.val_bpb,
        val_tokens=trainer.data.validation.tokens,
        target=config.train.target or None,
        reached_target=crossed is not None,
        tokens_to_target=crossed.tokens(config.batch.tokens) if crossed else None,
        steps_to_target=crossed.steps if crossed else None,
        seconds_to_target=crossed.seconds if crossed else None,
        wall_seconds_to_target=crossed.wall_seconds if crossed else None,
        cell_steps=crossed.cell if crossed else None,
        first_validation_tokens=None if below is None else below * config.batch.tokens,
        tokens_per_second=tokens / progress.seconds if progress.seconds else 0.0,
        peak_share=progress.peak_share,
        peak_seconds=round(progress.peak_seconds, 6),
        val_seconds=round(progress.val_seconds, 6),
        **{key: cast(Any, round(max(world.gather(value)))) for key, value in peaks.items()},
        corpus_sha256=dataset.source_fingerprint,
        dataset_fingerprint=dataset.fingerprint,
        seed=config.train.seed,
        world_size=world.size,
        device=str(world.device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        rewinds=progress.rewinds,
        forced=progress.forced,
        stopped_early=code != 0 or not trainer.complete,
        exit_code=code,
    )
    used = own_code(config)
    return summary.model_copy(update={"own_code": used}) if used else summary
