"""After a step: save if due, and rewind when the run is ill.

One non-finite step is skipped. After `NONFINITE_STEPS` in a row the weights are taken back to the
last good checkpoint while the data moves on, and after `REWINDS` of those the run gives up with a
report. Every decision follows from numbers all ranks share, so they act alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.train import checkpoint
from speedrun.train.health import Agreement, remember, spike
from speedrun.train.keeper import Keeper
from speedrun.train.log import Log
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
        meta = {"step": progress.step, "progress": progress.plain(), **parts.identity}
        # Ranks hold shares of the optimizer's state, so all of them take part in exporting it.
        self._keeper.save(meta, parts.model.state_dict(), parts.optimizer.export_state())

    def _rewind(self) -> None:
        progress, parts = self._progress, self._parts
        self._keeper.finish()
        parts.world.barrier()
        found, _ = checkpoint.latest(self._keeper.root)
        ill = (
            f"the loss or a gradient was not finite in {progress.nonfinite} steps in a row, "
            f"the last at step {progress.step} (batch {progress.batch - 1})"
        )
        if found is None:
            raise RunError(
                f"{ill}, and there is no checkpoint to go back to; lower the learning rates, or "
                "use --checkpoint-every to have one"
            )
        if progress.rewinds >= REWINDS:
            raise RunError(
                f"{ill}, after {REWINDS} rewinds already; the last good checkpoint is "
                f"{found.folder}; lower the learning rates and start from there"
            )
        parts.model.load_state_dict(found.model())
        parts.optimizer.import_state(found.optimizer())
        step = progress.step
        saved = found.meta["progress"]
        progress.step, progress.val_step = saved["step"], saved["val_step"]
        progress.recent[:] = saved["recent"]
        progress.nonfinite, progress.rewinds = 0, progress.rewinds + 1
        self._log.event("rewind", step=progress.step, from_step=step, batch=progress.batch)
