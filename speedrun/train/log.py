"""What a run says: `metrics.jsonl` for machines, a live panel or plain lines for people.

`Log` turns the loop's facts into rows of metrics once, on rank 0; sinks store them and a `Display`
draws them. Events that need a person's attention are also said as a sentence.

Shares of peak are those of a stretch of steps against the peak measured beside it, off the clock:
on a machine whose speed changes by the minute, a peak measured once would say nothing of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from speedrun.config.schema import Config
from speedrun.limits import memory_available, memory_bytes
from speedrun.train.guard import Guarded, Sink
from speedrun.train.health import Outcome
from speedrun.train.progress import Progress
from speedrun.train.validate import Validation

SENTENCES = {
    "nonfinite": "step {step}: loss or gradient is not finite; the update is left out on all ranks",
    "spike": "step {step}: loss {loss:.4f} is a spike, {z} standard deviations above the last ones",
    "rewind": "back to the checkpoint of step {step}, going on with the data after batch {batch}",
    "checkpoint_failed": "{reason}; the run goes on with the older checkpoints",
}
DATA_BOUND = 0.05  # share of training time spent waiting for data that is worth a word
DIVERGING = 1.0  # nats above the best of the last losses
MEMORY_LOW = 0.05  # share of memory still free
PEAK_PAUSE = 50  # times the work that fits in measuring a peak, before it is measured again


class Display:
    """What a run shows; this one shows nothing, for the ranks that keep quiet."""

    def note(self, text: str) -> None: ...
    def step(self, view: StepView) -> None: ...
    def validation(self, view: StepView) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Peak:
    """What all ranks could do together at some moment of a run, and the seconds it took to see."""

    flops: float
    seconds: float


@dataclass(frozen=True)
class StepView:
    """One step as people see it."""

    step: int
    total: int
    loss: float
    lr_multiplier: float  # of the peak rates
    seconds: float
    ms: float
    tokens_per_second: float
    peak_share: float | None  # of the steps since the last peak was measured
    wait_share: float
    eta: float
    val_loss: float | None
    val_bpb: float | None
    val_tokens: int
    target: float  # validation loss; 0: none
    tokens_to_target: int | None  # where the validations cross it; None: not reached yet
    verdict: str


class Log:
    def __init__(
        self,
        config: Config,
        sinks: Mapping[str, Sink],  # by the names that notes call them
        display: Display,
        *,
        start_seconds: float = 0.0,  # of training before this process
        flops_per_token: int,
        device: torch.device,
        last_step: int | None = None,  # None: the last of the config
    ) -> None:
        self._config, self._display = config, display
        self._sinks = [Guarded(name, sink, display.note) for name, sink in sinks.items()]
        self._flops_per_step, self._device = flops_per_token * config.batch.tokens, device
        self._last_step = last_step or config.steps
        self._peak: Peak | None = None  # as last measured, when the present stretch began
        self._stretch_from, self._stretch_steps = start_seconds, 0
        self._first_seconds = self._last_seconds = start_seconds
        self._steps = 0
        self._free = 1.0  # memory, of a GPU looked at off the clock: its driver takes its time
        self._loss, self._rate, self._ms, self._wait = float("nan"), 0.0, 0.0, 0.0

    def event(self, kind: str, **values: Any) -> None:
        for sink in self._sinks:
            sink.log(kind, **values)
        if kind in SENTENCES:
            self._display.note(SENTENCES[kind].format(**values))

    def step(self, progress: Progress, outcome: Outcome) -> None:
        """A step and its loss, with the seconds as `progress` has them when it is told."""
        if self._device.type == "cpu":
            self._free = memory_free(self._device)
        ms = 1000 * (progress.seconds - self._last_seconds)
        rate = outcome.settings.learning_rate_multiplier
        self._last_seconds, self._steps = progress.seconds, self._steps + 1
        self._stretch_steps += 1
        self._loss, self._rate, self._ms, self._wait = outcome.loss, rate, ms, outcome.waited
        view = self._view(progress, outcome.step)
        self.event(
            "train",
            **self._where(progress, outcome.step),
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr_multiplier=rate,
            ms=round(ms, 3),
            wait_seconds=round(outcome.waited, 6),
            peak_share=view.peak_share,
        )
        self._display.step(view)
        if not outcome.finite:
            self.event("nonfinite", step=outcome.step, batch=outcome.batch)
        elif outcome.spike is not None:
            self.event("spike", step=outcome.step, loss=outcome.loss, z=round(outcome.spike, 2))

    def validation(self, progress: Progress, result: Validation) -> None:
        self._free = memory_free(self._device)
        self.event(
            "val",
            **self._where(progress, progress.step),
            loss=result.loss,
            bits_per_byte=result.bits_per_byte,
            val_tokens=result.tokens,
        )
        self._display.validation(self._view(progress, progress.step))

    def peak(self, progress: Progress, measured: Peak) -> None:
        """A peak ends one stretch of steps and begins the next; each counts with both of its ends.

        The first stretch began without one: a first step need not wait for a measurement.
        """
        seconds, done = self._stretch(progress)
        ends = [peak.flops for peak in (self._peak, measured) if peak]
        progress.count_peak(done, seconds * sum(ends) / len(ends), measured.seconds)
        share = done / seconds * len(ends) / sum(ends) if seconds else None
        self.event(
            "peak",
            **self._where(progress, progress.step),
            peak_flops=measured.flops,
            peak_share=share,
            peak_seconds=round(measured.seconds, 6),
        )
        self._peak = measured
        self._stretch_from, self._stretch_steps = progress.seconds, 0

    @property
    def peak_due(self) -> bool:
        """Whether enough was trained since the last peak for another to cost next to nothing.

        It follows from numbers that all ranks share.
        """
        done = self._stretch_steps * self._flops_per_step
        return self._peak is None or done >= PEAK_PAUSE * self._peak.flops * self._peak.seconds

    def _stretch(self, progress: Progress) -> tuple[float, int]:
        """Seconds and FLOPs of the steps since the last peak was measured."""
        seconds = progress.seconds - self._stretch_from
        return seconds, self._stretch_steps * self._flops_per_step

    def _where(self, progress: Progress, step: int) -> Mapping[str, Any]:
        return {
            "step": step,
            "tokens": step * self._config.batch.tokens,
            "seconds": round(progress.seconds, 6),
            "wall_seconds": round(progress.wall, 3),
        }

    def _view(self, progress: Progress, step: int) -> StepView:
        seconds = progress.seconds - self._first_seconds
        each = seconds / self._steps if self._steps else 0.0
        speed = self._config.batch.tokens / each if each else 0.0
        wait_share = self._wait / seconds if seconds else 0.0
        stretch, done = self._stretch(progress)
        crossed = progress.crossed
        return StepView(
            step=step,
            total=self._last_step,
            loss=self._loss,
            lr_multiplier=self._rate,
            seconds=progress.seconds,
            ms=self._ms,
            tokens_per_second=speed,
            peak_share=done / stretch / self._peak.flops if self._peak and stretch > 0 else None,
            wait_share=wait_share,
            eta=each * (self._last_step - step),
            val_loss=progress.val_loss,
            val_bpb=progress.val_bpb,
            val_tokens=self._config.validation.tokens,
            target=self._config.train.target,
            tokens_to_target=crossed.tokens(self._config.batch.tokens) if crossed else None,
            verdict=_verdict(progress, self._loss, wait_share, self._free),
        )


def memory_free(device: torch.device) -> float:
    """The share of the device's memory that is still to be had."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + kept) / total
    return memory_available() / memory_bytes()


def _verdict(progress: Progress, loss: float, wait_share: float, free: float) -> str:
    """What is off, in two words; empty when nothing is."""
    off = []
    if wait_share > DATA_BOUND:
        off.append("data-bound")
    if progress.recent and not loss < min(progress.recent) + DIVERGING:
        off.append("diverging")
    if free < MEMORY_LOW:
        off.append("memory nearly full")
    return ", ".join(off)
