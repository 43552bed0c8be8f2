"""The time of a step and of a run on a machine that need not be here.

Each piece of work takes its amount over the chip's rate, of which a share is reached. The shares
are a handful of numbers for all configs, fitted on the step times of published runs (`fit.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from speedrun.config.schema import Config
from speedrun.model.gpt import GPT
from speedrun.plan.chips import Chip, Node
from speedrun.plan.work import Limit, Work, work_of_run, work_of_step
from speedrun.train.estimate import flops_per_token, without_storage
from speedrun.train.memory import MIB, USABLE, Systems, passes_that_fit

SHORTEST = 1024  # tokens of a row that is offered where longer ones do not fit


@dataclass(frozen=True)
class Shares:
    """Of a chip's rates, what is reached; and how good that is, record by record."""

    reached: Mapping[Limit, float]
    left_out: Mapping[int, tuple[float, float]]  # ms: measured, and predicted by a fit without it

    @property
    def errors(self) -> list[float]:
        """Relative, of records that the fit had not seen."""
        return [abs(predicted / real - 1) for real, predicted in self.left_out.values()]

    def seconds(self, chip: Chip, work: Work) -> float:
        return work.amount / rate(chip, work.limit) / self.reached[work.limit]


def rate(chip: Chip, limit: Limit) -> float:
    """What a chip does of it in a second at the best; of steps a share is how many could wait."""
    rates = {"memory": chip.memory_rate, "link": chip.link_rate, "steps": 1.0}
    return rates.get(limit, chip.flops)


@cache
def fitted() -> Shares:
    text = files("speedrun.plan").joinpath("shares.json").read_text(encoding="utf-8")
    found = json.loads(text)
    left_out = {int(record): (one[0], one[1]) for record, one in found["left_out_ms"].items()}
    return Shares(found["reached"], left_out)


@dataclass(frozen=True)
class Plan:
    """What a run is expected to take."""

    node: Node
    config: Config
    microbatches: int
    parts: Mapping[str, float]  # seconds of the mean step, by what they go to
    first_step: float  # seconds; a growing window makes later steps longer
    middle_step: float
    last_step: float
    memory: Mapping[str, float]  # bytes of a rank, by what they hold
    room: float  # bytes that a rank may fill
    flops_per_token: int

    @property
    def step(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.config.batch.tokens / self.step

    @property
    def mfu(self) -> float:
        """FLOPs of the model itself over what the chips could have done."""
        peak = self.node.count * self.node.chip.flops
        return self.flops_per_token * self.tokens_per_second / peak

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.room

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.config.recipe,
            "track": self.config.track,
            "on": self.node.name,
            "steps": self.config.steps,
            "step_ms": 1000 * self.step,
            "first_step_ms": 1000 * self.first_step,
            "last_step_ms": 1000 * self.last_step,
            "train_seconds": self.config.steps * self.step,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "microbatches": self.microbatches,
            "memory_mib": self.memory_bytes / MIB,
            "fits": self.fits,
            "parts": {part: 1000 * seconds for part, seconds in self.parts.items()},
            "memory": {what: size / MIB for what, size in self.memory.items()},
        }


class Rates(Protocol):
    """What a piece of work takes on a chip: by shares of its rates, or as measured."""

    def seconds(self, chip: Chip, work: Work) -> float: ...


def plan(config: Config, vocab_size: int, node: Node, shares: Shares | None = None) -> Plan:
    """The fewest microbatches that fit; those of the config, where it states them."""
    model = without_storage(config, vocab_size)
    shares_gradients = config.machine.share_gradients
    systems = Systems(ranks=node.count, shares_gradients=shares_gradients)
    microbatches, memory = passes_that_fit(config, model, systems, node.chip.memory)
    return predict(config, model, node, systems, shares or fitted(), microbatches=microbatches,
                   memory=memory, room=USABLE * node.chip.memory)  # fmt: skip


def predict(
    config: Config,
    model: GPT,
    node: Node,
    systems: Systems,
    rates: Rates,
    *,
    microbatches: int,
    memory: Mapping[str, float],
    room: float,
) -> Plan:
    """Of `model` the shapes alone are looked at."""

    def seconds(works: Iterable[Work]) -> dict[str, float]:
        found: dict[str, float] = {}
        for work in works:
            found[work.part] = found.get(work.part, 0.0) + rates.seconds(node.chip, work)
        found["waits"] *= microbatches  # each pass is launched by itself
        return found

    def of_step(step: int) -> float:
        return sum(seconds(work_of_step(config, model, systems, step)).values())

    return Plan(
        node=node,
        config=config,
        microbatches=microbatches,
        parts=seconds(work_of_run(config, model, systems)),
        first_step=of_step(0),
        middle_step=of_step(config.steps // 2),
        last_step=of_step(config.steps - 1),
        memory=memory,
        room=room,
        flops_per_token=flops_per_token(config, model),
    )


def duration(seconds: float) -> str:
    """With the two largest of its units."""
    whole = round(seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
