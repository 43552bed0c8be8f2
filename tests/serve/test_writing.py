"""Texts as they are written: pieces, ends, stop strings, odds, and any number at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedrun.data.tokenizer import ByteTokenizer
from speedrun.serve.load import LoadedRun
from speedrun.serve.sampling import Sampling
from speedrun.serve.writing import Piece, StopStrings, Wanted, Writer, prompt_ids, write
from tests.serve.loaded import loaded
from tests.train.heard import Make

BYTES = ByteTokenizer()
HOT = Sampling(temperature=1.0, top_k=0)


@pytest.fixture
def run(tiny: Make) -> LoadedRun:
    return loaded(tiny(
        "model.layers=4", "attention.window_start=64", "attention.window_end=64", recipe="best"
    ))  # fmt: skip


def texts(run: LoadedRun, wanted: list[Wanted], slots: int = 1) -> list[str]:
    made = [""] * len(wanted)
    for number, piece in write(Writer(run, slots), wanted):
        made[number] += piece.text
    return made


def wanted_with(seed: int, prompt: str = "ab", tokens: int = 40, **more: object) -> Wanted:
    ids = prompt_ids(BYTES, prompt)
    return Wanted(ids, tokens, replace(HOT, seed=seed), **more)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_text_whatever_the_batch(run: LoadedRun) -> None:
    """Prompts short and long, texts that outgrow the context of 64, more texts than slots."""
    prompts = ["", "x", "a prompt of more tokens than the decoder takes one by one", "yy"]
    wanted = [wanted_with(seed, prompts[seed % 4], 30 + 9 * seed) for seed in range(9)]
    alone = [texts(run, [one])[0] for one in wanted]
    for slots in (2, 4, 16):
        assert texts(run, wanted, slots) == alone
    assert texts(run, wanted[::-1], 3) == alone[::-1]
    assert len(set(alone)) == len(alone)
    # With odds each token is drawn by itself, without them several in one call.
    for one, text in zip(wanted, alone, strict=True):
        assert texts(run, [replace(one, alternatives=0)]) == [text]
    mixed = [replace(one, alternatives=0 if n % 2 else None) for n, one in enumerate(wanted)]
    assert texts(run, mixed, 4) == alone


def test_why_a_text_ends(run: LoadedRun) -> None:
    pieces = [piece for _, piece in write(Writer(run), [wanted_with(0, tokens=7)])]
    assert [piece.finish for piece in pieces] == [None] * 6 + ["length"]
    text = texts(run, [wanted_with(0)])[0]
    assert len(text) > 12
    stop = text[5:8]
    cut = [piece for _, piece in write(Writer(run), [wanted_with(0, stop=(stop, "never"))])]
    assert "".join(piece.text for piece in cut) == text[: text.index(stop)]
    assert cut[-1].finish == "stop"


def test_the_end_of_text_token_ends_it(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedrun.serve.writing.draw", lambda texts: [BYTES.eot] * len(texts))
    (number, piece), = write(Writer(run), [wanted_with(0, alternatives=0)])  # fmt: skip
    assert (number, piece.token, piece.text, piece.finish) == (0, BYTES.eot, "", "stop")


def test_a_character_appears_once_it_is_whole(
    run: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = [*"é€".encode(), 0xE2, 0x82]
    monkeypatch.setattr("speedrun.serve.writing.draw", lambda _: [coming.pop(0)])
    wanted = wanted_with(0, tokens=7, alternatives=0)
    pieces = [piece for _, piece in write(Writer(run), [wanted])]
    assert [piece.text for piece in pieces] == ["", "é", "", "", "€", "", "�"]
    assert [piece.offset for piece in pieces] == [0, 0, 1, 1, 1, 2, 2]


def test_odds_and_alternatives(run: LoadedRun) -> None:
    greedy = replace(wanted_with(0, alternatives=3), sampling=Sampling(temperature=0.0))
    for _, piece in write(Writer(run), [greedy]):
        assert piece.alternatives[0] == (piece.token, piece.log_probability)
        assert len(piece.alternatives) == 3
        assert all(odds <= 0 for _, odds in piece.alternatives)
    (_, none), *_ = write(Writer(run), [wanted_with(0, alternatives=0)])
    assert none.log_probability is not None
    assert none.alternatives == ()


def test_a_cancelled_text_leaves_its_slot(run: LoadedRun) -> None:
    writer, made = Writer(run, 1), list[tuple[str, Piece]]()
    first = writer.add(wanted_with(0, tokens=10_000), lambda _, piece: made.append(("a", piece)))
    in_line = writer.add(wanted_with(1), lambda _, piece: made.append(("b", piece)))
    last = wanted_with(2, tokens=3)
    writer.add(last, lambda _, piece: made.append(("c", piece)))
    writer.step()
    first.cancelled = in_line.cancelled = True
    while writer.busy:
        writer.step()
    assert {who for who, _ in made} == {"a", "c"}
    assert "".join(piece.text for who, piece in made if who == "c") == texts(run, [last])[0]


def test_a_dropped_text_is_told_why(run: LoadedRun) -> None:
    writer, made = Writer(run, 1), list[Piece]()
    writer.add(wanted_with(0), lambda _, piece: made.append(piece))
    writer.step()
    writer.drop("no more")
    assert (made[-1].finish, made[-1].text) == ("error", "no more")
    assert not writer.busy


def test_prompts_open_documents() -> None:
    eot = BYTES.eot
    assert prompt_ids(BYTES, "") == [eot]
    assert prompt_ids(BYTES, "a") == [eot, 97]
    assert prompt_ids(BYTES, "<|endoftext|>a<|endoftext|>b") == [eot, 97, eot, 98]


@given(st.lists(st.text("abc", max_size=3), max_size=3), st.text("abc", max_size=30), st.data())
def test_stop_strings_cut_at_the_first_wherever_pieces_end(
    stops: list[str], text: str, data: st.DataObject
) -> None:
    places = [text.find(stop) for stop in stops if stop and stop in text]
    seen, shown, cutter = 0, "", StopStrings(stops)
    while seen < len(text) and not cutter.found:
        step = data.draw(st.integers(1, 3))
        shown += cutter.feed(text[seen : seen + step], last=seen + step >= len(text))
        seen += step
        assert shown == text[: len(shown)]
    # A longer stop string that begins earlier may be whole only after a shorter one was found.
    if len(stops) == 1 or not places:
        assert shown == (text[: min(places)] if places else text)
    assert cutter.found == bool(places)
