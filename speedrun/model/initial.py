"""Initial weights as in GPT-2: normal with std 0.02, and 0.02 / sqrt(2 layers) for branch outputs.

Zeros stay zero, and modules that are none of ours keep what they were made with.
"""

import torch
from torch import nn

from speedrun.model.attention import Attention
from speedrun.model.block import MLP
from speedrun.model.embeddings import Table
from speedrun.model.linear import Linear


@torch.no_grad()
def init_as_gpt2(module: nn.Module, layers: int) -> None:
    """Of a model of so many layers, or of one of its modules."""
    for each in module.modules():
        if isinstance(each, (Linear, Table)) and not each.zero:
            each.weight.normal_(std=0.02)
    outputs = {MLP: "down", Attention: "output"}
    for each in module.modules():
        for kind, name in outputs.items():
            output = getattr(each, name, None) if isinstance(each, kind) else None
            if isinstance(output, Linear):
                output.weight.mul_((2 * layers) ** -0.5)
