"""`speedrun doctor`: what this machine has, what would be used and why, and what is missing."""

from __future__ import annotations

import importlib.util
import json
import platform

import torch

from speedrun import __version__
from speedrun.commands.surroundings import Fact, folders_here, limits_here
from speedrun.config.resolve import resolve
from speedrun.hardware import matmul_flops, probe_bf16
from speedrun.limits import threads
from speedrun.model import native
from speedrun.model.backend import prepare_backend
from speedrun.model.kernels import choose_kernels
from speedrun.model.native.build import compiler_here
from speedrun.model.plan import AttentionPlanner
from speedrun.terminal.console import print_table
from speedrun.train.build import choose_device, choose_precision

EXTRAS = {
    "serve": ("uvicorn", "`serve`"),
    "files": ("pyarrow", "compressed JSONL and parquet"),
    "hub": ("datasets", "Hugging Face datasets and `data download`"),
    "tensorboard": ("tensorboard", "`train --log tensorboard`"),
    "wandb": ("wandb", "`train --log wandb`"),
    "test": ("pytest", "the test suite"),
}


def doctor_command(*, as_json: bool = False) -> None:
    torch.set_num_threads(threads())
    facts = [*_versions(), *limits_here(), *_speed(), *folders_here(torch.cuda.is_available())]
    choices = _choices()
    missing = [
        (f"speedrun[{extra}]", what, f"pip install 'speedrun[{extra}]'")
        for extra, (module, what) in EXTRAS.items()
        if importlib.util.find_spec(module) is None
    ]
    if as_json:
        found = {
            "facts": {
                fact.name: {"found": fact.found, "advice": fact.advice, **fact.values}
                for fact in facts
            },
            "choices": {name: {"value": value, "because": why} for name, value, why in choices},
            "missing": [extra for extra, *_ in missing],
        }
        print(json.dumps(found, indent=2))
        return
    print_table(("what", "found"), [(fact.name, fact.found) for fact in facts])
    print()
    print_table(("choice", "value", "because"), choices)
    if advice := [(fact.name, fact.advice) for fact in facts if fact.advice]:
        print()
        print_table(("in the way", "what to do"), advice)
    if missing:
        print()
        print_table(("missing extra", "needed for", "install"), missing)


def _versions() -> list[Fact]:
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [
        Fact("speedrun", __version__),
        Fact("python", system),
        Fact("torch", torch.__version__),
    ]


def _speed() -> list[Fact]:
    fp32, bf16 = matmul_flops(), probe_bf16()
    rate = f"{fp32 / 1e9:,.0f} GFLOP/s measured on {torch.get_num_threads()} threads"
    bf16_rate = f"unusable: {bf16.failure}"
    if bf16.flops is not None:
        bf16_rate = f"{bf16.flops / 1e9:,.0f} GFLOP/s measured, {bf16.flops / fp32:.2g}x fp32"
    return [
        Fact("fp32 matmul", rate, values={"flops": fp32}),
        Fact("bf16 matmul", bf16_rate, values={"flops": bf16.flops}),
        Fact("gpu", _gpus()),
        Fact("c++ compiler", compiler_here()),
    ]


def _gpus() -> str:
    found = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(found) or "none that torch can use"


def _choices() -> list[tuple[str, str, str]]:
    """What a run of the nano track would use here, by the code that would choose it."""
    config = resolve("record-18", "nano").config
    device = choose_device("auto")
    dtype, precision = choose_precision("auto", device)
    attention = AttentionPlanner(config, device, dtype)
    kernels = prepare_backend(attention.backend, config.model.size_of_head)
    found = "torch sees one" if device.type == "cuda" else "torch sees no CUDA device"
    return [
        ("device", device.type, found),
        ("precision", str(dtype).removeprefix("torch."), precision),
        ("attention", attention.backend, f"{attention.reason}: {kernels}"),
        ("kernels", *_kernels()),
        ("gpu kernels", *choose_kernels("auto", device)),
    ]


def _kernels() -> tuple[str, str]:
    """The kernels for CPUs, and why they are those; or why there are none."""
    kernel = native.load()
    if isinstance(kernel, str):
        return "none: torch code, slower", kernel
    return kernel.built.partition(" by ")[0], "; ".join(filter(None, (kernel.why, kernel.note)))
