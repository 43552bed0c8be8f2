"""After a step: save if due, and rewind when the run is ill.

One non-finite step is skipped. After `NONFINITE_STEPS` in a row the weights are taken back to the
last good checkpoint, one saved while the run was well, and the data moves on; after `REWINDS` of
those the run gives up with a report. Every decision follows from numbers all ranks share, so they
act alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.optim.errors import OptimError
from speedrun.train import checkpoint
from speedrun.train.health import Agreement, remember, spike
from speedrun.train.keeper import Keeper
from speedrun.train.log import Log
from speedrun.train.run import finite
from speedrun.train.setup import Parts

if TYPE_CHECKING:
    from speedrun.train.loop import Progress

NONFINITE_STEPS = 3
REWINDS = 3


class Recovery:
    def __init__(
        self, config: Config, parts: Parts, progress: Progress, log: Log, keeper: Keeper
    ) -> None:
        self._config, self._parts, self._progress = config, parts, progress
        self._log, self._keeper = log, keeper

    def after_step(self, agreed: Agreement, *, save: bool) -> None:
        progress = self._progress
        if agreed.finite:
            progress.nonfinite = 0
            z = spike(progress.recent, agreed.loss)
            if z is not None:
                self._log.event("spike", step=progress.step, loss=agreed.loss, z=round(z, 2))
            remember(progress.recent, agreed.loss)
            if save:
                self.save()
            return
        progress.nonfinite += 1
        self._log.event("nonfinite", step=progress.step, batch=progress.batch - 1)
        if progress.nonfinite >= NONFINITE_STEPS:
            self._rewind()
        elif save:
            self.save()

    def save(self) -> None:
        progress, parts = self._progress, self._parts
        meta = {"step": progress.step, "progress": finite(progress.plain()), **parts.identity}
        # Ranks hold shares of the optimizer's state, so all of them take part in exporting it.
        self._keeper.save(meta, parts.model.state_dict(), parts.optimizer.export_state())

    def _rewind(self) -> None:
        progress, parts, keeper = self._progress, self._parts, self._keeper
        keeper.finish()
        found = None
        if parts.world.first:
            found, _ = checkpoint.latest(keeper.root, _was_well)
        step = parts.world.from_first(found.step if found else -1)
        ill = (
            f"the loss or a gradient was not finite in {progress.nonfinite} steps in a row, "
            f"the last at step {progress.step} (batch {progress.batch - 1})"
        )
        if step < 0:
            self._give_up(
                f"{ill}, and there is no checkpoint to go back to; lower the learning rates, or "
                "use --checkpoint-every to have one"
            )
        folder = checkpoint.folder_of(keeper.root, step)
        if progress.rewinds >= REWINDS:
            keeper.forget_after(step)
            self._give_up(
                f"{ill}, after {REWINDS} rewinds already; the last good checkpoint is {folder}; "
                "start anew with lower learning rates, or look at the data of these batches"
            )
        found = found or checkpoint.read(folder, verify=False)
        restore(parts, found)
        self._log.event("rewind", step=step, from_step=progress.step, batch=progress.batch)
        # All is as it was saved, but for the data, the clocks and the count of rewinds.
        saved = {**found.meta["progress"], "nonfinite": 0, "rewinds": progress.rewinds + 1}
        for key in saved.keys() - {"batch", "seconds", "earlier_wall"}:
            setattr(progress, key, saved[key])
        parts.world.barrier()  # all have read it before any of them is removed
        keeper.forget_after(step)

    def _give_up(self, report: str) -> NoReturn:
        self._log.event("gave_up", step=self._progress.step, reason=report)
        with self._parts.world.together():
            raise RunError(report)
        raise AssertionError("no rank comes here")


def _was_well(found: checkpoint.Checkpoint) -> bool:
    return not found.meta["progress"]["nonfinite"]


def restore(parts: Parts, found: checkpoint.Checkpoint) -> None:
    """Weights and moments of a checkpoint."""
    try:
        parts.model.load_state_dict(found.model())
        parts.optimizer.import_state(found.optimizer())
    except (RuntimeError, OptimError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"checkpoint {found.folder} does not fit this model: {reason}") from None
