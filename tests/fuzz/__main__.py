"""`make fuzz`: bad input by the thousand; see CONTRIBUTING.md.

Names of targets, or cases such as recipes:17 to repeat them; without any: all targets.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.configs import configs
from tests.fuzz.datasets import datasets
from tests.fuzz.native import Kernels, kernels
from tests.fuzz.options import options
from tests.fuzz.requests import requests
from tests.fuzz.results import results
from tests.fuzz.runner import Runner, Target
from tests.fuzz.runs import runs
from tests.fuzz.world import World

FAMILIES = (requests, configs, options, results, datasets, runs, kernels)


COUNTS = ("inputs", "results", "sentences", "faults")


def all_targets(world: World) -> dict[str, Target]:
    return {target.name: target for family in FAMILIES for target in family(world)}


def fuzz(
    words: list[str], seconds: float, seed: int, workers: int, keep: Path, made: Path | None
) -> int:
    """Exit code 1 if anything was wrong."""
    shared = Path("/dev/shm")
    memory = shared if os.access(shared, os.W_OK) else None  # files are forced to disk a lot
    with tempfile.TemporaryDirectory(prefix="speedrun-fuzz-", dir=memory) as root:
        world = World(made or Path(root) / "world")
        world.root.mkdir(parents=True, exist_ok=True)
        world.prepare()
        targets = all_targets(world)
        chosen = [word.partition(":") for word in words]
        for name, _, _ in chosen:
            if name not in targets:
                sys.exit(f"there is no target {name!r}, only {', '.join(targets)}")
        picked = [targets[name] for name, _, _ in chosen] or [*targets.values()]
        begun = time.monotonic()
        world.make()
        for target in picked:
            if isinstance(target, Kernels):
                target.program()  # built, and kept for the next time
        print(
            f"seed {seed}: runs and datasets made in {time.monotonic() - begun:.0f} s", flush=True
        )
        runner = Runner(seed, keep, Path(root) / "scratch", workers)
        cases = [(name, int(case)) for name, colon, case in chosen if colon]
        for name, case in cases:
            runner.repeat(targets[name], case)
        if not cases:
            runner.fuzz(picked, seconds)
    return tell(runner)


def tell(runner: Runner) -> int:
    row = "{:14} {:>8} {:>8} {:>10} {:>7} {:>9}".format
    print("\n" + row("target", *COUNTS, "seconds"))
    for name, tally in runner.tallies.items():
        print(
            row(
                name,
                tally.inputs,
                tally.results,
                tally.sentences,
                tally.faults,
                f"{tally.seconds:.0f}",
            )
        )
    tallies = [*runner.tallies.values()]
    sums = [sum(getattr(one, key) for one in tallies) for key in COUNTS]
    print(row("in all", *sums, f"{sum(one.seconds for one in tallies):.0f}"))
    for what, cases in runner.faults.items():
        print(f"{len(cases):5} x {what}  ({', '.join(cases[:3])})")
    return int(bool(runner.faults))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="TARGET[:CASE]")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-faults"), help="inputs that are wrong"
    )
    parser.add_argument("--world", type=Path, help="keep what is spoilt here, for the next time")
    asked = parser.parse_args()
    made = asked.world and asked.world.absolute()
    shutil.rmtree(asked.keep, ignore_errors=True)
    sys.exit(
        fuzz(asked.words, asked.seconds, asked.seed, asked.workers, asked.keep.absolute(), made)
    )
