"""The model of a run with its last weights, as everything that uses a trained run takes it.

Sampling, serving, evaluating and exporting all begin here, so that they agree on what "the model of
this run" is: the newest whole checkpoint, and the attention window that its last validation had.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from speedrun.config.experiment import run_hash
from speedrun.config.own_code import say_own_code
from speedrun.config.schedule import window_at
from speedrun.config.schema import Config, MachineConfig
from speedrun.errors import ConfigError, RunError
from speedrun.model.gpt import GPT
from speedrun.model.parts import Parts
from speedrun.model.plan import AttentionPlanner
from speedrun.model.trial import try_out
from speedrun.train import checkpoint
from speedrun.train.build import choose_precision
from speedrun.train.environment import code_hash
from speedrun.train.estimate import least_weights
from speedrun.train.run import RunFolder


@dataclass(frozen=True)
class Trained:
    """A run's model in evaluation mode, and the planner of its attention."""

    config: Config
    model: GPT
    planner: AttentionPlanner
    checkpoint: checkpoint.Checkpoint
    skipped: tuple[str, ...] = ()  # newer checkpoints that are damaged, a sentence each


def last_checkpoint(run: RunFolder) -> tuple[checkpoint.Checkpoint, tuple[str, ...]]:
    """The newest whole one, and a sentence for each newer one that is damaged."""
    found, skipped = checkpoint.latest(run.checkpoints)
    if found is None:
        why = (
            f": {skipped[0]}; restore a copy, or train it again" if skipped else "; train it first"
        )
        raise RunError(f"{run.path} has no whole checkpoint{why}")
    return found, tuple(skipped)


def _refuse_edited(run: RunFolder, config: Config, found: checkpoint.Checkpoint) -> None:
    """A config.toml that is not the one of the weights would give another model than was trained.

    Other versions of the code may hash a config otherwise: only this one's own word counts.
    """
    then, code = found.meta.get("experiment_sha256"), found.meta.get("code_sha256")
    if then not in (None, run_hash(config)) and code == code_hash():
        raise RunError(
            f"{run.config} was edited: the weights of step {found.step} were trained with another; "
            "put the old one back, or resume the run with --force"
        )


def load_trained(
    run: RunFolder, vocab_size: int, device: torch.device, *, length: int = 0
) -> Trained:
    """The model for texts of up to `length` tokens; 0: as many as it was trained on."""
    config = run.load_config()
    found, skipped = last_checkpoint(run)
    trained_on = config.batch.length
    learned = config.model.positions == "learned"
    if learned and length > trained_on:
        raise ConfigError(
            f"{run.path} has learned positions for {trained_on} tokens and none beyond: "
            f"use a context of at most {trained_on}"
        )
    _refuse_edited(run, config, found)
    # Weights that a loss of a user's own has are no part of what was trained by it.
    weights = {name: x for name, x in found.model().items() if not name.startswith("loss.")}
    try:
        stored, least = sum(x.numel() for x in weights.values()), least_weights(config, vocab_size)
        if least > stored:  # which may be more than memory holds: nothing is built to find out
            raise RuntimeError(f"there are {stored:,} of them, and {least:,} are the least")
        room = trained_on if learned else length or trained_on
        say_own_code(config)
        model = GPT(config.model, vocab_size, room, Parts.of(config, trains=False))
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip().rstrip(".")
        raise RunError(
            f"the weights of {run.path} do not fit its records: {reason}; config.toml or the "
            "tokenizer is another's, or was changed: restore the run's own"
        ) from None
    # Whatever machine the run was trained on, this is another one.
    here = config.model_copy(update={"machine": MachineConfig()})
    dtype, _ = choose_precision("auto", device)
    model.set_precision(dtype).to(device).eval()
    planner = AttentionPlanner(here, device, dtype)
    try_out(model, planner.backend, trains=False)
    planner.set_window(window_at(config, found.step))
    planner.widen(config.validation.window)
    return Trained(config, model, planner, found, skipped)
