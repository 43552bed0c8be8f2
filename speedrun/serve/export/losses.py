"""What the exported weights lose on the run's own validation rows, with an interval over rows.

A row is one draw of text, so the spread of rows says how far the mean would lie on other text of
the same kind. It says nothing about other seeds. The test split is not opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.find import built_datasets, load_tokenizer_if_any, open_dataset
from speedrun.data.splits import VAL
from speedrun.data.validation import ValidationBatches
from speedrun.errors import DataError, SpeedrunError
from speedrun.model.backend import prepare_backend
from speedrun.model.gpt import GPT
from speedrun.model.roles import MATRICES
from speedrun.serve.estimates import Interval, ratio_of_totals
from speedrun.train.build import choose_device
from speedrun.train.run import RunFolder
from speedrun.train.trained import last_checkpoint, load_trained

# Of a forward pass over all rows, on a CPU: some ten minutes on two cores.
MOST_OPERATIONS = 2e13


@dataclass(frozen=True)
class Losses:
    """Means over the validation tokens, each with its range of 95% confidence, if it has one."""

    loss: float | None  # nats per token
    bits_per_byte: float | None
    loss_range: Interval | None = None
    bits_per_byte_range: Interval | None = None
    tokens: int | None = None
    rows: int | None = None
    why_no_range: str | None = None


def losses_of(run: RunFolder, model: GPT) -> Losses:
    """Evaluated here where that can be done, else as the run recorded it and why."""
    try:
        _refuse_hours(run.load_config(), model)
        return evaluate_rows(run, dataset_here(run))
    except SpeedrunError as error:
        problem = str(error)
    summary = run.readable_summary()
    if summary is None:
        return Losses(None, None, why_no_range=problem)
    return Losses(
        summary.val_loss, summary.val_bpb, tokens=summary.val_tokens, why_no_range=problem
    )


def dataset_here(run: RunFolder) -> Path:
    """The very dataset of the run, by its fingerprint; none is built or fetched for an export."""
    config, wanted = run.load_config(), last_checkpoint(run)[0].meta["dataset_fingerprint"]
    candidates = [Path(config.data.dir).expanduser()] if config.data.dir else []
    for folder in [*candidates, *built_datasets()]:
        with suppress(SpeedrunError, OSError):
            if Dataset.open(folder).fingerprint == wanted:
                return folder
    raise DataError(f"its dataset, fingerprint {wanted[:12]}, is not on this machine")


def evaluate_rows(run: RunFolder, folder: Path) -> Losses:
    config, device = run.load_config(), choose_device("auto")
    dataset, length = open_dataset(folder, (VAL,)), config.batch.length
    together = math.gcd(config.validation.tokens // length, config.batch.tokens // length)
    batches = ValidationBatches(
        dataset.split(VAL), tokens=config.validation.tokens, seq_len=length,
        batch_tokens=together * length, how=config.validation.rows, vocab_size=dataset.vocab_size,
        eot=dataset.eot, device=device,
    )  # fmt: skip
    trained = load_trained(run, dataset.vocab_size, device)
    prepare_backend(trained.planner.backend, config.model.size_of_head)
    tokenizer, _ = load_tokenizer_if_any(dataset)
    sizes = torch.from_numpy(tokenizer.token_bytes()).to(device) if tokenizer else None
    nats: list[float] = []
    size: list[float] = []
    with torch.no_grad():
        for _, batch in batches.of_rank(0, 1):
            plan = trained.planner.plan(batch.documents)
            losses_BT = trained.model(batch.inputs, plan, batch.targets, each=True)
            nats += losses_BT.double().sum(1).tolist()
            if sizes is not None:
                size += sizes[batch.targets].sum(1).tolist()
    return summed_up(nats, size, length)


def summed_up(nats: Sequence[float], size: Sequence[float], length: int) -> Losses:
    """From the nats and the bytes, where they are known, of rows of `length` tokens."""
    rows = len(nats)
    per_token = ratio_of_totals(nats, [length] * rows)
    why = None if per_token.interval else "one validation row has no spread"
    if not math.isfinite(per_token.value):
        why = "the run diverged: its loss is not a number"
    found = Losses(
        per_token.value, None, per_token.interval, tokens=rows * length, rows=rows, why_no_range=why
    )
    if not sum(size):
        return found
    per_byte = ratio_of_totals([each / math.log(2) for each in nats], size)
    return replace(found, bits_per_byte=per_byte.value, bits_per_byte_range=per_byte.interval)


def _refuse_hours(config: Config, model: GPT) -> None:
    weights = sum(p.numel() for _, p, role in model.named_roles() if role in MATRICES)
    operations = 2.0 * weights * config.validation.tokens
    if operations > MOST_OPERATIONS and choose_device("auto").type == "cpu":
        raise DataError(
            f"{config.validation.tokens:,} tokens of validation are more than this CPU evaluates "
            "in minutes: export where there is a GPU"
        )
