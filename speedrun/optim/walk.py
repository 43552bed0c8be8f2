"""The order in which Muon walks its matrices, who owns which, and the buffers of the walk.

Parameters whose tiles have the same shape form a shelf, laid out in rows of one item per rank: item
i belongs to the rank after that of item i-1. A stop of the walk takes a few rows at once, so that
every rank has one batched orthogonalisation per stop and one gather moves the results. A rank
without an item in the last row sends whatever its buffer holds, and nobody reads it.

All buffers are made here, once, and shared by all stops: two to send from (one is on the wire while
the next is being filled), one to receive into, and scratch.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from speedrun.optim.layout import Layout
from speedrun.optim.orthogonalize import native_dtype, scratch_numel

# Elements per thread in one batched call. On a CPU a thread takes whole matrices of the batch, and
# four of 256 x 256 with their scratch stay in its cache: 1.3 times the speed of a loop over them.
# Matrices above this size keep all threads busy one at a time.
CPU_ELEMENTS = 4 * 256 * 256
GPU_ELEMENTS = 2**24
# With several ranks a shelf is cut into at least this many stops where it has the rows, so that
# gathers have something to hide behind.
OVERLAPPED_STOPS = 4


@dataclass(slots=True, eq=False)
class Item:
    """One parameter: how it is read, by which options, and which rank updates it."""

    param: Tensor
    name: str
    layout: Layout
    group: dict[str, Any]
    owner: int = 0


Shelf = list[Item]


@dataclass(slots=True, eq=False)
class Stop:
    """`items_of[rank]` are updated by that rank in one batched call and sent to all others.

    `staged` (fp32) takes the momenta and `sent` the orthogonalised updates, tile by tile; they are
    the same memory where the arithmetic is fp32. `outgoing` is all of the send buffer, filler
    included. `slots[i]` is the place of this rank's item i in
    `staged`; `arrivals[rank][i]` is where items_of[rank][i] is found once the gather is done.
    """

    items_of: list[list[Item]]
    group: dict[str, Any]
    staged: Tensor
    sent: Tensor
    outgoing: Tensor
    received: Tensor
    scratch: Tensor
    slots: list[Tensor]
    arrivals: list[list[Tensor]]


def shelve(items: Iterable[Item], world: int) -> list[Shelf]:
    """Put items that can share a batch together and give each an owner in turn.

    The turn goes on from shelf to shelf, so that single matrices do not all fall to rank 0.
    """
    shelves: defaultdict[tuple[Any, ...], Shelf] = defaultdict(list)
    for item in items:
        layout = item.layout
        cuts = (layout.row_cuts, layout.col_cuts)
        shelves[id(item.group), item.param.device, layout.stored_shape, cuts].append(item)
    turn = 0
    for shelf in shelves.values():
        for item in shelf:
            item.owner = turn % world
            turn += 1
    return list(shelves.values())


def plan_stops(shelves: Sequence[Shelf], world: int, rank: int) -> list[Stop]:
    """Every stop of one optimizer step, in order, as views into the shared buffers."""
    parts: list[Shelf] = []
    for shelf in shelves:
        take = world * _rows_at_once(shelf, world)
        parts += [shelf[i : i + take] for i in range(0, len(shelf), take)]
    sizes: dict[_BufferKey, int] = {}
    for number, part in enumerate(parts):
        for key, numel in _needs(part, number, world).items():
            sizes[key] = max(sizes.get(key, 0), numel)
    # Zeros, not empty: the filler of a rank without an item is sent and must not be garbage.
    pool = {key: torch.zeros(n, dtype=key[2], device=key[1]) for key, n in sizes.items()}
    return [_stop(part, number, world, rank, pool) for number, part in enumerate(parts)]


def all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to fill `received` with what every rank sends, in the order of the ranks."""
    # torch 2.13 renamed all_gather_into_tensor and warns at every use of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(received, sent, group=group, async_op=True)
    return work


def _rows_at_once(shelf: Shelf, world: int) -> int:
    """How many items per rank one stop takes."""
    rows = -(-len(shelf) // world)
    numel = shelf[0].param.numel()
    on_cpu = shelf[0].param.device.type == "cpu"
    most = (CPU_ELEMENTS if on_cpu else GPU_ELEMENTS) // numel
    if world > 1:
        # Not by this rank's threads: all ranks must cut alike, on unequal hosts too.
        most = min(most, rows // OVERLAPPED_STOPS)
    elif on_cpu:
        most *= torch.get_num_threads()
    return min(max(most, 1), rows)


_BufferKey = tuple[str, torch.device, torch.dtype]


def _needs(part: Shelf, number: int, world: int) -> dict[_BufferKey, int]:
    """Which buffers a stop uses, and how many elements of each."""
    device, layout = part[0].param.device, part[0].layout
    dtype = part[0].group["dtype"] or native_dtype(device)
    per_rank = -(-len(part) // world)
    numel = per_rank * part[0].param.numel()
    tiles, rows, cols = layout.stored_shape
    # Cuts are orthogonalised one after the other and together need no more than the whole.
    needs = {("scratch", device, dtype): scratch_numel(per_rank * tiles, rows, cols)}
    needs[_sending(number, world), device, dtype] = numel
    if dtype != torch.float32:
        needs["stage", device, torch.float32] = numel
    if world > 1:
        needs["receive", device, dtype] = world * numel
    return needs


def _sending(number: int, world: int) -> str:
    return f"send {number % 2 if world > 1 else 0}"


def _stop(part: Shelf, number: int, world: int, rank: int, pool: dict[_BufferKey, Tensor]) -> Stop:
    needs = _needs(part, number, world)
    taken = {role: pool[role, device, dtype][:n] for (role, device, dtype), n in needs.items()}
    sent = taken[_sending(number, world)]
    staged = taken.get("stage", sent)
    received = taken.get("receive", sent)
    layout, per_rank = part[0].layout, -(-len(part) // world)
    items_of = [[item for item in part if item.owner == r] for r in range(world)]

    def places(buffer: Tensor, items: list[Item]) -> list[Tensor]:
        each = buffer.view(per_rank, *layout.stored_shape)
        return [item.layout.stored_tiles(each[i]) for i, item in enumerate(items)]

    mine = len(items_of[rank]) * layout.stored_shape[0]
    matrices = (-1, *layout.stored_shape[1:])
    return Stop(
        items_of,
        part[0].group,
        staged.view(matrices)[:mine],
        sent.view(matrices)[:mine],
        sent,
        received,
        taken["scratch"],
        places(staged, items_of[rank]),
        [places(received.view(world, -1)[r], items_of[r]) for r in range(world)],
    )
