"""Shards, manifests and tokenizers of a dataset, and the texts that one is built from."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

from speedrun.data.tokenizer import BPE_FILE
from tests.fuzz.mutate import spoil_bytes, spoil_json, spoil_lines, text
from tests.fuzz.outcome import Command
from tests.fuzz.verbs import Verbs
from tests.fuzz.world import ITEMS, TINY, World, copied


def datasets(world: World) -> list[Verbs]:
    run = str(world.runs[0])

    def reading(rng: Random, damaged: str) -> Command:
        """A verb that reads a dataset; inspecting looks at headers and first documents alone."""
        steps = [*TINY, "data.dir=data", "--track", "sums", "--sample-tokens", "0", "--run", "run"]
        verify, inspect = ["data", "verify", "data"], ["data", "inspect", "data"]
        train, plan = ["train", "modern", *steps], ["train", "modern", *steps, "--dry-run"]
        words = rng.choice((verify, verify, inspect, inspect, plan, train, ["eval", run, "data"]))
        # Training hashes what it reads; the test it does not open.
        noticed = words == verify or (words == train and "_test_" not in damaged)
        return Command(words, leaves=("run",), damaged=damaged if noticed else "")

    def shards(rng: Random, folder: Path) -> Command:
        source = rng.choice((world.data, world.bpe))
        name = rng.choice([path.name for path in source.glob("*.bin")])
        copied(source, folder / "data", name)
        shard, how = folder / "data" / name, rng.randrange(8)
        if how == 0:
            shard.unlink()
            if rng.random() < 0.3:
                shard.mkdir()
        elif how == 1:  # another's
            shutil.copyfile(
                next((world.data if source == world.bpe else world.bpe).glob(name)), shard
            )
        else:
            shard.write_bytes(spoil_bytes(rng, shard.read_bytes()))
        same = shard.is_file() and shard.read_bytes() == (source / name).read_bytes()
        if public := rng.random() < 0.15:  # without a manifest, as public shards are
            (folder / "data" / "manifest.json").unlink()
            shutil.rmtree(folder / "data" / "tokenizer")
        return reading(rng, "" if same or public else name)

    def manifests(rng: Random, folder: Path) -> Command:
        data = copied(rng.choice((world.data, world.bpe)), folder / "data")
        file = data / rng.choice(("manifest.json", "manifest.json", "manifest.json", "build.json"))
        if rng.random() < 0.05:
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(spoil_json(rng, file.read_bytes()))
        return reading(rng, "")

    def tokenizers(rng: Random, folder: Path) -> Command:
        of_run = rng.random() < 0.3
        source = world.runs[0] if of_run else rng.choice((world.data, world.bpe))
        home = copied(source, folder / "data")
        file = rng.choice(sorted((home / "tokenizer").iterdir()))
        how = rng.randrange(8)
        if how == 0:
            file.unlink()
        elif how == 1:
            (home / "tokenizer" / rng.choice(("tokenizer.json", "vocab.json"))).write_bytes(
                spoil_bytes(rng, b"")
            )
        elif how == 2:
            kind = rng.choice(("gpt2", "bpe:280", "byte", "bpe:65535", "gpt2:x", text(rng)))
            file.write_text(
                f'{{"spec": "{kind}", "vocab_size": 257, "fingerprint": "x"}}', errors="replace"
            )
        else:
            file.write_bytes(spoil_json(rng, file.read_bytes()))
        if of_run:
            return Command(["sample", "data", "--tokens", "3"])
        whole = source / "tokenizer" / BPE_FILE
        stored = home / "tokenizer" / BPE_FILE
        same = not whole.exists() or (
            stored.is_file() and stored.read_bytes() == whole.read_bytes()
        )
        return reading(rng, "" if same else BPE_FILE)

    def texts(rng: Random, folder: Path) -> Command:
        source = rng.choice(sorted(world.packed.iterdir()))
        data = source.read_bytes()
        spoil = spoil_lines if source.suffix == ".jsonl" else spoil_bytes
        name = (
            source.name
            if rng.random() < 0.9
            else rng.choice(("a.parquet", "a.jsonl.gz", "a.txt.zst", "a.zst"))
        )
        (folder / name).write_bytes(spoil(rng, data))
        shutil.copyfile(world.text / "01.txt", folder / "b.txt")
        kind = rng.choice(("byte", "byte", "bpe:260"))
        sides = rng.choice(
            ([name, "b.txt"], [name], ["b.txt", "--val", name], ["b.txt", "--test", name])
        )
        words = ["data", "build", *sides, "--out", "out", "--tokenizer", kind]
        if rng.random() < 0.2:
            return Command(["eval", run, name])
        return Command(words, writes=("out",))

    def items(rng: Random, folder: Path) -> Command:
        (folder / "items.jsonl").write_bytes(spoil_lines(rng, ITEMS.read_bytes()))
        return Command(["eval", run, "--tasks", "items.jsonl", *rng.choice(([], ["--json"]))])

    return [
        Verbs("shards", 0.6, shards),
        Verbs("manifests", 0.6, manifests),
        Verbs("tokenizers", 0.6, tokenizers),
        Verbs("texts", 0.8, texts),
        Verbs("items", 0.4, items),
    ]
