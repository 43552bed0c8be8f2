"""A run's last weights on its dataset again: on the validation rows, and on the test, once.

The test split is opened here and nowhere else, for runs that have ended: by `verify`, by `submit`
and at the end of a race. What was found stays in the run's `test.json` with the hash of the weights
it holds for, so weights are tested once; a run that went on and is tested again keeps what was seen
before, for whoever looks often may choose. The public shards have no test split, but of their
validation shard only the first tenth is ever validated on: its last tokens are a test nobody looked
at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from speedrun.data.dataset import Dataset
from speedrun.data.find import find_dataset, load_tokenizer_if_any, open_dataset
from speedrun.data.loader import Batch
from speedrun.data.splits import TEST, VAL
from speedrun.data.validation import FIRST, LAST, SPREAD, ValidationBatches, rows_in
from speedrun.errors import DataError
from speedrun.files import write_json
from speedrun.model.backend import prepare_backend
from speedrun.model.parts import telling
from speedrun.train import checkpoint
from speedrun.train.build import choose_device
from speedrun.train.run import RunFolder
from speedrun.train.summary import read_json, validated
from speedrun.train.trained import last_checkpoint, load_trained
from speedrun.train.validate import Validation, validate
from speedrun.train.world import World


class TestLoss(BaseModel, frozen=True, strict=True):
    """The loss of some weights of a run on the test split."""

    loss: float
    bits_per_byte: float | None = None
    tokens: int
    step: int
    weights_sha256: str
    dataset_fingerprint: str


class Tested(TestLoss, frozen=True, strict=True):
    """That of its last weights, and of all that were looked at before them."""

    earlier: list[TestLoss] = []

    @property
    def all(self) -> list[TestLoss]:
        return [TestLoss.model_validate(self.model_dump(exclude={"earlier"})), *self.earlier]


def dataset_of(run: RunFolder) -> Path:
    """The folder of the very dataset a run was trained on."""
    folder = find_dataset(run.load_config())
    here, summary = Dataset.open(folder).fingerprint, run.read_summary()
    then = summary.dataset_fingerprint if summary else here
    if here != then:
        raise DataError(
            f"{run.path} was trained on a dataset with fingerprint {then[:12]}, and what its "
            f"config names here has {here[:12]}: it can be evaluated where its dataset is"
        )
    return folder


def evaluate(run: RunFolder, split: str = VAL) -> Validation | None:
    """The last weights on validation rows as in training, or on the test; None: there is none."""
    config, folder = run.load_config(), dataset_of(run)
    dataset = Dataset.open(folder)
    length, rows = config.batch.length, config.validation.tokens // config.batch.length
    how: str = config.validation.rows
    if split == TEST and dataset.manifest is None:
        held, how = dataset.split(VAL), LAST
        if config.validation.rows != FIRST or rows_in(held, length) < 2 * rows:
            return None
    elif split not in dataset.splits:
        return None
    else:
        dataset = open_dataset(folder, (split,))
        held, how = dataset.split(split), SPREAD if split == TEST else how
        rows = min(rows, rows_in(held, length))
        if not rows:
            return None
    device = choose_device("auto")
    together = math.gcd(rows, config.batch.tokens // length)
    batches = ValidationBatches(
        held, tokens=rows * length, seq_len=length, batch_tokens=together * length, how=how,
        vocab_size=dataset.vocab_size, eot=dataset.eot, device=device,
    )  # fmt: skip
    tokenizer, _ = load_tokenizer_if_any(dataset)
    sizes = torch.from_numpy(tokenizer.token_bytes()).to(device) if tokenizer else None
    return validate(_loss_of(run, dataset.vocab_size, device), batches, sizes,
                    World.alone(device))  # fmt: skip


def _loss_of(run: RunFolder, vocab_size: int, device: torch.device) -> Callable[[Batch], Tensor]:
    """The run's model as a function of a batch."""
    trained = load_trained(run, vocab_size, device)
    model, planner = trained.model, trained.planner
    prepare_backend(planner.backend, trained.config.model.size_of_head)

    def loss_of(batch: Batch) -> Tensor:
        plan = planner.plan(batch.documents)
        with telling(model.custom.values(), f"on the text of {run.path}"):
            loss: Tensor = model(batch.inputs, plan, batch.targets)
        return loss

    return loss_of


def tested(run: RunFolder) -> Tested | None:
    """What the run's weights lose on the test, evaluated once; None: its dataset has no test."""
    found, _ = last_checkpoint(run)
    of_these = found.meta["sha256"][checkpoint.MODEL], found.meta["dataset_fingerprint"]
    before = read_test(run)
    looks = before.all if before else []
    known = [one for one in looks if (one.weights_sha256, one.dataset_fingerprint) == of_these]
    if known:
        this = known[0]
    else:
        result = evaluate(run, TEST)
        if result is None:
            return None
        this = TestLoss(
            loss=result.loss, bits_per_byte=result.bits_per_byte, tokens=result.tokens,
            step=found.step, weights_sha256=of_these[0], dataset_fingerprint=of_these[1],
        )  # fmt: skip
    now = Tested(**this.model_dump(), earlier=[one for one in looks if one is not this])
    if now != before:
        write_json(run.test, now.model_dump())
    return now


def read_test(run: RunFolder) -> Tested | None:
    """What was seen of the test so far, without looking at it."""
    if not run.test.exists():
        return None
    return validated(Tested, read_json(run.test), run.test, "the result of a test")
