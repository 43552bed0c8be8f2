"""Overrides, recipes, tracks and options of the command line."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, get_args

from speedrun.config.files import FOLDERS, names
from speedrun.config.keys import describe, schema_fields
from speedrun.config.resolve import nest
from tests.fuzz.mutate import NUMBERS, as_toml, spoil_toml, text, value
from tests.fuzz.outcome import Command
from tests.fuzz.verbs import Verbs
from tests.fuzz.world import TINY, World

WORDS = (
    "none", "tokens", "blocks", "each", "ends", "mirrored", "pair", "muon", "adamw", "rotary",
    "half-rotary", "learned", "layer", "depth", "gpt2", "cosine", "first", "target", "bf16", "flex",
    "dense", "model", "cuda", "polar_express", "longest", "byte", "bpe:300", "bpe:²", "gpt2:x",
    "hf:x", "stdlib",
)  # fmt: skip


def a_key(rng: Random) -> str:
    known = rng.choice(list(describe()))
    odd = (
        known.upper(),
        known[:-1],
        known + ".x",
        known.partition(".")[0],
        f" {known} ",
        text(rng)[:200],
    )
    return known if rng.random() < 0.85 else rng.choice((*odd, "recipe", "train.device"))


def an_override(rng: Random) -> str:
    kind = rng.randrange(8)
    if kind == 0:
        return text(rng)
    if kind <= 2:
        return f"{a_key(rng)}={rng.choice((*NUMBERS, rng.randrange(0, 2000)))}"
    if kind == 3:
        return f"{a_key(rng)}={rng.choice(('true', 'false', *WORDS))}"
    if kind == 4:
        brackets = rng.choice(
            ("[", "{a=", "[[1],", '"', "'''", "[1, 2", "{}", "[0.9, 0.99]", "[0]")
        )
        return f"{a_key(rng)}={brackets * rng.choice((1, 1, 2, 50, 2000))}"
    if kind == 5:
        return f"{a_key(rng)}={value(rng)!r}"
    return f"{a_key(rng)}={text(rng)}"


def plausible(rng: Random) -> str:
    """A key with a value of its kind, near to what is usual."""
    key, field = rng.choice([*schema_fields()])
    kinds, usual = get_args(field.annotation), field.default
    if kinds and all(isinstance(kind, str) for kind in kinds):
        found: Any = rng.choice(kinds)
    elif isinstance(usual, bool):
        found = rng.choice(("true", "false"))
    elif isinstance(usual, int):
        found = rng.choice((0, 1, 2, 3, 4, 8, 16, 64, 96, 128, 192, usual, 2 * usual))
    elif isinstance(usual, float):
        found = rng.choice((0.0, 1e-8, 0.01, 0.3, 0.9, 1.0, 30.0, 1e4, usual))
    else:
        found = rng.choice(("[]", "[0]", "[1]", "[0.9, 0.95]", "[0.0, 0.0]", "byte", usual))
    return f"{key}={found}"


def some_overrides(rng: Random) -> list[str]:
    return [
        rng.choice((an_override, an_override, plausible))(rng)
        for _ in range(rng.choice((1, 1, 1, 2, 4)))
    ]


def configs(world: World) -> list[Verbs]:
    def overrides(rng: Random, _: Path) -> Command:
        recipe = rng.choice(names("recipe")) if rng.random() < 0.97 else text(rng)
        track = rng.choice(("nano", "sums", "pico")) if rng.random() < 0.97 else text(rng)
        words = [f"data.dir={world.data}", *some_overrides(rng), "--dry-run"]
        return Command(["train", recipe, "--track", track, *words])

    def a_file(rng: Random, folder: Path, kind: Any) -> Path:
        """A built-in file, spoilt as text or as tables, or one made of nothing."""
        path, how = folder / "mine.toml", rng.randrange(6)
        source = (FOLDERS[kind] / f"{rng.choice(names(kind))}.toml").read_bytes()
        if how == 0:
            source = as_toml(nest({a_key(rng): value(rng)})).encode(errors="replace")
        elif how == 1:
            source = text(rng).encode(errors="replace")
        else:
            for _ in range(rng.choice((1, 2, 3))):
                source = spoil_toml(rng, source)
        if rng.random() < 0.2:
            other = rng.choice(("mine.toml", "./mine.toml", "modern", "nano", "/", "..", "\\u0000"))
            source = f'extends = "{other}"\n'.encode() + source
        path.write_bytes(source)
        return path

    def recipes(rng: Random, folder: Path) -> Command:
        mine = str(a_file(rng, folder, "recipe"))
        small_run = ["train", mine, "--track", "sums", f"data.dir={world.data}", "--dry-run"]
        return Command(rng.choice((
            ["recipes", "show", mine], ["recipes", "show", mine, "--history"],
            ["recipes", "diff", "modern", mine], small_run, small_run,
        )))  # fmt: skip

    def tracks(rng: Random, folder: Path) -> Command:
        mine = str(a_file(rng, folder, "track"))
        small_run = ["train", "record-18", "--track", mine, f"data.dir={world.data}", "--dry-run"]
        return Command(rng.choice((
            ["tracks", "show", mine], ["tracks", "show", mine, "--history"],
            ["tracks", "diff", "nano", mine], small_run, small_run,
        )))  # fmt: skip

    def training(rng: Random, _: Path) -> Command:
        """A few real steps of whatever config is accepted."""
        odd = [an_override(rng)] if rng.random() < 0.3 else []
        likely = [plausible(rng) for _ in range(rng.randrange(1, 4))]
        changed = [*TINY, *likely, *odd, "train.steps=2", f"data.dir={world.data}",
                   "machine.compile=none"]  # fmt: skip  # which would take minutes
        how = ["--track", "sums", "--sample-tokens", "0", "--run", "run"]
        return Command(["train", rng.choice(names("recipe")), *changed, *how], leaves=("run",))

    return [
        Verbs("overrides", 2.0, overrides),
        Verbs("recipes", 1.0, recipes),
        Verbs("tracks", 1.0, tracks),
        Verbs("training", 1.5, training, batch=10),
    ]
