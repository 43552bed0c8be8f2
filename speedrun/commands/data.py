"""The `speedrun data` verbs: progress bars around the work, tables after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speedrun.data.dataset import MANIFEST, Dataset
from speedrun.data.splits import TEST
from speedrun.errors import DataError
from speedrun.terminal.console import print_table, printable, sentence, size_text
from speedrun.terminal.program import command, override
from speedrun.terminal.progress import stage_progress

SOME_IDS = 32  # of a document that cannot be decoded


def build_command(
    sources: Sequence[str],
    out: Path,
    tokenizer: str,
    **options: Any,
) -> None:
    """`options` are those of `build_dataset`."""
    from speedrun.data.build import build_dataset

    with stage_progress() as progress:
        build_dataset(sources, out, tokenizer, progress=progress, **options)
    print(f"\ntrain on it: {training_command(_print_summary(out))}")


def training_command(dataset: Dataset) -> str:
    """How to train on a dataset; what does not fit it is made to fit."""
    return command("train", "best", override("data.dir", str(dataset.folder)))


def inspect_command(folder: Path, documents: int) -> None:
    from speedrun.data.find import load_tokenizer_if_any
    from speedrun.data.inspect import first_documents

    dataset = _print_summary(folder)
    if not documents:
        return
    tokenizer, notes = load_tokenizer_if_any(dataset)
    for note in notes:
        print(f"\nids in place of text: {note}")
    for index, found in enumerate(first_documents(dataset, tokenizer, count=documents)):
        length = "" if found.tokens is None else f", {found.tokens:,} tokens"
        print(f"\n--- document {index}{length}")
        print(printable(found.text) if tokenizer else " ".join(map(str, found.ids[:SOME_IDS])))


def verify_command(folder: Path) -> None:
    from speedrun.data.verify import verify

    with stage_progress() as progress:
        report = verify(folder, progress=lambda done, total: progress("verifying", done, total))
    for problem in report.problems:
        print(sentence(problem), file=sys.stderr)
    if report.problems:
        raise DataError(
            f"{folder} is damaged in {len(report.problems)} place"
            f"{'s' if len(report.problems) > 1 else ''}; build or download it again"
        )
    recorded = (folder / MANIFEST).exists()
    verdict = "every byte as recorded" if recorded else "headers, sizes and ids are sound"
    print(f"{folder}: {report.shards} shards, {size_text(report.bytes)}, {verdict}")


def download_command(name: str, out: Path, shards: int) -> None:
    from speedrun.data.download import download

    with stage_progress() as progress:
        download(name, out, shards, progress=progress)
    _print_summary(out)


def _print_summary(folder: Path) -> Dataset:
    from speedrun.data.build import build_notes

    dataset = Dataset.open(folder)
    print(f"dataset:     {printable(str(folder))}")
    sources = dataset.manifest.sources if dataset.manifest else ("public shards",)
    print(f"sources:     {printable(', '.join(sources))}")
    print(f"tokenizer:   {dataset.tokenizer_spec}, {dataset.vocab_size:,} ids, "
          f"end of text {dataset.eot}")  # fmt: skip
    print(f"fingerprint: {dataset.fingerprint[:16]}")
    print_table(
        ("split", "shards", "documents", "tokens", "text", "bytes/token"),
        [
            (
                split.name,
                len(split.paths),
                "?" if split.documents is None else f"{split.documents:,}",
                f"{split.tokens:,}",
                "?" if split.bytes is None else size_text(split.bytes),
                f"{split.bytes / split.tokens:.2f}" if split.bytes and split.tokens else "?",
            )
            for split in dataset.splits.values()
        ],
    )
    if TEST not in dataset.splits:
        print(f"no test split: {_instead_of_a_test(dataset)}")
    for note in build_notes(folder):
        print(f"note: {printable(note)}")
    return dataset


def _instead_of_a_test(dataset: Dataset) -> str:
    if dataset.manifest is None:  # `train/evaluate.py` has the rule
        return "with validation.rows=first the last rows of these shards' validation are the test"
    return (
        "a result on this dataset cannot be checked on text that nobody chose by; to have one, "
        "name files with --test, or build it of three texts or more, without --val and with a "
        "--test-fraction above 0"
    )
