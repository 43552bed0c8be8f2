"""`speedrun verify`, `submit` and `leaderboard`: claims about runs, tested and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from speedrun.errors import ConfigError
from speedrun.science.leaderboard import Submission, read, submit
from speedrun.science.verify import (
    OnTest,
    Verdict,
    common_target,
    gather,
    on_the_test,
    read_losses,
    verify,
)
from speedrun.terminal.console import print_table
from speedrun.terminal.progress import stage_progress

CHANGES = 3  # of a recipe's values that are shown
OWN = "own code"  # marks entries that were made with code of a user's


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
            raise ConfigError(
                "--target is needed with --losses, for a file states none: add --target LOSS"
            )
        values = read_losses(losses)
    else:
        found, notes = gather(runs)
        values = [run.loss for run in found]
        target = common_target(found) if target is None else target
    verdict = verify(values, target, alpha=alpha, sigma=sigma, notes=notes)
    test = on_the_test(runs) if runs else None
    if test and test.failed:
        note = f"the test could not be evaluated: {test.failed}"
        verdict = replace(verdict, notes=(*verdict.notes, note))
    elif test:
        verdict = replace(verdict, test_mean=test.mean)
    print(verdict.as_json() if as_json else as_text(verdict, test))
    return 0 if verdict.holds else 1


def as_text(verdict: Verdict, test: OnTest | None = None) -> str:
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
    if test and test.none:
        rows.append(("test", "none: the dataset has no test split"))
    elif test and test.mean is not None:
        rows.append(("test", f"{test.mean:.5f} (validation {shown(verdict.mean, '.5f')})"))
    lines = [f"{name + ':':20} {text}" for name, text in rows]
    lines += [f"note: {note}" for note in verdict.notes]
    claim = f"mean below {verdict.target:g} at p < {verdict.alpha:g}"
    return "\n".join([*lines, f"{'holds' if verdict.holds else 'does not hold'}: {claim}"])


def submit_command(*, runs: Sequence[Path], file: Path, alpha: float) -> None:
    with stage_progress() as progress:
        submit(runs, file, alpha, progress)
    leaderboard_command(file=file)


def leaderboard_command(*, file: Path) -> None:
    entries = read(file)
    if not entries:
        print("the leaderboard is empty: add runs with `speedrun submit RUN...`")
        return
    # What is not judged alike is not compared: each text, target and validation has its own table.
    for index, (_, same) in enumerate(groupby(sorted(entries, key=_ruler_of), _ruler_of)):
        if index:
            print()
        _print_table_of([*same])


def _ruler_of(entry: Submission) -> tuple[str | float, ...]:
    """What entries must share to stand in one table; those that were checked come first."""
    return (entry.unchecked, entry.track, entry.dataset_fingerprint, entry.shards_sha256 or "",
            entry.target, entry.judged_on or "")  # fmt: skip


def _print_table_of(entries: Sequence[Submission]) -> None:
    """The entries of one ruler, and which it is."""
    first = entries[0]
    pythons = sorted({one.python or "not recorded" for one in entries})
    print(f"track {first.track}, dataset {first.dataset_fingerprint[:12]}, Python "
          f"{', '.join(pythons)}")  # fmt: skip
    print(f"target {first.target:g}, judged on {first.judged_on or 'rows not recorded'}")
    if first.shards_sha256:
        print(f"public shards with SHA-256 {first.shards_sha256[:12]} in all, trusted to be those "
              "of the track")  # fmt: skip
    if first.unchecked:
        print(f"unchecked: {first.unchecked}")
    rows = [
        (f"{_recipe_of(one)} ({OWN})" if one.own_code else _recipe_of(one),
         f"{one.train_seconds:.1f}", f"{one.tokens:,}", one.steps,
         f"{one.mean:.4f}", _test_of(one), one.n, f"{one.p:.2g}", one.machine,
         one.code_sha256[:8], one.date)
        for one in entries
    ]  # fmt: skip
    header = ("recipe", "seconds", "tokens", "steps", "mean loss", "test loss", "n", "p", "machine")
    print_table((*header, "code", "date"), rows)
    for one in entries:
        if one.own_code:
            print(f"{OWN} {_recipe_of(one)}: {', '.join(one.own_code)}")
    if not all(one.evaluated for one in entries):
        print("unknown: the weights were not evaluated where they were submitted")


def _recipe_of(entry: Submission) -> str:
    """Its name, and what was changed of the recipe that has that name here."""
    if not entry.changes:
        return entry.recipe
    more = f" and {len(entry.changes) - CHANGES} more" if len(entry.changes) > CHANGES else ""
    return f"{entry.recipe} with {', '.join(entry.changes[:CHANGES])}{more}"


def _test_of(entry: Submission) -> str:
    if entry.test_mean is not None:
        return f"{entry.test_mean:.4f}"
    return "none" if entry.evaluated else "unknown"
