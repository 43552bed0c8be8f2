"""The verbs race, ablate, verify, submit and leaderboard, as the command line calls them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speedrun.errors import ConfigError
from speedrun.science.verify import Verdict, common_target, gather, read_losses, verify


def verify_command(
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


def race_command(
    recipes: Sequence[str], track: str, seeds: int, budget: int | None, out: Path,
    overrides: Sequence[str],
) -> None:  # fmt: skip
    from speedrun.science.race import race
    from speedrun.science.tables import print_race

    print_race(race(recipes, track, seeds, out, overrides=overrides, budget=budget, say=_say))
    _page(out, "race")


def ablate_command(
    recipe: str, track: str, seeds: int, switches: Sequence[str], out: Path, alpha: float,
    overrides: Sequence[str],
) -> None:  # fmt: skip
    from speedrun.science.ablate import ablate
    from speedrun.science.tables import print_ablation

    print_ablation(
        ablate(
            recipe, track, seeds, out, switches=switches, overrides=overrides, alpha=alpha, say=_say
        )
    )
    _page(out, "ablation")


def submit_command(runs: Sequence[Path], file: Path, alpha: float) -> None:
    from speedrun.science.leaderboard import read, submit
    from speedrun.science.tables import print_leaderboard

    submit(runs, file, alpha)
    print_leaderboard(read(file))


def leaderboard_command(file: Path) -> None:
    from speedrun.science.leaderboard import read
    from speedrun.science.tables import print_leaderboard

    print_leaderboard(read(file))


def _say(text: str) -> None:
    print(text, flush=True)


def _page(out: Path, name: str) -> None:
    from speedrun.report.command import report_command

    report_command([out], out / f"{name}.html", watch=False)
