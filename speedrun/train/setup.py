"""From a config to the parts of a run: dataset, loaders, model, optimizer, schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedrun.config.schema import Config
from speedrun.data.loader import KEEP_BYTES, Batch, Loader, ValidationBatches
from speedrun.data.shards import Dataset
from speedrun.data.tokenizer import Tokenizer
from speedrun.data.verify import verify
from speedrun.errors import DataError
from speedrun.model.gpt import GPT
from speedrun.model.window import Attention
from speedrun.optim import AdamRule, CombinedOptimizer, MuonRule, Rule
from speedrun.optim.schedules import cosine, momentum, trapezoid
from speedrun.train.choices import choose_precision, device_memory
from speedrun.train.estimate import sequences_that_fit
from speedrun.train.world import World


@dataclass(frozen=True)
class Parts:
    config: Config
    world: World
    dataset: Dataset
    tokenizer: Tokenizer | None
    loader: Loader
    validation: ValidationBatches
    token_bytes: Tensor | None
    model: GPT
    parallel: nn.Module  # the model, or DistributedDataParallel around it
    optimizer: CombinedOptimizer
    attention: Attention
    dtype: torch.dtype
    microbatches: int
    notes: tuple[str, ...]

    def loss_of(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(batch.inputs, self.attention.plan(batch.documents), batch.targets)
        return loss

    def training_loss(self, batch: Batch) -> Tensor:
        """As `loss_of`, through the module that averages gradients over ranks."""
        loss: Tensor = self.parallel(
            batch.inputs, self.attention.plan(batch.documents), batch.targets
        )
        return loss

    def dummy_batch(self, rows: int) -> Batch:
        """Made-up tokens in the shapes of a real batch of `rows` rows."""
        shape = (rows, self.config.batch.length)
        ids = torch.arange(math.prod(shape)).view(shape) % self.dataset.vocab_size
        zeros = torch.zeros(shape, dtype=torch.int32)
        return Batch(ids.int(), ids, zeros, zeros).to(self.world.device)

    def no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return nullcontext()

    def clip_gradients(self, norm: float) -> None:
        """Scale gradients of the given norm down to `optimizer.clip`, if there is a limit."""
        limit = self.config.optimizer.clip
        if limit and norm > limit:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, limit / norm)

    def set_schedule(self, step: int) -> float:
        """Set learning rates, momentum and window for `step`; returns the rates' multiplier."""
        self.attention.set_step(step)
        rate = learning_rate_multiplier(self.config, step)
        self.optimizer.set_multiplier(rate)
        self.optimizer.set_momentum(momentum_at(self.config, step))
        return rate

    @property
    def identity(self) -> dict[str, str]:
        """What a checkpoint belongs to."""
        return {
            "dataset_fingerprint": self.dataset.fingerprint,
            "tokenizer_fingerprint": self.dataset.tokenizer_fingerprint,
        }


def find_dataset(config: Config, progress: Callable[..., None] | None = None) -> Path:
    """The folder of the run's dataset, built first if the track names a corpus."""
    if config.data.dir:
        return Path(config.data.dir).expanduser()
    from speedrun.data.build import default_dataset

    return default_dataset(
        config.data.sources,
        config.data.tokenizer,
        val_fraction=config.data.val_fraction,
        progress=progress,
    )


def learning_rate_multiplier(config: Config, step: int) -> float:
    warmup = config.scaled(config.schedule.warmup)
    floor = config.schedule.floor
    if config.schedule.shape == "cosine":
        return cosine(step, config.steps, warmup=warmup, floor=floor)
    cooldown = min(config.scaled(config.schedule.cooldown), config.steps - warmup)
    return trapezoid(step, config.steps, warmup=warmup, cooldown=cooldown, floor=floor)


def momentum_at(config: Config, step: int) -> float:
    muon, warmup = config.optimizer.muon, config.scaled(config.schedule.momentum_warmup)
    return momentum(step, start=muon.momentum_start, end=muon.momentum, warmup=warmup)


def build_optimizer(model: GPT, config: Config) -> CombinedOptimizer:
    """Muon or Adam for the hidden matrices, Adam for the rest, by the roles the model gives."""
    rules: dict[str, Rule] = {
        role: AdamRule(**getattr(config.optimizer, role).model_dump())
        for role in ("hidden", "embedding", "value_embedding", "bigram", "head", "scalar")
    }
    rules["qkv"] = rules["hidden"]
    if config.optimizer.kind == "muon":
        chosen = config.optimizer.muon
        muon = MuonRule(
            lr=chosen.lr, momentum=chosen.momentum, nesterov=chosen.nesterov,
            weight_decay=chosen.weight_decay, scale=chosen.scale,
            coefficients=chosen.coefficients, steps=chosen.iterations,
        )  # fmt: skip
        sizes = config.model
        parts = (sizes.heads, sizes.groups, sizes.groups)
        split = tuple(n * sizes.size_of_head for n in parts) if chosen.split_qkv else 1
        rules["hidden"], rules["qkv"] = muon, replace(muon, split_rows=split)
    parameters = dict(model.named_parameters())
    return CombinedOptimizer(
        [(name, parameters[name], role) for name, role in model.roles().items()],
        rules,
        check_finite=False,  # the loop checks before it steps, on all ranks at once
    )


def compile_model(model: GPT, requested: str, device: torch.device) -> str:
    """Compile in place, one graph without breaks; returns what was done and why."""
    chosen = requested
    if requested == "auto":
        chosen = "model" if device.type == "cuda" else "none"
    if chosen == "model":
        model.compile(fullgraph=True, dynamic=False)
    elif chosen == "block":
        # Blocks of one form share a graph: their weights are inputs of it.
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
    if requested != "auto":
        return f"{chosen}, as asked"
    return chosen if chosen != "none" else "none: on a CPU our own kernels do it without the wait"


def share_gradients(parts: Parts) -> Parts:
    """Ranks meet: gradients are averaged in the buckets they travel in; buffers do not travel."""
    if parts.world.size == 1:
        return parts
    newer = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    quiet: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    parallel = DistributedDataParallel(parts.model, gradient_as_bucket_view=True, **quiet)
    return replace(parts, parallel=parallel)


def open_dataset(folder: Path) -> Dataset:
    """A dataset ready to train on; one that is small is re-hashed first, which takes no time."""
    dataset = Dataset.open(folder)
    size = sum(path.stat().st_size for split in dataset.splits.values() for path in split.paths)
    if dataset.manifest is not None and size <= KEEP_BYTES:
        report = verify(folder)
        if not report.ok:
            raise DataError(report.problems[0])
    return dataset


def load_tokenizer_if_any(dataset: Dataset) -> tuple[Tokenizer | None, list[str]]:
    """Public shards can be trained on where GPT-2's tokenizer is out of reach."""
    try:
        return dataset.tokenizer(), []
    except DataError as error:
        if dataset.manifest is not None:
            raise
        return None, [f"no bits per byte and no samples in this run: {error}"]


def prepare(config: Config, folder: Path, world: World, start: int = 0) -> Parts:
    """This rank's share of what a run needs, at step 0 but for the loader's position.

    No rank talks to another here, so that a mistake on one of them can be told to all.
    """
    config.microbatches(world.size)
    torch.set_num_threads(config.train.threads or world.threads)
    # Attention weights and gradients fade into subnormal numbers, which CPUs compute in microcode:
    # after a hundred steps of record 2 they made a step take half as long again. Threads started
    # from here on inherit it.
    torch.set_flush_denormal(True)
    device = world.device
    dtype, precision = choose_precision(config.train.precision, device)
    dataset = open_dataset(folder)
    tokenizer, notes = load_tokenizer_if_any(dataset)
    length = config.batch.length
    shared: dict[str, Any] = {
        "seq_len": length,
        "vocab_size": dataset.vocab_size,
        "eot": dataset.eot,
        "device": device,
    }
    torch.manual_seed(config.train.seed)
    model = GPT(config.model, dataset.vocab_size, length)
    model.set_precision(dtype).to(device)
    compiled = compile_model(model, config.train.compile, device)
    attention = Attention(config, device, dtype)
    memory = device_memory(device) // world.local_size
    fits = sequences_that_fit(config, dataset.vocab_size, memory, dtype.itemsize)
    microbatches = config.microbatches(world.size, fits)
    rows = config.batch.tokens // length // world.size // microbatches  # what fits in training
    validation = ValidationBatches(
        dataset.split("val"),
        tokens=config.validation.tokens,
        batch_tokens=math.gcd(rows, config.validation.tokens // length) * length,
        **shared,
    )
    loader = Loader(
        dataset.split("train"),
        batch_tokens=config.batch.tokens,
        seed=config.train.seed,
        order=config.data.order,
        rank=world.rank,
        world=world.size,
        start=start,
        **shared,
    )
    notes += [
        f"device {device}, {world.size} x {torch.get_num_threads()} threads, {microbatches} "
        f"forward pass{'es' if microbatches > 1 else ''} a step",
        f"precision {str(dtype).removeprefix('torch.')}: {precision}",
        f"attention {attention.backend}: {attention.reason}",
        f"torch.compile: {compiled}",
    ]
    return Parts(
        config=config,
        world=world,
        dataset=dataset,
        tokenizer=tokenizer,
        loader=loader,
        validation=validation,
        token_bytes=torch.from_numpy(tokenizer.token_bytes()).to(device) if tokenizer else None,
        model=model,
        parallel=model,
        optimizer=build_optimizer(model, config),
        attention=attention,
        dtype=dtype,
        microbatches=microbatches,
        notes=tuple(notes),
    )
