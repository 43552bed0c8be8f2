from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speedrun.config.schema import Config
from speedrun.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from speedrun.errors import ConfigError, DataError
from speedrun.model import native
from speedrun.serve import evaluate
from speedrun.serve.evaluate import (
    Loss,
    Row,
    Scored,
    Scorer,
    by_file,
    difference,
    rows_of,
    score,
    total,
)
from speedrun.serve.load import LoadedRun
from speedrun.serve.texts import Texts
from tests.serve.loaded import loaded, slow_nats
from tests.train.heard import Make

LONG = ("batch.length=256", "batch.tokens=512", "model.zero_init_head=false")
WINDOW = ("attention.window_start=128", "attention.window_end=128")
RECIPES = {
    "baseline": LONG,
    "record-03": LONG,
    "record-18": (*LONG, *WINDOW, "model.layers=4", "model.value_tables=1"),
    "best": (*LONG, *WINDOW, "model.layers=4", "model.value_tables=1", "model.bigram_rows=300"),
}


def drawn(count: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """A document of `count` ids after its end-of-text."""
    ids = np.random.default_rng(seed).integers(0, 256, count + 1, dtype=np.uint16)
    ids[0] = 256
    return ids


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_every_token_is_predicted_once_and_from_enough(
    n: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    ids = np.arange(n + 1, dtype=np.uint16)
    predicted: list[int] = []
    rows = list(rows_of(7, ids, context, stride, read=n))
    for index, row in enumerate(rows):
        inputs, targets = row.ids[:-1], row.ids[-row.scored :]
        assert len(inputs) <= context
        predicted += targets.tolist()
        seen = len(inputs) - row.scored + 1  # by the first that it predicts
        assert seen >= context - stride + 1 if index else inputs[0] == 0
        assert len(inputs) == context or len(rows) == 1
    assert predicted == [*range(1, n + 1)]
    assert sum(row.read for row in rows) == pytest.approx(n)


def test_disjoint_rows_are_those_of_training_but_for_the_last() -> None:
    ids = np.arange(11, dtype=np.uint16)
    found = [(row.ids.tolist(), row.scored) for row in rows_of(0, ids, 4, 4)]
    assert found == [([0, 1, 2, 3, 4], 4), ([4, 5, 6, 7, 8], 4), ([6, 7, 8, 9, 10], 2)]
    assert [row.scored for row in rows_of(0, ids, 1, 1)] == [1] * 10


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("context", "stride"), [(256, 256), (256, 100), (130, 1), (37, 37), (1, 1)]
)
def test_rows_together_are_as_one_by_one(
    tiny: Make, recipe: str, context: int, stride: int
) -> None:
    """Documents of many lengths in one pool against each token's own dense row."""
    run = loaded(tiny(*RECIPES[recipe], recipe=recipe))
    lengths = [1, 2, 36, 37, 38, 140] if context < 256 else [5, 255, 256, 257, 300]
    documents = [drawn(count, count) for count in lengths]
    rows = (
        row for owner, ids in enumerate(documents) for row in rows_of(owner, ids, context, stride)
    )
    found = [0.0] * len(documents)
    for row, nats in Scorer(run)(rows):
        found[row.owner] += nats
    for ids, nats in zip(documents, found, strict=True):
        expected = math.fsum(slow_nats(run, ids, context, stride))
        assert nats == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("recipe", ["record-03", "best"])
def test_a_context_may_be_longer_than_that_of_training(tiny: Make, recipe: str) -> None:
    run = loaded(tiny(*RECIPES[recipe], recipe=recipe), length=300)
    ids = drawn(310)
    found = sum(nats for _, nats in Scorer(run)(rows_of(0, ids, 300, 300)))
    assert found == pytest.approx(math.fsum(slow_nats(run, ids, 300, 300)), rel=2e-6)


def test_torch_alone_gives_the_same(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = loaded(tiny(*RECIPES["best"], recipe="best"))
    rows = [Row(i, drawn(n, n), min(n, 9)) for i, n in enumerate((3, 40, 200, 256, 256))]
    native_way = {row.owner: nats for row, nats in Scorer(run)(rows)}
    monkeypatch.setattr(native, "load", lambda: "the test says so")
    torch_way = {row.owner: nats for row, nats in Scorer(run)(rows)}
    assert native_way == pytest.approx(torch_way, rel=1e-5)


def test_passes_and_pools_are_bounded_and_change_nothing(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loaded(tiny(*LONG))
    lengths = [int(n) for n in np.random.default_rng(3).integers(1, 200, 60)]
    rows = [Row(i, drawn(n, i), n) for i, n in enumerate(lengths)]
    expected = {row.owner: nats for row, nats in Scorer(run)(rows)}
    sizes: list[tuple[int, int]] = []
    run.model.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape)))
    monkeypatch.setattr(evaluate, "PASS_TOKENS", 512)
    monkeypatch.setattr(evaluate, "POOL_TOKENS", 2048)
    taken = 0

    def counted() -> Iterator[Row]:
        nonlocal taken
        for row in rows:
            taken += 1
            yield row

    found = {}
    for row, nats in Scorer(run)(counted()):
        found[row.owner] = nats
        assert taken <= len(found) + 2048
    assert found == pytest.approx(expected, rel=1e-5)
    assert max(B * T for B, T in sizes) <= 512
    # What is computed beyond the tokens there are: little, since rows of a pass are of one length.
    assert sum(B * T for B, T in sizes) < 1.4 * sum(lengths)


def test_the_mean_is_that_of_validation(tiny: Make) -> None:
    """On whole rows of one document the loss is what training would report."""
    run = loaded(tiny(*LONG))
    ids = drawn(512)
    rows = torch.tensor(np.stack([ids[:257], ids[256:513]]).astype(np.int64))
    plan = run.planner.plan(torch.zeros(2, 256, dtype=torch.int32))
    with torch.no_grad():
        expected = run.model(rows[:, :-1], plan, rows[:, 1:].contiguous()).item()
    found = sum(nats for _, nats in Scorer(run)(rows_of(0, ids, 256, 256))) / 512
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_row_that_memory_cannot_hold_is_refused(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loaded(tiny(*LONG), length=1024)
    monkeypatch.setattr(evaluate, "PASS_TOKENS", 256)
    monkeypatch.setattr(evaluate, "memory_bytes", lambda: 2**20)
    assert list(Scorer(run)(rows_of(0, drawn(200), 1024, 1024)))
    with pytest.raises(ConfigError, match=r"1,000 tokens .* use a --context of at most 2\d\d"):
        list(Scorer(run)(rows_of(0, drawn(1000), 1024, 1024)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("one and one is two, ça va " * 9)
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n\n{"text": " "}\n{"text": "four, é"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "notes.bin").write_bytes(b"\0\1")
    return tmp_path


def test_losses_by_file_and_in_all(tiny: Make, folder: Path) -> None:
    run = loaded(tiny(*LONG))
    seen: list[int] = []
    texts = Texts([str(folder)])
    scored = score(run, texts, 40, 10, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] in range(texts.total_bytes - 5, texts.total_bytes + 1)
    assert [name.rpartition("/")[2] for name, _ in by_file(scored)] == ["a.txt", "b.jsonl"]
    documents = ["one and one is two, ça va " * 9, "three", "four, é"]
    tokenizer = ByteTokenizer()
    nats = []
    for text in documents:
        ids = np.concatenate([[tokenizer.eot], tokenizer.encode(text)]).astype(np.uint16)
        nats.append(math.fsum(slow_nats(run, ids, 40, 10)))
    assert scored.nats.tolist() == pytest.approx(nats, rel=2e-6)
    sizes = [len(text.encode()) for text in documents]
    assert scored.tokens.tolist() == scored.bytes.tolist() == sizes
    whole = total(scored)
    assert whole.documents == 3
    assert whole.nats_per_token == pytest.approx(sum(nats) / sum(sizes), rel=2e-6)
    assert whole.bits_per_byte == pytest.approx(whole.nats_per_token / math.log(2))
    assert whole.perplexity == pytest.approx(math.exp(whole.nats_per_token))
    assert by_file(scored)[0][1].stderr is None
    assert by_file(scored)[1][1].nats_per_token == pytest.approx(
        sum(nats[1:]) / sum(sizes[1:]), rel=2e-6
    )
    assert +scored.notes == {"blank documents left out": 2, "files of other kinds left out": 1}


def test_bits_are_per_byte_of_text_whatever_the_tokens(tiny: Make, folder: Path) -> None:
    tokenizer = train_bpe(["one and one is two and three " * 50], 270)
    run = loaded(tiny(*LONG), tokenizer=tokenizer)
    whole = total(score(run, Texts([str(folder / "a.txt")]), 64, 64))
    assert whole.bytes == 27 * 9
    assert whole.tokens < whole.bytes
    nats = whole.nats_per_token * whole.tokens
    assert whole.bits_per_byte == pytest.approx(nats / math.log(2) / whole.bytes)


def scored_of(nats: list[float], tokens: list[int], sizes: list[int]) -> Scored:
    count = len(nats)
    return Scored(["a"], array("q", [0] * count), array("d", nats), array("q", tokens),
                  array("q", sizes))  # fmt: skip


def test_the_difference_is_of_tokens_or_of_bytes() -> None:
    first = scored_of([3.0, 8.0, 5.0], [2, 4, 3], [9, 18, 13])
    second = scored_of([2.0, 7.5, 4.0], [2, 4, 3], [9, 18, 13])
    of, found = difference(second, first, same_tokenizer=True)
    assert of == "nats_per_token"
    assert found.value == pytest.approx(-2.5 / 9)
    assert found.stderr is not None
    residuals = [-1.0 + 2.5 / 9 * 2, -0.5 + 2.5 / 9 * 4, -1.0 + 2.5 / 9 * 3]
    assert found.stderr == pytest.approx(math.sqrt(1.5 * sum(e * e for e in residuals)) / 9)
    of, found = difference(second, first, same_tokenizer=False)
    assert of == "bits_per_byte"
    assert found.value == pytest.approx(-2.5 / math.log(2) / 40)


def test_texts_that_changed_between_two_runs_are_noticed() -> None:
    first, second = (scored_of([1.0] * 3, [1] * 3, sizes) for sizes in ([1, 2, 3], [1, 2, 4]))
    with pytest.raises(DataError, match="changed while they were read"):
        difference(second, first, same_tokenizer=True)


def test_what_is_not_finite_stays_so_and_has_no_error() -> None:
    loss = Loss.of([math.nan, 1.0], [1, 1], [1, 1])
    assert math.isnan(loss.nats_per_token)
    assert loss.stderr is None
    assert loss.interval is None
    assert Loss.of([1e4], [1], [1]).perplexity == math.inf


def test_a_run_with_another_tokenizer_sees_the_same_documents(
    tiny: Make, tiny_dataset: Path
) -> None:
    """The dataset is of bytes: as they are for one run, decoded and encoded anew for the other."""
    config: Config = tiny(*LONG)
    tokenizer: Tokenizer = train_bpe(["1 + 2 = 3\n" * 99], 261)
    runs: list[LoadedRun] = [loaded(config), loaded(config, tokenizer=tokenizer)]
    first, second = (score(run, Texts([str(tiny_dataset)]), 256, 256) for run in runs)
    assert first.bytes == second.bytes
    assert sum(second.tokens) < sum(first.tokens)
    of, found = difference(second, first, same_tokenizer=False)
    assert of == "bits_per_byte"
    assert found.value == pytest.approx(total(second).bits_per_byte - total(first).bits_per_byte)
