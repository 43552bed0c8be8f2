"""Chips as their makers state them: rates without sparsity, memory, and the link between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from speedrun.errors import ConfigError, quoted

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    name: str
    flops: float  # a second, of bf16 products summed up in fp32
    memory_rate: float  # bytes a second
    link_rate: float  # bytes a second that one sends to its neighbour while it receives as many
    memory: int  # bytes


CHIPS = {
    chip.name.lower(): chip
    for chip in (
        Chip("H100", 989e12, 3.35e12, 450e9, 80 * GIB),
        Chip("A100", 312e12, 2.039e12, 300e9, 80 * GIB),
        Chip("RTX4090", 165.2e12, 1.008e12, 25e9, 24 * GIB),
    )
}


@dataclass(frozen=True)
class Node:
    """Some chips of one kind, a rank on each."""

    chip: Chip
    count: int

    @staticmethod
    def parse(text: str) -> Node:
        """'8xH100', or 'H100' for one."""
        found = re.fullmatch(r"(?:([0-9]{1,4})\s*x\s*)?([a-z][\w -]*)", text.strip().lower())
        chip = CHIPS.get(re.sub(r"[\s_-]", "", found[2])) if found else None
        if found is None or chip is None or found[1] == "0":
            names = ", ".join(chip.name for chip in CHIPS.values())
            raise ConfigError(
                f"--on {quoted(text)} is no machine that is known: a number of chips and their "
                f"kind, as 8xH100; the kinds are {names}; or cpu for this machine"
            )
        return Node(chip, int(found[1] or 1))

    @staticmethod
    def of_device(named: str, count: int) -> Node | None:
        """By what a driver calls its GPUs, 'NVIDIA H100 80GB HBM3'; None for a kind not known."""
        words = re.sub(r"[\s_-]", "", named).lower()
        return next((Node(chip, count) for name, chip in CHIPS.items() if name in words), None)

    @property
    def name(self) -> str:
        return f"{self.count} x {self.chip.name}"
