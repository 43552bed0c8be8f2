"""Checkpoints: safetensors and JSON in a folder that is either whole or not there.

A checkpoint is written under a temporary name, flushed, hashed into `checkpoint.json`, and renamed;
a crash at any instant leaves the previous ones untouched. `checkpoint.json` holds its own hash too,
so no byte that matters can change unnoticed. Nothing is ever unpickled. The state of a run is plain
data: weights, optimizer tensors by parameter name, and a few numbers from which the position in the
data and every schedule follow; none of it depends on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from speedrun.errors import RunError
from speedrun.files import flush, parse_json, sha256_of

if TYPE_CHECKING:  # what lists runs reads no tensors, and does not wait for torch
    from torch import Tensor

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
        return self._tensors(MODEL)

    def optimizer(self) -> dict[str, Tensor]:
        return self._tensors(OPTIMIZER)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / name)


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def folders(root: Path) -> list[Path]:
    """Folders that bear a checkpoint's name, by step; whether they are whole is `read`'s to say."""
    named = (path for path in root.glob("step-*") if re.fullmatch(r"step-[0-9]{6,15}", path.name))
    return sorted((path for path in named if path == folder_of(root, step_of(path))), key=step_of)


def _sha256_of_meta(meta: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in meta.items() if key != "meta_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def save(
    root: Path,
    meta: Mapping[str, Any],
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
) -> Path:
    """Write `root/step-NNNNNN` for `meta["step"]`; an older one of that step is replaced."""
    from safetensors.torch import save_file

    final = folder_of(root, meta["step"])
    temporary, replaced = root / f".{final.name}.partial", root / f".{final.name}.replaced"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = {MODEL: model, OPTIMIZER: optimizer}
        for name, tensors in files.items():
            save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()},
                      temporary / name)  # fmt: skip
            flush(temporary / name)
        whole = {
            **meta,
            "bytes": {name: (temporary / name).stat().st_size for name in files},
            "sha256": {name: sha256_of(temporary / name) for name in files},
        }
        whole["meta_sha256"] = _sha256_of_meta(whole)
        (temporary / META).write_text(json.dumps(whole, indent=2) + "\n")
        flush(temporary / META)
        flush(temporary)
        if final.exists():
            final.rename(replaced)  # a crash before the next line is mended by `tidy`
        temporary.rename(final)
        flush(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"checkpoint {final} could not be written: {error}") from error
    return final


def tidy(root: Path) -> None:
    """Clear up after a crash in `save`; only for the one process that writes here."""
    for old in root.glob(".step-*.replaced"):
        final = root / old.name[1:].removesuffix(".replaced")
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(final)
    for torn in root.glob(".step-*.partial"):
        shutil.rmtree(torn, ignore_errors=True)


def read(folder: Path, *, verify: bool = True) -> Checkpoint:
    """A checkpoint whose every byte has been checked against its manifest."""

    def damaged(what: str) -> RunError:
        return RunError(f"checkpoint {folder} is damaged: {what}")

    try:
        meta = parse_json((folder / META).read_bytes())
        if meta["meta_sha256"] != _sha256_of_meta(meta):
            raise damaged(f"{META} does not match its own SHA-256")
        for name, size in meta["bytes"].items() if verify else ():
            found = (folder / name).stat().st_size
            if found != size:
                raise damaged(f"{name} has {found:,} bytes, not {size:,}")
            if sha256_of(folder / name) != meta["sha256"][name]:
                raise damaged(f"{name} does not match its SHA-256")
        return Checkpoint(folder, meta)
    except FileNotFoundError as error:
        raise damaged(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise damaged(f"{error.strerror} in {error.filename}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged(f"{META} is not what was written") from None


def latest(
    root: Path, fit: Callable[[Checkpoint], bool] = lambda _: True
) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole (and fit) checkpoint, and a sentence for each damaged one passed over."""
    skipped: list[str] = []
    for folder in reversed(folders(root)):
        try:
            found = read(folder)
        except RunError as error:
            skipped.append(str(error))
            continue
        if fit(found):
            return found, skipped
    return None, skipped
