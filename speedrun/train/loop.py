"""The training loop, and what is on the clock.

A step is `Trainer.step`: schedule, batch, forward and backward, agreement of all ranks, update.
Everything a step needs follows from its number and the batch's, so a resumed run does what the
uninterrupted one would have done.

On a GPU a step's loss is read while the next one is computed, and what was asked for is heard then.
Before anything that is off the clock, all steps are waited for.
"""

from __future__ import annotations

from speedrun.train.checkpoint_writer import CheckpointWriter
from speedrun.train.clock import Clock, Mark
from speedrun.train.health import Outcome, heard
from speedrun.train.log import Log
from speedrun.train.signals import Controls, Pending
from speedrun.train.trainer import Trainer


def train(trainer: Trainer, log: Log, checkpoints: CheckpointWriter, controls: Controls) -> int:
    """Train to the end (0) or to a stop that was asked for (its exit code)."""
    progress = trainer.progress
    clock = Clock(trainer.world.device, progress.seconds)
    # The validation of step 0 waits until the first step is done, and so needs its weights.
    weights = trainer.copy_weights() if progress.val_step < 0 else None

    def asked() -> Pending:
        pending = controls.pending()
        return pending._replace(save=pending.save or checkpoints.due(progress.step + 1))

    marks: dict[int, Mark] = {}

    def told(outcome: Outcome | None = None, *, everything: bool = False) -> Outcome | None:
        """Log what steps came to; the last of it, with what is asked for in any, `outcome` too."""
        for later in trainer.outcomes(everything=everything):
            progress.seconds = max(progress.seconds, clock.at(marks.pop(later.step)))
            log.step(progress, later)
            outcome = later.after(outcome)
        return outcome

    clock.start()  # kernels were built and code compiled before
    while not trainer.finished:
        # On the clock: the step. Its line of log counts with the next one.
        trainer.step(asked)
        marks[progress.step] = clock.mark()
        validates = weights is not None or trainer.validation_due
        border = validates or trainer.finished or checkpoints.due_at(progress.step)
        outcome = told(everything=border)
        if outcome is None or not (border or outcome.interrupts):
            continue
        outcome = told(outcome, everything=True) or outcome

        # Off the clock: the machine's peak, validation, a rewind, the copy of a checkpoint; writing
        # it overlaps steps.
        with clock.paused():
            well = not outcome.must_rewind  # else these weights are about to be left
            last = trainer.finished or outcome.exit_code is not None
            if well and (weights or last or (trainer.validation_due and log.peak_due)):
                log.peak(progress, trainer.measure_peak())
            if weights:
                with trainer.at_start(weights):
                    log.validation(progress, trainer.validate())
                weights = None
            if well and trainer.validation_due:
                log.validation(progress, trainer.validate())
            if well and validates and not trainer.finished:
                # What was asked for meanwhile is heard now, and not a whole step later.
                outcome = heard(trainer.world, outcome, controls.pending())
            if not well:
                trainer.rewind(checkpoints, log)
            elif outcome.save or trainer.finished:
                trainer.save(checkpoints)
        if outcome.exit_code is not None:
            return outcome.exit_code
    return 0
