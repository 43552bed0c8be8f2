"""Words, numbers and files that a config cannot be made of: each is refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from speedrun.config.fields import SEEDS
from speedrun.config.resolve import STORED, from_toml, parse_override, resolve, to_toml
from speedrun.errors import ConfigError
from speedrun.science.space import Budget, Range
from speedrun.science.until import Until
from speedrun.science.verify import read_losses
from speedrun.train.request import Interval, parse_seconds
from speedrun.train.run import RunFolder

LONG = "9" * 5000  # more digits than Python reads


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (f"train.seed={SEEDS}", "less than 18446744073709551616"),
        ("train.seed=-1", "greater than or equal to 0"),
        ("model.attention_scale=1e300", "32-bit floats"),
        ("model.softcap=1e-300", "32-bit floats"),
        ("optimizer.hidden.lr=1e39", "32-bit floats"),
        (f"model.layers={LONG}", "valid integer"),
        (f"model.layers={'[' * 5000}", "valid integer"),
        ("model.layers=٣", "valid integer"),
        ("model.softcap=15.0\nbatch.tokens=512", "says more than one thing"),
        ("model.softcap=15.0\n[batch]\ntokens=512", "says more than one thing"),
    ],
)
def test_overrides_that_cannot_be(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve("modern", "nano", [override])


def test_the_largest_seed_and_a_value_of_several_lines_can_be() -> None:
    assert resolve("modern", "nano", [f"train.seed={SEEDS - 1}"]).config.train.seed == SEEDS - 1
    assert parse_override('data.sources=[\n"a",\n"b",\n]') == ("data.sources", ["a", "b"])
    assert parse_override("model.softcap=15.0\n") == ("model.softcap", 15.0)


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        ('"model.positions" = 2', "model.positions = 'half-rotary' is not a number"),
        ('"model.layers" = { of = "model.positions" }', "is not a number"),
        ('"model.bias" = 3', "model.bias = False is not a number"),
        ('"data.sources" = 2.0', r"data.sources = \['stdlib'\] is not a number"),
        ('"model.layers" = { power = 1e9 }', "is no number that model.layers can have"),
        ('"optimizer.hidden.lr" = { power = -1e9 }', "is no number"),
        ('"model.attention_free" = 1e308', "is no number|is not a number"),
        ('"model.layers" = 1e400', "must be a factor or a table"),
    ],
)
def test_a_track_that_scales_what_cannot_be_scaled(
    scale: str, sentence: str, tmp_path: Path
) -> None:
    recipe, track = tmp_path / "recipe.toml", tmp_path / "track.toml"
    recipe.write_text('extends = "record-18"\n[model]\nattention_free = [7, 9]\n')
    track.write_text(f'extends = "nano"\n[scale]\n{scale}\n')
    with pytest.raises(ConfigError, match=sentence):
        resolve(str(recipe), str(track))


@pytest.mark.parametrize(
    "text", ["[" * 5000, f"a{'.a' * 5000} = 1", f"[model]\nlayers = {LONG}", "\udcff"]
)
def test_files_that_are_no_toml(text: str, tmp_path: Path) -> None:
    for name, read in (("a.toml", lambda path: resolve(str(path))), ("config.toml", from_toml)):
        path = tmp_path / name
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match=r"is not valid TOML|cannot be read"):
            read(path)


@pytest.mark.parametrize("key", STORED)
def test_a_stored_config_that_lost_a_key_is_not_completed_by_defaults(
    key: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match="states no recipe"):
        from_toml(path)
    whole = to_toml(resolve("modern", "nano").config)
    path.write_text(whole)
    assert from_toml(path).recipe == "modern"
    table, _, name = key.rpartition(".")
    before, mark, after = whole.partition(f"[{table}]") if table else ("", "", whole)
    path.write_text(before + mark + re.sub(rf"^{name} = .*$", "", after, count=1, flags=re.M))
    with pytest.raises(ConfigError, match=f"states no {key}"):
        from_toml(path)


def test_a_recipe_named_by_its_path_names_no_folder(tmp_path: Path) -> None:
    """`speedrun train sub/mine` without the .toml went to runs/sub/mine-nano-..."""
    (tmp_path / "mine").write_text('extends = "modern"\n')
    config = resolve(str(tmp_path / "mine"), "nano").config
    assert config.recipe == "mine"
    assert RunFolder.default(config).path.parent == Path("runs")


@pytest.mark.parametrize("digits", ["²", "٣", "३", "１２", LONG])
@pytest.mark.parametrize(
    ("read", "around"),
    [
        (Interval.parse, "{}"),
        (Interval.parse, "{}m"),
        (lambda text: parse_seconds(text, "--time-limit"), "{}s"),
        (lambda text: Until.parse([text]), "{} seeds"),
        (lambda text: Until.parse([text]), "{}h"),
        (Budget.parse, "{}"),
        (Budget.parse, "{}m"),
        (Range.parse, "model.layers=1..{}"),
        (Range.parse, "optimizer.head.lr={}..9:log"),
    ],
)
def test_digits_of_other_scripts_and_without_end_are_no_numbers(
    read: Callable[[str], object], around: str, digits: str
) -> None:
    with pytest.raises(ConfigError):
        read(around.format(digits))


def test_losses_are_written_in_plain_digits(tmp_path: Path) -> None:
    (tmp_path / "losses.csv").write_text("3.27\n٣.٢٧\n")
    with pytest.raises(ConfigError, match=r"line 2: '٣\.٢٧' is not a number"):
        read_losses(tmp_path / "losses.csv")


def test_a_file_named_with_a_letter_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for name in ("mine.toml", "in/other.toml"):
        (tmp_path / name).write_text('extends = "best"')
    for given, near in (
        ("mine.tml", "mine.toml"), ("min.toml", "mine.toml"), ("in/othr.toml", "in/other.toml"),
        ("modem", "modern"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"nearest: '{near}'"):
            resolve(given, "nano")
