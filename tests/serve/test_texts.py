from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from speedrun.data.build import build_dataset
from speedrun.data.shards import Split, write_shard
from speedrun.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, train_bpe
from speedrun.errors import ConfigError, DataError, SpeedrunError
from speedrun.serve import texts as texts_module
from speedrun.serve.texts import Text, Texts, documents_in, whole_words
from tests.serve.loaded import loaded
from tests.train.heard import Make

BYTE = ByteTokenizer()


def text_of(text: Text, tokenizer: Tokenizer = BYTE) -> str:
    assert text.ids[0] == tokenizer.eot
    decoded = tokenizer.decode_bytes(text.ids[1:].tolist())
    assert len(decoded) == text.bytes
    return decoded.decode()


def found(*names: Path | str, **options: str) -> list[tuple[str, str]]:
    """File and text of each document."""
    read = Texts([str(name) for name in names], **options).documents(BYTE)  # type: ignore[arg-type]
    return [(text.file, text_of(text)) for text in read]


def test_a_file_is_named_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "sub/b.md", "sub/c.jsonl", "LICENSE"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text('{"text": "x"}\n{"text": "y"}\n' if "jsonl" in name else name)
    Path("d.txt.gz").write_bytes(gzip.compress(b"zipped \xc3\xa9"))
    assert found("a.txt") == [("a.txt", "a.txt")]
    assert found("sub") == [("sub/b.md", "sub/b.md"), ("sub/c.jsonl", "x"), ("sub/c.jsonl", "y")]
    assert found("s*/*.md", "d.txt.gz") == [("sub/b.md", "sub/b.md"), ("d.txt.gz", "zipped é")]
    assert found("LICENSE") == [("LICENSE", "LICENSE")]  # a name that says nothing: text


def test_a_large_file_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "PIECE_BYTES", 1024)
    text = "".join(f"line {n} of many \n" for n in range(999)) + "é" * 5000
    (tmp_path / "a.txt").write_text(text)
    assert [one for _, one in found(tmp_path / "a.txt")] == [text]


BPE = train_bpe(["the cat's  hat \n\n is\there, isn't it?   'tis 12 345 ¡él!\u3000ok" * 30], 291)
assert isinstance(BPE, BpeTokenizer)
LETTERS = st.sampled_from("ab  \n\n\t's.1\u00a0\u3000é\x1c\x85日\r")


@given(st.lists(st.text(LETTERS, max_size=12), max_size=12))
@example(["a ", " b"])
@example(["a\n", "\nb", " \n"])
@example(["it'", "s  ", "", "x"])
def test_pieces_are_encoded_as_the_whole(pieces: list[str]) -> None:
    cut = list(whole_words(pieces))
    assert "".join(cut) == "".join(pieces)
    for tokenizer in (BPE, BYTE):
        parts = [tokenizer.encode(piece).tolist() for piece in cut]
        assert [*chain(*parts)] == tokenizer.encode("".join(pieces)).tolist()


def test_lines_that_end_in_a_space_are_cut_too() -> None:
    """As those of wikitext do: a large file must not be held whole for that."""
    pieces = [" = Title = \n \n Some words . \n"] * 9
    assert max(map(len, whole_words(pieces))) < 2 * len(pieces[0])


def write_shards(folder: Path, *shards: list[int]) -> Split:
    paths = [folder / f"x_val_{number}.bin" for number in range(len(shards))]
    for path, tokens in zip(paths, shards, strict=True):
        write_shard(path, np.array(tokens))
    return Split("val", tuple(paths), tuple(map(len, shards)))


@pytest.mark.parametrize("first", [[], [7, 8]])
def test_documents_of_shards(tmp_path: Path, first: list[int]) -> None:
    """One goes on over two shards, one is empty, and the first may have lost its beginning."""
    split = write_shards(tmp_path, [*first, 9, 1, 2, 9, 9, 3], [4, 5], [6, 9, 9, 7])
    documents = [ids.tolist() for ids in documents_in(split, 10, eot=9)]
    begun = [first] if first else []
    assert documents == [*begun, [1, 2], [], [3, 4, 5, 6], [], [7]]
    (tmp_path / "one").mkdir()
    ends = write_shards(tmp_path / "one", [9, 1, 9])
    assert [ids.tolist() for ids in documents_in(ends, 10, eot=9)] == [[1], []]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"Ça, document {number}: " + "word " * number)
    build_dataset([str(folder / "*.txt")], folder / "built", "byte", val_fraction=0.3,
                  test_fraction=0.2)  # fmt: skip
    return folder / "built"


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["as stored", "encoded anew"])
def test_a_dataset_is_its_documents(dataset: Path, tokenizer: Tokenizer) -> None:
    texts = Texts([str(dataset)])
    documents = list(texts.documents(tokenizer))
    assert {text.file for text in documents} == {"built/val"}
    written = {path.read_text() for path in dataset.parent.glob("*.txt")}
    read = [text_of(text, tokenizer) for text in documents]
    assert len(set(read)) == len(read) > 5
    assert set(read) < written
    assert sum(text.read for text in documents) == texts.total_bytes
    trained = [text for _, text in found(dataset, split="train")]
    tested = [text for _, text in found(dataset, split="test")]
    assert sorted([*read, *trained, *tested]) == sorted(written)


def test_datasets_of_one_name_are_two(dataset: Path, tmp_path: Path) -> None:
    other = shutil.copytree(dataset, tmp_path / "built")
    files = {text.file for text in Texts([str(dataset), str(other)]).documents(BYTE)}
    assert files == {"built/val", f"{other}/val"}


def test_the_test_of_a_runs_own_dataset_is_refused(tiny: Make, dataset: Path) -> None:
    from speedrun.data.dataset import Dataset

    run, other = loaded(tiny()), loaded(tiny())
    meta = run.trained.checkpoint.meta
    assert isinstance(meta, dict)
    meta["dataset_fingerprint"] = Dataset.open(dataset).fingerprint
    with pytest.raises(DataError, match="speedrun verify untrained` alone, which remembers"):
        Texts([str(dataset)], split="test", runs=[other, run])
    assert Texts([str(dataset)], split="test", runs=[other])
    assert Texts([str(dataset)], runs=[run])


def test_built_in_corpora_and_folders_carry_no_paths_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = Texts(["stdlib"]).documents(BYTE)
    assert next(documents).file.startswith("stdlib/")
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("x")
    assert found(".") == [("x.txt", "x")]


def test_what_is_blank_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n ")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n{"text": "c"}\n')
    notes: Counter[str] = Counter()
    documents = list(Texts([str(tmp_path)]).documents(BYTE, notes))
    assert [text_of(text) for text in documents] == ["b", "c"]
    assert +notes == {"blank documents left out": 2}


def test_mistakes_are_a_sentence_each(tmp_path: Path, dataset: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "zero.dat").write_bytes(b"ab\0c")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text " * 999)[:-20])
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "a"}) + '\n{"text": 3}\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "ok.txt").write_text("ok")
    cases: list[tuple[list[str], dict[str, str], str]] = [
        (["empty.txt"], {}, "is empty"),
        (["blank.txt"], {}, "no document of .* has any text"),
        (["latin.txt"], {}, "is not UTF-8 at byte 3"),
        (["zero.dat"], {}, "is binary: byte 2 is zero"),
        (["cut.txt.gz"], {}, "is cut short or not gzip"),
        (["bad.jsonl"], {}, "line 2 has int under 'text'"),
        (["bad.jsonl"], {"text_field": "body"}, "line 1 has no field 'body'"),
        (["missing.txt"], {}, "there is no file, folder or corpus"),
        (["*.nothing"], {}, "no file matches"),
        (["other"], {}, "holds no file this can read"),
        (["ok.txt", "ok.txt"], {}, "ok.txt is named twice"),
        (["ok.txt", "*.txt"], {}, "ok.txt is named twice"),
        (["ok.txt"], {"split": "test"}, "--split test is for datasets"),
        ([str(dataset)], {"split": "valid"}, "--split 'valid' is not known: use train, val, test"),
        ([str(dataset), str(dataset)], {}, "built is named twice"),
    ]
    for names, options, sentence in cases:
        with pytest.raises(SpeedrunError, match=sentence) as error:
            found(*(tmp_path / name for name in names), **options)
        assert "\n" not in str(error.value)
        assert isinstance(error.value, (DataError, ConfigError))


def test_a_build_that_did_not_finish_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x.partial"
    folder.mkdir()
    with pytest.raises(DataError, match="did not finish"):
        Texts([str(folder)])
