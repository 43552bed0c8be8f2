"""What the runs of a page would take on GPUs, by `speedrun plan`: a few machines, or a few groups.

It is arithmetic on the configs and needs no GPU. Code of a user's own is not executed for a page,
so configs that name some are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from speedrun.config.schema import Config
from speedrun.data.download import REPOSITORIES
from speedrun.data.shards import PUBLIC_VOCAB
from speedrun.errors import SpeedrunError
from speedrun.plan.chips import Node
from speedrun.plan.predict import plan
from speedrun.report.page.compare import Group
from speedrun.train.estimate import vocab_size_of

MACHINES = ("8xH100", "8xA100", "H100", "RTX4090")  # of a single group
OF_SEVERAL = (("8xH100",), ("H100",))  # of several groups: one of these, the same for all
# What the parts of a plan are drawn as, by the beginning or the end of their names.
KINDS = {
    "matrix products": ("products",),
    "attention": ("attention",),
    "norms, sums, activations": ("norms",),
    "loss": ("loss",),
    "optimizer": ("orthogonalisation", "momentum", "Adam"),
    "communication": ("sent",),
    "waits": ("waits",),
}


def planned(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One entry for each machine or group that a plan can be made for."""
    choices = [MACHINES] if len(groups) == 1 else OF_SEVERAL
    return max((_on(machines, groups) for machines in choices), key=len)  # the first, if alike


def _on(machines: Sequence[str], groups: Sequence[Group]) -> list[dict[str, Any]]:
    known = [(number, group.config) for number, group in enumerate(groups)
             if not group.config.used_code()]  # fmt: skip
    return [
        {"group": number, "machine": Node.parse(machine).name, **found}
        for number, config in known
        for machine in machines
        if (found := _planned(config.model_dump_json(), machine))
    ]


@cache  # a page that is watched is made again and again
def _planned(config: str, machine: str) -> dict[str, Any] | None:
    """Nothing where the text is not here or the batch cannot be divided by the GPUs."""
    read = Config.model_validate_json(config)
    try:
        found = plan(read, _vocab_size(read), Node.parse(machine))
    except (SpeedrunError, OSError):
        return None
    kinds = dict.fromkeys(KINDS, 0.0)
    for part, seconds in found.parts.items():
        kinds[kind_of(part)] += seconds
    return {
        "step": found.step,
        "run": read.steps * found.step,
        "passes": found.microbatches,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "memory": found.memory_bytes,
        "room": found.node.chip.memory,
        "fits": found.fits,
        "parts": [[kind, seconds / found.step] for kind, seconds in kinds.items() if seconds],
    }


def _vocab_size(config: Config) -> int:
    """Of a public text also where it was not downloaded to."""
    folder = Path(config.data.dir).expanduser()
    if folder.name in REPOSITORIES and not folder.exists():
        return PUBLIC_VOCAB
    return vocab_size_of(config)


def kind_of(part: str) -> str:
    """What a part of a plan is drawn as."""
    [kind] = [kind for kind, words in KINDS.items()
              if any(part.startswith(word) or part.endswith(word) for word in words)]  # fmt: skip
    return kind
