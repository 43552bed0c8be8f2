"""`speedrun plan`: what a run would take, on GPUs that are not here or on this CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean

from speedrun.commands.train import before_it_is_built
from speedrun.config.optimizer import MATRIX_ROLES
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.plan.chips import Node
from speedrun.plan.predict import SHORTEST, Plan, Shares, duration, fitted, plan
from speedrun.science.published import curves
from speedrun.terminal.console import print_table, size_text
from speedrun.train.memory import USABLE

FITTED_ON = "H100"
HERE = "cpu"  # the name of this machine


def plan_command(
    *,
    recipe: str,
    track: str,
    overrides: Sequence[str],
    on: str,
    leave_out: int | None,
    as_json: bool,
) -> None:
    if on.strip().lower() == HERE:
        _plan_here(recipe, track, overrides, leave_out, as_json)
        return
    node = Node.parse(on)
    config, vocab_size = _read(recipe, track, overrides)
    shares = fitted() if leave_out is None else _without(leave_out)
    found = plan(config, vocab_size, node, shares)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    _print(found)
    print(f"\n{_trust(node, shares, leave_out)}")
    if config.optimizer.is_own(MATRIX_ROLES[0]):
        used = config.optimizer.hidden.use
        print(f"What {used} computes is not known: its time and memory are taken to be AdamW's.")
    if not found.fits:
        print(_what_would_fit(recipe, track, overrides, node, shares))


def _plan_here(
    recipe: str, track: str, overrides: Sequence[str], leave_out: int | None, as_json: bool
) -> None:
    from speedrun.plan.here import plan_here

    if leave_out is not None:
        raise ConfigError(
            f"--leave-out {leave_out} is about shares that were fitted on published runs, and on a "
            "CPU every piece is timed instead: leave it out"
        )
    found = plan_here(*_read(recipe, track, overrides))
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    _print(found, peak_is=", what torch's own products reach here")
    print("\nA block, attention, head and loss, and updates were timed just now for a moment each, "
          "at their real\nshapes and on documents of made-up lengths; whatever else ran here made "
          "them slower.")  # fmt: skip
    if not found.fits:
        print("Make batch.length, model.width or model.layers smaller, or set "
              "machine.recompute=true.")  # fmt: skip


def _read(recipe: str, track: str, overrides: Sequence[str]) -> tuple[Config, int]:
    """The config and its vocabulary, for which no dataset need be there."""
    fitted_to_text, vocab_size, _ = before_it_is_built(resolve(recipe, track, overrides))
    return fitted_to_text.config, vocab_size


def _without(record: int) -> Shares:
    """Fitted anew, which takes some seconds."""
    from speedrun.plan.fit import fit

    if record not in curves():
        raise ConfigError(
            f"--leave-out {record} cannot be used: the shares are fitted on records "
            f"{min(curves())} to {max(curves())}"
        )
    found = fit([record])
    real, predicted = found["left_out_ms"][record]
    return Shares(found["reached"], {record: (real, predicted)})


def _print(found: Plan, peak_is: str = "") -> None:
    config, chip = found.config, found.node.chip
    passes = f"{found.microbatches} forward pass{'es' if found.microbatches > 1 else ''} a step"
    print(f"{config.recipe} on {config.track}, planned for {found.node.name}\n")
    rows = [
        ("step", f"{1000 * found.step:,.1f} ms"),
        ("first and last", f"{1000 * found.first_step:,.1f} and {1000 * found.last_step:,.1f} ms"),
        ("run", f"{duration(config.steps * found.step)} for {config.steps:,} steps of "
                f"{config.batch.tokens:,} tokens"),
        ("tokens", f"{found.tokens_per_second:,.0f} a second"),
        ("MFU", f"{found.mfu:.1%} of {_rate_text(found.node.count * chip.flops)}{peak_is}"),
        ("memory", f"{size_text(found.memory_bytes)} of {size_text(chip.memory)} a rank, {passes}"
                   f"{'' if found.fits else ': DOES NOT FIT'}"),
    ]  # fmt: skip
    print_table(("", ""), rows)
    parts = sorted(found.parts.items(), key=lambda item: -item[1])
    print()
    print_table(
        ("where the time goes", "ms", "share"),
        [(part, f"{1000 * s:.1f}", f"{s / found.step:.1%}") for part, s in parts],
    )
    print()
    print_table(
        ("where the memory goes", "a rank"),
        [(what, size_text(size)) for what, size in found.memory.items()],
    )


def _rate_text(flops: float) -> str:
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"


def _trust(node: Node, shares: Shares, left_out: int | None) -> str:
    """How far such plans have been off, where that is known."""
    if left_out is not None:
        [(record, (real, predicted))] = shares.left_out.items()
        return (
            f"Fitted without record {record}, whose published step takes {real:.1f} ms on "
            f"8 x H100; as its authors ran it, this predicts {predicted:.1f} ms "
            f"({predicted / real - 1:+.1%})."
        )
    records, errors = [*shares.left_out], shares.errors
    text = (
        f"What kernels reach of a chip's rates was fitted on the published runs of records "
        f"{min(records)} to {max(records)} on 8 x H100. Predicted by a fit without it, a record is "
        f"off by {fmean(errors):.1%} on average and {max(errors):.1%} at the most."
    )
    if node.chip.name != FITTED_ON or node.count != 8:
        text += f" On {node.name} nothing was measured: the same shares are assumed."
    return text


def _what_would_fit(
    recipe: str, track: str, overrides: Sequence[str], node: Node, shares: Shares
) -> str:
    """Blocks computed again, or the longest rows that fit, halved as often as it takes."""
    length = _read(recipe, track, overrides)[0].batch.length
    room = f"{USABLE:.0%} of {size_text(node.chip.memory)}"
    again = "machine.recompute=true"
    found = plan(*_read(recipe, track, [*overrides, again]), node, shares)
    if found.fits:
        return (
            f"To fit into {room}: {again}, which takes {size_text(found.memory_bytes)} with "
            f"{found.microbatches} forward passes a step and {1000 * found.step:,.0f} ms; it is "
            "the same experiment"
        )
    while (length := length // 2) >= SHORTEST:
        words = [*overrides, f"batch.length={length}"]
        try:
            config, vocab_size = _read(recipe, track, words)
            found = plan(config, vocab_size, node, shares)
        except ConfigError:
            continue  # a window that is longer, say
        if found.fits:
            return (
                f"To fit into {room}: batch.length={length}, which takes "
                f"{size_text(found.memory_bytes)} with {found.microbatches} forward passes a step "
                f"and {1000 * found.step:,.0f} ms; documents are then cut at other places, so it "
                "is another experiment"
            )
    return (
        f"No length of rows from {SHORTEST} tokens on fits into {room}: make model.width or "
        "model.layers smaller, or use chips with more memory"
    )
