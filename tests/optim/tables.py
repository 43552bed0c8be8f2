"""Tables that ranks share out by rows, or not, and steps of Adam on them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from speedrun.optim import Adam

TABLES = {  # name: shape, type; the first three are shared out on 2, 3 and 4 ranks
    "even": ((240, 96), torch.float32),
    "odd": ((241, 97), torch.float32),
    "half": ((241, 96), torch.bfloat16),
    "few rows": ((3, 9000), torch.float32),
    "small": ((40, 8), torch.float32),
    "gain": ((20,), torch.float32),
}


def make_tables() -> dict[str, Parameter]:
    g = torch.Generator().manual_seed(5)
    return {
        name: Parameter(torch.randn(shape, generator=g).to(dtype))
        for name, (shape, dtype) in TABLES.items()
    }


def train_tables(adam: Adam, tables: dict[str, Parameter], steps: range) -> None:
    """One step in four is left out, and one table has no gradient in another."""
    for step in steps:
        g = torch.Generator().manual_seed(step)
        for name, table in tables.items():
            grad = torch.randn(table.shape, generator=g).to(table.dtype)
            table.grad = None if step % 4 == 1 and name == "odd" else grad
        if step % 4 == 3:
            adam.step_where(torch.tensor(False))
        else:
            adam.step()


def make_adam(tables: dict[str, Parameter], group: Any = None) -> Adam:
    return Adam([*tables.items()], lr=0.05, weight_decay=0.1, process_group=group)
