"""`speedrun doctor`: what this machine has, what would be used and why, and what is missing."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from pathlib import Path

import torch

from speedrun import __version__
from speedrun.config.resolve import resolve
from speedrun.hardware import cores, cpu_name, matmul_flops, memory_bytes, probe_bf16
from speedrun.model.backend import prepare_backend
from speedrun.model.plan import AttentionPlanner
from speedrun.terminal.console import print_table, size_text
from speedrun.train.build import choose_device, choose_precision

EXTRAS = {
    "serve": ("uvicorn", "`serve`"),
    "files": ("pyarrow", "compressed JSONL and parquet"),
    "hub": ("datasets", "Hugging Face datasets and `data download`"),
    "tensorboard": ("tensorboard", "`train --log tensorboard`"),
    "wandb": ("wandb", "`train --log wandb`"),
    "test": ("pytest", "the test suite"),
}


def doctor_command() -> None:
    torch.set_num_threads(cores())
    fp32 = matmul_flops()
    bf16 = probe_bf16()
    bf16_rate = f"unusable: {bf16.failure}"
    if bf16.flops is not None:
        bf16_rate = f"{bf16.flops / 1e9:,.0f} GFLOP/s measured, {bf16.flops / fp32:.2g}x fp32"
    rows = [
        ("speedrun", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("cpu", f"{cpu_name()}, {cores()} cores for us"),
        ("memory", size_text(memory_bytes())),
        ("fp32 matmul", f"{fp32 / 1e9:,.0f} GFLOP/s measured on {cores()} threads"),
        ("bf16 matmul", bf16_rate),
        ("gpu", _gpus()),
        ("c++ compiler", shutil.which("c++") or shutil.which("g++") or "none found"),
        ("free disk here", size_text(shutil.disk_usage(Path.cwd()).free)),
    ]
    print_table(("what", "found"), rows)
    print()
    print_table(("choice", "value", "because"), _choices())
    missing = [
        (f"speedrun[{extra}]", what, f"pip install 'speedrun[{extra}]'")
        for extra, (module, what) in EXTRAS.items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        print()
        print_table(("missing extra", "needed for", "install"), missing)


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
        ("threads", str(cores()), "one a core, shared out over the ranks of this host"),
    ]
