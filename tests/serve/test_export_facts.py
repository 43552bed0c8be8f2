"""What an export says: its tokenizer as ours, its card and its losses true, no place named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from speedrun.data.build import build_dataset
from speedrun.data.tokenizer import END_OF_TEXT, Tokenizer, load_gpt2
from speedrun.errors import DataError
from speedrun.files import write_json
from speedrun.serve.export import losses
from speedrun.serve.export.export import export
from speedrun.serve.export.facts import without_places
from speedrun.serve.export.folder import FACTS
from speedrun.serve.export.tokenizer import PROBES, check, library_of
from speedrun.serve.load import load_run
from speedrun.train.checkpoint import MODEL
from speedrun.train.evaluate import evaluate
from tests.data.test_tokenizer import BPE, BYTE, public_pair
from tests.serve.exporting import Make, contents, make_run, maker, read, small


@pytest.fixture
def make(tmp_path: Path, tiny_dataset: Path) -> Make:
    return maker(tmp_path / "run", tiny_dataset)


# The tokenizer.


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("gpt2")
    return load_gpt2(folder, *public_pair(BPE, folder))


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2"])
def test_the_library_reads_texts_as_we_do(kind: str, gpt2: Tokenizer) -> None:
    ours = {"byte": BYTE, "bpe": BPE, "gpt2": gpt2}[kind]
    library = Library.from_str(library_of(ours).to_str())
    assert library.get_vocab_size() == ours.vocab_size

    @settings(max_examples=150)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def alike(text: str) -> None:
        ids = ours.encode(text).tolist()
        assert library.encode(text, add_special_tokens=False).ids == ids
        assert library.encode(text).ids == [ours.eot, *ids]
        assert library.decode([ours.eot, *ids]) == text

    alike()
    for text in PROBES:
        assert library.encode(text).ids == [ours.eot, *ours.encode(text).tolist()]
    # As is usual there, and unlike ours, the token in a text is the token.
    assert library.encode(f"a{END_OF_TEXT}", add_special_tokens=False).ids[-1] == ours.eot


def test_any_bytes_decode_as_we_decode_them() -> None:
    library = library_of(BYTE)
    for ids in ([0xFF, 0x41], [0xE2, 0x82], [0xF0, 0x9F, 0x98, 0x41], [0xC3, 0xC3, 0xA9]):
        assert library.decode(ids) == BYTE.decode(ids)


def test_a_tokenizer_that_reads_otherwise_is_refused() -> None:
    library = library_of(BPE)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with pytest.raises(DataError, match="otherwise than the tokenizer bpe:400"):
        check(library, BPE)
    with pytest.raises(DataError, match="not the last id"):
        check(library_of(BYTE), BPE)


def test_the_tokenizers_settings(make: Make, tmp_path: Path) -> None:
    export(make().path, tmp_path / "out")
    found = read(tmp_path / "out/tokenizer_config.json")
    assert found["model_max_length"] == 512
    assert found["bos_token"] == found["eos_token"] == END_OF_TEXT
    assert not found["clean_up_tokenization_spaces"]
    assert found["model_input_names"] == ["input_ids", "attention_mask"], "no token types"


# What it says of the model.


def test_the_card_says_where_the_model_comes_from(make: Make, tmp_path: Path) -> None:
    run = make()
    export(run.path, tmp_path / "out")
    card, facts = (tmp_path / "out/README.md").read_text(), read(tmp_path / "out" / FACTS)
    header = card.split("---\n")[1]
    assert "library_name: transformers\npipeline_tag: text-generation\n" in header
    meta = run.checkpoint(8).meta
    assert facts["data"]["dataset_fingerprint"] == meta["dataset_fingerprint"]
    assert facts["weights_sha256"] == meta["sha256"][MODEL]
    loss = facts["validation"]
    for told in (
        "`best`", "`nano`", meta["dataset_fingerprint"], f"{facts['parameters']:,}", "`byte`",
        f"{loss['loss']:.4f} nats per token ({loss['loss_range'][0]:.4f} to ",
        f"{loss['bits_per_byte']:.4f} bits per byte ({loss['bits_per_byte_range'][0]:.4f} to ",
        "95%, over 4 rows of 512 tokens", "inside of its document", "1 blocks of 128",
        "`speedrun train best --run run data.dir=dataset`", "`speedrun export run --to hf out`",
        "trust_remote_code=True", "What it is not",
    ):  # fmt: skip
        assert told in card, told
    assert "trust_remote_code" not in (card_of(make, tmp_path, "baseline"))


def card_of(make: Make, tmp_path: Path, recipe: str) -> str:
    (tmp_path / "run").rename(tmp_path / "best")
    export(make(recipe).path, tmp_path / recipe)
    return (tmp_path / recipe / "README.md").read_text()


@pytest.mark.parametrize("to", ["hf", "weights"])
def test_nothing_names_a_place_on_this_machine(
    make: Make, tmp_path: Path, tiny_dataset: Path, to: str
) -> None:
    export(make().path, tmp_path / "out", to)
    for name, data in contents(tmp_path / "out").items():
        for place in (tmp_path, tiny_dataset, tiny_dataset.parent, Path.home()):
            assert f"{place}/".encode() not in data, name


@pytest.mark.parametrize(("text", "expected"), [
    ("speedrun train x --run /home/me/runs/a", "speedrun train x --run a"),
    ('data.sources=["/a/b.txt", "c/d.txt"]', 'data.sources=["b.txt", "c/d.txt"]'),
    ("data.dir=~/data/set/ x", "data.dir=set x"),
    ("runs/first ../x/y hf:org/name ./z", "runs/first ../x/y hf:org/name ./z"),
    ("/a/b/c.json is damaged: /d/e", "c.json is damaged: e"),
    ("1/2 http://example.org/x", "1/2 http://example.org/x"),
])  # fmt: skip
def test_of_a_path_its_last_part_is_kept(text: str, expected: str) -> None:
    assert without_places(text) == expected


def test_the_loss_is_that_of_evaluation_with_an_interval_around_it(make: Make) -> None:
    run = make()
    found, known = losses.losses_of(run, load_run(run.path).model), evaluate(run)
    assert known is not None
    assert found.loss == pytest.approx(known.loss, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(known.bits_per_byte, rel=1e-6)
    assert (found.tokens, found.rows, found.why_no_range) == (known.tokens, 4, None)
    assert found.loss_range is not None
    assert found.bits_per_byte_range is not None
    assert found.loss_range[0] < known.loss < found.loss_range[1]


def test_intervals_by_hand() -> None:
    found = losses.summed_up([100.0, 120.0, 110.0], [40.0, 50.0, 45.0], 50)
    # Mean 2.2, standard deviation 0.2, t of 2 degrees of freedom 4.303.
    assert found.loss == pytest.approx(2.2)
    assert found.loss_range == pytest.approx((2.2 - 0.49683, 2.2 + 0.49683), abs=1e-4)
    assert found.bits_per_byte == pytest.approx(330 / 135 / 0.693147, rel=1e-5)
    # A row that has nats in proportion to its bytes adds nothing to the doubt.
    even = losses.summed_up([80.0, 160.0], [40.0, 80.0], 50).bits_per_byte_range
    assert even is not None
    assert even[1] - even[0] < 1e-5
    assert "no spread" in (losses.summed_up([1.0], [1.0], 1).why_no_range or "")
    assert "diverged" in (losses.summed_up([1.0, math.nan], [1.0, 1.0], 1).why_no_range or "")


def test_without_its_dataset_there_is_no_interval_and_the_card_says_why(
    tmp_path: Path, tiny_dataset: Path
) -> None:
    moved = tmp_path / "data"
    moved.mkdir()
    for index in range(12):
        (moved / f"{index}.txt").write_text(f"text {index} " * 400)
    build_dataset([str(moved / "*.txt")], moved / "set", "byte", test_fraction=0.2)
    run = make_run(small("modern", moved / "set"), tmp_path / "run")
    for path in (moved / "set").glob("*test*"):
        path.unlink()  # nobody looks at the test
    export(run.path, tmp_path / "first")
    assert read(tmp_path / "first" / FACTS)["validation"]["rows"] == 4
    (moved / "set").rename(moved / "elsewhere")
    export(run.path, tmp_path / "second")
    assert "is not on this machine" in (tmp_path / "second/README.md").read_text()
    assert read(tmp_path / "second" / FACTS)["validation"]["loss_range"] is None


def test_hours_of_evaluation_are_not_begun(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MOST_OPERATIONS", 1.0)
    run = make()
    found = losses.losses_of(run, load_run(run.path).model)
    assert found.loss_range is None
    assert "export where there is a GPU" in (found.why_no_range or "")


def test_a_test_that_was_made_is_shown(make: Make, tmp_path: Path) -> None:
    run = make()
    meta = run.checkpoint(8).meta
    test = {"loss": 1.2345, "bits_per_byte": 2.5, "tokens": 10, "step": 8,
            "weights_sha256": meta["sha256"][MODEL], "dataset_fingerprint": "x"}  # fmt: skip
    write_json(run.test, {**test, "earlier": []})
    export(run.path, tmp_path / "out")
    assert "1.2345 nats per token, 2.5000 bits per byte" in (tmp_path / "out/README.md").read_text()
    write_json(run.test, {**test, "weights_sha256": "of others", "earlier": []})
    export(run.path, tmp_path / "other")
    assert "1.2345" not in (tmp_path / "other/README.md").read_text()
