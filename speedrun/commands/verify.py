"""`speedrun verify`, `submit` and `leaderboard`: claims about runs, tested and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speedrun.errors import ConfigError
from speedrun.science.leaderboard import read, submit
from speedrun.science.verify import Verdict, common_target, gather, read_losses, verify
from speedrun.terminal.console import print_table


def verify_command(
    *,
    runs: Sequence[Path],
    target: float | None,
    alpha: float,
    losses: Path | None,
    sigma: float | None,
    as_json: bool,
) -> int:
    """Print the verdict and return the exit code: 0 it holds, 1 it does not; misuse raises."""
    if (losses is not None) == bool(runs):
        raise ConfigError("verify needs either run folders or --losses FILE, and not both")
    notes: list[str] = []
    if losses is not None:
        if target is None:
            raise ConfigError("--target is needed with --losses: a file states none")
        values = read_losses(losses)
    else:
        found, notes = gather(runs)
        values = [run.loss for run in found]
        target = common_target(found) if target is None else target
    verdict = verify(values, target, alpha=alpha, sigma=sigma, notes=notes)
    print(verdict.as_json() if as_json else as_text(verdict))
    return 0 if verdict.holds else 1


def as_text(verdict: Verdict) -> str:
    def shown(value: float | None, form: str) -> str:
        return "undefined" if value is None else format(value, form)

    rows = [
        ("runs", str(verdict.n)),
        ("mean", shown(verdict.mean, ".5f")),
        ("standard deviation", shown(verdict.std, ".5f")),
        (verdict.test, shown(verdict.t, ".3f")),
        ("p", f"{shown(verdict.p, '.3g')} (one-sided)"),
    ]
    if verdict.sigma is not None:
        rows.insert(3, ("known sigma", f"{verdict.sigma:g}"))
    lines = [f"{name + ':':20} {text}" for name, text in rows]
    lines += [f"note: {note}" for note in verdict.notes]
    claim = f"mean below {verdict.target:g} at p < {verdict.alpha:g}"
    return "\n".join([*lines, f"{'holds' if verdict.holds else 'does not hold'}: {claim}"])


def submit_command(*, runs: Sequence[Path], file: Path, alpha: float) -> None:
    submit(runs, file, alpha)
    leaderboard_command(file=file)


def leaderboard_command(*, file: Path) -> None:
    entries = read(file)
    if not entries:
        print("the leaderboard is empty: add runs with `speedrun submit RUN...`")
        return
    rows = [
        (one.track, one.recipe, f"{one.train_seconds:.1f}", f"{one.tokens:,}", one.steps,
         f"{one.mean:.4f}", one.n, f"{one.p:.2g}", one.machine, one.date)
        for one in entries
    ]  # fmt: skip
    header = ("track", "recipe", "seconds", "tokens", "steps", "mean loss", "n", "p", "machine")
    print_table((*header, "date"), rows)
