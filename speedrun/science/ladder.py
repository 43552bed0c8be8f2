"""`speedrun ladder`: which optimizer needs the fewest steps? A table of which any row stands alone.

A row is one entry. Its two rates and its momentum are searched on the first track, in the same
number of trials of the same length for all (`tune.py`); for built-in entries that was done before
(`known.py`). Then the shortest runs that end below the target are looked for on every track
(`climb.py`). A track may say that entries are tuned on another one (`tuned_on`): it is held out,
and tells what was fitted to the other text.

Every row is written as soon as it is there, into a file for each track (`rungs.py`). Seconds are
measured apart (`clock`), one run at a time, taking turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from speedrun.config.code import EXTRA, package_hash
from speedrun.config.files import chain, is_path
from speedrun.config.fixed import of_track
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, quoted
from speedrun.science.climb import Table, packages_of
from speedrun.science.finish import USUAL_SLOPE
from speedrun.science.jobs import Say, config_of
from speedrun.science.known import FINALISTS, as_guessed, known_tuning
from speedrun.science.race import TARGET_SEED
from speedrun.science.results import Tuning
from speedrun.science.rungs import GRID, Ladder, Tuned
from speedrun.science.space import Budget
from speedrun.science.tune import default_ranges, tune
from speedrun.train.build import try_code

FARTHEST_GUESS = 20  # places that a guess leads away from the track's own length

Named = Mapping[str, tuple[str, Config]]  # entries: how each is called, its config on one track


def ladder(
    *,
    recipes: Sequence[str],
    tracks: Sequence[str],
    tuned: Budget | None,
    seeds: int,
    first_seed: int,
    out: Path,
    say: Say,
    clock: int = 0,
    jobs_at_once: int | None = None,
    retune: bool = False,
) -> list[Ladder]:
    """Make what is missing of these rows and write a file for each track; returns what is there.

    With `retune` built-in entries are tuned again, too.
    """
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds} cannot be used: intervals take 2 at least")
    if first_seed + max(seeds, clock) > TARGET_SEED:
        raise ConfigError(
            f"--first-seed {first_seed} cannot be used: seeds from {TARGET_SEED} on are for tuning"
        )
    entries = read_entries(recipes, tracks)
    numbers = range(first_seed, first_seed + seeds)
    tables = [Table(track, numbers, out, jobs_at_once, say) for track in tracks]
    if clock:
        files = {name: _file(name, recipe, out) for name, (recipe, _) in entries.items()}
        for table in tables:
            table.measure(files, clock)
        return [table.found for table in tables]
    on = tuned_on(tracks[0])
    for table in tables:
        table.refuse_other_tuning((str(tuned), tuned_name(on)) if tuned else None, entries)
    for name, (recipe, _) in entries.items():
        file, found = recipe, None
        if tuned:
            config = config_of(recipe, on, ())
            found = None if retune else known_tuning(recipe, config, on, tuned)
            if found:
                say(f"{name} states what was found by {tuned} before (--retune searches again)")
            else:
                found = _tune(name, recipe, on, tuned, out, jobs_at_once, say)
                file = str(out / "tuning" / name / found.file)
        guess = _guess(found, config_of(recipe, on, ()).train.target)
        for table in tables:
            guess = table.add(name, recipe, file, _summary(found), guess)
    return [table.found for table in tables]


def read_entries(recipes: Sequence[str], tracks: Sequence[str]) -> Named:
    """By name. What the last would be refused for is refused before the first takes its time."""
    entries = _read(recipes, tracks)
    refuse_missing(entries)
    for _, config in entries.values():
        try_code(config)
    return entries


def tuned_on(track: str) -> str:
    """The track that entries of a track are tuned on: itself, unless its file names another."""
    layer = chain("track", track)[-1]
    named = str(layer.notes.get("tuned_on", track))
    return str(layer.folder / named) if is_path(named) and "tuned_on" in layer.notes else named


def tuned_name(track: str) -> str:
    return resolve(None, track).config.track


def _tune(
    name: str, recipe: str, track: str, budget: Budget, out: Path, jobs: int | None, say: Say
) -> Tuning:
    folder = out / "tuning" / name
    guessed = as_guessed(recipe, track, folder)
    over = default_ranges(config_of(guessed, track, ()), track)
    say(f"tuning {name} on {track} with {budget} over {', '.join(map(str, over))}")
    return tune(recipe=guessed, track=track, over=over, budget=budget, finalists=FINALISTS,
                out=folder, say=say, jobs_at_once=jobs)  # fmt: skip


def _read(recipes: Sequence[str], tracks: Sequence[str]) -> dict[str, tuple[str, Config]]:
    for track in tracks:
        if of_track(track) is None:
            raise ConfigError(
                f"track {track!r} fixes nothing, so steps on it would not compare optimizers: name "
                "one that does (optimizer, optimizer-prose), or write one that extends it"
            )
    found: dict[str, tuple[str, Config]] = {}
    for recipe in recipes:
        if "=" in recipe and not is_path(recipe):
            raise ConfigError(
                f"{quoted(recipe)} is no recipe: an entry of the table is a file that says all it "
                "is, so write one that extends another and sets it there"
            )
        configs = [config_of(recipe, track, ()) for track in tracks]
        for config in configs:
            if not config.train.target:
                raise ConfigError(f"track {config.track} has no target: set train.target in it")
        name = configs[0].recipe
        if name in found:
            raise ConfigError(f"two entries are called {name!r}; rename one")
        found[name] = recipe, configs[0]
    return found


def refuse_missing(entries: Named) -> None:
    """Packages that are not here, all of them at once, and what can be run without."""
    missing = {
        name: lacking
        for name, (_, config) in entries.items()
        if (lacking := [one for one in packages_of(config) if package_hash(one) is None])
    }
    if not missing:
        return
    packages = sorted({package for lacking in missing.values() for package in lacking})
    install = sorted({f"'speedrun[{EXTRA[one]}]'" if one in EXTRA else one for one in packages})
    rest = [name for name in entries if name not in missing]
    without = f", or go on without: speedrun ladder {' '.join(rest)}" if rest else ""
    raise ConfigError(
        f"{', '.join(missing)} cannot be run without {', '.join(packages)}: pip install "
        f"{' '.join(install)}{without}"
    )


def _file(name: str, recipe: str, out: Path) -> str:
    """The recipe with the values that were found for it, where they were searched."""
    found = out / "tuning" / name / f"{name}-tuned.toml"
    return str(found) if found.exists() else recipe


def _summary(found: Tuning | None) -> Tuned | None:
    if found is None or found.best_trial is None:
        return None
    own = found.as_it_stands
    return Tuned(
        track=tuned_name(found.track),
        budget=str(found.budget),
        trials=len(found.trials),
        finalists=found.finalists,
        over=tuple(map(str, found.over)),
        values={key: float(value) for key, value in found.best_trial.values.items()},
        loss=found.best_trial.loss,
        before=own.loss if own else None,
        edges=found.edges,
    )


def _guess(found: Tuning | None, target: float) -> int:
    """Where on the grid an entry should end at the target, by its loss in tuning."""
    best = found.best_trial if found else None
    if best is None or best.loss is None:
        return 0
    away = round((target - best.loss) / USUAL_SLOPE / math.log(GRID))
    return max(-FARTHEST_GUESS, min(FARTHEST_GUESS, away))
