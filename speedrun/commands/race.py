"""`speedrun race` and `speedrun ablate`: run, print the tables, write the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from speedrun.commands.report import report_command
from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.science.ablate import ablate
from speedrun.science.bets import fewest_pairs
from speedrun.science.compare import PUBLIC, Row, comparable
from speedrun.science.race import profile, race
from speedrun.science.results import Ablation, Effect, Race, agreement
from speedrun.science.space import Budget
from speedrun.science.until import Until
from speedrun.terminal.console import print_table, size_text
from speedrun.train.build import try_code
from speedrun.train.run import RunFolder

say = partial(print, flush=True)
SEEDS = 3  # where nobody says how many
REACHED = "reached by {n} of {of}"
UNITS = {"tokens_to_target": "tokens", "seconds_to_target": "s", "val_loss": "nats"}


def race_command(
    *,
    recipes: Sequence[str],
    tracks: Sequence[str],
    seeds: int | None,
    until: Sequence[str],
    margin: float | None,
    finish: bool,
    tuned: str,
    budget: int | None,
    out: Path,
    overrides: Sequence[str],
    jobs: int | None,
) -> None:
    fixed, limit = seeds_of(seeds, until), _share_of(tracks, until)
    _known(recipes, tracks, overrides)
    races = []
    for track, folder in _folders(out, tracks).items():
        found = race(recipes=recipes, track=track, seeds=fixed, until=limit, margin=margin,
                     finished=finish, tuned=Budget.parse(tuned) if tuned else None,
                     budget=budget, out=folder, overrides=overrides, jobs_at_once=jobs,
                     say=say)  # fmt: skip
        print_race(found, folder)
        report_command(paths=[folder], out=folder / "race.html", watch=False)
        races.append(found)
    if len(races) > 1:
        print_profile(races)


def ablate_command(
    *,
    recipe: str,
    tracks: Sequence[str],
    seeds: int | None,
    until: Sequence[str],
    switches: Sequence[str],
    out: Path,
    alpha: float,
    margin: float,
    overrides: Sequence[str],
    jobs: int | None,
) -> None:
    fixed, limit = seeds_of(seeds, until), _share_of(tracks, until)
    _known([recipe], tracks, overrides)
    ablations = []
    for track, folder in _folders(out, tracks).items():
        found = ablate(recipe=recipe, track=track, seeds=fixed, until=limit, switches=switches,
                       out=folder, alpha=alpha, margin=margin, overrides=overrides,
                       jobs_at_once=jobs, say=say)  # fmt: skip
        print_ablation(found, folder)
        report_command(paths=[folder], out=folder / "ablation.html", watch=False)
        ablations.append(found)
    if len(ablations) > 1:
        print_agreement(ablations)


def _known(recipes: Sequence[str], tracks: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse what the last of several tracks would be refused for before the first takes hours."""
    for track in tracks:
        for recipe in recipes:
            try_code(resolve(recipe, track, overrides).config)


def _folders(out: Path, tracks: Sequence[str]) -> dict[str, Path]:
    """Where the results of each track go: `out` itself, or a folder for each of several."""
    if len(tracks) == 1:
        return {tracks[0]: out}
    folders = {track: out / Path(track).stem for track in tracks}
    if len(set(folders.values())) < len(tracks):
        raise ConfigError("--track names a track twice, or two files of one name; give each once")
    return folders


def _share_of(tracks: Sequence[str], until: Sequence[str]) -> Until | None:
    limit = Until.parse(until)
    return limit.each_of(len(tracks)) if limit else None


def seeds_of(seeds: int | None, until: Sequence[str]) -> int:
    """A number of seeds that is fixed beforehand; `until` finds its own."""
    if seeds is not None and until:
        raise ConfigError(
            f"--seeds {seeds} fixes the number of seeds, --until finds it: give one of them "
            f"(or --until '{max(2, seeds)} seeds')"
        )
    return SEEDS if seeds is None else seeds


def _text(track: str | None, runs: Iterable[str | None], folder: Path | None) -> str:
    """What it was raced on, as one of the runs in `folder` records it."""
    run = next(filter(None, runs), None)
    return RunFolder(folder / run).told_text(track) if folder and run else str(track)


def print_race(found: Race, folder: Path | None = None) -> None:
    text = _text(found.track, (entry.run for entry in found.entries), folder)
    what = "shortest runs that end at" if found.finished else "to"
    tuned = f", each recipe's rates tuned with {found.tuned}" if found.tuned else ""
    print(
        f"\n{what} a validation loss of {found.target} on {text}, {found.seeds} "
        f"seeds{tuned}: mean +- standard deviation [95% interval]; ratios to {found.order[0]}"
    )
    before = found.to_the_one_before() if len(found.order) > 2 else {}
    timed = found.jobs == 1 and not found.finished
    tokens, times, ends = [], [], []
    for recipe, table in found.statistics().items():
        sizes = (entry.params for entry in found.entries if entry.recipe == recipe)
        params = next(filter(None, sizes), None)  # none: out of time, or all diverged
        memory = table["peak_memory_bytes"].mean
        size = "-" if memory is None else size_text(memory)
        step = [_ratio(before[recipe]) if recipe in before else ""] if before else []
        public = [] if found.finished else [_mean(table[PUBLIC], ",.0f")]
        none = "found for {n} of {of}" if found.finished else REACHED
        tokens.append((recipe, _mean(table["tokens_to_target"], ",.0f", none),
                       _ratio(table["tokens_to_target"]), *step,
                       _mean(table["steps_to_target"], ",.1f", none), *public))  # fmt: skip
        if timed:
            seconds = (table[metric] for metric in ("seconds_to_target", "wall_seconds_to_target"))
            training, wall = (_mean(row, ".1f") for row in seconds)
            times.append((recipe, training, _ratio(table["seconds_to_target"]), wall))
        losses = (_mean(table[loss], ".4f", "not tested") for loss in ("val_loss", "test_loss"))
        ends.append((recipe, *losses, _number(params, ","), size))
    to_before = ("to the one before",) if before else ()
    rule = () if found.finished else ("tokens by the public rule",)
    print_table(("recipe", "tokens", "ratio of tokens", *to_before, "steps", *rule), tokens)
    print()
    if timed:
        print_table(("recipe", "training seconds", "ratio of seconds", "wall seconds"), times)
        print()
    print_table(("recipe", "last loss", "test loss", "parameters", "memory"), ends)
    if found.finished:
        print("tokens of the shortest run, schedule finished, whose last loss is at the target, "
              "between two lengths a tenth apart; the interval includes that")  # fmt: skip
    else:
        print("tokens where the validations cross the target, the distance between them in the "
              "interval; public rule: the first validation at or below it")  # fmt: skip
    for line in found.verdicts():
        print(line)
    if found.effects:
        print("intervals of the table are for a number of seeds fixed beforehand, those of the "
              f"lines above hold at every look; {_ending(found, 'recipe')}")  # fmt: skip
    for note in found.notes:
        print(f"note: {note}")
    if found.jobs > 1 and not found.finished:
        print(_shared(found.jobs))


def print_profile(races: Sequence[Race]) -> None:
    """On how many of the tracks each recipe is how near to the best."""
    tracks = ", ".join(str(one.track) for one in races)
    print(f"\nperformance profile over {tracks}: share of tracks on which a recipe needs at most "
          "so many times the tokens of the best")  # fmt: skip
    found = profile(races)
    factors = sorted({1.0, *(round(f, 3) for points in found.values() for f, _ in points)})
    rows = [
        (recipe, *(
            f"{max((share for f, share in points if f <= factor + 5e-4), default=0.0):.2f}"
            for factor in factors
        ))
        for recipe, points in found.items()
    ]  # fmt: skip
    print_table(("recipe", *(f"x {factor:g}" for factor in factors)), rows)


def print_ablation(found: Ablation, folder: Path | None = None) -> None:
    text = _text(found.track, found.runs, folder)
    print(
        f"\n{found.recipe} on {text}, {found.seeds} seeds: effect of each "
        "switch (switched - recipe; above 0: the technique helped)"
    )
    if found.until:
        _print_watched(found)
        return
    margin = any(effect.p_equal is not None for effect in found.effects)
    for metric in comparable(tuple(UNITS), found.jobs):
        if not any(effect.n for effect in found.effects if effect.metric == metric):
            print(f"{metric}: no pair of runs has it\n")
            continue
        equal = margin and metric == "val_loss"
        form, unit = "+,.4f" if metric == "val_loss" else "+,.0f", UNITS[metric]
        rows = [
            (
                effect.switch,
                f"{_number(effect.effect, form)} {unit}{_interval(effect.low, effect.high, form)}",
                _number(effect.p, ".3g"),
                _number(effect.p_holm, ".3g"),
                *([_number(effect.p_equal, ".3g")] if equal else []),
                _decision(effect),
            )
            for effect in found.effects
            if effect.metric == metric
        ]
        header = (f"switch: {metric}", "effect [95% interval]", "p", "p (Holm)")
        print_table((*header, *(["p (equal)"] if equal else []), ""), rows)
        print()
    if any(effect.more_seeds for effect in found.effects):
        print("new seeds: as many as a test of its own would want; to add to these and look again "
              "breaks the level, --until decided does not")  # fmt: skip
    if margin:
        print(f"equal: within {found.margin:g} nats, by two one-sided tests")
    if found.jobs > 1:
        print(_shared(found.jobs))


def print_agreement(ablations: Sequence[Ablation]) -> None:
    """The same switches on several tracks: does what was found on one hold on the others?"""
    tracks = [f"{found.recipe} on {found.track}" for found in ablations]
    print(f"\neffects on the last loss in nats, side by side: {', '.join(tracks)}")
    found = agreement(ablations)
    rows = [
        (switch, *(f"{_number(one.effect, '+.4f')} {one.verdict or 'undecided'}" if one else "-"
                   for one in effects), verdict)
        for switch, (effects, verdict) in found.items()
    ]  # fmt: skip
    print_table(("switch", *(str(one.track) for one in ablations), ""), rows)
    count = Counter(verdict for _, verdict in found.values())
    print(f"decided on all: {len(found) - count['open']} of {len(found)}, of which "
          f"{count['agree']} agree and {count['opposite']} point the other way; {count['differ']} "
          "have an effect on one track and none on another")  # fmt: skip


def _print_watched(found: Ablation) -> None:
    """Of an ablation that added seeds until it was decided."""
    alpha, margin = found.alpha or 0.0, found.margin or 0.0
    level = f"{100 * (1 - alpha):g}%"
    rows = [
        (
            effect.switch,
            effect.n,
            f"{_number(effect.effect, '+.4f')}{_interval(effect.low, effect.high, '+.4f')}",
            _number(effect.p_holm, ".2g"),
            _number(effect.p_equal, ".2g"),
            f"{effect.verdict}{f': {effect.note}' if effect.note else ''}",
        )
        for effect in found.effects
    ]
    effect = f"effect on the last loss in nats [{level} at every look]"
    print_table(("switch", "seeds", effect, "p (effect)", "p (equal)", "verdict"), rows)
    some = found.made is not None and found.made < len(found.runs)
    made = f", in which {found.made} of {len(found.runs)} runs were made" if some else ""
    print(f"\n{_ending(found, 'switch')} after {(found.seconds or 0) / 60:.0f} min{made}")
    print(
        f"p-values may be looked at after every seed, and are corrected over {len(rows)} switch"
        f"{'es' if len(rows) > 1 else ''}; "
        f"decided at {alpha:g}; equal: within {margin:g} nats (docs/deciding.md)"
    )


def _ending(found: Race | Ablation, what: str) -> str:
    """What ended the adding of seeds, and how to go on with what is undecided."""
    left = [effect.switch for effect in found.effects if effect.verdict == "undecided"]
    named = ", ".join(left)
    return {
        "time": f"out of time, undecided: {named}; the same command goes on",
        "seeds": f"out of seeds, undecided: {named}; a larger number of seeds goes on "
        f"(with {len(found.effects)} to decide, one takes {_least(found)} at least)",
        "stuck": f"no further seed would settle: {named}",
    }.get(found.stopped or "", f"every {what} decided")


def _least(found: Race | Ablation) -> int:
    alpha = found.alpha or 0.05
    return fewest_pairs(alpha, len(found.effects), equal=found.margin is not None)


def _shared(jobs: int) -> str:
    return (f"{jobs} runs at a time shared the machine, so their seconds do not compare; --jobs 1 "
            "measures them")  # fmt: skip


def _decision(effect: Effect) -> str:
    if effect.effect is None:
        return f"{effect.n} of {effect.of} pairs have it"
    if effect.decided:
        return effect.verdict or "decided"
    more = effect.more_seeds
    return "undecided" if more is None else f"undecided: about {(effect.n or 0) + more} new seeds"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"


def _mean(row: Row, form: str, none: str = REACHED) -> str:
    if row.mean is None:
        return none.format(n=row.n, of=row.of)
    spread = "" if row.std is None else f" +- {row.std:{form}}"
    return f"{row.mean:{form}}{spread}{_interval(row.low, row.high, form)}"


def _ratio(row: Row) -> str:
    return _number(row.ratio, ".3f") + _interval(row.ratio_low, row.ratio_high, ".3f")
