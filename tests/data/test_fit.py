"""What does not fit a dataset is made smaller; what a user set for it is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from speedrun.config.files import names
from speedrun.config.fixed import of_track
from speedrun.config.resolve import Resolved, resolve
from speedrun.data.build import build_dataset
from speedrun.data.dataset import Dataset
from speedrun.data.find import fit_to_dataset
from speedrun.data.fit import SHORTEST, Fitted, Room, fit, room_of
from speedrun.errors import ConfigError, DataError

SMALL = Room("mine", train=1_000, val=300, all=1_000)


def fitted(room: Room, *words: str, recipe: str = "best", track: str = "nano") -> Fitted:
    return fit(resolve(recipe, track, ["data.dir=mine", *words]), room)


def usable(found: Fitted, room: Room) -> None:
    """By the rules of the loader and of validation."""
    config = found.config  # whose own rules `fit` has applied
    assert config.batch.tokens < room.train
    assert config.validation.tokens < room.val
    assert config.batch.tokens % config.batch.length == 0


@pytest.mark.parametrize(("recipe", "track"), [("best", "nano"), ("record-12", "small")])
def test_any_recipe_fits_any_text(recipe: str, track: str) -> None:
    for train, val in product((60, 999, 8_193, 10**8), (9, 300, 10**8)):
        room = Room("mine", train, val, train)
        usable(fitted(room, recipe=recipe, track=track), room)


def test_what_is_made_smaller_is_said_with_what_it_was() -> None:
    found = fitted(SMALL)
    config = found.config
    assert (config.batch.length, config.batch.tokens, config.validation.tokens) == (128, 512, 128)
    assert config.attention.window_end == 128
    assert config.steps == 19  # ten passes over a thousand tokens, and no more
    assert found.shrunk["batch.tokens"] == (8192, 512)
    origin = found.resolved.origin
    assert origin["batch.tokens"] == "shrunk to fit mine, from 8192 of track nano"
    shrunk, target = found.notes
    assert shrunk.startswith("shrunk to fit mine (1,000 tokens to train on, 300 to validate): ")
    assert "batch.length 512 -> 128" in shrunk
    assert target == (
        "no target: 3.9 of track nano is for another text than mine; train.target=LOSS sets one"
    )
    assert config.train.target == 0.0


def test_a_large_text_changes_nothing_but_the_target() -> None:
    large = Room("mine", 10**7, 10**6, 10**7)
    plain = resolve("best", "nano", ["data.dir=mine", "train.target=0.0"]).config
    found = fitted(large)
    assert (found.config, found.shrunk) == (plain, {})
    assert fitted(replace(large, usual_text=True)).config.train.target == 3.9
    assert fitted(large, "train.target=3.0").config.train.target == 3.0


@pytest.mark.parametrize("track", names("track"))
def test_nothing_is_fitted_to_the_tracks_own_text(track: str) -> None:
    words = ["train.steps=5"] if of_track(track) else ["train.steps=5", "batch.tokens=65536"]
    resolved = resolve("modern" if of_track(track) else "best", track, words)
    assert fit_to_dataset(resolved) == Fitted(resolved)  # and no dataset is looked for


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("batch.tokens=8192", "batch.tokens=896"),
        ("batch.length=512", "at most batch.length=256"),
        ("validation.tokens=131072", "validation text of mine has 300 tokens, so at most"),
    ],
)
def test_what_a_user_sets_is_refused_with_what_fits(word: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        fitted(SMALL, word)
    assert word.replace("=", " = ") in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["batch.tokens=4096"],
        ["batch.length=512"],
        ["batch.length=384", "batch.tokens=7680", "validation.tokens=768"],
        ["validation.tokens=1024"],
        ["batch.tokens=4096", "validation.tokens=1024"],
        ["attention.window_end=256"],
        ["attention.window_start=256", "attention.window_end=256"],
    ],
)
def test_what_a_refusal_names_is_accepted(words: list[str]) -> None:
    """Pasted after what was typed; where two values are too large there are two refusals."""
    for train, val in product((700, 5_000), (12, 70, 300)):
        room, typed, refused = Room("mine", train, val, train), [*words], set[str]()
        while True:
            try:
                usable(fitted(room, *typed, track="pico"), room)
                break
            except ConfigError as error:
                about, advice = str(error).split(", so at most ")
                assert about.partition(" = ")[0] not in refused
                refused.add(about.partition(" = ")[0])
                typed += advice.split()
        assert refused or (train, val) != (700, 12)


def test_what_a_user_sets_is_kept_and_the_rest_fits_it() -> None:
    config = fitted(SMALL, "batch.tokens=768", "batch.length=96", "validation.tokens=192",
                    "train.steps=186").config  # fmt: skip
    assert (config.batch.tokens, config.batch.length, config.validation.tokens) == (768, 96, 192)
    assert config.attention.window_end == 96
    assert config.steps == 186
    assert config.validation.every == 32


def test_a_track_of_ones_own_with_a_text_is_fitted_but_for_what_it_states(tmp_path: Path) -> None:
    track = tmp_path / "mine.toml"
    track.write_text('extends = "nano"\n[data]\ndir = "mine"\n[validation]\nevery = 7\n')
    found = fit(resolve("best", str(track)), SMALL)
    assert found.config.batch.tokens == 512
    assert found.config.validation.every == 7
    track.write_text(track.read_text() + "tokens = 131072\n")
    with pytest.raises(ConfigError, match=r"validation.tokens = 131072 cannot be used"):
        fit(resolve("best", str(track)), SMALL)


def test_sources_need_no_tokenizer_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page has no 2,048 pieces of words to learn, as nano asks for."""
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    page = tmp_path / "page.txt"
    page.write_text("".join(f"{n} is {n + n} by two\n" for n in range(200)))
    found = fit_to_dataset(resolve("best", "nano", [f"data.sources={page}"]))
    assert found.config.data.tokenizer == "bpe:..2048"
    assert found.notes[0].startswith("shrunk to fit page.txt (")
    asked = [f"data.sources={page}", "data.tokenizer=bpe:2048"]
    with pytest.raises(DataError, match="bpe:2048 needs more text"):
        fit_to_dataset(resolve("best", "nano", asked))


def test_what_is_too_small_says_what_to_do() -> None:
    with pytest.raises(DataError, match="mine is too small to train on"):
        fitted(Room("mine", train=99, val=SHORTEST, all=99))
    with pytest.raises(DataError, match="build the dataset from more text"):
        fitted(Room("mine", train=99, val=0, all=99), "batch.length=4")


def test_a_folder_with_the_text_of_the_track_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n" for n in range(300)))
    build_dataset([str(tmp_path / "a.txt")], tmp_path / "mine", "byte")
    dataset = Dataset.open(tmp_path / "mine")
    assert dataset.manifest is not None

    def usual(resolved: Resolved, **manifest: object) -> bool:
        told = replace(dataset, manifest=replace(dataset.manifest, **manifest))  # type: ignore[type-var]
        return room_of(told, resolved).usual_text

    nano, small = (resolve("best", track, ["data.dir=mine"]) for track in ("nano", "small"))
    assert usual(nano, sources=("stdlib",), tokenizer="bpe:2048")
    assert not usual(nano, sources=("stdlib",), tokenizer="bpe:4096")
    assert not usual(nano)
    assert not usual(small)
    public = replace(dataset, manifest=None)
    assert room_of(public, small).usual_text  # public shards in another folder
    assert not room_of(public, nano).usual_text
