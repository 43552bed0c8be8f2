"""A run in memory, on one rank: config, world, data, model, optimizer, progress; and its verbs.

    step      schedule -> batch -> forward and backward -> agreement of all ranks -> update
    outcomes  what the steps came to: at once on a CPU, a step later where it would be waited for
    validate  the loss on the validation split, with the weights as they are
    save      a checkpoint, written in the background
    rewind    after steps that were not finite: back to the last good checkpoint, on with the data
    peak      the matmul peak of all ranks, measured beside the steps

Every decision follows from numbers that all ranks share, so they act alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedrun.config.experiment import run_hash
from speedrun.config.own_code import own_code
from speedrun.config.schedule import Settings, settings_at
from speedrun.config.schema import Config
from speedrun.data.loader import Batch
from speedrun.errors import RunError
from speedrun.files import finite
from speedrun.hardware import matmul_flops
from speedrun.limits import idle_cores
from speedrun.model.backend import prepare_backend
from speedrun.model.kernels import choose_kernels, use_kernels
from speedrun.model.parts import telling
from speedrun.model.plan import AttentionPlanner
from speedrun.model.planned import Planned
from speedrun.model.rehearsal import stand_in_for_a_gpu
from speedrun.model.trial import as_it_was
from speedrun.optim.build import build_optimizer
from speedrun.optim.errors import OptimError
from speedrun.streams import Streams
from speedrun.train import checkpoint
from speedrun.train.build import (
    build_model,
    check_muons_dtype,
    choose_compile,
    choose_guards,
    choose_precision,
    compile_passes,
    open_data,
    unread_switches,
)
from speedrun.train.checkpoint_writer import CheckpointWriter
from speedrun.train.compiled import Compilations
from speedrun.train.gradients import averaging, clip_gradients
from speedrun.train.health import Outcome, Report, agree, refuse_unlike
from speedrun.train.log import Log, Peak
from speedrun.train.outcomes import UnderWay
from speedrun.train.progress import Progress
from speedrun.train.signals import Pending
from speedrun.train.validate import Validation, validate
from speedrun.train.world import World

REWINDS = 3  # before it gives up
PEAK_REPEATS = 3  # matmuls of which the best counts: some 35 ms on two cores


class Trainer:
    def __init__(
        self,
        config: Config,
        world: World,
        dataset: Path,
        progress: Progress | None = None,
        stop_after: int | None = None,
    ) -> None:
        """At step 0, or at the place in the data of a checkpoint's progress (see `restore`).

        `stop_after` leaves later steps to those who resume the run. No rank talks to another here,
        so that a mistake on one of them can be told to all.
        """
        self.config, self.world, self.progress = config, world, progress or Progress()
        self.last_step = min(config.steps, stop_after or config.steps)
        shared = max(1, world.threads // config.machine.jobs)
        torch.set_num_threads(config.machine.threads or shared)
        # Attention weights and gradients fade into subnormal numbers, which CPUs compute in
        # microcode: after a hundred steps of record 2 they made a step take half as long again.
        # Threads started from here on inherit it.
        torch.set_flush_denormal(True)
        rehearsal = config.machine.rehearsal
        how = {"rehearsal": rehearsal}
        if rehearsal:
            stand_in_for_a_gpu()  # before anything is multiplied in bf16
        self.dtype, precision = choose_precision(config.machine.precision, world.device, **how)
        check_muons_dtype(config, world.device)
        triton, why_triton = choose_kernels(config.machine.kernels, world.device, **how)
        use_kernels(triton, world.device)  # before anything is compiled
        self.data = open_data(config, world, dataset, self.dtype, self.progress.batch)
        self.loader, self.microbatches = self.data.loader, self.data.microbatches
        vocab_size = self.data.dataset.vocab_size
        compiled, why = choose_compile(config.machine.compile, world.device, **how)
        self.model = build_model(config, vocab_size, self.dtype, world.device)
        self.planner = AttentionPlanner(config, world.device, self.dtype)
        self.passes = Planned(self.model, self.planner)
        compile_passes(self.passes, compiled, **how)
        self.parallel: nn.Module = self.passes  # or DistributedDataParallel around it
        kernels = prepare_backend(self.planner.backend, config.model.size_of_head)
        gpus = triton == "triton" or world.device.type == "cuda"
        others = [f"{triton} for loss, MLP and Muon: {why_triton}"] if gpus else []
        self.kernels = "; ".join([f"attention {self.planner.backend}: {kernels}", *others])
        self.compiles = compiled != "none" or self.planner.backend == "flex"
        few = self.compiles and choose_guards(config, world.device)
        self.compilations = Compilations(few_guards=few)
        self.optimizer = build_optimizer(self.model.named_roles(), config)
        # Where a step's numbers are read before its update. A CPU has them anyway; an optimizer of
        # somebody else's cannot leave a step out by itself.
        on_gpu = world.device.type == "cuda" or rehearsal
        self.waits = not on_gpu or bool(self.optimizer.foreign)
        self._under_way = UnderWay(self.progress)
        # Written at every start and into every checkpoint, so that an edited file is found out.
        self.identity: dict[str, Any] = {
            "dataset_fingerprint": self.data.dataset.fingerprint,
            "tokenizer_fingerprint": self.data.dataset.tokenizer_fingerprint,
            "experiment_sha256": run_hash(config),
            "train_steps": config.steps,
            **({"own_code": used} if (used := own_code(config)) else {}),
        }
        asked = config.machine.threads or world.device.type != "cpu"
        idle = "" if asked else idle_cores(world.local_size)
        stream = f"; tables and stream {config.model.stream}, matrices fp32"
        passes = f"{self.microbatches} forward pass{'es' if self.microbatches > 1 else ''} a step"
        self.notes = (
            *self.data.notes,
            *unread_switches(config, world, compiles=self.compiles),
            *([idle] if idle else []),
            f"device {world.device}, {world.size} x {torch.get_num_threads()} threads, {passes}",
            f"precision {str(self.dtype).removeprefix('torch.')}: {precision}"
            f"{stream if self.dtype == torch.bfloat16 else ''}",
            f"attention {self.planner.backend}: {self.planner.reason}: {kernels}",
            *others,
            f"torch.compile: {compiled}{why}",
            *(foreign.about for foreign in self.optimizer.foreign),
            *(["each step waits for its finite check: an optimizer that is not ours cannot leave "
               "an update out by itself"] if on_gpu and self.waits else []),
        )  # fmt: skip

    def share_gradients(self) -> None:
        """Average gradients over ranks from here on; all ranks call this."""
        if self.world.size > 1:
            self.parallel = averaging(self.passes, self.config.machine)

    def step(self, asked: Callable[[], Pending] = Pending) -> None:
        """One update of the weights, or none if loss or gradient is not finite on some rank.

        `asked` is called after the backward, so that a stop waits for no second step; what was
        asked for on any rank comes back in the outcome. One all-reduce carries it all.
        """
        settings = self.apply_settings()
        loss = self.forward_backward(next(self.loader))
        report = agree(self.world, loss, self.model.parameters(), asked())
        self.update(report)
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.count_step()
        self._under_way.add(report, settings, self.loader.wait_seconds)

    def update(self, report: Report) -> None:
        """Of a GPU nothing is asked here: the weights stay as they are where not `report.good`."""
        if not self.waits:
            clip_gradients(self.model.parameters(), report.norm, self.config.optimizer.clip)
            self.optimizer.step_where(report.good)
        elif (agreed := report.read()).finite:
            clip_gradients(self.model.parameters(), agreed.grad_norm, self.config.optimizer.clip)
            with self._failing_together():
                self.optimizer.step()

    def outcomes(self, *, everything: bool = False) -> Iterator[Outcome]:
        """Of the steps that were not told yet, but for the last where it is waited for.

        `everything` waits for that one, too.
        """
        return self._under_way.told(everything=everything or self.waits)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """An optimizer of somebody else's may fail, and on one rank alone: all of them end."""
        alone = self.world.size == 1 or not self.optimizer.foreign
        with nullcontext() if alone else self.world.together():
            try:
                yield
            except OptimError as error:
                raise RunError(f"step {self.progress.step}: {error}") from error

    def forward_backward(self, batch: Batch) -> Tensor:
        """Gradients of the batch's mean loss, whatever it is cut into; returns that loss.

        Ranks average their gradients during the last backward only.
        """
        self.passes.train()
        if self.model.custom:
            self._seed_step()
        total = torch.zeros((), device=self.world.device)
        with telling(self.model.custom.values(), f"at step {self.progress.step}"):
            for index, micro in enumerate(batch.split(self.microbatches)):
                last = index == self.microbatches - 1
                with nullcontext() if last else self._no_sync():
                    loss = self.training_loss(micro) / self.microbatches
                    loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total

    def _seed_step(self) -> None:
        """Random numbers of users' own code, dropout say, follow from the place in the data.

        So a resumed run draws those of an uninterrupted one. Ours draws none.
        """
        Streams.of(self.config.train.seed, self.progress.batch, self.world.rank).put()

    def training_loss(self, batch: Batch) -> Tensor:
        """Through the module that averages gradients over ranks."""
        with self.compilations.running("training"):
            loss: Tensor = self.parallel(batch.inputs, batch.documents, batch.targets)
        return loss

    def validate(self) -> Validation:
        """Where the run stands, with the window of its step or a wider one."""
        begun = time.perf_counter()
        self.apply_settings()
        self.planner.widen(self.config.validation.window)
        self._compare_ranks()
        with self.optimizer.evaluating():
            result = validate(
                self.validation_loss, self.data.validation, self.data.token_bytes, self.world
            )
        self.progress.count_validation(result, self.config)
        self.progress.val_seconds += time.perf_counter() - begun
        return result

    @contextmanager
    def at_start(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """With these weights at step 0, for the validation there, which a first step need not
        wait for."""
        progress = self.progress
        place = progress.step, progress.seconds
        with self.optimizer.evaluating():
            now = self.copy_weights()
            self._set_weights(weights)
            progress.step, progress.seconds = 0, 0.0
            try:
                yield
            finally:
                self._set_weights(now)
                progress.step, progress.seconds = place

    def copy_weights(self) -> list[Tensor]:
        """Those to be used, where an optimizer trains others."""
        with self.optimizer.evaluating():
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _compare_ranks(self) -> None:
        """Every rank runs an optimizer of somebody else's: they must have come to the same bits."""
        if self.world.size == 1:
            return
        with self._failing_together():  # as one may whose state cannot be saved
            mine = [(foreign.called, foreign.digest()) for foreign in self.optimizer.foreign]
        refuse_unlike(self.world, mine, f"after step {self.progress.step}")

    @torch.no_grad()
    def _set_weights(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self.model.parameters(), weights, strict=True):
            parameter.copy_(weight)

    def measure_peak(self) -> Peak:
        """The best matmul rate of all ranks together, each with its threads or its GPU."""
        begun = time.perf_counter()
        self.world.barrier()  # ranks that share cores measure at the same time
        dtype = torch.float32 if self.config.machine.rehearsal else self.dtype  # a CPU's
        flops = matmul_flops(repeats=PEAK_REPEATS, dtype=dtype, device=self.world.device)
        seconds = time.perf_counter() - begun
        return Peak(sum(self.world.gather(flops)), max(self.world.gather(seconds)))

    def validation_loss(self, batch: Batch) -> Tensor:
        self.passes.eval()
        where = telling(self.model.custom.values(), f"in validation at step {self.progress.step}")
        with where, self.compilations.running("validation"):
            loss: Tensor = self.passes(batch.inputs, batch.documents, batch.targets)
        return loss

    def apply_settings(self) -> Settings:
        """Set what is scheduled to its value at the step the run stands at."""
        settings = settings_at(self.config, self.progress.step)
        for part in (self.planner, self.model.loss, self.optimizer):
            part.apply_settings(settings)
        return settings

    @property
    def complete(self) -> bool:
        """The run has come to the end that its config gives it."""
        at_target = self.config.train.stop == "target" and self.progress.to_target is not None
        return at_target or self.progress.step >= self.config.steps

    @property
    def finished(self) -> bool:
        """It is complete, or as long as was asked for here."""
        return self.complete or self.progress.step >= self.last_step

    @property
    def validation_due(self) -> bool:
        step, every = self.progress.step, self.config.validation.every
        return step % every == 0 or step in (self.config.steps, self.progress.next_look)

    def save(self, checkpoints: CheckpointWriter) -> None:
        """All ranks call this: each holds a share of the optimizer's state."""
        assert not self._under_way, "what a step came to is part of where a run stands"
        step, progress = self.progress.step, finite(self.progress.to_save())
        meta = {"step": step, "progress": progress, **self.identity}
        self._compare_ranks()
        moments = self.optimizer.export_state()
        with self.optimizer.evaluating():
            checkpoints.save(meta, self.model.state_dict(), moments)

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Take weights and moments from a checkpoint."""
        try:
            self.model.load_state_dict(found.model())
            self.optimizer.import_state(found.optimizer())
        except (RuntimeError, OptimError) as error:
            reason = " ".join(str(error).split())
            raise RunError(
                f"checkpoint {found.folder} does not fit this model: {reason}; resume it with "
                "the config it had"
            ) from None

    def rewind(self, checkpoints: CheckpointWriter, log: Log) -> None:
        """Back to the last checkpoint saved after a finite step; the data goes on where it is."""
        progress = self.progress
        checkpoints.finish()
        found = None
        if self.world.first:
            found, _ = checkpoint.latest(
                checkpoints.root, lambda it: not it.meta["progress"]["nonfinite"]
            )
        step = self.world.from_first(found.step if found else -1)
        folder = checkpoint.folder_of(checkpoints.root, step)
        hopeless = ""
        if step < 0:
            hopeless = (
                "and there is no checkpoint to go back to; lower the learning rates, or use "
                "--checkpoint-every to have one"
            )
        elif progress.rewinds >= REWINDS:
            checkpoints.forget_after(step)
            hopeless = (
                f"after {REWINDS} rewinds already; the last good checkpoint is {folder}; start "
                "anew with lower learning rates, or look at the data of these batches"
            )
        if hopeless:
            last, batch = self._under_way.last_bad
            report = (
                f"the loss or a gradient was not finite in {progress.nonfinite} steps in a row, "
                f"the last at step {last} (batch {batch}), {hopeless}"
            )
            log.event("gave_up", step=progress.step, reason=report)
            with self.world.together():  # which no rank leaves
                raise RunError(report)
        found = found or checkpoint.read(folder, verify=False)
        self.restore(found)
        log.event("rewind", step=step, from_step=progress.step, batch=progress.batch)
        progress.go_back(found.meta["progress"])
        self.world.barrier()  # all have read the checkpoint before any later one is removed
        checkpoints.forget_after(step)

    @property
    def needs_warm_up(self) -> bool:
        """Whether a first step would find something to do that no other step does.

        That is compiling, and the buckets of gradients, which torch orders anew after the first
        backward: a resumed run must send the same ones as the uninterrupted one. Fresh memory alone
        is not worth a pass: it makes the first nano step a seventh longer, and a pass takes a step.
        """
        return self.compiles or self.world.size > 1

    def warm_up(self) -> None:
        """A step on made-up tokens: compiles, allocates, and finds what cannot work.

        No weight, moment or random number is changed, so a run is the same with and without it:
        the update is left out as that of a loss that is not finite.
        """
        rows = self.config.batch.tokens // self.config.batch.length // self.world.size
        shape = (rows if self.compiles else self.microbatches, self.config.batch.length)
        ids = torch.arange(math.prod(shape)).view(shape) % self.data.dataset.vocab_size
        batch = Batch(ids.int(), ids, torch.zeros(shape, dtype=torch.int32))
        self.apply_settings()
        with as_it_was(self.model):  # code of a user's own may count in a forward pass
            loss = self.forward_backward(batch.to(self.world.device))
            if not self.waits:
                self.update(agree(self.world, loss * math.nan, self.model.parameters(), Pending()))
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.prepare()

    def _no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return nullcontext()
