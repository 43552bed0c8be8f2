"""The `speedrun data` verbs: progress bars around the work, tables after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from speedrun.config.resolve import resolve
from speedrun.data.shards import MANIFEST, Dataset
from speedrun.errors import DataError
from speedrun.report.text import print_table, size_text

StageProgress = Callable[[str, int, int], None]


@contextmanager
def dataset_progress() -> Iterator[StageProgress]:
    """A bar for each stage in a terminal; when piped, a line as each stage begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        begun: set[str] = set()

        def say(stage: str, _: int, total: int) -> None:
            if stage not in begun:
                begun.add(stage)
                print(f"{stage}: {size_text(total)}" if total else stage, flush=True)

        yield say
        return
    bars: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage)
            progress.update(bars[stage], completed=done, total=total or None)

        yield update


def build_command(
    sources: Sequence[str],
    out: Path,
    tokenizer: str,
    *,
    val_fraction: float,
    text_field: str,
    max_document_bytes: int,
    shard_tokens: int,
    force: bool,
) -> None:
    from speedrun.data.build import build_dataset

    with dataset_progress() as progress:
        build_dataset(
            sources,
            out,
            tokenizer,
            val_fraction=val_fraction,
            text_field=text_field,
            max_document_bytes=max_document_bytes,
            shard_tokens=shard_tokens,
            progress=progress,
            force=force,
        )
    print(f"\ntrain on it: {training_command(_print_summary(out))}")


def training_command(dataset: Dataset) -> str:
    """How to train on a dataset, with what the nano track needs changed if it is small."""
    config = resolve(track="nano").config
    length, rows = config.batch.length, (dataset.split("val").tokens - 1) // config.batch.length
    command = f"speedrun train record-18 --track nano data.dir={dataset.folder}"
    if 0 < rows * length < config.validation.tokens:
        command += f" validation.tokens={rows * length}"
    return command


def inspect_command(folder: Path, documents: int) -> None:
    from speedrun.data.inspect import first_documents

    dataset = _print_summary(folder)
    for index, preview in enumerate(first_documents(dataset, count=documents) if documents else []):
        length = "" if preview.tokens is None else f", {preview.tokens:,} tokens"
        print(f"\n--- document {index}{length}")
        print(preview.text)


def verify_command(folder: Path) -> None:
    from speedrun.data.verify import verify

    with dataset_progress() as progress:
        report = verify(folder, lambda done, total: progress("verifying", done, total))
    for problem in report.problems:
        print(problem, file=sys.stderr)
    if not report.ok:
        raise DataError(
            f"{folder} is damaged in {len(report.problems)} place"
            f"{'s' if len(report.problems) > 1 else ''}; build or download it again"
        )
    recorded = (folder / MANIFEST).exists()
    verdict = "every byte as recorded" if recorded else "headers, sizes and ids are sound"
    print(f"{folder}: {report.shards} shards, {size_text(report.bytes)}, {verdict}")


def download_command(name: str, out: Path, shards: int) -> None:
    from speedrun.data.download import download

    with dataset_progress() as progress:
        download(name, out, shards, progress=progress)
    _print_summary(out)


def _print_summary(folder: Path) -> Dataset:
    from speedrun.data.build import build_notes
    from speedrun.data.inspect import summarize

    dataset = Dataset.open(folder)
    summary = summarize(dataset)
    print(f"dataset:     {folder}")
    print(f"sources:     {', '.join(summary.sources) or 'public shards'}")
    print(f"tokenizer:   {summary.tokenizer}, {summary.vocab_size:,} ids, "
          f"end of text {summary.eot}")  # fmt: skip
    print(f"fingerprint: {summary.fingerprint[:16]}")
    print_table(
        ("split", "shards", "documents", "tokens", "text", "bytes/token"),
        [
            (
                split.name,
                split.shards,
                "?" if split.documents is None else f"{split.documents:,}",
                f"{split.tokens:,}",
                "?" if split.bytes is None else size_text(split.bytes),
                "?" if split.bytes_per_token is None else f"{split.bytes_per_token:.2f}",
            )
            for split in summary.splits
        ],
    )
    for note in build_notes(folder):
        print(f"note: {note}")
    return dataset
