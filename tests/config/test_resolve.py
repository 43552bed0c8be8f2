from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from speedrun.config.experiment import all_differences
from speedrun.config.fields import Technique
from speedrun.config.files import Kind, chain, names, optimizers
from speedrun.config.fixed import of_track
from speedrun.config.keys import describe, schema_fields, techniques
from speedrun.config.resolve import from_toml, resolve, to_toml
from speedrun.config.schema import MOVED
from speedrun.errors import ConfigError


def test_layers_win_in_order_and_remember_their_origin(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text('why = "base"\n[model]\nlayers = 3\nwidth = 96\nheads = 3\nsoftcap = 30.0\n')
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\n[model]\nlayers = 5\n')
    track = tmp_path / "track.toml"
    track.write_text("[model]\nwidth = 64\n[batch]\ntokens = 2048\nlength = 128\n")
    resolved = resolve(str(child), str(track), ["model.heads=4"], {"train.seed": 7})
    model = resolved.config.model
    assert (model.layers, model.width, model.heads, model.softcap) == (5, 64, 4, 30.0)
    assert resolved.config.train.seed == 7
    assert resolved.origin["model.layers"] == f"recipe {child}"
    assert resolved.origin["model.softcap"] == "recipe base.toml"
    assert resolved.origin["model.width"] == f"track {track}"
    assert resolved.origin["model.heads"] == "override"
    assert resolved.origin["train.seed"] == "option"
    assert ("machine.microbatch", 0, "default") in resolved.rows()
    assert (resolved.config.recipe, resolved.config.track) == ("child", "track")


def test_a_config_is_frozen_and_survives_storage(tmp_path: Path) -> None:
    config = resolve("modern", "nano", ["optimizer.hidden.betas=[0.8, 0.99]"]).config
    with pytest.raises(ValueError, match="frozen"):
        config.train.seed = 3  # type: ignore[misc]
    stored = tmp_path / "config.toml"
    stored.write_text(to_toml(config))
    assert from_toml(stored) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.widht=64", ["model.widht", "override", "nearest", "model.width"]),
        ("width=64", ["'width'", "model.width"]),
        ("model=3", ["'model'", "table", "model.layers"]),
        ("model.heads=two", ["model.heads", "'two'", "integer"]),
        ("model.bias=1", ["model.bias", "1", "boolean"]),
        ("model.layers=2.5", ["model.layers", "2.5", "integer"]),
        ("model.norm=batch", ["model.norm", "'batch'", "'rms' or 'layer'"]),
        ("model.heads=5", ["model.heads", "5", "must divide", "model.width = 192"]),
        ("model.kv_heads=2", ["model.kv_heads", "2", "divide", "model.heads = 3"]),
        ("model.attention_free=[4]", ["model.attention_free", "[4]", "0 to 3"]),
        ("batch.tokens=1000", ["batch.tokens", "1000", "multiple", "512"]),
        ("validation.tokens=1000", ["validation.tokens", "1000", "multiple"]),
        ("attention.window_end=128", ["attention.window_end", "128", "attention.window"]),
        ("train.steps=-1", ["train.steps", "-1", "greater than or equal to 0"]),
        ("optimizer.hidden.lr=0", ["optimizer.hidden.lr", "0", "greater than 0"]),
        ("optimizer.hidden.lr=nan", ["optimizer.hidden.lr", "nan", "finite"]),
        ("optimizer.hidden.betas=[0.9]", ["optimizer.hidden.betas", "[0.9]", "two moments"]),
        ("schedule.cooldown=990", ["schedule.cooldown", "990", "schedule.steps = 1000"]),
        ("nonsense", ["'nonsense'", "key=value"]),
        ("recipe=x", ["the recipe's name, not a setting"]),
    ],
)
def test_a_bad_override_is_one_sentence(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("modern", "nano", [override])
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_a_window_longer_than_the_sequence_is_refused() -> None:
    overrides = ["attention.window=tokens", "attention.window_start=64"]
    with pytest.raises(ConfigError, match=r"window_end = 1024 .* batch\.length = 512"):
        resolve("modern", "nano", [*overrides, "attention.window_end=1024"])


def test_batches_that_ranks_and_microbatches_cannot_share_are_refused() -> None:
    config = resolve("modern", "nano", ["batch.tokens=8192", "batch.length=512"]).config
    assert config.microbatches(world=4) == 1
    with pytest.raises(ConfigError, match=r"batch\.tokens = 8192 .* 16 sequences .* 3 ranks"):
        config.microbatches(world=3)
    config = resolve("modern", "nano", ["machine.microbatch=4"]).config
    assert config.microbatches(world=2) == 2
    with pytest.raises(ConfigError, match=r"machine\.microbatch = 4 .* 2 sequences"):
        config.microbatches(world=8)


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recipe 'modren' is not known; nearest: 'modern'"):
        resolve("modren", "nano")
    with pytest.raises(ConfigError, match="does not exist"):
        resolve("modern", str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resolve(str(broken), "nano")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[modle]\nwidth = 3\n")
    with pytest.raises(ConfigError, match=r"'modle.width' \(recipe .*wrong.toml\).*'model.width'"):
        resolve(str(wrong), "nano")


def test_a_circle_of_extends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with pytest.raises(ConfigError, match="extends itself: a -> b -> a"):
        chain("recipe", str(tmp_path / "a.toml"))


def test_every_shipped_file_resolves_and_says_why() -> None:
    for kind in get_args(Kind):
        for name in names(kind):
            assert chain(kind, name)[-1].notes["why"]
    for track in names("track"):
        for recipe in [*optimizers(), *(() if of_track(track) else names("recipe"))]:
            resolve(recipe, track)


def test_every_key_is_described() -> None:
    undescribed = [key for key, text in describe().items() if not text]
    assert undescribed == []


def test_difference_lists_what_resolved_values_differ_in() -> None:
    rows = all_differences(resolve("modern").config, resolve("modern-cosine").config)
    assert ("schedule.shape", "trapezoid", "cosine") in rows
    assert all_differences(resolve("modern").config, resolve("modern").config) == []


def test_schedules_scale_with_the_length_of_the_run() -> None:
    config = resolve("modern", "nano", ["train.steps=100"]).config
    assert config.schedule.steps == 1000
    assert config.scaled(config.schedule.cooldown) == config.schedule.cooldown // 10
    assert resolve("modern", "nano", ["train.steps=0"]).config.steps == 1000


@pytest.mark.parametrize("old", MOVED)
def test_a_key_that_moved_is_refused_by_its_old_name_with_the_new_one_named(
    old: str, tmp_path: Path
) -> None:
    new = MOVED[old]
    assert new in describe()
    assert old not in describe()
    section, key = old.split(".")
    recipe, track = tmp_path / "mine.toml", tmp_path / "track.toml"
    recipe.write_text(f'extends = "modern"\n[{section}]\n{key} = "auto"\n')
    track.write_text(f'extends = "nano"\n[scale]\n"{old}" = 2.0\n')
    for recipe_name, track_name, words in (
        ("modern", "nano", [f"{old}=1"]),
        (str(recipe), "nano", []),
        ("modern", str(track), []),
    ):
        with pytest.raises(ConfigError, match=f"'{old}' .* is now called '{new}'"):
            resolve(recipe_name, track_name, words)


def test_a_stored_config_with_old_names_is_read(tmp_path: Path) -> None:
    stored = tmp_path / "config.toml"
    stored.write_text(
        'recipe = "modern"\ntrack = "nano"\n[attention]\nbackend = "dense"\n'
        "[model]\nlayers = 4\nwidth = 96\n[batch]\ntokens = 8192\nmicrobatch = 2\n"
        '[train]\nthreads = 3\ndevice = "cpu"\nprecision = "fp32"\ncompile = "block"\nseed = 4\n'
    )
    config = from_toml(stored)
    machine = config.machine
    assert (machine.attention, machine.microbatch, machine.threads) == ("dense", 2, 3)
    assert (machine.device, machine.precision, machine.compile) == ("cpu", "fp32", "block")
    assert config.train.seed == 4


def marks() -> dict[str, tuple[str, Technique]]:
    return {
        mark.name: (key, mark)
        for key, field in schema_fields()
        for mark in field.metadata
        if isinstance(mark, Technique)
    }


def test_techniques_are_marked_in_the_schema_and_can_be_taken_out() -> None:
    assert len(marks()) >= 19
    for key, mark in marks().values():
        assert {key, *mark.also} <= set(describe())
    best = techniques(resolve("best", "nano").config)
    assert best.keys() >= {"Muon", "softcap", "key offset", "half-truncated rotary", "U-net skips"}
    for name, values in best.items():
        without = resolve("best", "nano", (), values).config
        assert name not in techniques(without)


def test_a_recipe_without_techniques_claims_none() -> None:
    assert techniques(resolve("baseline", "nano").config) == {}


@pytest.mark.parametrize("track", ["nano", "pico"])
@pytest.mark.parametrize("word", ["stdlib", '["stdlib"]'])
def test_a_tracks_own_sources_named_are_the_same_experiment(track: str, word: str) -> None:
    assert resolve("best", track, [f"data.sources={word}"]).config == resolve("best", track).config
    other = resolve("best", track, ['data.sources=["stdlib", "a.txt"]']).config
    assert other.data.tokenizer.startswith("bpe:..")


def test_a_source_by_itself_is_a_list_of_one() -> None:
    def sources(word: str) -> tuple[str, ...]:
        return resolve("modern", "nano", [f"data.sources={word}"]).config.data.sources

    assert sources("wiki.txt") == sources('"wiki.txt"') == sources('["wiki.txt"]') == ("wiki.txt",)
    assert sources('["a.txt", "stdlib"]') == ("a.txt", "stdlib")
    assert sources("") == sources("[]") == ()  # which is refused where a source is needed
    with pytest.raises(ConfigError, match="names in a list have quotes"):
        sources("[a.txt, b.txt]")
    with pytest.raises(ConfigError, match=r"data.sources = 7 \(override\) cannot be used"):
        sources("7")


@pytest.mark.parametrize(
    "override",
    ["model.layers=1000000000000", "model.head_dim=1000000000000000000",
     "model.width=9223372036854775808", "batch.length=100000000000", "machine.threads=1000000",
     "train.steps=100000000000000000",
     "model.bigram_rows=18446744073709551616", "validation.every=18446744073709551616"],
)  # fmt: skip
def test_what_no_machine_computes_is_refused(override: str) -> None:
    """Each of them ended in an OverflowError, a crash, or did not end."""
    with pytest.raises(ConfigError, match="input should be less than or equal to"):
        resolve("modern", "nano", [override])


def test_a_stored_table_that_is_a_value_too_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('"model.layers" = 3\n[model.layers]\nx = 1\n')
    with pytest.raises(ConfigError, match=r"model\.layers\.x cannot be set: layers is a value"):
        from_toml(path)


@pytest.mark.parametrize("text", ["a\udcff", "a\0b"])
def test_what_config_toml_cannot_hold_is_refused(text: str) -> None:
    """A byte that is no UTF-8 ended a run when its config was written."""
    for key in ("data.tokenizer", "data.dir", "data.sources"):
        with pytest.raises(ConfigError, match=rf"{key} = .* cannot be used: it has bytes that"):
            resolve("modern", "nano", [f"{key}={text}"])


def test_an_element_of_a_list_is_set_by_its_place(tmp_path: Path) -> None:
    def betas(*words: str, recipe: str = "modern") -> tuple[float, ...]:
        return resolve(recipe, "nano", words).config.optimizer.hidden.betas

    assert betas() == (0.9, 0.95)
    assert betas("optimizer.hidden.betas[0]=0.8") == (0.8, 0.95)
    both = ("optimizer.hidden.betas[1]=0.99", "optimizer.hidden.betas[0]=0.7")
    assert betas(*both) == (0.7, 0.99)
    own = tmp_path / "own.toml"
    own.write_text('extends = "modern"\noptimizer.hidden.betas = [0.5, 0.6]\n')
    assert betas("optimizer.hidden.betas[1]=0.9", recipe=str(own)) == (0.5, 0.9)
    own.write_text('extends = "modern"\n[optimizer.hidden]\n"betas[0]" = 0.5\n')
    assert betas(recipe=str(own)) == (0.5, 0.95)
    own.write_text(
        'extends = "modern"\n[optimizer.hidden]\nuse = "torch.optim:AdamW"\n'
        "args = { lr = 0.1, betas = [0.5, 0.6] }\n"
    )
    config = resolve(str(own), "nano", ["optimizer.hidden.args.betas[0]=0.7"]).config
    assert config.optimizer.hidden.args["betas"] == [0.7, 0.6]
    for word in ("optimizer.hidden.betas[2]=0.5", "optimizer.head.lr[0]=0.5",
                 "optimizer.hidden.args.betas[0]=0.5"):  # fmt: skip
        with pytest.raises(ConfigError, match="no list with so many elements here"):
            resolve("modern", "nano", [word])
    anew = ["optimizer.hidden.use=torch.optim:NAdam", "optimizer.hidden.args.betas[0]=0.5"]
    with pytest.raises(ConfigError, match="no list with so many elements here"):
        resolve(str(own), "nano", anew)  # those of the class before are gone
    with pytest.raises(ConfigError, match=r"unknown key 'optimizer[.]hidden"):
        resolve("modern", "nano", ["optimizer.hidden.bettas=[1, 2]"])
