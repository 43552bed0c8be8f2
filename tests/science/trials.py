"""Runs of a tuning that are made up: a moment each, and a loss that follows from their values."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from speedrun.config.experiment import all_values
from speedrun.config.keys import with_elements
from speedrun.config.resolve import resolve
from speedrun.train.environment import code_hash
from speedrun.train.run import RunFolder
from tests.report.made import made_summary

BEST = {"optimizer.head.lr": 0.0123, "optimizer.hidden.lr": 0.00456}


class MadeChild:
    """A run without training: its loss is a bowl in the logarithms of two rates.

    A run that fails says why, and one that gave up has logged that.
    """

    seconds = 0.0
    begun: ClassVar[list[list[str]]]  # the words of all
    best: ClassVar[dict[str, float]] = BEST
    luck: ClassVar[Callable[[dict[str, Any], int], float]] = staticmethod(lambda _, __: 0.0)
    fails: ClassVar[Callable[[dict[str, Any]], str]] = staticmethod(lambda _: "")

    def __init__(self, words: Sequence[str]) -> None:
        type(self).begun.append(list(words))
        self._words, self._end = words, time.monotonic() + self.seconds
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and time.monotonic() >= self._end:
            self._code = self._finish()
        return self._code

    def _finish(self) -> int:
        options = dict(pairwise(self._words))
        settings = self._words[2 : self._words.index("--track")]
        seed = int(options["--seed"])
        config = resolve(self._words[1], options["--track"], settings, {"train.seed": seed}).config
        values = with_elements(all_values(config))
        run = RunFolder(Path(options["--run"]))
        run.create(config, {"code_sha256": code_hash()})
        if kind := type(self).fails(values):
            if kind == "gave_up":
                run.log("gave_up", step=3, reason="not finite")
            return 1
        loss = 3.0 + 0.001 * (seed - 1000) + type(self).luck(values, seed)
        loss += sum(math.log(values[key] / best) ** 2 for key, best in self.best.items())
        run.write_summary(made_summary(val_loss=loss, seed=seed))
        return 0

    def terminate(self) -> None:
        if self._code is None:
            self._code = 128 + signal.SIGTERM

    kill = terminate

    def last_words(self) -> str:
        return "no memory left"
