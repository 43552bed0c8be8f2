"""Runs that were never trained, whose every weight matters, and the slow way to judge them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config, MachineConfig
from speedrun.data.shards import Tokens
from speedrun.data.tokenizer import ByteTokenizer, Tokenizer
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.serve.load import LoadedRun
from speedrun.train.checkpoint import Checkpoint
from speedrun.train.run import RunFolder
from speedrun.train.trained import Trained

CPU = torch.device("cpu")


def planner_of(config: Config, attention: str = "auto") -> AttentionPlanner:
    machine = MachineConfig.model_validate({"attention": attention})
    planner = AttentionPlanner(config.model_copy(update={"machine": machine}), CPU)
    planner.apply_settings(settings_at(config, config.steps))
    return planner


def loaded(config: Config, *, length: int = 0, tokenizer: Tokenizer | None = None) -> LoadedRun:
    """A fresh model of the config with noise on all its weights."""
    tokenizer = tokenizer or ByteTokenizer()
    trained_on = config.batch.length
    model = GPT(config.model, tokenizer.vocab_size, max(length, trained_on)).eval()
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source), alpha=0.08)
    found = Checkpoint(Path(), {"step": config.steps, "dataset_fingerprint": "none"})
    trained = Trained(config, model, planner_of(config), found)
    return LoadedRun(RunFolder(Path("untrained")), tokenizer, trained)


def slow_nats(run: LoadedRun, ids: Tokens, context: int, stride: int) -> list[float]:
    """The nats of each id but the first, one at a time, with every pair of the mask written out.

    What stands below is the definition of docs/evaluate.md, and shares no code with the fast way
    but the model's forward, whose logits are of one row.
    """
    planner, n = planner_of(run.config, "dense"), len(ids) - 1
    nats: list[float] = []
    known: dict[tuple[int, int], Tensor] = {}
    for j in range(1, n + 1):
        if j <= context:
            begin, end = 0, min(context, n)
        else:
            end = min(context + ((j - context - 1) // stride + 1) * stride, n)
            begin = end - context
        if (begin, end) not in known:
            row = torch.tensor([ids[begin:end].tolist()])
            plan = planner.plan(torch.zeros(row.shape, dtype=torch.int32))
            with torch.no_grad():
                known[begin, end] = run.model(row, plan)[0].double()
        logits = known[begin, end][j - 1 - begin]
        nats.append(F.cross_entropy(logits, torch.tensor(int(ids[j]))).item())
    return nats
