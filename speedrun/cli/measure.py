"""Verbs that compare and measure: races, ablations, tunings, claims, pages, the machine itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from speedrun.cli.complete import (
    bench_names,
    override,
    recipe_names,
    run_folders,
    switches,
    track_names,
)
from speedrun.cli.mistakes import refuse_overrides

app = typer.Typer()

Track = Annotated[
    str, typer.Option(help="Track name or path to a .toml file.", autocompletion=track_names)
]
Tracks = Annotated[
    list[str] | None,
    typer.Option(help="Track name or path; several: the same on each, then side by side.",
                 show_default="nano", autocompletion=track_names),
]  # fmt: skip
Seeds = Annotated[
    int | None,
    typer.Option(help="Runs of each, with seeds 0, 1, ...: 3 if not given.", min=1,
                 show_default=False),
]  # fmt: skip
UntilOption = Annotated[
    list[str] | None,
    typer.Option(
        "--until",
        help="Add seeds until decided, or until 2h (which tracks share, without tuning), or until "
        "'12 seeds'.",
    ),
]
SetOverrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value for every run.", autocompletion=override),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        help="Runs at a time, which then share the cores and compare no seconds; 0: one a core. "
        "Default: 1 in a race, 0 in an ablation or a tuning, or as it was begun.",
        min=0,
        show_default=False,
    ),
]
RACE = Path("races/race")


@app.command(epilog="Example:  speedrun race baseline record-18 best --track nano --seeds 3")
def race(
    recipes: Annotated[
        list[str], typer.Argument(help="Recipe names or paths.", autocompletion=recipe_names)
    ],
    track: Tracks = None,
    seeds: Seeds = None,
    until: UntilOption = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="With --until: share of tokens within which recipes are equal.",
            show_default="0.05",
        ),
    ] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Shortest runs that end at the target.")
    ] = False,
    tuned: Annotated[
        str, typer.Option(help="Tune each recipe's rates first: trials (12) or a time (30m) each.")
    ] = "",
    budget: Annotated[int | None, typer.Option(help="Most steps of a run.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Folder of the race; finished runs stay.")] = RACE,
    jobs: Jobs = None,
    override: SetOverrides = None,
) -> None:
    """Race recipes to the track's target: seeds, intervals, ratios, race.json and a page."""
    refuse_overrides("speedrun race", recipes)
    from speedrun.commands.race import race_command

    race_command(
        recipes=recipes, tracks=track or ["nano"], seeds=seeds, until=until or [], margin=margin,
        finish=finish, tuned=tuned, budget=budget, out=out, jobs=jobs, overrides=override or [],
    )  # fmt: skip


@app.command(epilog="Example:  speedrun ablate record-18 --track pico --until decided --until 1h")
def ablate(
    recipe: Annotated[
        str, typer.Argument(help="Recipe name or path.", autocompletion=recipe_names)
    ],
    track: Tracks = None,
    seeds: Seeds = None,
    until: UntilOption = None,
    switch: Annotated[
        list[str] | None,
        typer.Option(
            help="key=value, or the name of a technique to be off; without: each of them.",
            autocompletion=switches,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder; finished runs stay.")] = Path("races/ablation"),
    alpha: Annotated[float, typer.Option(help="Level of the decisions.")] = 0.05,
    margin: Annotated[float, typer.Option(help="Nats within which effects are equal.")] = 0.01,
    jobs: Jobs = None,
    override: SetOverrides = None,
) -> None:
    """Switch a recipe's techniques off one at a time, paired by seed: helps, hurts or equal?"""
    from speedrun.commands.race import ablate_command

    ablate_command(
        recipe=recipe, tracks=track or ["nano"], seeds=seeds, until=until or [],
        switches=switch or [], out=out, alpha=alpha, margin=margin, jobs=jobs,
        overrides=override or [],
    )  # fmt: skip


@app.command(
    epilog="Example:  speedrun tune modern --over optimizer.hidden.lr=0.0003..0.01:log --budget 12"
)
def tune(
    recipe: Annotated[
        str, typer.Argument(help="Recipe name or path.", autocompletion=recipe_names)
    ],
    budget: Annotated[
        str, typer.Option(help="Trials (12), the recipe as it stands included, or a time (30m).")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=LOW..HIGH, with :log after it on a log scale; may be given several times. "
            "Default: the rates of the hidden matrices (1/6 to 6 times) and the head (1/4 to 4); "
            "the momentum, too, on a track that fixes all but the optimizer.",
            autocompletion=override,
            show_default=False,
        ),
    ] = None,
    track: Track = "nano",
    seeds: Annotated[
        int, typer.Option(help="Runs of each trial, with seeds 1000, 1001, ...", min=1)
    ] = 1,
    finalists: Annotated[
        int,
        typer.Option(help="Of the best trials: run again with two further seeds, the lowest mean "
                     "is chosen; 0: the lowest loss is."),
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder; finished runs stay.")] = Path("races/tuning"),
    jobs: Jobs = None,
    override: SetOverrides = None,
) -> None:  # fmt: skip
    """Search the best values of a recipe's keys on seeds and rows that no race uses."""
    from speedrun.commands.tune import tune_command

    tune_command(
        recipe=recipe, track=track, over=over or [], budget=budget, seeds=seeds, out=out, jobs=jobs,
        overrides=override or [], finalists=finalists,
    )  # fmt: skip


@app.command(epilog="Example:  speedrun ladder mine.toml muon adamw --out races/mine")
def ladder(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipe names or paths; default: every optimizer that `recipes` lists.",
            autocompletion=recipe_names,
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Track name or path; rates are tuned on the first, or on the track that it names, "
            "and the others see them as found.",
            show_default="optimizer and optimizer-prose", autocompletion=track_names,
        ),
    ] = None,
    tuned: Annotated[
        int | None,
        typer.Option(help="Trials for each entry's rates and momentum; 0: as recipes state them.",
                     min=0, show_default="20"),
    ] = None,
    retune: Annotated[
        bool, typer.Option("--retune", help="Built-in entries, too, which have been tuned before.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(help="Runs of each length that counts.", min=2, show_default="5"),
    ] = None,
    first_seed: Annotated[
        int | None, typer.Option(help="The first of them.", min=0, show_default="0")
    ] = None,
    clock: Annotated[
        int | None,
        typer.Option(
            help="Measure seconds and memory of rows that are there: so many runs of each, one at "
            "a time. For a machine with nothing else to do.", min=1, show_default=False,
        ),
    ] = None,
    spread: Annotated[
        int | None,
        typer.Option(
            help="Measure the spread that a track states as sigma: so many runs of each entry, "
            "every one with another seed.", min=1, show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder; rows and finished runs stay.")] = Path(
        "races/ladder"
    ),
    write: Annotated[
        Path | None, typer.Option(help="Make no runs: write the rows of --out as a document.")
    ] = None,
    jobs: Jobs = None,
) -> None:  # fmt: skip
    """Which optimizer needs the fewest steps? Rows of the optimizer track, each for the same."""
    from speedrun.commands.ladder import ladder_command

    ladder_command(
        recipes=recipes or [], tracks=track or [], tuned=tuned, retune=retune, seeds=seeds,
        first_seed=first_seed, clock=clock, spread=spread, out=out, jobs=jobs, write=write,
    )  # fmt: skip


@app.command(epilog="Example:  speedrun plan record-18 --track small --on 8xH100")
def plan(
    recipe: Annotated[
        str, typer.Argument(help="Recipe name or path.", autocompletion=recipe_names)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value, for example batch.length=16384", metavar="KEY=VALUE...",
                       autocompletion=override),
    ] = None,
    track: Track = "small",
    on: Annotated[
        str,
        typer.Option(help="How many GPUs of which kind (H100, A100, RTX4090), or cpu: this one."),
    ] = "8xH100",
    leave_out: Annotated[
        int | None,
        typer.Option(help="A record whose published runs the prediction must not know.",
                     show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:  # fmt: skip
    """What a run would take on GPUs that are not here, or on this CPU: time and memory."""
    from speedrun.commands.plan import plan_command

    plan_command(
        recipe=recipe, track=track, overrides=overrides or [], on=on, leave_out=leave_out,
        as_json=as_json,
    )  # fmt: skip


@app.command("verify", epilog="Example:  speedrun verify runs/a runs/b runs/c --target 3.28")
def verify_claim(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders.", autocompletion=run_folders)
    ] = None,
    target: Annotated[float | None, typer.Option(help="Default: the runs' own.")] = None,
    alpha: Annotated[float, typer.Option(help="Level of the test.")] = 0.01,
    losses: Annotated[
        Path | None, typer.Option(help="A file: one loss a line, or a column val_loss.")
    ] = None,
    sigma: Annotated[float | None, typer.Option(help="Known spread: z-test.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Test that the mean loss is below a target. Exit 0: it holds, 1: not, 2: misuse."""
    from speedrun.commands.verify import verify_command

    sys.exit(
        verify_command(
            runs=runs or [], target=target, alpha=alpha, losses=losses, sigma=sigma, as_json=as_json
        )
    )


@app.command(epilog="Example:  speedrun report races/race --out race.html")
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Runs, races, ablations or tunings.", autocompletion=run_folders),
    ],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve it live on this machine only.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port for --watch.", min=0, max=65535)] = 8765,
) -> None:
    """Draw runs, a race, an ablation or a tuning as one page that needs no network."""
    from speedrun.commands.report import report_command

    report_command(paths=paths, out=out, watch=watch, port=port)


@app.command(epilog="Example:  speedrun submit runs/a runs/b runs/c")
def submit(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders of one recipe.", autocompletion=run_folders)
    ],
    file: Annotated[Path, typer.Option(help="The leaderboard.")] = Path("leaderboard.json"),
    alpha: Annotated[float, typer.Option(help="Level of the test.")] = 0.01,
) -> None:
    """Check runs against the track's rules and add them to the leaderboard."""
    from speedrun.commands.verify import submit_command

    submit_command(runs=runs, file=file, alpha=alpha)


@app.command()
def leaderboard(
    file: Annotated[Path, typer.Option(help="The leaderboard.")] = Path("leaderboard.json"),
) -> None:
    """Show the leaderboard."""
    from speedrun.commands.verify import leaderboard_command

    leaderboard_command(file=file)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what this machine has, which backend would be used and why, and what is in the way."""
    from speedrun.commands.doctor import doctor_command

    doctor_command(as_json=as_json)


@app.command(epilog="Example:  speedrun bench loader --json")
def bench(
    name: Annotated[
        str,
        typer.Argument(help="What to measure; without a name: all.", autocompletion=bench_names),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One flat JSON object.")] = False,
) -> None:
    """Measure side by side on this machine and print ratios."""
    from speedrun.commands.bench import bench_command

    bench_command(name, as_json)
