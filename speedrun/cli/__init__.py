"""The `speedrun` command: verbs only.

Those that use a trained run are in use.py, those that compare and measure in measure.py.

Each verb imports what it needs when it runs, so `speedrun --help` never loads torch. A user's
mistake is a `SpeedrunError`: its sentence goes to stderr and its code to the shell.
"""

from __future__ import annotations

import gc
import io
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from speedrun import __version__
from speedrun.cli.complete import (
    file_names,
    override,
    recipe_names,
    run_folders,
    use_own_scripts,
)
from speedrun.cli.measure import Track
from speedrun.cli.measure import app as measure_app
from speedrun.cli.mistakes import UsageError, misuse
from speedrun.cli.shortage import of_user, shortage
from speedrun.cli.use import app as use_app
from speedrun.cli.verbs import SomeVerbs, Verbs, leave_closed_pipe, start_screen
from speedrun.errors import ConfigError, SpeedrunError, shortened
from speedrun.terminal.console import sentence

if TYPE_CHECKING:
    from speedrun.config.files import Kind

INTERRUPTED = 130

app = typer.Typer(
    cls=Verbs,
    help="Train GPTs as fast as the hardware allows, measure it honestly, and show it.",
    epilog="Start with:  speedrun train best --track nano",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(cls=SomeVerbs, help="How to train: list, show and compare recipes.")
tracks_app = typer.Typer(cls=SomeVerbs, help="What is raced: list, show and compare tracks.")
data_app = typer.Typer(cls=SomeVerbs, help="Build, inspect, verify and download datasets.")
use_own_scripts()
app.add_typer(use_app)  # without a name: its verbs are listed after those of this file
app.add_typer(measure_app)
app.add_typer(recipes_app, name="recipes")
app.add_typer(tracks_app, name="tracks")
app.add_typer(data_app, name="data")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="key=value, for example model.layers=6",
        metavar="KEY=VALUE...",
        autocompletion=override,
    ),
]
Name = Annotated[
    str, typer.Argument(help="Name, or path to a .toml file.", autocompletion=file_names)
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"speedrun {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(start_screen())


@data_app.callback(invoke_without_command=True)
def _data(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(epilog="Example:  speedrun train best --track nano --seed 1 model.layers=6")
def train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            help="Recipe name or path; none with --resume.", autocompletion=recipe_names
        ),
    ] = "",
    overrides: Overrides = None,
    track: Track = "nano",
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--run-dir",
            help="Run folder; default: runs/NAME.",
            autocompletion=run_folders,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Initial weights and data order.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length; schedules scale with it.")] = None,
    ranks: Annotated[int, typer.Option(help="Processes to start by torchrun.", min=0)] = 0,
    max_restarts: Annotated[int, typer.Option(help="Restarts after a rank dies.", min=0)] = 0,
    checkpoint_every: Annotated[
        str, typer.Option(help="Steps (50) or time (5m); a stop and the end always save.")
    ] = "",
    keep: Annotated[int, typer.Option(help="Newest checkpoints kept, with the best.", min=1)] = 2,
    time_limit: Annotated[str, typer.Option(help="Save and stop after, for example, 30m.")] = "",
    stop_after: Annotated[
        int | None, typer.Option(help="Save and stop after so many steps; --resume goes on.", min=1)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --run.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Resume although config, data or code differ.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the config and its cost, and exit.")
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="Also log to tensorboard or wandb (extras); WANDB_MODE=offline: without network."
        ),
    ] = None,
    sample_tokens: Annotated[
        int, typer.Option(help="Tokens of text to write at the end; 0: none.", min=0)
    ] = 120,
    rehearse: Annotated[
        str,
        typer.Option(
            help="cuda: try out in short runs what GPUs would be given; track: pico, if not named."
        ),
    ] = "",
) -> None:
    """Train a model: RECIPE says how, --track says on what.

    Exit codes: 0 done, 1 a run or its data cannot be used, 2 a mistake on the command line, 124 out
    of time, 130 Ctrl-C, 143 SIGTERM. SIGUSR1 saves a checkpoint and goes on.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is nothing to save until the loop listens
    from speedrun.commands.train import train_command
    from speedrun.train.request import Interval, Request, parse_seconds

    request = Request(
        recipe=recipe,
        overrides=overrides or [],
        track=track,
        folder=run,
        seed=seed,
        steps=steps,
        resume=resume,
        force=force,
        dry_run=dry_run,
        sample_tokens=sample_tokens,
        checkpoint_every=Interval.parse(checkpoint_every),
        keep=keep,
        time_limit=parse_seconds(time_limit, "--time-limit") if time_limit else None,
        stop_after=stop_after,
        log=tuple(log or ()),
        ranks=ranks,
        max_restarts=max_restarts,
    )
    if rehearse:
        from speedrun.commands.rehearse import rehearse_command

        source = context.get_parameter_source("track")
        named = source is not None and source.name != "DEFAULT"
        raise typer.Exit(rehearse_command(request, rehearse, track if named else None))
    train_command(request)


def _add_file_verbs(group: typer.Typer, kind: Kind) -> None:
    """The same three verbs for recipes and tracks."""

    @group.callback(invoke_without_command=True)
    def listing(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            from speedrun.commands.files import list_files

            list_files(kind)

    @group.command()
    def show(
        name: Name,
        history: Annotated[
            bool, typer.Option("--history", help="What each ancestor changed, oldest first.")
        ] = False,
    ) -> None:
        """Print every value it sets and which file set it."""
        from speedrun.commands.files import show_file, show_history

        (show_history if history else show_file)(kind, name)

    @group.command()
    def diff(first: Name, second: Name) -> None:
        """Print the resolved values in which two of them differ."""
        from speedrun.commands.files import diff_files

        diff_files(kind, first, second)


_add_file_verbs(recipes_app, "recipe")
_add_file_verbs(tracks_app, "track")


class _SeveralFiles(typer.core.TyperCommand):
    """`--val A B` is `--val A --val B`, and so is `--val=A B`: nobody means to train on B."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks how to go on
            return super().parse_args(ctx, args)
        end = args.index("--") if "--" in args else len(args)
        parts: list[str] = []
        for word in args[:end]:
            parts += word.split("=", 1) if word.startswith(("--val=", "--test=")) else [word]
        words: list[str] = []
        option = ""
        for word, after in pairwise([*parts, "--"]):
            if word in ("--val", "--test"):
                if not after or after.startswith("-"):
                    raise ConfigError(
                        f"{word} names no file: write {word} FILE..., or leave it out"
                    )
                option = word
                continue
            option = "" if word.startswith("-") else option
            words += [option, word] if option else [word]
        return super().parse_args(ctx, [*words, *args[end:]])


@data_app.command(
    cls=_SeveralFiles,
    epilog="Example:  speedrun data build notes/ logs.jsonl.zst --out mine --tokenizer bpe:4096",
)
def build(
    sources: Annotated[
        list[str],
        typer.Argument(help="stdlib, docstrings, files, folders, globs, hf:NAME[:SPLIT]."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new dataset.")],
    tokenizer: Annotated[
        str, typer.Option(help="byte, bpe:N, bpe:..N (at most N), gpt2 or gpt2:FOLDER.")
    ] = "bpe:..4096",
    val: Annotated[
        list[str] | None, typer.Option(help="For validation alone; may be given several times.")
    ] = None,
    test: Annotated[
        list[str] | None, typer.Option(help="For the test alone; may be given several times.")
    ] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share kept for validation; 0.05, more of a small text.", min=0, max=0.99
        ),
    ] = None,
    test_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share kept for the test, likewise; none of it with --val.", min=0, max=0.99
        ),
    ] = None,
    text_field: Annotated[str, typer.Option(help="JSONL field or parquet column.")] = "text",
    max_document_bytes: Annotated[
        int | None,
        typer.Option(
            help="Longer text files are cut at line ends; 65536, less for one small file.", min=1
        ),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens in a shard.", min=1)] = 100_000_000,
    force: Annotated[bool, typer.Option("--force", help="Replace a different dataset.")] = False,
) -> None:
    """Tokenize text into shards that train reads."""
    from speedrun.commands.data import build_command

    build_command(
        sources, out, tokenizer, held_out={"val": val or [], "test": test or []},
        val_fraction=val_fraction, test_fraction=test_fraction, text_field=text_field,
        max_document_bytes=max_document_bytes, shard_tokens=shard_tokens, force=force,
    )  # fmt: skip


@data_app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Dataset folder.")],
    documents: Annotated[int, typer.Option(help="First documents to show.", min=0)] = 3,
) -> None:
    """Show a summary and the first documents, decoded."""
    from speedrun.commands.data import inspect_command

    inspect_command(folder, documents)


@data_app.command()
def verify(folder: Annotated[Path, typer.Argument(help="Dataset folder.")]) -> None:
    """Re-hash everything; name the bad file and offset."""
    from speedrun.commands.data import verify_command

    verify_command(folder)


@data_app.command(
    epilog="Example:  speedrun data download fineweb10B --shards 9 --out data/fineweb10B"
)
def download(
    name: Annotated[str, typer.Argument(help="fineweb10B, fineweb100B or finewebedu10B.")],
    out: Annotated[Path | None, typer.Option(help="Folder; default: data/NAME.")] = None,
    shards: Annotated[int, typer.Option(help="Training shards of 100M tokens.", min=1)] = 9,
) -> None:
    """Fetch the public GPT-2 shards (extra: hub)."""
    from speedrun.commands.data import download_command

    download_command(name, out or Path("data") / name, shards)


def main() -> None:
    """Entry point: a user's mistake is one sentence, never a traceback."""
    # Importing torch makes half a million objects that stay, and looking through them again and
    # again for garbage is a tenth of its time. Who trains looks for it as usual (session.py).
    gc.set_threshold(1_000_000)
    # A name or a text that the terminal cannot show is escaped; it does not end the program.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            code = app(standalone_mode=False, prog_name="speedrun")
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()  # now, while a closed pipe can still be told from a fault of ours
    except SpeedrunError as error:
        _fail("usage error" if isinstance(error, ConfigError) else "error", error, error.exit_code)
    except UsageError as error:
        _fail("usage error", misuse(error, sys.argv[1:]), ConfigError.exit_code)
    except BrokenPipeError:
        leave_closed_pipe()
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        if short := shortage(error, sys.argv[1:]):
            _fail("error", short, short.exit_code)
        if not isinstance(error, OSError) or not of_user(error.filename, sys.argv[1:]):
            raise
        _fail(
            "error",
            f"{shortened(error.filename)}: {error.strerror}; check the path and who may use it",
            1,
        )
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        typer.echo("speedrun: interrupted", err=True)
    sys.exit(code)


def _fail(kind: str, message: object, code: int) -> NoReturn:
    typer.echo(f"speedrun: {kind}: {sentence(str(message))}", err=True)
    sys.exit(code)
