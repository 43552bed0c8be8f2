"""A trained run, ready to be used on this machine's CPU: its model, its window, its tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from speedrun.config.schema import Config
from speedrun.data.tokenizer import Tokenizer, load_tokenizer
from speedrun.errors import RunError
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.train.run import RunFolder
from speedrun.train.trained import Trained, load_trained


@dataclass(frozen=True)
class LoadedRun:
    run: RunFolder
    tokenizer: Tokenizer
    trained: Trained

    @property
    def config(self) -> Config:
        return self.trained.config

    @property
    def model(self) -> GPT:
        return self.trained.model

    @property
    def planner(self) -> AttentionPlanner:
        return self.trained.planner

    @property
    def name(self) -> str:
        """What people call it: the name of its folder."""
        return self.run.path.resolve().name


def load_run(path: Path, *, length: int = 0) -> LoadedRun:
    """The newest whole weights in fp32, for `length` tokens (0: as many as it was trained on).

    That a newer checkpoint is damaged and an older one taken is said on stderr.
    """
    run = RunFolder(path)
    run.load_config()  # what is no run is refused as one, before anything in it is looked for
    tokenizer = load_tokenizer(run.tokenizer)
    trained = load_trained(run, tokenizer.vocab_size, torch.device("cpu"), length=length)
    then = trained.checkpoint.meta.get("tokenizer_fingerprint", tokenizer.fingerprint)
    if tokenizer.fingerprint != then:
        raise RunError(
            f"{run.tokenizer} is not the tokenizer that {path} was trained with (fingerprint "
            f"{tokenizer.fingerprint[:12]} against {then[:12]}): copy it from the run's dataset"
        )
    for sentence in trained.skipped:
        print(f"speedrun: {sentence}; going by step {trained.checkpoint.step:,}", file=sys.stderr)
    return LoadedRun(run, tokenizer, trained)
