"""Code that a recipe names: found by hash, loaded only when asked for, refused with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from speedrun.config.code import UsedCode, copy_of, found, hash_here, keep, load, package_hash
from speedrun.config.experiment import differences, experiment_hash
from speedrun.config.idle import idle
from speedrun.config.keys import techniques
from speedrun.config.optimizer import AdamOptions, OwnOptions
from speedrun.config.resolve import change, from_toml, override_words, resolve, to_toml
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.streams import Streams

SOURCE = "class Mine:\n    pass\n\n\ndef wrap(inner):\n    return inner\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "modern"\n[optimizer.hidden]\nuse = "mine.py:Mine"\n'
        "args = { lr = 0.002, beta = 0.9 }\n"
    )
    return path


def of(recipe: Path, *words: str) -> Config:
    return resolve(str(recipe), "nano", words).config


def test_a_recipe_names_a_file_beside_it(recipe: Path) -> None:
    before = set(sys.modules)
    config = of(recipe)
    assert set(sys.modules) == before  # nothing is imported to read a recipe
    own = config.optimizer.of("hidden")
    assert isinstance(own, OwnOptions)
    assert own.kind == config.optimizer.kind == "own"
    assert own.args == {"lr": 0.002, "beta": 0.9}
    assert config.optimizer.of("qkv") == own
    assert isinstance(config.optimizer.of("head"), AdamOptions)
    assert list(config.used_code()) == ["optimizer.hidden"]
    assert load(own).__name__ == "Mine"
    assert load(own) is load(own)


def test_names_of_ours_are_no_code() -> None:
    assert not resolve("best", "nano").config.used_code()
    assert "\nuse =" not in to_toml(resolve("best", "nano").config)


def test_a_stored_config_is_the_same_one(recipe: Path, tmp_path: Path) -> None:
    config = of(recipe)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert from_toml(tmp_path / "config.toml") == config
    assert load(config.optimizer.hidden).__name__ == "Mine"


def test_other_code_is_another_experiment_and_another_folder_is_not(
    recipe: Path, tmp_path: Path
) -> None:
    one = of(recipe)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("mine.py", "mine.toml"):
        (elsewhere / name).write_bytes((tmp_path / name).read_bytes())
    moved = of(elsewhere / "mine.toml")
    assert experiment_hash(one) == experiment_hash(moved)
    (tmp_path / "mine.py").write_text(SOURCE + "# other\n")
    changed = of(recipe)
    assert [key for key, *_ in differences(one, changed)] == ["optimizer.hidden.code"]
    with pytest.raises(ConfigError, match=r"mine\.py was changed since"):
        load(one.optimizer.hidden)
    assert load(changed.optimizer.hidden).__name__ == "Mine"


def test_a_run_keeps_its_own_copy(recipe: Path, tmp_path: Path) -> None:
    used = of(recipe).optimizer.hidden
    keep(used, tmp_path / "copies")
    (tmp_path / "mine.py").unlink()
    assert hash_here(used) == ""
    copy = copy_of(used, tmp_path / "copies")
    kept = used.model_copy(update={"place": str(copy.parent)})  # as config/own_code.py has it
    assert load(kept).__name__ == "Mine"
    copy.write_text("class Mine: ...\n")
    with pytest.raises(ConfigError, match="was changed since"):
        load(kept)


def test_naming_code_drops_the_arguments_of_what_was_named_before(recipe: Path) -> None:
    heir = recipe.with_name("heir.toml")
    heir.write_text(
        'extends = "mine.toml"\n[optimizer.hidden]\nuse = "torch.optim:SGD"\nargs = {lr = 0.1}\n'
    )
    assert of(heir).optimizer.hidden.args == {"lr": 0.1}
    assert of(recipe, "optimizer.hidden.args.lr=0.5").optimizer.hidden.args["lr"] == 0.5
    assert of(recipe, 'optimizer.hidden.args={gamma = "x"}').optimizer.hidden.args == {
        "lr": 0.002, "beta": 0.9, "gamma": "x",
    }  # fmt: skip
    without = of(recipe, 'optimizer.hidden.use=""')
    assert without.optimizer.kind == "adamw"
    assert not without.used_code()
    assert not differences(without, resolve("modern", "nano").config)


def test_kind_decides_about_the_matrices(recipe: Path) -> None:
    resolved = resolve(str(recipe), "nano", ["optimizer.kind=muon"])
    assert not resolved.config.used_code()
    assert "Muon" in techniques(resolved.config)
    assert "Muon" not in techniques(of(recipe))
    assert any("optimizer.hidden.use changes nothing" in one for one in idle(resolved))
    told = idle(resolve("muon", "nano", ["optimizer.hidden.lr=0.5", "optimizer.head.lr=0.5"]))
    assert told == ["optimizer.hidden.lr changes nothing here: nothing reads it with "
                    "optimizer.kind as it is"]  # fmt: skip
    assert not idle(resolve("modern", "nano", ["optimizer.kind=muon"]))
    told = idle(resolve(str(recipe), "nano", ["optimizer.hidden.lr=0.5"]))
    assert any("optimizer.hidden.lr changes nothing" in one for one in told)


def test_a_value_beside_the_code_in_its_place_is_told(recipe: Path) -> None:
    """Though the track multiplies it."""
    recipe.write_text(recipe.read_text() + "lr = 0.003\n")
    resolved = resolve(str(recipe), "nano")
    assert "(track nano)" in resolved.origin["optimizer.hidden.lr"]
    assert any("optimizer.hidden.lr changes nothing" in one for one in idle(resolved))


def test_importing_a_file_changes_nothing_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import random, numpy, torch\nrandom.seed(7)\nnumpy.random.seed(7)\n"
        "torch.manual_seed(7)\ntorch.set_default_dtype(torch.float64)\n"
        "torch.set_num_threads(torch.get_num_threads() + 1)\nclass Mine:\n    pass\n"
    )
    streams, threads = Streams.now(), torch.get_num_threads()
    assert load(UsedCode.model_validate(found("mine.py:Mine", tmp_path))).__name__ == "Mine"
    assert not Streams.now().moved(streams)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float32, threads)


def test_a_file_that_is_written_like_a_package_is_told(tmp_path: Path) -> None:
    (tmp_path / "no_such_package.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=r"beside the recipe is 'no_such_package\.py:Mine'"):
        found("no_such_package:Mine", tmp_path)
    assert found("no_such_package:Mine", tmp_path / "elsewhere")["code"] == ""


def test_words_that_make_the_config_again(recipe: Path) -> None:
    config, base = of(recipe), resolve("modern", "nano").config
    words = override_words(base, config)
    assert set(words) == {
        "optimizer.kind", "optimizer.hidden.use", "optimizer.hidden.args.lr",
        "optimizer.hidden.args.beta", "optimizer.hidden.scheduled", "optimizer.hidden.random",
    }  # fmt: skip
    assert not differences(resolve("modern", "nano", [*words.values()]).config, config)
    assert not differences(change(base, [*words.values()], {}).config, config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.hidden.code=abc"], "follows from optimizer.hidden.use: leave it out"),
        (["custom.mlp.place=/x"], "follows from custom.mlp.use: leave it out"),
        (["optimizer.head.use=nix.py:A"], "cannot be read, 'nix.py'"),
        (["optimizer.head.use=nix"], "names no code: write"),
        (["optimizer.head.use=a b:C"], "names no code: write"),
        (["optimizer.head.args.lr=0.1"], "args are those of the code that `use` names"),
        (["optimizer.hidden.args.a-b=1"], "no name that an argument can have"),
        (["optimizer.kind=own", 'optimizer.hidden.use=""'], "name the optimizer of the hidden"),
        (["custom.mlp.args.x=1"], "args are those of the code"),
        (["custom.nix.use=mine.py:Mine"], "nearest known"),
    ],
)
def test_what_cannot_be_named(
    recipe: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        of(recipe, *words)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def wrong(:\n", "SyntaxError in line 1"),
        ("\nimport nixpackage\n", "ModuleNotFoundError in line 2"),
        ("raise SystemExit(3)\n", "SystemExit in line 1"),
        ("x = 1\n", r"mine.py has no Mine$"),
        ("class MINE: ...\n", "has no Mine; nearest: 'MINE'"),
        ("class Other: ...\n", "has no Mine; nearest: 'Other'"),
        ("from torch import min\nclass Main: ...\n", "has no Mine; nearest: 'Main'"),
        ("from re import match as mine\n", "has no Mine; nearest: 'mine'"),
    ],
)
def test_code_that_cannot_be_loaded(recipe: Path, source: str, said: str) -> None:
    recipe.with_name("mine.py").write_text(source)
    with pytest.raises(ConfigError, match=said):
        load(of(recipe).optimizer.hidden)


def test_packages() -> None:
    used = UsedCode.model_validate(found("torch.optim:SGD", Path()))
    assert used.code == package_hash("torch")
    assert load(used).__name__ == "SGD"
    with pytest.raises(ConfigError, match="nearest: 'SGD'"):
        load(UsedCode.model_validate(found("torch.optim:SDG", Path())))
    missing = UsedCode.model_validate(found("nixpackage.soap:SOAP", Path()))
    assert missing.code == ""  # a recipe can be read without it
    with pytest.raises(ConfigError, match="pip install nixpackage"):
        load(missing)
    with pytest.raises(ConfigError, match="other code"):
        load(used.model_copy(update={"code": "0" * 64}))
    own = found("speedrun.errors:RunError", Path())
    assert own["code"] == package_hash("speedrun") != package_hash("typer")
