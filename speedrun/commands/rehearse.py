"""`speedrun train ... --rehearse cuda`: what a GPU would be given, tried out before there is one.

Three short runs of a small model, each by the command that a user would write: in fp32 on the CPU;
as on GPUs, on several ranks; and the same once more, stopped half way and resumed. Then everything
that can be known of them is compared: losses, bits, graphs of the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, RunError
from speedrun.files import sha256_of
from speedrun.science.children import Children
from speedrun.terminal.console import print_table
from speedrun.train.build import choose_device
from speedrun.train.checkpoint import MODEL, OPTIMIZER
from speedrun.train.compiled import USES
from speedrun.train.request import Request
from speedrun.train.run import RunFolder

# What a rehearsal takes from the command line.
READ = {"recipe", "overrides", "track", "seed", "steps", "ranks"}
TRACK = "pico"  # where none is named
STEPS = 24
RANKS = 2
PASSES = 2  # a step and rank, so that gradients are added up before they are sent
VALIDATIONS = 3
# Nats between losses in bf16 and in fp32, on average over the steps. A number of bf16 is known to
# 2^-9, and what that does to the weights adds up. A single step says little: where rates are high
# two runs that differ by a rounding are soon as far apart as two batches are.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    wanted: str
    good: bool


def rehearse_command(request: Request, place: str, track: str | None) -> int:
    """Prints what was found; 0: all of it is as it should be, 1: not."""
    if place != "cuda":
        raise ConfigError(f"--rehearse {place} cannot be used: cuda is what can be rehearsed")
    plain = Request()
    for option in fields(Request):
        if option.name not in READ and getattr(request, option.name) != getattr(plain, option.name):
            word = "--run" if option.name == "folder" else f"--{option.name.replace('_', '-')}"
            raise ConfigError(f"--rehearse makes short runs of its own: leave {word} out")
    if any(word.startswith("machine.device=") for word in request.overrides):
        raise ConfigError("--rehearse chooses machine.device itself: leave it out")
    there = choose_device("auto").type == "cuda"
    ranks = request.ranks or (_gpus(RANKS) if there else RANKS)
    words = _words(request, track or TRACK, ranks)
    with TemporaryDirectory(prefix="rehearsal-") as name:
        runs = _make(words, Path(name), ranks, "cuda" if there else "rehearsal")
        findings = [*_compare(runs, exact=not there)]
    print()
    print_table(
        ("", "found", "wanted", ""),
        [(one.what, one.found, one.wanted, "" if one.good else "NOT SO") for one in findings],
    )
    wrong = sum(not one.good for one in findings)
    kernels = "" if there else ", but for a GPU's own kernels, which this CPU cannot run"
    if wrong:
        print(f"\n{wrong} of {len(findings)} are not as they should be")
    else:
        print(f"\n{request.recipe} is ready for {ranks} ranks on CUDA{kernels}")
    return 1 if wrong else 0


def _gpus(most: int) -> int:
    import torch

    return min(most, torch.cuda.device_count())


def _words(request: Request, track: str, ranks: int) -> list[str]:
    """The command of all three runs, with a batch and a length that take seconds."""
    options = {"train.steps": request.steps or STEPS}
    config = resolve(request.recipe, track, request.overrides, options).config
    small = _small(config, ranks)
    written = {word.partition("=")[0] for word in request.overrides}
    words = [f"{key}={value}" for key, value in small.items() if key not in written]
    seed = [] if request.seed is None else ["--seed", str(request.seed)]
    return [
        request.recipe, *words, *request.overrides, "--track", track, *seed,
        "--steps", str(config.steps), "--sample-tokens", "0",
    ]  # fmt: skip


def _small(config: Config, ranks: int) -> Mapping[str, int]:
    length = config.batch.length
    return {
        "batch.tokens": ranks * PASSES * length,
        "machine.microbatch": 1,
        "validation.tokens": 2 * ranks * length,
        "validation.every": max(1, config.steps // VALIDATIONS),
    }


def _make(words: Sequence[str], folder: Path, ranks: int, device: str) -> dict[str, RunFolder]:
    """The runs by name; what goes wrong in one ends the rehearsal with its last words."""
    # Whatever a GPU alone can do is left out here, and asked for there.
    plain = [
        "machine.device=cpu",
        "machine.precision=fp32",
        "machine.attention=auto",
        "machine.compile=none",
        "machine.full_blocks=true",
        "machine.kernels=auto",
        "optimizer.muon.dtype=fp32",
    ]
    # All guards: with few, a constant that changes would not be noticed.
    on_gpus = [f"machine.device={device}", "machine.guards=all", "--ranks", str(ranks)]
    steps = int(words[words.index("--steps") + 1])
    runs = {name: RunFolder(folder / name) for name in ("plain", "whole", "stopped")}
    kind = "as on GPUs" if device == "rehearsal" else "on GPUs"
    where = f"{kind}, {ranks} rank{'s' if ranks > 1 else ''}"
    at = {name: ["--run", str(run.path)] for name, run in runs.items()}
    stages = [
        ("fp32 on the CPU", ["train", *words, *plain, *at["plain"]]),
        (where, ["train", *words, *on_gpus, *at["whole"]]),
        (f"{where}, to step {steps // 2}",
         ["train", *words, *on_gpus, "--stop-after", str(steps // 2), *at["stopped"]]),
        (f"{where}, resumed", ["train", "--resume", "--ranks", str(ranks), "--sample-tokens", "0",
                               *at["stopped"]]),
    ]  # fmt: skip
    with Children() as children:
        for number, (title, command) in enumerate(stages):
            print(f"[{number + 1}/{len(stages)}] {title} ...", flush=True)
            children.start(number, command)
            _, child = children.wait()
            if children.asked:
                sys.exit(128 + children.asked)
            if child.poll():
                raise RunError(f"{title}: {child.last_words()}")
    return runs


def _compare(runs: Mapping[str, RunFolder], *, exact: bool) -> list[Finding]:
    """`exact`: a resumed run has the same bits, which sums on a GPU need not have."""
    plain, whole, stopped = (runs[name] for name in ("plain", "whole", "stopped"))
    found = [
        _losses("loss", "train", plain, whole),
        _losses("validation", "val", plain, whole),
        _losses("resumed", "train", whole, stopped, "the run in one go"),
    ]
    if exact:
        same = _hashes(whole) == _hashes(stopped)
        said = "the same bits" if same else "other bits"
        found.append(Finding("weights and moments, resumed", said, "the same bits", same))
    for run, name in ((whole, ""), (stopped, ", resumed")):
        end = run.read_metrics("end")[-1]
        again, graphs = end.get("recompilations", 0), end.get("graphs", 0)
        found.append(Finding(f"recompilations{name}", str(again), "0", again == 0))
        if run.load_config().machine.compile in ("auto", "model"):  # blocks have some each
            found.append(Finding(f"graphs{name}", str(graphs), str(USES), graphs == USES))
    return found


def _losses(what: str, kind: str, one: RunFolder, other: RunFolder, whom: str = "fp32") -> Finding:
    """How far apart two runs are on average, and at the step where they are furthest."""
    here, there = (
        {row["step"]: row["loss"] for row in run.read_metrics(kind)} for run in (one, other)
    )
    if here.keys() != there.keys() or None in (*here.values(), *there.values()):
        return Finding(what, "steps are missing or not finite", "every step of both", good=False)
    apart = {step: abs(here[step] - there[step]) for step in here}
    mean, step = fmean(apart.values()), max(apart, key=lambda at: apart[at])
    said = f"{mean:.4f} nats from {whom} on average, {apart[step]:.4f} in step {step}"
    return Finding(what, said, f"at most {TOLERANCE} on average", mean <= TOLERANCE)


def _hashes(run: RunFolder) -> list[str]:
    newest = max(run.checkpoints.iterdir())
    return [sha256_of(newest / name) for name in (MODEL, OPTIMIZER)]
