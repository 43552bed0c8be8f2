"""A pass of the model with its plan: the whole way from tokens to the loss, as one piece.

Who sees whom is worked out inside, so that compiled code makes the plan on the GPU in its own graph
and a step launches nothing before it.
"""

from __future__ import annotations

from torch import Tensor, nn

from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner


class Planned(nn.Module):
    """What is compiled, and what ranks average the gradients of."""

    def __init__(self, model: GPT, planner: AttentionPlanner) -> None:
        super().__init__()
        self.model, self.planner = model, planner

    def forward(self, ids_BT: Tensor, documents_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss: Tensor = self.model(ids_BT, self.planner.plan(documents_BT), targets_BT)
        return loss
