"""`speedrun train`: from words on the command line to a finished run and its last lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.config.resolve import Resolved, change, resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.report.text import console, print_table, size_text, value_text
from speedrun.train.keeper import Every, parse_seconds
from speedrun.train.run import RunFolder


@dataclass(frozen=True)
class Request:
    """The words of `speedrun train`."""

    recipe: str
    overrides: Sequence[str]
    track: str
    folder: Path | None
    seed: int | None
    steps: int | None
    resume: bool
    force: bool
    dry_run: bool
    sample_tokens: int
    checkpoint_every: str
    keep: int
    time_limit: str
    log: tuple[str, ...]
    ranks: int
    max_restarts: int


def train_command(request: Request) -> None:
    resolved, run = _resolve(request)
    config = resolved.config
    config.microbatches(request.ranks or int(os.environ.get("WORLD_SIZE", "1")))
    every = Every.parse(request.checkpoint_every)
    limit = parse_seconds(request.time_limit, "--time-limit") if request.time_limit else None
    if request.dry_run:
        print_dry_run(resolved, request.ranks or 1)
        return
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and request.folder is None:
        raise ConfigError("torchrun --max-restarts needs --run-dir DIR, to find the run again")
    if request.resume and run.finished(config):
        if os.environ.get("RANK", "0") == "0":
            print(f"{run.path} is complete after {config.steps} steps: nothing to resume; --steps "
                  "makes a run longer")  # fmt: skip
        return
    if request.ranks:
        from speedrun.train.launch import launch

        if not request.resume:
            run.refuse_if_taken()
        _dataset(config, talk=True)
        launch(request.ranks, request.max_restarts, run)
    if request.max_restarts:
        raise ConfigError("--max-restarts cannot be used without --ranks: torchrun does restarts")
    _train(config, run, every, limit, request)


def _resolve(request: Request) -> tuple[Resolved, RunFolder]:
    """The config of a new run, or of the one to resume with what the request changes in it."""
    options = {
        key: value
        for key, value in (("train.seed", request.seed), ("train.steps", request.steps))
        if value is not None
    }
    if request.steps is not None and request.steps < 1:
        raise ConfigError(f"--steps {request.steps} cannot be used: at least 1")
    if request.resume:
        if request.folder is None or (request.recipe and "=" not in request.recipe):
            raise ConfigError(
                "--resume continues a run with the recipe it has: give it --run DIR and no recipe"
            )
        run = RunFolder(request.folder)
        overrides = [*([request.recipe] if request.recipe else []), *request.overrides]
        return change(run.load_config(), overrides, options), run
    if not request.recipe:
        raise ConfigError("train needs a recipe, for example: speedrun train modern")
    if "=" in request.recipe and not request.recipe.endswith(".toml"):
        raise ConfigError(f"the recipe comes before the overrides, and {request.recipe!r} is none")
    resolved = resolve(request.recipe, request.track, request.overrides, options)
    return resolved, RunFolder(request.folder) if request.folder else RunFolder.default(
        resolved.config
    )


def _train(
    config: Config, run: RunFolder, every: Every, limit: float | None, request: Request
) -> None:
    from speedrun.train.choices import choose_device
    from speedrun.train.display import NoDisplay, choose_display
    from speedrun.train.launch import exit_of_rank
    from speedrun.train.session import Options, run_training
    from speedrun.train.world import World

    world = World.join(choose_device(config.train.device))
    display = choose_display(console()) if world.first else NoDisplay()
    try:
        with world.watching_peers():
            if request.folder is None:
                run = RunFolder(Path(world.text_from_first(str(run.path))))
            # A rank that torchrun started again goes on from what the last attempt left.
            again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
            resume = request.resume or (again and run.config.exists())
            options = Options(
                resume=resume, force=request.force, checkpoint_every=every, keep=request.keep,
                time_limit=limit, log=request.log,
            )  # fmt: skip
            with world.together():
                if not resume and world.first:
                    run.refuse_if_taken()
                dataset = _dataset(config, world.first)
            display.note(
                f"{config.recipe} on {config.track}: {config.steps} steps of "
                f"{config.batch.tokens:,} tokens, run folder {run.path}"
            )
            summary, code = run_training(config, run, dataset, display, world, options)
    finally:
        display.close()
        world.leave()
    if world.first:
        _say_result(config, run, summary, code, request.sample_tokens)
    if code and world.first:  # the others are done; torchrun would end this rank for their codes
        sys.exit(exit_of_rank(code))


def _dataset(config: Config, talk: bool) -> Path:
    from speedrun.data.command import dataset_progress
    from speedrun.train.setup import find_dataset

    if not talk:
        return find_dataset(config)
    with dataset_progress() as progress:
        return find_dataset(config, progress)


def _say_result(
    config: Config, run: RunFolder, summary: dict[str, Any], code: int, sample_tokens: int
) -> None:
    print_result(config, run, summary)
    if code:
        print(
            f"stopped at step {summary['steps']}; continue with: "
            f"speedrun train --resume --run {run.path}"
        )
        return
    can_write = run.tokenizer.exists()
    if sample_tokens and can_write:
        print_sample(run, sample_tokens)
    print(f"\nrun folder: {run.path}")
    if can_write:
        print(f"more text:  speedrun sample {run.path} --prompt 'import '")


def print_result(config: Config, run: RunFolder, summary: dict[str, Any]) -> None:
    from speedrun.report.curve import draw

    points = [
        (row["tokens"], row["loss"]) for row in run.read_metrics("train") if row["loss"] is not None
    ]
    print("\ntraining loss (nats per token) over tokens"
          + (", dotted: target" if config.train.target else ""))  # fmt: skip
    print(draw(points, line=config.train.target))
    rows: list[tuple[str, str]] = [
        ("parameters", f"{summary['params']:,}"),
        ("steps, tokens", f"{summary['steps']:,}, {summary['tokens']:,}"),
        (
            "training time",
            f"{summary['train_seconds']:.1f} s ({summary['tokens_per_second']:,.0f} tokens/s)",
        ),
        ("wall time", f"{summary['wall_seconds']:.1f} s, from the start of the process"),
        ("peak memory", size_text(summary["peak_memory_bytes"])),
    ]
    if summary["val_loss"] is not None:
        rows.append(
            (
                "validation",
                f"{summary['val_loss']:.4f} nats/token"
                + ("" if summary["val_bpb"] is None else f", {summary['val_bpb']:.4f} bits/byte")
                + f" ({summary['val_tokens']:,} tokens)",
            )
        )
    if summary["target"]:
        if summary["reached_target"]:
            verdict = (
                f"{summary['target']} reached after {summary['tokens_to_target']:,} tokens, "
                f"{summary['seconds_to_target']:.1f} s"
            )
        else:
            verdict = f"{summary['target']} not reached"
        rows.append(("target", verdict))
    print()
    for name, text in rows:
        print(f"{name + ':':15} {text}")


def print_sample(run: RunFolder, tokens: int) -> None:
    from speedrun.serve.sample import generate, load_run

    model, tokenizer = load_run(run.path)
    prompt = "def "
    pieces = [prompt]
    print("\nwhat it writes:\n" + prompt, end="")
    for piece in generate(
        model, tokenizer, prompt, tokens=tokens, temperature=1.0, top_k=40, seed=0
    ):
        pieces.append(piece)
        print(piece, end="", flush=True)
    print()
    run.log("sample", prompt=prompt, text="".join(pieces))


def print_dry_run(resolved: Resolved, ranks: int) -> None:
    from speedrun.hardware import memory_bytes
    from speedrun.train.estimate import estimate, vocab_size_of

    config = resolved.config
    print_table(
        ("key", "value", "from"),
        [(key, value_text(value), origin) for key, value, origin in resolved.rows()],
    )
    vocab_size = vocab_size_of(config)
    cost = estimate(config, vocab_size, ranks, memory_bytes())
    print()
    print_table(
        ("parameters", "count"),
        [
            *((role, f"{count:,}") for role, count in cost.parameters.items()),
            ("total", f"{cost.total_parameters:,}"),
        ],
    )
    print(f"\nvocabulary:            {vocab_size:,}")
    print(f"FLOPs per token:       {cost.flops_per_token:,}")
    print(f"steps, tokens:         {config.steps:,}, {cost.tokens:,}")
    print(f"FLOPs in all:          {cost.flops_per_token * cost.tokens:.3g}")
    print(f"microbatches per step: {cost.microbatches}")
    rank = " a rank" if ranks > 1 else ""
    print(f"estimated peak memory: {size_text(cost.memory_bytes)}{rank}")
    if cost.memory_bytes * ranks > memory_bytes():
        print(f"that is more than this machine's {size_text(memory_bytes())}: set a smaller "
              "batch.length or model")  # fmt: skip
