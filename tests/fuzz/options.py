"""Options of every verb with values that nobody expects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.fuzz.configs import an_override
from tests.fuzz.mutate import NUMBERS, text
from tests.fuzz.outcome import Command
from tests.fuzz.verbs import Verbs
from tests.fuzz.world import TINY, World

SPANS = (
    "5", "5m", "0", "-1", "1e9h", "²", "1.5h", "m", "5 m", "nan", "inf", "9" * 400, "1d", "٣m",
    "0s", "", "decided", "12 seeds", "² seeds", "-1 seeds",
)  # fmt: skip
EVERYWHERE = {
    "/",
    "~",
    ".",
    "../" * 50,
    "../../x",
    "*",
    "**/*",
}  # a search that would take its time


def odd_word(rng: Random) -> str:
    found = rng.choice((str(rng.choice(NUMBERS)), text(rng), rng.choice(SPANS), an_override(rng)))
    return "odd" if found in EVERYWHERE else found


def options(world: World) -> list[Verbs]:
    run, text_file = str(world.runs[0]), str(world.packed / "a.txt")
    dry = ["train", "modern", "--track", "sums", *TINY, f"data.dir={world.data}", "--dry-run"]
    nowhere = ["--track", "nowhere"]  # no race begins
    verbs: Sequence[tuple[list[str], Sequence[str]]] = (
        (dry, ("--seed", "--steps", "--keep", "--stop-after", "--ranks", "--max-restarts", "--log",
               "--checkpoint-every", "--time-limit", "--run", "--track", "--sample-tokens")),
        (["sample", run, "--tokens", "3"],
         ("--temperature", "--top-k", "--top-p", "--seed", "--samples", "--repetition-penalty",
          "--prompt", "--stop")),
        (["verify", "--target", "5", "--losses", "losses.csv"], ("--target", "--alpha", "--sigma")),
        (["verify", run], ("--target", "--alpha", "--sigma")),
        (["eval", run, text_file], ("--context", "--stride", "--split", "--tasks", "--text-field")),
        (["data", "inspect", str(world.data)], ("--documents",)),
        (["race", "modern", "best", *nowhere],
         ("--until", "--margin", "--tuned", "--budget", "--seeds", "--jobs", "--set")),
        (["tune", "modern", *nowhere, "--budget", "2"], ("--over", "--budget", "--seeds", "--set")),
        (["ablate", "modern", *nowhere],
         ("--switch", "--until", "--alpha", "--margin", "--set", "--seeds")),
        (["data", "build", text_file, "--out", "out", "--tokenizer", "byte"],
         ("--val-fraction", "--test-fraction", "--val", "--text-field", "--max-document-bytes",
          "--shard-tokens", "--tokenizer")),
        (["export", run, "out"], ("--to",)),
        (["leaderboard"], ("--file",)),
        (["serve", run], ("--slots", "--queue", "--context", "--host", "--port")),
        (["runs", str(world.root)], ("--sort", "--track", "--recipe", "--state")),
        (["recipes", "show"], ("",)), (["tracks", "show"], ("",)), (["report"], ("",)),
        (["sample"], ("",)), (["bench", "none"], ("",)), ([], ("",)),
    )  # fmt: skip

    def odd_options(rng: Random, folder: Path) -> Command:
        (folder / "losses.csv").write_text("5.1\n5.2\n5.15\n")
        words, names = rng.choice(verbs)
        more = [odd_word(rng)] if rng.random() < 0.9 else []
        if name := rng.choice(names):
            more = [name, *more]
        if words[:1] == ["serve"]:
            more += ["--host", "256.0.0.1"]  # which no server listens on
        return Command([*words, *more], writes=("out", "report.html"))

    return [Verbs("options", 1.0, odd_options)]
