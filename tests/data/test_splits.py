"""Sides: by content, files whole, never empty, held-out files kept apart."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from speedrun.data.build import COPIES, HELD_OUT, build_dataset, build_notes
from speedrun.data.dataset import Dataset
from speedrun.data.shards import read_tokens
from speedrun.data.splits import SPLITS, TEST, TRAIN, VAL, Sides, SplitRule
from speedrun.data.stream import Hashed
from speedrun.errors import ConfigError, DataError


def document(number: int, text: str, first: str | None = None, side: str = "") -> Hashed:
    """A whole text, or with `first` a part of the file that begins so."""
    own, of_text = (hashlib.sha256(each.encode()).digest() for each in (text, first or text))
    return Hashed(number, text, own, of_text, len(text), side, -1 if first else number)


def rule_for(documents: list[Hashed], val: float = 0.1, test: float = 0.1) -> SplitRule:
    sides = Sides(val, test)
    for each in documents:
        sides.add(each)
    return sides.rule()


def texts_in(folder: Path, split: str) -> list[str]:
    dataset = Dataset.open(folder)
    tokens = np.concatenate([read_tokens(path) for path in dataset.split(split).paths])
    parts = np.split(tokens, np.where(tokens == dataset.eot)[0])[1:]
    return [dataset.tokenizer().decode(part) for part in parts]


def test_sides_follow_from_a_text_alone_in_the_shares_asked_for() -> None:
    documents = [document(number, f"text {number}") for number in range(3000)]
    rule = rule_for(documents)
    found = [rule.split_of(each) for each in documents]
    assert {split: found.count(split) for split in SPLITS} == pytest.approx(
        {TRAIN: 2400, VAL: 300, TEST: 300}, rel=0.2
    )
    fewer = rule_for(documents[1000:2000])
    assert [fewer.split_of(each) for each in documents] == found
    # Another share of the test does not move validation.
    other = rule_for(documents, test=0.3)
    assert [(other.split_of(each) == VAL) for each in documents] == [each == VAL for each in found]


@pytest.mark.parametrize("count", range(2, 12))
@pytest.mark.parametrize("share", [1e-9, 0.05, 0.49])
def test_no_split_is_empty_where_there_are_enough_texts(count: int, share: float) -> None:
    for seed in range(20):
        words = random.Random(f"{seed} {count}")
        documents = [document(n, "x" * words.randint(1, 500) + f"{seed} {n}") for n in range(count)]
        rule = rule_for(documents, share, share)
        found = {rule.split_of(each) for each in documents}
        assert found == set(SPLITS[: min(3, count)])


def test_a_small_corpus_gives_up_texts_of_the_right_size() -> None:
    sizes = [1000, 60, 3, 5000]
    documents = [document(n, chr(97 + n) * size) for n, size in enumerate(sizes)]
    rule = rule_for(documents, 1e-9, 1e-9)  # by their hashes all four are for training
    assert [rule.split_of(each) for each in documents] == [TRAIN, TEST, VAL, TRAIN]


def test_one_single_file_is_cut_at_its_end() -> None:
    parts = [document(n, f"part {n}", first="part 0") for n in range(40)]
    rule = rule_for(parts)
    assert [rule.split_of(each) for each in parts] == [TRAIN] * 32 + [VAL] * 4 + [TEST] * 4
    rule = rule_for(parts[:2])
    assert [rule.split_of(each) for each in parts[:2]] == [TRAIN, VAL]
    # Shares are of the bytes: a short last part is not a test by itself.
    uneven = [document(n, "x" * (1000 if n < 20 else 3) + str(n), first="0") for n in range(21)]
    rule = rule_for(uneven, 0.05, 0.05)
    assert [rule.split_of(each) for each in uneven] == [TRAIN] * 18 + [VAL] + [TEST] * 2
    rule = rule_for(parts, test=0.0)
    assert [rule.split_of(each) for each in parts].count(TEST) == 0
    with pytest.raises(DataError, match="one single document"):
        rule_for(parts[:1])


def test_equal_documents_are_not_taken_for_the_parts_of_one_file(tmp_path: Path) -> None:
    for count in (2, 10_000):
        with pytest.raises(DataError, match=r"all documents are equal.* add others, or name files"):
            rule_for([document(n, "the same") for n in range(count)])
    # Nor are two copies of a file that was cut.
    parts = [f"line {n} {'x' * 1000}\n" for n in range(20)]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(parts))
    sources = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    with pytest.raises(DataError, match="all documents are equal"):
        build_dataset(sources, tmp_path / "out", "byte", max_document_bytes=1024)
    # With files of their own for validation there is nothing to divide.
    (tmp_path / "val.txt").write_text("another")
    manifest = build_dataset(sources, tmp_path / "out", "byte", max_document_bytes=1024,
                             held_out={"val": [str(tmp_path / "val.txt")]})  # fmt: skip
    assert manifest.splits[TRAIN].documents == 40


def test_one_single_file_with_gaps_is_cut_where_it_should_be() -> None:
    """Parts 1 to 29 of 42 are in a file for the test, so 13 are left to divide."""
    parts = [document(n, f"part {n:02}", first="part 00") for n in range(42)]
    left = [parts[0], *parts[30:]]
    rule = rule_for(left, 0.05, 0.0)
    assert [rule.split_of(each) for each in left] == [TRAIN] * 12 + [VAL]
    rule = rule_for(left, 0.2, 0.1)  # at least that: 3 parts of 13, and 2
    assert [rule.split_of(each) for each in left] == [TRAIN] * 8 + [VAL] * 3 + [TEST] * 2


def test_one_single_file_of_which_the_test_has_a_part(tmp_path: Path) -> None:
    lines = [f"line {n:02} {'x' * 1000}\n" for n in range(42)]
    (tmp_path / "book.txt").write_text("".join(lines))
    (tmp_path / "middle.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in lines[1:30])
    )
    manifest = build_dataset([str(tmp_path / "book.txt")], tmp_path / "out", "byte",
                             max_document_bytes=1024,
                             held_out={"test": [str(tmp_path / "middle.jsonl")]})  # fmt: skip
    counts = {split: info.documents for split, info in manifest.splits.items()}
    assert counts == {TRAIN: 12, VAL: 1, TEST: 29}


def line(number: int) -> str:
    return f"line {number:04} {'x' * 1000}\n"  # of two, a document of 1024 bytes holds one


def lines_for(split: str) -> list[str]:
    """Lines that are on this side as texts of their own."""
    rule = SplitRule(0.1, 0.1)
    numbers = range(300)
    return [line(n) for n in numbers if rule.by_hash(document(n, line(n)).hash) == split]


def test_no_text_is_trained_on_and_held_out(tmp_path: Path) -> None:
    """A part goes with its file and a whole text by itself, so equal ones may be on two sides."""
    train, val, test = (lines_for(split) for split in SPLITS)
    files = {
        "a": train[:3],
        "b": [train[3], val[0], train[4]],  # its second part is also ...
        "c": [val[0]],  # ... a text that validates
        "d": [test[0], train[5], train[6]],  # its second part is held out for the test, so ...
        "e": [train[5]],  # ... not trained on
        "f": [train[5], train[7]],
        "g": [val[1], train[8]],
    }
    for name, lines in files.items():
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    for name in ("out", "again"):
        build_dataset([str(tmp_path / "*.txt")], tmp_path / name, "byte", max_document_bytes=1024,
                      val_fraction=0.1, test_fraction=0.1)  # fmt: skip
        assert texts_in(tmp_path / name, VAL) == [val[0], val[1], train[8]]
        assert texts_in(tmp_path / name, TEST) == [test[0], train[5], train[6]]
        left = [*train[:3], train[3], train[4], train[7]]
        assert texts_in(tmp_path / name, TRAIN) == left
        notes = [note for note in build_notes(tmp_path / name) if "left out" in note]
        assert notes == [f"3 {HELD_OUT}"]
    # The text is the same for all that: a second build finds the dataset it would make.
    before = (tmp_path / "out").stat().st_ino
    build_dataset([str(tmp_path / "*.txt")], tmp_path / "out", "byte", max_document_bytes=1024,
                  val_fraction=0.1, test_fraction=0.1)  # fmt: skip
    assert (tmp_path / "out").stat().st_ino == before


def test_a_single_file_that_repeats_itself(tmp_path: Path) -> None:
    path, out = tmp_path / "book.txt", tmp_path / "out"
    path.write_text("".join(line(n % 19) for n in range(20)))  # the last line is the first again
    build_dataset([str(path)], out, "byte", max_document_bytes=1024)
    assert texts_in(out, TRAIN) == [line(n) for n in range(1, 18)]
    assert texts_in(out, VAL) == [line(18)]
    assert texts_in(out, TEST) == [line(0)]
    path.write_text(line(0) * 20)
    for tokenizer in ("byte", "bpe:300"):
        with pytest.raises(DataError, match="have the text of every document for training too"):
            build_dataset([str(path)], tmp_path / "none", tokenizer, max_document_bytes=1024)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["book.txt", "out"]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.45])
def test_the_beginning_of_one_single_file_is_trained_on_whatever_its_hash(share: float) -> None:
    for seed in range(20):  # by the hash of its first part one file in ten is not for training
        parts = [document(n, f"{seed} {n:02}", first=f"{seed} 00") for n in range(20)]
        rule = rule_for(parts, share, share)
        kept = {0.05: 1, 0.1: 2, 0.45: 9}[share]
        sides = [TRAIN] * (20 - 2 * kept) + [VAL] * kept + [TEST] * kept
        assert [rule.split_of(each) for each in parts] == sides


def test_a_dataset_without_a_document_to_train_on_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one\n" * 600)
    monkeypatch.setattr(Sides, "rule", lambda _: SplitRule(0.1, 0.1, {}, 0, 2))
    with pytest.raises(DataError, match="no document is left to train on: add documents"):
        build_dataset([str(tmp_path / "a.txt")], tmp_path / "out", "byte", max_document_bytes=1024,
                      shard_tokens=100)  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_parts_of_a_file_stay_together(tmp_path: Path) -> None:
    """Ten parts each: by their own hashes they would fall on all sides."""
    for number in range(60):
        lines = [f"file {number} line {line} {'x' * 90}\n" for line in range(100)]
        (tmp_path / f"{number}.txt").write_text("".join(lines))
    out = tmp_path / "out"
    build_dataset([str(tmp_path / "*.txt")], out, "byte", max_document_bytes=1024,
                  val_fraction=0.2, test_fraction=0.2)  # fmt: skip
    files = [{text.split()[1] for text in texts_in(out, split)} for split in SPLITS]
    assert all(len(each) > 3 for each in files)
    assert sum(map(len, files)) == len(set.union(*files)) == 60
    documents = [len(texts_in(out, split)) for split in SPLITS]
    assert sum(documents) > 9 * 60


def test_files_of_the_users_own(tmp_path: Path) -> None:
    def write(name: str, texts: list[str]) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(path)

    stories = [f"story {number}" for number in range(50)]
    source = write("train", stories)
    val = write("val", ["mine", stories[3], stories[4]])
    test = write("test", ["yours", stories[4], stories[5]])
    out = tmp_path / "out"
    manifest = build_dataset([source], out, "byte", held_out={"val": [val], "test": [test]})
    assert texts_in(out, TEST) == ["yours", stories[4], stories[5]]
    assert texts_in(out, VAL) == ["mine", stories[3]]
    assert texts_in(out, TRAIN) == [each for each in stories if each not in stories[3:6]]
    assert build_notes(out) == [f"4 {COPIES}"]
    held_out = ("val.jsonl for val alone", "test.jsonl for test alone")
    assert manifest.sources == ("train.jsonl", *held_out)
    # Without files for a test there is none, and validation takes nothing from the sources.
    build_dataset([source], tmp_path / "two", "byte", held_out={"val": [val], "test": []})
    assert Dataset.open(tmp_path / "two").splits.keys() == {TRAIN, VAL}
    assert len(texts_in(tmp_path / "two", TRAIN)) == 48
    build_dataset([source], tmp_path / "three", "byte", held_out={"test": [test]})
    assert Dataset.open(tmp_path / "three").splits.keys() == set(SPLITS)
    # The same text elsewhere is another dataset.
    with pytest.raises(DataError, match="a dataset of other text"):
        build_dataset([val], tmp_path / "two", "byte", held_out={"val": [source]})
    with pytest.raises(DataError, match="held-out files have every document"):
        build_dataset([val], tmp_path / "four", "byte",
                      held_out={"val": [write("copy", ["mine", *stories])]})  # fmt: skip
    with pytest.raises(DataError, match="named for val hold no text of their own"):
        build_dataset([source], tmp_path / "five", "byte",
                      held_out={"val": [write("same", ["yours"])], "test": [test]})  # fmt: skip
    with pytest.raises(DataError, match="reached by two sources"):
        build_dataset([source], tmp_path / "six", "byte", held_out={"val": [source]})


def test_a_file_that_is_held_out_is_left_out_of_its_folder(tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    names = [f"{number:02}.txt" for number in range(12)]
    for name in names:
        (many / name).write_text(f"text of {name}")
    one, other = str(many / "03.txt"), str(many / "04.txt")

    def built(source: object, **held_out: list[str]) -> list[list[str]]:
        out = tmp_path / "out"
        build_dataset([str(source)], out, "byte", held_out=held_out, force=True)
        return [texts_in(out, split) for split in Dataset.open(out).splits]

    left = [f"text of {name}" for name in names if name != "03.txt"]
    for source in (many, many / "*.txt"):
        assert built(source, val=[one]) == [left, ["text of 03.txt"]]
        assert build_notes(tmp_path / "out") == []
    del left[3]
    assert built(many, val=[one], test=[other]) == [left, ["text of 03.txt"], ["text of 04.txt"]]
    assert built(many, val=[str(many / "0[34].txt")])[0] == left
    # Who names a file twice has to say what is meant.
    for held_out in ({"val": [one]}, {"val": [one], "test": [one]}, {"val": [str(many)]}):
        with pytest.raises(DataError, match="reached by two sources: name it once, or for"):
            build_dataset([one, other], tmp_path / "out", "byte", held_out=held_out)
    with pytest.raises(DataError, match="held-out files have every document of the sources"):
        build_dataset([str(many)], tmp_path / "out", "byte", held_out={"val": [str(many)]})


def test_shares_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for val, test in ((0.0, 0.1), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="validation fraction"):
            build_dataset(["stdlib"], tmp_path / "out", "byte", val_fraction=val,
                          test_fraction=test)  # fmt: skip
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        build_dataset(["stdlib"], tmp_path / "out", "byte", val_fraction=0.5, test_fraction=0.5)


def test_training_never_opens_the_test(tmp_path: Path) -> None:
    """A dataset whose test shards are poisoned or gone is the same to whoever trains on it."""
    from speedrun.data.find import open_dataset

    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"story {n}"}) + "\n" for n in range(200))
    )
    out = tmp_path / "out"
    build_dataset([str(tmp_path / "a.jsonl")], out, "byte")
    before = open_dataset(out)
    shard = before.splits[TEST].paths[0]
    shard.write_bytes(b"poison")
    assert open_dataset(out) == before
    assert open_dataset(out).fingerprint == before.fingerprint
    with pytest.raises(DataError, match="byte 6, inside the 1024-byte header"):
        open_dataset(out, (TEST,))
    shard.unlink()
    assert open_dataset(out) == before
