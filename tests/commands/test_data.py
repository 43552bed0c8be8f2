"""`speedrun data`: what the verbs print about a dataset, and how damage ends."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speedrun.cli import app
from speedrun.commands import data
from speedrun.commands.data import build_command, inspect_command, training_command, verify_command
from speedrun.data.dataset import Dataset
from speedrun.errors import ConfigError, DataError


@pytest.fixture
def built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    for index in range(12):
        (tmp_path / f"{index}.txt").write_text(f"text number {index}\n" * 60)
    build_command(
        [str(tmp_path / "*.txt")], tmp_path / "mine", "byte", val_fraction=0.2, text_field="text",
        max_document_bytes=65_536, shard_tokens=5_000, force=False,
    )  # fmt: skip
    return tmp_path / "mine", capsys.readouterr().out


def test_build_ends_with_a_summary_and_the_command_to_train(built: tuple[Path, str]) -> None:
    folder, said = built
    for words in (f"dataset:     {folder}", "tokenizer:   byte, 257 ids", "fingerprint: ",
                  f"data.dir={folder}"):  # fmt: skip
        assert words in said
    rows = [line.split() for line in said.splitlines()]
    splits = [row for row in rows if len(row) == 7 and row[0] in ("train", "val", "test")]
    assert sum(int(row[2]) for row in splits) == 12


def test_the_training_command_fits_a_small_dataset(built: tuple[Path, str]) -> None:
    folder, said = built
    dataset = Dataset.open(folder)
    tokens = int(training_command(dataset).rpartition("validation.tokens=")[2])
    assert 0 < tokens < dataset.split("val").tokens
    assert training_command(dataset) in said


def test_inspect_shows_documents(
    built: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    inspect_command(built[0], 2)
    said = capsys.readouterr().out
    assert "--- document 0, " in said
    assert "--- document 1, " in said
    assert "--- document 2" not in said
    assert "text number" in said


@pytest.mark.parametrize(
    ("words", "val", "test"),
    [
        ("--out o many --val a b --test c d", ["a", "b"], ["c", "d"]),
        ("many --val=a b --test=c --out o", ["a", "b"], ["c"]),
        ("many --val a --force --val b --out=o", ["a", "b"], []),
        ("--val a --out o -- many", ["a"], []),
        ("many --out o", [], []),
    ],
)
def test_all_words_after_an_option_are_held_out(
    words: str, val: list[str], test: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def fake(sources: object, *_: object, held_out: object, **__: object) -> None:
        asked.append((sources, held_out))

    monkeypatch.setattr(data, "build_command", fake)
    done = CliRunner().invoke(app, ["data", "build", *words.split()])
    assert done.exit_code == 0, done.output
    assert asked == [(["many"], {"val": val, "test": test})]


@pytest.mark.parametrize(
    "words", ["many --out o --val", "many --val --out o", "many --out o --val="]
)
def test_an_option_that_names_no_file_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="--val names no file: write --val FILE"):
        CliRunner().invoke(app, ["data", "build", *words.split()], catch_exceptions=False)


def test_how_to_have_a_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the sentence advises is what helps; public shards have a rule of their own."""
    names = ["a.txt", "b.txt", "c.txt"]
    for name in names:
        (tmp_path / name).write_text(f"text of {name}")
    a, b, c = (str(tmp_path / name) for name in names)

    def said(*sources: str, **options: Any) -> str:
        build_command(sources, tmp_path / "out", "byte", force=True, **options)
        lines = capsys.readouterr().out.splitlines()
        return next((line for line in lines if line.startswith("no test split")), "")

    for lacking in (
        said(a, b),
        said(a, b, c, test_fraction=0.0),
        said(a, b, held_out={"val": [c]}),
    ):
        assert "to have one, name files with --test, or build it of three texts" in lacking
    assert said(a, b, c) == said(a, held_out={"val": [b], "test": [c]}) == ""
    assert said(a, b, held_out={"test": [c]}) == ""
    public = tmp_path / "public"
    public.mkdir()
    for split in ("train", "val"):
        with (public / f"x_{split}_000000.bin").open("wb") as file:
            file.write(struct.pack("<3i", 20240520, 1, 10_000))
            file.truncate(1024 + 20_000)
    inspect_command(public, 0)
    assert "no test split: with validation.rows=first the last rows" in capsys.readouterr().out


def test_an_empty_split_is_shown(
    built: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As earlier versions made them of some small corpora."""
    manifest = built[0] / "manifest.json"
    stored = json.loads(manifest.read_text())
    stored["splits"]["train"] = {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
    manifest.write_text(json.dumps(stored))
    inspect_command(built[0], 0)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["train", "0", "0", "0", "0", "B", "?"] in rows


def test_verify_says_that_all_is_well_or_what_is_not(
    built: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = built
    verify_command(folder)
    assert "every byte as recorded" in capsys.readouterr().out
    shard = sorted(folder.glob("*.bin"))[0]
    data = bytearray(shard.read_bytes())
    data[-2] ^= 1  # the low byte of the last token
    shard.write_bytes(data)
    with pytest.raises(DataError, match="is damaged in 1 place; build or download it again"):
        verify_command(folder)
    assert f"{shard} is damaged between bytes" in capsys.readouterr().err
