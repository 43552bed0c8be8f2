"""Tokenizers: exact round trips, the reserved end-of-text id, storage, and every refusal."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.data.gpt2 import GPT2_FINGERPRINT, PublicFile
from speedrun.data.tokenizer import (
    END_OF_TEXT,
    StreamDecoder,
    Tokenizer,
    create_tokenizer,
    load_gpt2,
    load_tokenizer,
    parse_spec,
    train_bpe,
)
from speedrun.errors import ConfigError, DataError

SOURCES = [Path(json.__file__).parent / name for name in ("decoder.py", "encoder.py", "scanner.py")]
TEXTS = [path.read_text() for path in SOURCES]
BYTE = create_tokenizer(parse_spec("byte"), [])
BPE = train_bpe(TEXTS, 400)


def public_pair(tokenizer: Tokenizer, folder: Path) -> tuple[PublicFile, PublicFile]:
    """A trained BPE in the layout of GPT-2's two files, with their hashes as the expected ones."""
    stored = json.loads(tokenizer.files["tokenizer.json"])
    merges = "#version: 0.2\n" + "".join(
        " ".join(pair) + "\n" for pair in stored["model"]["merges"]
    )
    vocabulary = json.dumps({**stored["model"]["vocab"], END_OF_TEXT: tokenizer.eot})
    files = []
    for names, text in ((("vocab.bpe",), merges), (("encoder.json",), vocabulary)):
        (folder / names[0]).write_text(text, encoding="utf-8")
        files.append(PublicFile(names, hashlib.sha256(text.encode()).hexdigest(), "http://example"))
    return files[0], files[1]


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_is_exact(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.eot not in ids
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    stream = StreamDecoder(tokenizer)
    assert "".join([*(stream.feed(int(token)) for token in ids), stream.finish()]) == text


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
def test_end_of_text_in_a_text_is_ordinary_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.token_bytes()[tokenizer.eot] == 0


def test_batches_encode_like_single_texts_in_order() -> None:
    texts = [text[start : start + 97] for text in TEXTS for start in range(0, len(text), 97)]
    together = BPE.encode_batch(texts)
    assert len(together) == len(texts) > 50
    assert all(
        np.array_equal(ids, BPE.encode(text)) for ids, text in zip(together, texts, strict=True)
    )
    assert BPE.encode_batch([]) == []


def test_ids_equal_those_of_the_tokenizers_library(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library

    BPE.save(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert library.token_to_id(END_OF_TEXT) == BPE.eot == BPE.vocab_size - 1 == 399
    for text in [*TEXTS, "naïve  café\n\n\t'll 日本語 👩‍👩‍👧 \r\n   x"]:
        assert library.encode(text).ids == BPE.encode(text).tolist()
        assert library.decode(library.encode(text).ids) == text


def test_long_runs_do_not_blow_up() -> None:
    for text in (" " * 300_000 + "x", "a" * 300_000, "\n" * 300_000, "é" * 100_000):
        assert BPE.decode(BPE.encode(text)) == text


def test_stream_holds_back_half_a_character() -> None:
    stream = StreamDecoder(BYTE)
    assert [stream.feed(value) for value in "é!".encode()] == ["", "é", "!"]
    assert stream.feed(0xC3) == ""
    assert stream.finish() == "\ufffd"


def test_training_is_the_same_in_another_process() -> None:
    code = (
        "import json, pathlib, sys; from speedrun.data.tokenizer import train_bpe;"
        "print(train_bpe([pathlib.Path(p).read_text() for p in sys.argv[1:]], 400).fingerprint)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, SOURCES)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == BPE.fingerprint
    assert train_bpe(TEXTS[:2], 400).fingerprint != BPE.fingerprint


def test_storage_is_plain_and_checked(tmp_path: Path) -> None:
    for tokenizer in (BYTE, BPE):
        folder = tmp_path / tokenizer.spec.replace(":", "-")
        tokenizer.save(folder)
        for path in folder.iterdir():
            json.loads(path.read_text())
        again = load_tokenizer(folder)
        for name in ("spec", "fingerprint", "tokens"):
            assert getattr(again, name) == getattr(tokenizer, name)
        assert np.array_equal(again.encode(TEXTS[0]), tokenizer.encode(TEXTS[0]))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokenizer.json", lambda data: data[: len(data) // 2]),
        ("tokenizer.json", lambda data: data.replace(b'"it"', b'"hh"')),
        ("tokenizer.json", lambda data: data.replace(b'"it": ', b'"it": 9')),
        ("spec.json", lambda data: data[:20]),
        ("spec.json", lambda data: data.replace(b"bpe:400", b"bpe:1")),
        ("spec.json", lambda data: data[:0] + b"[]"),
        ("spec.json", lambda data: data.replace(b"vocab_size", b"vocab]size")),
    ],
)
def test_damaged_storage_is_refused(tmp_path: Path, name: str, damage: object) -> None:
    assert callable(damage)
    BPE.save(tmp_path)
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(damage(before))
    assert (tmp_path / name).read_bytes() != before
    with pytest.raises(DataError, match="build the dataset again"):
        load_tokenizer(tmp_path)


def test_missing_storage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a stored tokenizer"):
        load_tokenizer(tmp_path)
    BPE.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("spec", ["", "bytes", "byte:3", "bpe", "bpe:", "bpe:x", "bpe:-5", "gpt2:"])
def test_bad_specs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"bpe:4096"):
        parse_spec(spec)


@pytest.mark.parametrize("size", [0, 256, 65_536, 100_000])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"257 .* 65,535"):
        parse_spec(f"bpe:{size}")


def test_specs_print_without_machine_paths() -> None:
    for spec in ("byte", "bpe:300", "gpt2"):
        assert str(parse_spec(spec)) == spec
    assert str(parse_spec("gpt2:/a/b")) == "gpt2"


def test_too_little_text_says_how_many_ids_it_gives() -> None:
    with pytest.raises(DataError, match=r"learn (\d+) ids, so use bpe:\1") as caught:
        train_bpe(["the cat the cat the dog"], 4096)
    size = int(str(caught.value).split("bpe:")[2].split()[0])
    assert train_bpe(["the cat the cat the dog"], size).vocab_size == size
    assert train_bpe([], 257).vocab_size == 257


def test_ids_outside_the_vocabulary_and_lone_surrogates_are_refused() -> None:
    with pytest.raises(DataError, match="token id 400 is outside the 400 ids"):
        BPE.decode([5, 400])
    for tokenizer in (BYTE, BPE):
        with pytest.raises(DataError, match="surrogate pair at character 2"):
            tokenizer.encode("ab\ud800c")


def test_gpt2_from_files(tmp_path: Path) -> None:
    merges, vocabulary = public_pair(BPE, tmp_path)
    gpt2 = load_gpt2(tmp_path, merges, vocabulary)
    assert (gpt2.spec, gpt2.vocab_size, gpt2.fingerprint) == ("gpt2", 400, GPT2_FINGERPRINT)
    for text in TEXTS:
        assert np.array_equal(gpt2.encode(text), BPE.encode(text))
    gpt2.save(tmp_path / "saved")
    assert (tmp_path / "saved/vocab.bpe").read_bytes() == (tmp_path / "vocab.bpe").read_bytes()
    assert np.array_equal(
        load_gpt2(tmp_path / "saved", merges, vocabulary).encode("for x"), BPE.encode("for x")
    )


def test_a_stored_file_of_which_any_byte_changed_is_refused(tmp_path: Path) -> None:
    """The merges are for other tools: what stood there instead was exported with the run."""
    train_bpe(["aa bb aa bb"] * 20, 259).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = file.read_text()
    load_tokenizer(tmp_path)
    for changed in (whole.replace('"merges": [', '"merges": [["x", "y"],'), whole + " "):
        assert changed != whole
        file.write_text(changed)
        with pytest.raises(DataError, match=r"tokenizer\.json is not the file that was saved"):
            load_tokenizer(tmp_path)
    file.write_text(whole)
    spec = json.loads((tmp_path / "spec.json").read_text())
    wrongs: list[dict[str, object]] = [{"vocab_size": 260}, {"files": []}, {"files": {}}]
    for wrong in wrongs:
        (tmp_path / "spec.json").write_text(json.dumps(spec | wrong))
        with pytest.raises(DataError, match=r"says 260 ids|is not the file that was saved"):
            load_tokenizer(tmp_path)
    older = {key: value for key, value in spec.items() if key != "files"}
    (tmp_path / "spec.json").write_text(json.dumps(older))
    load_tokenizer(tmp_path)


def test_a_vocabulary_may_be_as_large_as_the_text_allows() -> None:
    spec = parse_spec("bpe:..4096")
    assert str(spec) == "bpe:..4096"
    assert spec.for_text(1 << 20).size == 4096
    assert spec.for_text(1_600).size == 357
    assert parse_spec("bpe:4096").for_text(10).size == 4096  # asked for, to be refused
    texts = ["the cat and the dog and the cat"]
    found = create_tokenizer(spec, texts)
    assert 257 < found.vocab_size < 300
    assert found.spec == f"bpe:{found.vocab_size}"
    assert found.fingerprint == create_tokenizer(parse_spec(found.spec), texts).fingerprint
    for wrong in ("bpe:..", "bpe:..x", "bpe:...9", "bpe:..99999"):
        with pytest.raises(ConfigError):
            parse_spec(wrong)
