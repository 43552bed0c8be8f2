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
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from speedrun.bench.attention import HEADS, sparse_round
from speedrun.bench.step import nano_config, nano_trainer
from speedrun.bench.timing import Figures, seconds_of, take_turns
from speedrun.config.architecture import BLOCK
from speedrun.config.resolve import resolve
from speedrun.data.loader import Loader
from speedrun.data.shards import PUBLIC_VOCAB
from speedrun.model.gpt import GPT
from speedrun.optim.build import build_optimizer
from speedrun.optim.muon import Muon
from speedrun.train.trainer import Trainer

TOKENS, BLOCKS = 16_384, 14  # the records' last window; a quarter of their sequence


def measure_masks(turns: int) -> Figures:
    rivals = {
        "tokens": sparse_round(TOKENS, BLOCKS * BLOCK, "tokens"),
        "mixed": sparse_round(TOKENS, BLOCKS * BLOCK, "tokens_in_blocks"),
        "blocks": sparse_round(TOKENS, BLOCKS, "blocks"),
    }
    seconds = take_turns(rivals, turns)
    return {
        "attention_heads": HEADS,
        "attention_tokens": TOKENS,
        "token_mask_over_block_mask": seconds["tokens"] / seconds["blocks"],
        "mixed_mask_over_block_mask": seconds["mixed"] / seconds["blocks"],
    }


def _rank(rank: int, meeting: Path, turns: int) -> float:
    """Muon steps on record 18's nano matrices, alternately waiting for each gather at once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    config = nano_config("record-18")
    torch.manual_seed(0)
    model = GPT(config.model, 2048, config.batch.length)
    combined = build_optimizer(model.named_roles(), config)
    optimizer = next(each for each in combined.optimizers if isinstance(each, Muon))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)

    def seconds(*, overlap: bool) -> float:
        for group in optimizer.param_groups:
            group["overlap"] = overlap
        dist.barrier()
        return seconds_of(optimizer.step)

    seconds(overlap=True)
    ratios = [seconds(overlap=False) / seconds(overlap=True) for _ in range(turns)]
    dist.barrier()
    dist.destroy_process_group()
    return median(ratios)


def measure_gather(turns: int) -> Figures:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as ranks:
        arguments = [(rank, Path(folder) / "meeting", turns) for rank in range(2)]
        found = ranks.starmap(_rank, arguments, chunksize=1)
    return {"blocking_gather_over_async": found[0]}


def measure_steps(turns: int) -> Figures:
    """Step times of record 2 and 3 (one architecture, AdamW and Muon), and what batches cost."""
    adam, muon = nano_trainer("record-02"), nano_trainer("record-03")
    ratios, waits, makes = [], [], []
    with adam.loader, muon.loader:
        for trainer in (adam, muon):
            trainer.step()
        for step in range(turns):
            adamw, waited = seconds_of(adam.step), muon.loader.wait_seconds
            taken = seconds_of(muon.step)
            ratios.append(taken / adamw)
            waits.append((muon.loader.wait_seconds - waited) / taken)
            makes.append(seconds_to_make(muon, step) / taken)
    return {
        "muon_step_over_adamw_step": median(ratios),
        "waiting_for_batches_made_ahead": median(waits),
        "making_batches_in_the_step": median(makes),
    }


def seconds_to_make(trainer: Trainer, number: int) -> float:
    """A batch read and made while the step waits, shards in memory."""
    config, dataset = trainer.config, trainer.data.dataset
    loader = Loader(
        dataset.split("train"), seq_len=config.batch.length,
        batch_tokens=config.batch.tokens, vocab_size=dataset.vocab_size,
        eot=dataset.eot, seed=config.train.seed, order=config.data.order, start=number,
    )  # fmt: skip
    with loader:
        return seconds_of(loader.__next__)


def state_bytes(recipe: str) -> int:
    """Of a recipe's optimizer at full size, counted on a device that holds no memory."""
    config = resolve(recipe, "small").config
    with torch.device("meta"):
        model = GPT(config.model, PUBLIC_VOCAB, config.batch.length)
    return build_optimizer(model.named_roles(), config).state_bytes()


def measure_claims(turns: int = 15) -> Figures:
    adam, muon = state_bytes("record-02"), state_bytes("record-03")
    return {
        **measure_masks(turns),
        **measure_gather(turns),
        **measure_steps(turns),
        "adamw_state_bytes": adam,
        "muon_state_bytes": muon,
        "state_ratio": muon / adam,
    }
