"""Checkpoints: safetensors and JSON in a folder that is either whole or not there.

A checkpoint is written under a temporary name, flushed, hashed into `checkpoint.json`, and renamed;
a crash at any instant leaves the previous ones untouched. Nothing is ever unpickled. The state of a
run is plain data: weights, optimizer tensors by parameter name, and one integer, the step, from
which the data position and every schedule follow.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speedrun.errors import RunError

META = "checkpoint.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    meta: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    def model(self) -> dict[str, Tensor]:
        return load_file(self.folder / MODEL)

    def optimizer(self) -> dict[str, Tensor]:
        return load_file(self.folder / OPTIMIZER)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(
    root: Path,
    meta: Mapping[str, Any],
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
) -> Path:
    """Write `root/step-NNNNNN` for `meta["step"]`; an older one of that step is replaced."""
    final = root / f"step-{meta['step']:06d}"
    temporary = root / f".{final.name}.{os.getpid()}.partial"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        files = {MODEL: model, OPTIMIZER: optimizer}
        for name, tensors in files.items():
            save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()},
                      temporary / name)  # fmt: skip
            flush(temporary / name)
        hashes = {name: _sha256(temporary / name) for name in files}
        (temporary / META).write_text(json.dumps({**meta, "sha256": hashes}, indent=2) + "\n")
        flush(temporary / META)
        flush(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        flush(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"checkpoint {final} could not be written: {error}") from error
    return final


def read(folder: Path) -> Checkpoint:
    """A checkpoint whose every byte has been checked against its manifest."""
    try:
        meta = json.loads((folder / META).read_text())
        for name, expected in meta["sha256"].items():
            if _sha256(folder / name) != expected:
                raise RunError(f"checkpoint {folder} is damaged: {name} does not match its SHA-256")
        return Checkpoint(folder, meta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"checkpoint {folder} is damaged: {error}") from None


def latest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint below `root`, and a sentence for each damaged one passed over."""
    skipped: list[str] = []
    for folder in sorted(root.glob("step-*"), key=lambda path: path.name, reverse=True):
        try:
            return read(folder), skipped
        except RunError as error:
            skipped.append(str(error))
    return None, skipped
