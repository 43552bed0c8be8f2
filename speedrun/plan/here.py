"""A plan for the CPU at hand: pieces of the run are timed here, at their real shapes.

A chip's maker states its rates, and what kernels reach of them was published. Of a CPU neither is
known: whether its vectors have 8 or 16 lanes, or memory is slow, moves a step by a factor of three.
So one block, attention by itself, a part of the head with the loss, and the optimizer's update of
some weights run for a moment on made-up tokens, and every piece of work is taken to cost what it
cost there. Nothing is fitted.

Shapes: B rows, T tokens of a row, D width, G key/value heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from speedrun.config.optimizer import MATRIX_ROLES, Role
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.hardware import cpu_name, matmul_flops
from speedrun.limits import memory_shares, threads
from speedrun.model.attention import attend
from speedrun.model.backend import prepare_backend
from speedrun.model.block import Block
from speedrun.model.embeddings import Table
from speedrun.model.gpt import GPT
from speedrun.model.parts import Parts
from speedrun.model.plan import AttentionPlan, AttentionPlanner
from speedrun.model.products import head_loss, linear
from speedrun.model.roles import roles_of
from speedrun.model.rotary import Rotary
from speedrun.optim.build import build_optimizer
from speedrun.plan.chips import Chip, Node
from speedrun.plan.predict import Plan, predict
from speedrun.plan.work import Work, document_numbers, tokens_of_rank, visited_keys, work_of_keys
from speedrun.train.estimate import estimate, without_storage
from speedrun.train.memory import (
    FP32,
    TABLES,
    Systems,
    attending,
    count,
    mixed_values,
    shapes_of,
)

SECONDS = 0.3  # that a piece is timed for at least, and
REPEATS = 3  # so often
TOKENS = 4096  # of a piece, or one row where rows are longer
ROWS = 8192  # of a table or of the head
SYSTEMS = Systems(ranks=1, number=FP32)


@dataclass(frozen=True)
class Costs:
    """Seconds of a unit of each part's work on this machine."""

    of: Mapping[str, float]

    def seconds(self, chip: Chip, work: Work) -> float:  # noqa: ARG002
        return work.amount * self.of[work.part]


def plan_here(config: Config, vocab_size: int) -> Plan:
    """What the run takes on this machine, in one process."""
    machine = config.machine
    refuse_what_is_not_timed(config)
    torch.set_num_threads(machine.threads or max(1, threads() // machine.jobs))
    torch.set_flush_denormal(True)  # as a run does
    memory = memory_shares()[0].amount
    needed = estimate(config, vocab_size, 1, memory)
    model = without_storage(config, vocab_size)
    costs = Pieces(config, model).costs()
    # A maker's rates are asked of no chip whose costs were measured; the peak is, for the MFU.
    chip = Chip(cpu_name(), matmul_flops(), 0.0, 0.0, memory)
    return predict(
        config, model, Node(chip, 1), SYSTEMS, costs,
        microbatches=needed.microbatches, memory=needed.memory, room=memory,
    )  # fmt: skip


def refuse_what_is_not_timed(config: Config) -> None:
    """Settings under which a run does other work than the pieces here."""
    for key, value, usual in (
        ("device", config.machine.device, ("auto", "cpu")),
        ("precision", config.machine.precision, ("auto", "fp32")),
        ("compile", config.machine.compile, ("auto", "none")),
    ):
        if value not in usual:
            raise ConfigError(
                f"machine.{key} = {value!r} is not planned on a CPU, whose pieces are timed in "
                f"fp32 and not compiled: leave it out"
            )


class Pieces:
    """The pieces of one config's step, on made-up tokens and weights."""

    def __init__(self, config: Config, model: GPT) -> None:
        self.config, self.model = config, model
        T = config.batch.length
        rows = config.batch.tokens // T
        self.shape_BT = (max(1, min(rows, TOKENS // T)), T)
        self.tokens = self.shape_BT[0] * T
        self.step = config.steps // 2  # whose window is used
        planner = AttentionPlanner(config, torch.device("cpu"))
        prepare_backend(planner.backend, config.model.size_of_head)
        planner.apply_settings(settings_at(config, self.step))
        documents = document_numbers(T).expand(self.shape_BT).contiguous()
        self.plan: AttentionPlan = planner.plan(documents)

    def costs(self) -> Costs:
        """Each part's seconds over what its work was counted as, in these pieces."""
        block, attention, head = self.block(), self.attention(), self.head()
        product, number, byte = self.product(), self.number_of_matrices(), self.byte_of_rows()
        counted = {work.part: work.amount for work in self.counted()}
        layers, attends = self.config.model.layers, attending(self.config)
        steps = tokens_of_rank(self.config, SYSTEMS) / self.tokens  # pieces that make a whole step
        flops = counted["products of the blocks"] / steps / layers
        flops_of_head = counted["products of the head"] / steps
        # Inside of a block a product may be faster than alone; the block's own time is kept.
        products = min(product * flops, max(0.0, block - attention))
        products_of_head = min(product * flops_of_head, head)
        rest = max(0.0, block - attention - products)
        seconds = {  # of a whole step, where every layer attends
            "products of the blocks": steps * layers * products,
            "norms, sums, activations": steps * layers * rest,
            "attention": steps * attends * attention,
            "products of the head": steps * products_of_head,
            "loss": steps * (head - products_of_head),
            "waits": self.launches(),
        }
        for part in counted.keys() - seconds.keys():
            seconds[part] = byte * counted[part]
        matrices = number * count(shapes_of(self.model, *MATRIX_ROLES))
        if "orthogonalisation" in counted:
            others = seconds["momentum and updates"]
            seconds["orthogonalisation"] = max(0.0, matrices - others)
        else:
            seconds["Adam of the matrices"] = matrices
        return Costs({part: seconds[part] / amount for part, amount in counted.items() if amount})

    def counted(self) -> Iterable[Work]:
        """A step's work with the window of the pieces, where nothing is computed again."""
        machine = self.config.machine.model_copy(update={"recompute": False})
        config = self.config.model_copy(update={"machine": machine})
        return work_of_keys(config, self.model, SYSTEMS, visited_keys(config, self.step))

    def product(self) -> float:
        """Seconds of a FLOP in a product of the model's width with the MLP's, there and back."""
        it = self.config.model
        x = torch.randn(self.tokens, it.width, requires_grad=True)
        weight = nn.Parameter(0.02 * torch.randn(it.mlp_ratio * it.width, it.width))
        back = torch.randn(self.tokens, len(weight))
        seconds = median_seconds(lambda: _there_and_back(linear(x, weight), back, x, weight))
        return seconds / (6 * weight.numel() * self.tokens)

    def block(self) -> float:
        """Seconds of a block that attends, there and back."""
        it, (B, T) = self.config.model, self.shape_BT
        layer = next((i for i in range(it.layers) if i not in it.attention_free), 0)
        blocks = self.blocks(1, layer)
        x = torch.randn(B, T, it.width, requires_grad=True)
        back = torch.randn(B, T, it.width)
        mixes = 2 * mixed_values(self.config) > attending(self.config)
        values = torch.randn(B, T, it.groups * it.size_of_head) if mixes else None
        half = it.positions == "half-rotary"
        rotary = None if it.positions == "learned" else Rotary(it.size_of_head, T, half)
        plan, held = self.plan.for_layer(0), [x, *blocks.parameters()]

        def run() -> None:
            _there_and_back(blocks[0](x, x, values, rotary, plan)[0], back, *held)

        return median_seconds(run)

    def attention(self) -> float:
        """Seconds of one layer's softmax over the keys, there and back."""
        it, (B, T) = self.config.model, self.shape_BT
        q = torch.randn(B, T, it.heads, it.size_of_head, requires_grad=True)
        k, v = (torch.randn(B, T, it.groups, it.size_of_head, requires_grad=True) for _ in "kv")
        back = torch.randn(B, it.heads, T, it.size_of_head)
        plan, scale = self.plan.for_layer(0), it.size_of_head**-0.5

        def run() -> None:
            y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), plan, scale)
            _there_and_back(y, back, q, k, v)

        return median_seconds(run)

    def head(self) -> float:
        """Seconds of the head and the loss for as many tokens as a block was timed with."""
        rows, width = self.model.head_weight.shape
        tokens = max(256, min(self.tokens, self.tokens * ROWS // rows))
        x = torch.randn(1, tokens, width, requires_grad=True)
        head = nn.Parameter(torch.empty(rows, width).uniform_(-(width**-0.5), width**-0.5))
        targets = torch.arange(tokens)[None] % rows
        cap = self.config.model.softcap

        def run() -> None:
            head_loss(x, head, targets, cap).backward()  # type: ignore[no-untyped-call]
            x.grad = head.grad = None

        return median_seconds(run) * self.tokens / tokens

    def number_of_matrices(self) -> float:
        """Seconds of a number of the hidden matrices in the optimizer's step."""
        blocks = self.blocks(min(2, self.config.model.layers))
        roles = roles_of(blocks)
        return self.update(
            (name, weight, roles[name])
            for name, weight in blocks.named_parameters()
            if roles[name] in MATRIX_ROLES
        )

    def byte_of_rows(self) -> float:
        """Seconds of a byte of what tables and the head cost, by Adam or what stands for it."""
        rows = min(ROWS, self.model.head_weight.shape[0])
        role: Role = "head" if self.config.model.tied_head else "embedding"
        table = Table(rows, self.config.model.width, role=role)
        per_number = self.update([("table", table.weight, role)])
        counted = {work.part: work.amount for work in self.counted()}
        head, tables = shapes_of(self.model, "head"), shapes_of(self.model, *TABLES)
        numbers = count(head) + count(tables)
        return per_number * numbers / counted["Adam of tables and head"]

    def update(self, parameters: Iterable[tuple[str, Tensor, Role]]) -> float:
        """Seconds of a number in a step of these."""
        parameters = list(parameters)
        optimizer = build_optimizer(parameters, self.config)
        optimizer.apply_settings(settings_at(self.config, self.step))
        for _, weight, _ in parameters:
            weight.grad = torch.randn_like(weight)
        return median_seconds(optimizer.step) / sum(weight.numel() for _, weight, _ in parameters)

    def launches(self) -> float:
        """Seconds of a pass and an update of a model as deep that has next to nothing to compute.

        The optimizer and whatever is a user's own are left out: they were timed where they act.
        """
        it, T = self.config.model, 64
        small = it.model_copy(update={
            "width": 64, "heads": 1, "head_dim": 64, "kv_heads": 0, "bigram_rows": 0,
            "vocab_multiple": 1,
        })  # fmt: skip
        model = GPT(small, 64, T)
        ids = torch.arange(T)[None]
        batch = self.config.batch.model_copy(update={"length": T, "tokens": T})
        mask = self.config.attention.model_copy(update={"window": "none"})
        config = self.config.model_copy(update={"batch": batch, "attention": mask})
        planner = AttentionPlanner(config, torch.device("cpu"))

        def run() -> None:
            model(ids, planner.plan(torch.zeros_like(ids)), ids).backward()
            model.zero_grad(set_to_none=True)

        return median_seconds(run)

    def blocks(self, number: int, first: int = 0) -> nn.ModuleList:
        """Blocks of the config, with whatever of a user's own is in them."""
        it = self.config.model
        made = nn.ModuleList(Block(it, first + i) for i in range(number))
        parts = replace(Parts.of(self.config), loss=None)
        parts.fit(made, it)
        return made


def _there_and_back(y: Tensor, back: Tensor, *held: Tensor) -> None:
    y.backward(back)  # type: ignore[no-untyped-call]
    for tensor in held:
        tensor.grad = None


def median_seconds(run: Callable[[], object]) -> float:
    """Of some repeats, after one that finds its memory."""
    run()
    found: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(found) < REPEATS or time.perf_counter() < end:
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return median(found)
