"""Matrices of one shape, cut into buckets: which rank owns which, their state and their buffers.

Blocks whose tiles have the same shape are laid out in rows of one block per rank: block i belongs
to the rank after that of block i-1. A bucket takes a batch of a few rows at once, so that every
rank has one batched update per bucket and one all_gather moves the results. A rank without a block
in the last row sends whatever its buffer holds, and nobody reads it.

A batch has its state from the start, one tensor per slot. The other buffers are made once and
shared by all buckets: two to send from (one is on the wire while the next is being filled), one to
receive into, and scratch.

Tall matrices lie on their side in memory, because the orthogonalisation multiplies along the
longer side; whoever gets them from here sees them upright.

Shapes: N matrices of R rows and C columns.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from speedrun.optim.base import ParamBlock, Shape
from speedrun.optim.orthogonalize import native_dtype, scratch_numel

# Elements per thread in one batched call. On a CPU a thread takes whole matrices of the batch, and
# four of 256 x 256 with their scratch stay in its cache: 1.3 times the speed of a loop over them.
# Matrices above this size keep all threads busy one at a time.
CPU_ELEMENTS = 4 * 256 * 256
GPU_ELEMENTS = 2**24
# With several ranks a shape group is cut into at least this many buckets where it has the rows, so
# that gathers have something to hide behind.
OVERLAPPED_BUCKETS = 4


@dataclass(slots=True, eq=False)
class MatrixBatch:
    """The blocks of one bucket, and the state (N, *slot shape) of those this rank owns."""

    blocks: list[ParamBlock]
    state: dict[str, Tensor]

    def share_state(self, rank: int) -> None:
        """Let each block of this rank see its part of the state."""
        mine = [block for block in self.blocks if block.owner == rank]
        for slot, whole in self.state.items():
            for i, block in enumerate(mine):
                own = whole[i * block.num_tiles : (i + 1) * block.num_tiles]
                block.state[slot] = own.view(block.state_shape(slot))


@dataclass(slots=True, eq=False)
class Bucket:
    """`blocks_of[rank]` are updated by that rank in one batched call and sent to all others.

    `grad` (fp32) takes this rank's gradients and `update` the updates, both (N, R, C); they are the
    same memory where the arithmetic is fp32. `grads[i]` is the place of this rank's block i in
    `grad`, `updates[rank][i]` that of blocks_of[rank][i] in `received`, both (*grid, R, C).
    `sent` is all of the send buffer, filler included.
    """

    blocks_of: list[list[ParamBlock]]
    group: dict[str, Any]
    grad: Tensor
    update: Tensor
    state: dict[str, Tensor]
    scratch: Tensor
    sent: Tensor
    received: Tensor
    grads: list[Tensor]
    updates: list[list[Tensor]]


def make_batches(
    blocks: Iterable[ParamBlock], turn: int, world: int, rank: int
) -> list[MatrixBatch]:
    """Put blocks of one param group that can share a batch together, and give each an owner.

    Owners take turns, from `turn` on and from shape to shape, so that single matrices do not all
    fall to rank 0.
    """
    found: defaultdict[tuple[Any, ...], list[ParamBlock]] = defaultdict(list)
    for block in blocks:
        found[block.param.device, block.block.shape, block.num_tiles].append(block)
    batches = []
    for alike in found.values():
        for block in alike:
            block.owner = turn % world
            turn += 1
        take = world * _rows_at_once(alike, world)
        for start in range(0, len(alike), take):
            members = alike[start : start + take]
            batch = MatrixBatch(members, _make_state(members, rank))
            batch.share_state(rank)
            batches.append(batch)
    return batches


def _make_state(members: list[ParamBlock], rank: int) -> dict[str, Tensor]:
    first, count = members[0], sum(block.owner == rank for block in members)
    shape, state = first.block.shape, {}
    for slot, slot_shape in first.slots.items():
        whole = (count * first.num_tiles, *slot_shape)
        zeros = torch.zeros(math.prod(whole), device=first.param.device)
        state[slot] = upright(zeros, shape) if slot_shape == shape else zeros.view(whole)
    return state


def upright(flat: Tensor, shape: Shape) -> Tensor:
    """A flat buffer as matrices (N, R, C), tall ones by way of (N, C, R)."""
    rows, cols = shape
    if rows > cols:
        return flat.view(-1, cols, rows).mT
    return flat.view(-1, rows, cols)


def make_buckets(batches: Sequence[MatrixBatch], world: int, rank: int) -> list[Bucket]:
    """Every bucket of one optimizer step, in order, as views into the shared buffers."""
    needs = [_needs(batch.blocks, number, world) for number, batch in enumerate(batches)]
    sizes: dict[_BufferKey, int] = {}
    for key, numel in (item for needed in needs for item in needed.items()):
        sizes[key] = max(sizes.get(key, 0), numel)
    # Zeros, not empty: the filler of a rank without a block is sent and must not be garbage.
    pool = {key: torch.zeros(n, device=key[1], dtype=key[2]) for key, n in sizes.items()}
    return [
        _bucket(batch, {key[0]: pool[key][:n] for key, n in needed.items()}, world, rank)
        for batch, needed in zip(batches, needs, strict=True)
    ]


def all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to fill `received` with what every rank sends, in the order of the ranks."""
    # torch 2.13 renamed all_gather_into_tensor and warns at every use of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(received, sent, group=group, async_op=True)
    return work


def _rows_at_once(blocks: list[ParamBlock], world: int) -> int:
    """How many blocks per rank one bucket takes."""
    rows = -(-len(blocks) // world)
    on_cpu = blocks[0].param.device.type == "cpu"
    most = (CPU_ELEMENTS if on_cpu else GPU_ELEMENTS) // blocks[0].numel
    if world > 1:
        # Not by this rank's threads: all ranks must cut alike, on unequal hosts too.
        most = min(most, rows // OVERLAPPED_BUCKETS)
    elif on_cpu:
        most *= torch.get_num_threads()
    return min(max(most, 1), rows)


_BufferKey = tuple[str, torch.device, torch.dtype, int]  # use, ..., which of several


def _needs(blocks: list[ParamBlock], number: int, world: int) -> dict[_BufferKey, int]:
    """Which buffers a bucket uses, and how many elements of each."""
    first = blocks[0]
    device = first.param.device
    dtype = first.group["dtype"] or native_dtype(device)
    per_rank = -(-len(blocks) // world)
    numel = per_rank * first.numel
    rows, cols = first.block.shape
    needs = {
        ("scratch", device, dtype, 0): scratch_numel(per_rank * first.num_tiles, rows, cols),
        ("send", device, dtype, number % 2 if world > 1 else 0): numel,
    }
    if dtype != torch.float32:
        needs["grad", device, torch.float32, 0] = numel
    if world > 1:
        needs["receive", device, dtype, 0] = world * numel
    return needs


def _bucket(batch: MatrixBatch, buffers: dict[str, Tensor], world: int, rank: int) -> Bucket:
    blocks, sent = batch.blocks, buffers["send"]
    received = buffers.get("receive", sent)
    shape, tiles = blocks[0].block.shape, blocks[0].num_tiles
    blocks_of = [[block for block in blocks if block.owner == r] for r in range(world)]

    def places(upright: Tensor, members: list[ParamBlock]) -> list[Tensor]:
        return [
            upright[i * tiles : (i + 1) * tiles].view(*block.block.grid, *shape)
            for i, block in enumerate(members)
        ]

    mine = len(blocks_of[rank]) * tiles
    grad_NRC = upright(buffers.get("grad", sent), shape)[:mine]
    return Bucket(
        blocks_of,
        blocks[0].group,
        grad_NRC,
        upright(sent, shape)[:mine],
        batch.state,
        buffers["scratch"],
        sent,
        received,
        places(grad_NRC, blocks_of[rank]),
        [places(upright(received.view(world, -1)[r], shape), blocks_of[r]) for r in range(world)],
    )
