"""The first documents of a dataset are shown."""

from pathlib import Path

import pytest

from speedrun.data.dataset import Dataset
from speedrun.data.inspect import DocumentPreview, first_documents


def test_the_first_documents_are_decoded(folder: Path) -> None:
    dataset = Dataset.open(folder)
    assert first_documents(dataset, count=4, max_tokens=7) == [
        DocumentPreview("one fis", 8),
        DocumentPreview("two fis", 8),
        DocumentPreview("", 0),
        DocumentPreview("red red", 12_000),  # its end is in the second shard
    ]
    previews = first_documents(dataset, "val", count=9)
    assert previews == [DocumentPreview("old fish", 8), DocumentPreview("new", 3)]


def test_a_document_that_runs_out_of_view_has_no_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedrun.data.inspect.PREVIEW_TOKENS", 5_000)
    assert first_documents(Dataset.open(folder), count=9)[-1].tokens is None
