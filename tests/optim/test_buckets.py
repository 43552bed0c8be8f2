"""Shape groups and buckets as every rank plans them, without any rank to talk to."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn import Parameter

from speedrun.optim import Muon
from speedrun.optim.base import ParamBlock
from speedrun.optim.buckets import CPU_ELEMENTS, make_batches, make_buckets

SHAPES = [(8, 8)] * 5 + [(24, 8), (8, 24)] * 3 + [(5, 9)]


def blocks_of(shapes: Sequence[tuple[int, ...]]) -> list[ParamBlock]:
    """Fresh blocks, owned by nobody yet."""
    made = Muon([(f"w{i}", Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]).blocks
    return [ParamBlock(b.param, b.name, b.group, b.block, b.slots) for b in made]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_plan_alike_and_every_block_is_in_one_bucket(world: int) -> None:
    plans = []
    for rank in range(world):
        blocks = blocks_of(SHAPES)
        buckets = make_buckets(make_batches(blocks, 0, world, rank), world, rank)
        plans.append([[[b.name for b in row] for row in bucket.blocks_of] for bucket in buckets])
        names = [name for bucket in plans[-1] for row in bucket for name in row]
        assert sorted(names) == sorted(block.name for block in blocks)
        for bucket in buckets:
            mine = bucket.blocks_of[rank]
            assert len(bucket.grads) == len(mine)
            assert {bool(block.state) for block in mine} <= {True}
            assert len(bucket.state["momentum"]) == len(bucket.grad) == len(mine)
            for row, updates in zip(bucket.blocks_of, bucket.updates, strict=True):
                assert [u[0, 0, 0].shape for u in updates] == [b.param.shape for b in row]
    assert all(plan == plans[0] for plan in plans)
    counts = [sum(len(bucket[rank]) for bucket in plans[0]) for rank in range(world)]
    assert max(counts) - min(counts) <= 1


def test_turns_go_on_from_group_to_group() -> None:
    blocks = blocks_of([(4, 4), (5, 5), (6, 6), (7, 7)])
    make_batches(blocks, 1, 3, 0)
    assert [block.owner for block in blocks] == [1, 2, 0, 1]


def test_the_state_of_a_bucket_is_one_tensor_of_which_blocks_have_views() -> None:
    blocks = blocks_of([(512, 256)] * 6)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        buckets = make_buckets(make_batches(blocks, 0, 1, 0), 1, 0)
    finally:
        torch.set_num_threads(threads)
    assert len(buckets) == 6 * 512 * 256 // CPU_ELEMENTS
    for i, bucket in enumerate(buckets):
        momentum = bucket.state["momentum"]
        assert momentum.shape == (2, 512, 256)
        assert momentum.mT.is_contiguous(), "tall matrices lie on their side"
        momentum.copy_(torch.tensor([2.0 * i, 2.0 * i + 1]).view(2, 1, 1).expand_as(momentum))
    assert [float(block.state["momentum"].mean()) for block in blocks] == [0, 1, 2, 3, 4, 5]
