"""The first documents of a dataset are shown."""

from dataclasses import replace
from pathlib import Path

import pytest

from speedrun.data.build import build_dataset
from speedrun.data.dataset import Dataset
from speedrun.data.inspect import CODE_PROMPT, DocumentPreview, first_documents, prompt_of


def shown(text: str, tokens: int) -> DocumentPreview:
    return DocumentPreview(tuple(text.encode()), text, tokens)


def test_the_first_documents_are_decoded(folder: Path) -> None:
    dataset = Dataset.open(folder)
    found = first_documents(dataset, dataset.tokenizer(), count=4, max_tokens=7)
    # The end of the last is in the second shard.
    assert found == [
        shown("one fis", 8),
        shown("two fis", 8),
        shown("", 0),
        shown("red red", 12_000),
    ]
    previews = first_documents(dataset, dataset.tokenizer(), "val", count=9)
    assert previews == [shown("old fish", 8), shown("new", 3)]
    (ids,) = first_documents(dataset, None, "val", count=1)
    assert ids == DocumentPreview(tuple(b"old fish"), "", 8)


def test_a_document_that_runs_out_of_view_has_no_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedrun.data.inspect.PREVIEW_TOKENS", 5_000)
    assert first_documents(Dataset.open(folder), None, count=9)[-1].tokens is None


def test_a_prompt_is_how_a_text_of_the_dataset_begins(folder: Path) -> None:
    """Not how Python begins, unless it is Python's own library."""
    dataset = Dataset.open(folder)
    tokenizer = dataset.tokenizer()
    assert prompt_of(dataset, tokenizer) == "old fish"  # of validation
    assert dataset.manifest is not None
    manifest = replace(dataset.manifest, sources=("stdlib",))
    assert prompt_of(replace(dataset, manifest=manifest), tokenizer) == CODE_PROMPT


def test_a_prompt_is_a_few_words_that_can_be_typed(tmp_path: Path) -> None:
    line = "\n\x1b[31m\t" + "whereas the people " * 9 + "\n"
    (tmp_path / "a.txt").write_text("no\n" * 99)
    (tmp_path / "val.txt").write_text(line)
    out = tmp_path / "mine"
    build_dataset(
        [str(tmp_path / "a.txt")], out, "byte", held_out={"val": [str(tmp_path / "val.txt")]}
    )
    dataset = Dataset.open(Path(out))
    assert prompt_of(dataset, dataset.tokenizer()) == "[31mwhereas the people whereas the"
