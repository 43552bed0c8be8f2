"""Gradients that go out together, each rank getting the sum of its own.

Blocks lie in the buffer by their owners, the chunks of all ranks equally long. Ranks are sent a
chunk each, which is what reduce_scatter does. Gloo's, as of torch 2.13, is an all-reduce of which
most is thrown away: there every rank sends each other its chunk and adds up what it got, in the
order of the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from speedrun.optim.base import ParamBlock
from speedrun.optim.layout import Rows


class Scatter:
    """The gradients of some blocks that have owners, in one collective a step.

    All ranks add the same parameters in the same order.
    """

    def __init__(self, blocks: Sequence[ParamBlock]) -> None:
        self._world, rank = dist.get_world_size(), dist.get_rank()
        of_rank = [[one for one in blocks if one.owner == r] for r in range(self._world)]
        lengths = [sum(one.numel for one in of) for of in of_rank]
        self._chunk = max(lengths)
        dtype = reduce(torch.promote_types, (one.param.dtype for one in blocks))
        self._received = torch.zeros(self._chunk, dtype=dtype, device=blocks[0].param.device)
        self.own = self._received[: lengths[rank]]  # this rank's gradients, all together
        self._places: defaultdict[Tensor, list[tuple[ParamBlock, slice]]] = defaultdict(list)
        for owner, of in enumerate(of_rank):
            at = owner * self._chunk
            for block in of:
                self._places[block.param].append((block, slice(at, at + block.numel)))
                at += block.numel
        mine = torch.split(self.own, [one.numel for one in of_rank[rank]])
        for block, shard in zip(of_rank[rank], mine, strict=True):
            block.shard = shard.view(*block.block.grid, *block.block.shape)
        self._missing = len(self._places)
        self._sent: Tensor | None = None
        self._arriving: tuple[dist.Work, Tensor] | None = None

    @property
    def params(self) -> list[Tensor]:
        return [*self._places]

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Take a gradient; with the last one they are sent."""
        if self._lies_as_sent(param):
            self._sent = grad.flatten()
        else:
            if self._sent is None:
                self._sent = self._received.new_empty(self._world * self._chunk)
            for block, place in self._places[param]:
                tiles = block.block.as_tiles(grad.contiguous())
                self._sent[place].view_as(tiles).copy_(tiles)
        self._missing -= 1
        if not self._missing:
            assert self._sent is not None
            self._arriving = _send(self._sent, self._received)

    def _lies_as_sent(self, param: Tensor) -> bool:
        """Whether a table's rows divide by the ranks: then they are sent from where they are."""
        rows = all(isinstance(block.block, Rows) for block, _ in self._places[param])
        return rows and param.numel() == self._world * self._chunk

    def arrive(self) -> None:
        """Wait until this rank's are there."""
        assert self._arriving is not None, "a parameter took no part in the backward"
        work, arrived = self._arriving
        work.wait()
        if arrived is not self._received:
            torch.sum(arrived.view(self._world, -1), 0, out=self._received)
        self._missing, self._sent, self._arriving = len(self._places), None, None


def _send(sent: Tensor, received: Tensor) -> tuple[dist.Work, Tensor]:
    """To each rank its chunk: the work to wait for, and where it puts what comes."""
    if dist.get_backend() == dist.Backend.GLOO:
        arrived = torch.empty_like(sent)
        work = dist.all_to_all_single(arrived, sent, async_op=True)
    else:
        arrived = received
        # torch 2.13 renamed reduce_scatter_tensor and warns at every use of the old name.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = scatter(received, sent, async_op=True)
    assert work is not None
    return work, arrived
