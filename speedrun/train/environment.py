"""Where a run happened: versions, hardware, code. Enough to repeat it, or to say what changed."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from speedrun import __version__
from speedrun.hardware import cpu_name
from speedrun.limits import cores, memory_bytes
from speedrun.train.summary import Environment

PACKAGE = Path(__file__).parent.parent
LIBRARIES = ("torch", "numpy", "tokenizers", "safetensors", "pydantic")


# What a result depends on. Recipes and tracks are not code: the resolved config is compared itself.
STAGES = ("config", "data", "model", "optim", "train")


def code_hash() -> str:
    """SHA-256 over the source of the stages that training goes through, names and contents."""
    digest = hashlib.sha256()
    for path in sorted(path for stage in STAGES for path in (PACKAGE / stage).rglob("*")):
        if path.suffix in (".py", ".cpp", ".h") and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _driver() -> str | None:
    """The version of NVIDIA's driver, which torch does not know."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def _commit() -> tuple[str | None, str | None, str | None]:
    """The commit of the code, its uncommitted changes and files; asked for at once, to wait once.

    A package installed below someone else's repository is not at that repository's commit.
    """
    questions = (
        ("ls-files", "--error-unmatch", "__init__.py"),
        ("rev-parse", "HEAD"),
        ("diff", "HEAD", "--", "."),
        ("ls-files", "-o", "--exclude-standard"),
    )
    with ThreadPoolExecutor(len(questions)) as pool:
        ours, commit, diff, untracked = pool.map(lambda words: _git(*words), questions)
    return (commit.strip(), diff, untracked) if ours and commit else (None, None, None)


def with_earlier(here: dict[str, Any], before: Environment | None) -> dict[str, Any]:
    """With the machines that a resumed run was on before, where they were others than this one."""
    if before is None:
        return here
    machines = [*before.earlier, before.machine]
    now = Environment.model_validate({**here, "torch": here["libraries"]["torch"], "recorded": {}})
    return {**here, "earlier": [each for each in machines if each != now.machine]}


def environment(device: torch.device, kernels: str) -> dict[str, Any]:
    commit, diff, untracked = _commit()
    return {
        "speedrun": __version__,
        "code_sha256": code_hash(),
        "git_commit": commit,
        "git_diff": diff,
        "git_untracked": untracked,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {name: version(name) for name in LIBRARIES},
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "kernels": kernels,
        "memory_bytes": memory_bytes(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "driver": _driver() if device.type == "cuda" else None,
        "command": " ".join(["speedrun", *sys.argv[1:]]),
        "variables": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("OMP_", "MKL_", "TORCH", "SPEEDRUN_", "CUDA_"))
        },
    }
