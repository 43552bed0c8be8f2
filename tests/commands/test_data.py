"""`speedrun data`: what the verbs print about a dataset, and how damage ends."""

from __future__ import annotations

import json
import shlex
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speedrun.cli import app
from speedrun.commands import data
from speedrun.commands.data import build_command, inspect_command, verify_command
from speedrun.data.gpt2 import PublicFile
from speedrun.errors import ConfigError, DataError
from speedrun.train.run import RunFolder


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
    splits = [row for row in rows if row[:1] in (["train"], ["val"], ["test"]) and row[2].isdigit()]
    assert sum(int(row[2]) for row in splits) == 12


def test_a_few_words_train_as_the_build_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No override is needed, and the command can be pasted: the folder has a space in its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["speedrun"])
    poem = "The rose is red, the violet blue, the honey's sweet, and so are you.\n"
    Path("poem.txt").write_text(poem * 3 + "".join(f"{n} roses, {n} violets\n" for n in range(9)))
    build = CliRunner().invoke(app, ["data", "build", "poem.txt", "--out", "my poem"])
    assert build.exit_code == 0, build.output
    *_, said = build.stdout.splitlines()
    assert said == "train on it: speedrun train best 'data.dir=my poem'"
    _, *words = shlex.split(said.removeprefix("train on it: "))
    size = ["--track", "pico", "--steps", "2", "--run", "runs/poem", "machine.threads=1"]
    done = CliRunner().invoke(app, [*words, *size])
    assert done.exit_code == 0, done.output
    header, shrunk, target, *_ = done.stdout.splitlines()
    assert header.startswith("best on my poem, sized as pico: 2 steps of ")
    assert shrunk.startswith("shrunk to fit my poem (")
    assert target.startswith("no target: 4 of track pico is for another text than my poem")
    assert "text:           my poem (poem.txt)" in done.stdout
    assert "\ntarget:" not in done.stdout
    assert "training loss" not in done.stdout  # a curve of braille is for a terminal
    run = RunFolder(Path("runs/poem"))
    known = run.trained_on()
    assert known is not None
    assert known.shrunk["batch.length"] == [512, run.load_config().batch.length]
    assert run.load_config().train.target == 0.0
    *_, more = done.stdout.splitlines()
    _, *words = shlex.split(more.removeprefix("more text:  "))
    assert words[:2] == ["sample", "runs/poem"]
    assert words[3] in Path("poem.txt").read_text()  # how a text of its own begins
    again = CliRunner().invoke(app, [*words, "--tokens", "3"])
    assert again.exit_code == 0, again.output
    # A resumed run has its stored config, and is called what it was.
    longer = CliRunner().invoke(
        app, ["train", "--resume", "--run", "runs/poem", "--steps", "3", "--force",
              "--sample-tokens", "0"]
    )  # fmt: skip
    assert longer.stdout.startswith("best on my poem, sized as pico: 3 steps of "), longer.output
    assert "shrunk" not in longer.stdout


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


def test_public_shards_are_shown_without_the_files_of_their_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [50256, 464, 5166, 50256, 7]
    for split in ("train", "val"):
        with (tmp_path / f"x_{split}_000000.bin").open("wb") as file:
            file.write(struct.pack("<3i", 20240520, 1, len(ids)).ljust(1024, b"\0"))
            file.write(struct.pack(f"<{len(ids)}H", *ids))
    nowhere = PublicFile(("vocab.bpe",), "0" * 64, (tmp_path / "none").as_uri())
    monkeypatch.setattr("speedrun.data.tokenizer.load_gpt2.__defaults__", (None, nowhere, nowhere))
    inspect_command(tmp_path, 2)
    said = capsys.readouterr().out
    assert "sources:     public shards" in said
    assert "--- document 0, 2 tokens\n464 5166\n" in said
    assert "ids in place of text: GPT-2's vocab.bpe is not in tiktoken's cache" in said
    assert "copy vocab.bpe and encoder.json beside public shards" in said
    (tmp_path / "vocab.bpe").write_text("something else")
    inspect_command(tmp_path, 1)  # a file there is looked at, and refused for what it is
    assert "vocab.bpe is not the public GPT-2 file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        (["."], "here"),
        (["notes", "b.txt"], "notes, b.txt"),
        (["notes/*.txt"], "notes/*.txt"),
        (["{here}/**/a.txt"], "here/**/a.txt"),
    ],
)
def test_sources_are_told_by_their_names(
    sources: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    home = tmp_path / "here"
    (home / "notes").mkdir(parents=True)
    monkeypatch.chdir(home)
    for name in ("notes/a.txt", "b.txt"):
        Path(name).write_text("".join(f"{name} {n}\n" for n in range(40)))
    named = [source.replace("{here}", str(home)) for source in sources]
    build_command(named, tmp_path / "mine", "byte", val_fraction=None, test_fraction=None)
    assert f"sources:     {told}\n" in capsys.readouterr().out


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
