"""What pages and tables are made of: races, ablations, tunings, leaderboards, files of losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

from speedrun.science import committed
from tests.fuzz.mutate import spoil_bytes, spoil_json, text
from tests.fuzz.outcome import Command
from tests.fuzz.verbs import Verbs
from tests.fuzz.world import RESULTS, SEEDS, World

RACE = Path(committed.__file__).parent / "race.json"
LOSSES = (
    b"3.2785\n3.2781\n3.2790\n3.2783\n",
    b"seed,val_loss\n0,3.27\n1,3.28\n2,3.275\n",
    b"3.1\n\n3.2\n3.3\n",
)


def results(world: World) -> list[Verbs]:
    known = [RACE, *sorted(RESULTS.glob("race*.json")), *sorted(RESULTS.glob("ablation*.json")),
             *sorted(RESULTS.glob("tune*.json"))]  # fmt: skip
    sources = [path.read_bytes() for path in known]
    entries = [
        {"recipe": "modern", "seed": seed, "run": str(world.runs[seed]), "val_loss": 5 + seed / 9,
         "tokens_to_target": 100 + seed}
        for seed in SEEDS
    ]  # fmt: skip
    sources.append(json.dumps({"track": "sums", "entries": entries}).encode())

    def reports(rng: Random, folder: Path) -> Command:
        name = rng.choice(("race.json", "ablation.json", "tune.json", "mine.json"))
        (folder / name).write_bytes(spoil_json(rng, rng.choice(sources)))
        paths = rng.choice(([name], [name], ["."], [name, str(world.runs[0])], [name, name]))
        out = rng.choice(("out.html", "out.html", "no/out.html"))
        return Command(["report", *paths, "--out", out], writes=("out.html", "no"))

    def boards(rng: Random, folder: Path) -> Command:
        board = folder / "board.json"
        board.write_bytes(spoil_json(rng, world.leaderboard.read_bytes()))
        if rng.random() < 0.95:
            return Command(["leaderboard", "--file", "board.json"])
        for run in world.runs:
            shutil.copytree(run, folder / run.name)
        names = [run.name for run in world.runs]
        tests = [f"{name}/test.json" for name in names]
        return Command(
            ["submit", *names, "--file", "board.json"], writes=("board.json",), leaves=tests
        )

    def losses(rng: Random, folder: Path) -> Command:
        (folder / "losses.csv").write_bytes(spoil_bytes(rng, rng.choice(LOSSES)))
        target = rng.choice(("3.28", "3.3", "0", "-1", "nan", "1e999", text(rng)))
        more = rng.choice(([], ["--json"], ["--sigma", "0.001"], ["--sigma", "0"]))
        return Command(["verify", "--losses", "losses.csv", "--target", target, *more])

    return [
        Verbs("reports", 1.0, reports),
        Verbs("leaderboards", 0.5, boards),
        Verbs("losses", 0.4, losses),
    ]
