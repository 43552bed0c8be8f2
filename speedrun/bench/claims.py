"""What the records' systems changes are worth on this machine, each against what it replaced.

    masks    attention under a window counted in tokens (records 13 to 15) and in blocks (16 to 18)
    gather   a Muon step on two ranks, its all_gather asynchronous and waited for at once
    loader   making a batch in the step, as a share of the step, and waiting for one made ahead
    Muon     a training step of record 3 against one of record 2, and the optimizers' memory

Rivals take turns in one process (the ranks in two) and medians are compared.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from speedrun.bench.attention import HEADS, WIDTH, inputs, interleaved, mixed_documents
from speedrun.bench.step import nano_config, nano_parts, step_seconds
from speedrun.config.resolve import resolve
from speedrun.data.loader import Loader
from speedrun.data.shards import PUBLIC_VOCAB
from speedrun.errors import RunError
from speedrun.model.attention import attend, plan_attention
from speedrun.model.gpt import GPT
from speedrun.optim.walk import all_gather
from speedrun.train.setup import Parts, build_optimizer

TOKENS, BLOCKS = 16_384, 14  # the records' last window; a quarter of their sequence


def attention_round(rule: Literal["tokens", "tokens_in_blocks", "blocks"]) -> Callable[[], None]:
    """A forward and backward pass, mask building included."""
    q, k, v, gradient = inputs(TOKENS)
    documents_BT = mixed_documents(TOKENS)
    window = torch.tensor(BLOCKS if rule == "blocks" else BLOCKS * 128, dtype=torch.int32)

    def run() -> None:
        plan = plan_attention("blocks", documents_BT, window, rule)
        torch.autograd.grad(attend(q, k, v, plan, WIDTH**-0.5), (q, k, v), gradient)

    return run


def measure_masks(turns: int) -> dict[str, float]:
    rounds = {
        "tokens": (attention_round("tokens"), 1),
        "tokens_in_blocks": (attention_round("tokens_in_blocks"), 1),
        "blocks": (attention_round("blocks"), 1),
    }
    seconds = interleaved(rounds, turns)
    return {
        "attention_heads": HEADS,
        "attention_tokens": TOKENS,
        "token_mask_over_block_mask": seconds["tokens"] / seconds["blocks"],
        "mixed_mask_over_block_mask": seconds["tokens_in_blocks"] / seconds["blocks"],
    }


Answers = SimpleQueue[float]


def _rank(rank: int, meeting: Path, turns: int, answers: Answers) -> None:
    """Muon steps on record 18's nano matrices, alternately waiting for each gather at once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    config = nano_config("record-18")
    torch.manual_seed(0)
    model = GPT(config.model, 2048, config.batch.length)
    optimizer = build_optimizer(model, config).muon
    assert optimizer is not None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)

    def wait(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
        work = all_gather(received, sent, group)
        work.wait()
        return work

    def seconds(gather: Callable[..., dist.Work]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        with mock.patch("speedrun.optim.muon.all_gather", gather):
            optimizer.step()
        return time.perf_counter() - begun

    seconds(all_gather)
    ratios = [seconds(wait) / seconds(all_gather) for _ in range(turns)]
    if rank == 0:
        answers.put(median(ratios))
    dist.barrier()
    dist.destroy_process_group()


def measure_gather(turns: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    answers: Answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, Path(folder) / "meeting", turns, answers) for rank in range(2)]
        ranks = [context.Process(target=_rank, args=chosen) for chosen in arguments]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise RunError("a rank of the bench failed; its error is above")
    return {"blocking_gather_over_async": answers.get()}


def measure_steps(turns: int) -> dict[str, float]:
    """Step times of record 2 and 3 (one architecture, AdamW and Muon), and what batches cost."""
    adam, muon = nano_parts("record-02"), nano_parts("record-03")
    ratios, waits, makes = [], [], []
    with adam.loader, muon.loader:
        for parts in (adam, muon):
            step_seconds(parts, 0)
        for step in range(turns):
            adamw, waited = step_seconds(adam, step), muon.loader.wait_seconds
            taken = step_seconds(muon, step)
            ratios.append(taken / adamw)
            waits.append((muon.loader.wait_seconds - waited) / taken)
            makes.append(seconds_to_make(muon, step) / taken)
    return {
        "muon_step_over_adamw_step": median(ratios),
        "waiting_for_batches_made_ahead": median(waits),
        "making_batches_in_the_step": median(makes),
    }


def seconds_to_make(parts: Parts, number: int) -> float:
    """A batch read and made while the step waits, shards in memory."""
    config = parts.config
    loader = Loader(
        parts.dataset.split("train"), seq_len=config.batch.length,
        batch_tokens=config.batch.tokens, vocab_size=parts.dataset.vocab_size,
        eot=parts.dataset.eot, seed=config.train.seed, order=config.data.order, start=number,
    )  # fmt: skip
    begun = time.perf_counter()
    with loader:
        next(loader)
        return time.perf_counter() - begun


def state_bytes(recipe: str) -> int:
    """Of a recipe's optimizer at full size, counted on a device that holds no memory."""
    config = resolve(recipe, "small").config
    with torch.device("meta"):
        model = GPT(config.model, PUBLIC_VOCAB, config.batch.length)
    return build_optimizer(model, config).state_bytes()


def measure_claims(turns: int = 15) -> dict[str, float | int | str]:
    adam, muon = state_bytes("record-02"), state_bytes("record-03")
    return {
        **measure_masks(turns),
        **measure_gather(turns),
        **measure_steps(turns),
        "adamw_state_bytes": adam,
        "muon_state_bytes": muon,
        "state_ratio": muon / adam,
    }
