"""The attention mask as a picture: which blocks are computed at steps along the run.

Documents come from the first validation row where the run's dataset is still at hand, and are
otherwise made up (lengths log-normal around 400 tokens, as in web text). Each frame holds, per
query block, where partial and full key blocks begin, and the exact edge of the mask as segments
[query, first key, slope]: enough to draw 512 x 512 blocks from a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedrun.config.architecture import BLOCK
from speedrun.config.schedule import window_at
from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.find import built_datasets
from speedrun.data.loader import document_ids
from speedrun.errors import SpeedrunError
from speedrun.model.mask import block_lists, first_key
from speedrun.report.page.compare import Group
from speedrun.report.page.run import RunData

FRAMES = 9
LONG_ROW = 16_384  # tokens from which fewer frames and no exact edge are kept
MOST_PICTURES = 6


def mask_frames(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One picture for each way of attending among the groups, up to a number.

    Steps only matter to a window that grows over them, a dataset only where documents are told
    apart.
    """
    pictures: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        config = group.config
        steps = config.steps if config.attention.window != "none" else 0
        dataset = group.dataset if config.attention.documents else ""
        key = f"{config.attention} {config.batch.length} {steps} {dataset}"
        if key in pictures:
            pictures[key]["groups"].append(index)
        elif len(pictures) < MOST_PICTURES:
            pictures[key] = _picture(group.runs[0]) | {"groups": [index]}
    return list(pictures.values())


def _picture(run: RunData) -> dict[str, Any]:
    config = run.config
    real = _validation_documents(run)
    documents_1T = real if real is not None else _made_up_documents(config.batch.length)
    if not config.attention.documents:
        documents_1T = documents_1T * 0
    count = 5 if config.batch.length > LONG_ROW else FRAMES
    steps = sorted({round(i * config.steps / (count - 1)) for i in range(count)})
    frames: list[dict[str, Any]] = []
    for step in steps:
        window = window_at(config, step)
        if frames and frames[-1]["window"] == window:
            continue
        frames.append({"step": step, "window": window} | _frame(documents_1T, window, config))
    return {
        "length": config.batch.length,
        "block": BLOCK,
        "rule": config.attention.window,
        "documents": config.attention.documents,
        "real": real is not None,
        "frames": frames,
    }


def _frame(documents_1T: Tensor, window: int | None, config: Config) -> dict[str, Any]:
    tensor = None if window is None else torch.tensor(window, dtype=torch.int32)
    first_1T = first_key(documents_1T, tensor, config.attention.window)
    lists = block_lists(first_1T)
    T = config.batch.length
    visible = int((torch.arange(T) - first_1T[0] + 1).sum())
    return {
        "partial": lists.partial_count[0].tolist(),
        "full": lists.full_count[0].tolist(),
        "visible": visible / (T * (T + 1) / 2),
        "edge": _segments(first_1T[0].tolist()) if T <= LONG_ROW else [],
    }


def _segments(first_T: Sequence[int]) -> list[list[int]]:
    """Runs of constant or steadily moving first key as [query, first key, slope]."""
    segments: list[list[int]] = []
    for query, first in enumerate(first_T):
        if segments:
            start, begun, slope = segments[-1]
            if query == start + 1 and first - begun in (0, 1):
                segments[-1][2] = first - begun
                continue
            if first == begun + slope * (query - start):
                continue
        segments.append([query, first, 0])
    return segments


def _made_up_documents(length: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.exp(6.0 + 0.9 * torch.randn(length // 16 + 8, generator=draw)).long() + 16
    return torch.bucketize(torch.arange(length), sizes.cumsum(0), right=True).to(torch.int32)[None]


def _validation_documents(run: RunData) -> Tensor | None:
    """Document numbers of the first validation row, if the dataset is here; nothing is built."""
    place = run.config.data.dir
    for folder in [Path(place).expanduser()] if place else built_datasets():
        try:
            dataset = Dataset.open(folder)
            if dataset.fingerprint != run.dataset_fingerprint:
                continue
            tokens = dataset.split("val").head(run.config.batch.length, dataset.vocab_size)
        except (SpeedrunError, OSError):
            continue
        return torch.from_numpy(document_ids(tokens[None], dataset.eot))
    return None
