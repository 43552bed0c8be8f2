"""Everything in the folder of a run, spoilt, before every verb that reads it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

from speedrun.config.experiment import run_hash
from speedrun.config.resolve import from_toml
from speedrun.errors import SpeedrunError
from tests.fuzz.mutate import spoil_bytes, spoil_json, spoil_lines, spoil_toml
from tests.fuzz.outcome import Command
from tests.fuzz.verbs import Verbs
from tests.fuzz.world import World, copied

NEWEST = "checkpoints/step-000012"
RECORDS = (
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "summary.json",
    "test.json",
    "forced.json",
)
CHECKPOINT = tuple(
    f"{NEWEST}/{name}" for name in ("checkpoint.json", "model.safetensors", "optimizer.safetensors")
)
TESTED = ("run0/test.json",)
USES = ("sample", "eval", "export", "submit")
NOTICED_BY = {
    "config.toml": USES,
    f"{NEWEST}/model.safetensors": USES,
    "metrics.jsonl": ("submit",),
}


def runs(world: World) -> list[Verbs]:
    first, *others = world.runs
    tested = str(world.packed / "a.txt")

    def spoil(rng: Random, file: Path) -> None:
        """As what it is, as bytes, gone, a folder, or another run's."""
        how = rng.randrange(12)
        if file.is_dir():
            return
        if how == 0 and file.exists():
            file.unlink()
            if rng.random() < 0.3:
                file.mkdir()
            return
        other = others[0] / file.relative_to(file.parents[2 if "step-" in str(file) else 0])
        if how == 1 and other.is_file():
            shutil.copyfile(other, file)
            return
        data = file.read_bytes() if file.exists() else b'["at step 2: data differs"]'
        if file.suffix == ".json":
            data = spoil_json(rng, data)
        elif file.suffix == ".jsonl":
            data = spoil_lines(rng, data)
        elif file.suffix == ".toml":
            data = spoil_toml(rng, data)
        else:
            data = spoil_bytes(rng, data)
        file.write_bytes(data)

    def command(rng: Random, name: str, damaged: str) -> Command:
        again = ["train", "--resume", "--run", "run0", "--steps", "13", "--sample-tokens", "0"]
        three = ["run0", *map(str, others)]
        words = rng.choice((
            ["sample", "run0", "--tokens", "3"], ["sample", "run0", "--tokens", "3"],
            ["report", "run0", "--out", "out.html"], ["report", *three, "--out", "out.html"],
            ["verify", *three], ["verify", "run0", "--target", "9"],
            ["submit", *three, "--file", "board.json"], again, [*again, "--force"],
            ["eval", "run0", tested], ["export", "run0", "out", "--to", "hf"],
            ["export", "run0", "out", "--to", "weights"], ["runs", "."], ["runs", ".", "--json"],
            ["compare", *three], ["compare", "run0", str(others[0]), "--json"],
        ))  # fmt: skip
        if words[0] not in NOTICED_BY.get(damaged, ()):
            damaged = ""
        # A run goes on in its own folder; what was tested is kept in it.
        leaves = {"train": ("run0",), "verify": TESTED, "submit": TESTED}.get(words[0], ())
        return Command(
            words, writes=("out", "out.html", "board.json"), leaves=leaves, damaged=damaged
        )

    def damage(run: Path, name: str) -> str:
        """What of it is told by a hash that stands elsewhere in the run."""
        file, whole = run / name, first / name
        same = file.is_file() and whole.is_file() and file.read_bytes() == whole.read_bytes()
        if same or name not in ("config.toml", "metrics.jsonl", f"{NEWEST}/model.safetensors"):
            return ""
        if name == "config.toml":
            with suppress(SpeedrunError):
                same = run_hash(from_toml(file)) == run_hash(from_toml(whole))
        return "" if same else name

    def of(names: tuple[str, ...]) -> Verbs:
        def made(rng: Random, folder: Path) -> Command:
            name = rng.choice(names)
            run = copied(first, folder / "run0", name)
            for _ in range(rng.choice((1, 1, 1, 2))):
                spoil(rng, run / name)
            return command(rng, name, damage(run, name))

        name = "checkpoints" if names == CHECKPOINT else names[0].partition(".")[0]
        return Verbs(name, 0.5, made, batch=10)

    return [of(CHECKPOINT), *(of((name,)) for name in RECORDS)]
