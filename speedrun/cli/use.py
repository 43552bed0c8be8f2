"""Verbs that use a trained run: text from it, its loss on any text, a page to try it, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speedrun.cli.complete import (
    recipe_names,
    run_folders,
    run_sorts,
    run_states,
    track_names,
)

app = typer.Typer()

Run = Annotated[Path, typer.Argument(help="Run folder.", autocompletion=run_folders)]


@app.command(epilog="Example:  speedrun runs --track nano --sort loss")
def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders to look in, such as races/race; default: runs."),
    ] = None,
    sort: Annotated[
        str, typer.Option(help="date (newest first), loss or recipe.", autocompletion=run_sorts)
    ] = "date",
    track: Annotated[str, typer.Option(help="Only this track.", autocompletion=track_names)] = "",
    recipe: Annotated[
        str, typer.Option(help="Only this recipe.", autocompletion=recipe_names)
    ] = "",
    state: Annotated[
        str,
        typer.Option(
            help="Only those running, finished, stopped, failed, damaged or foreign.",
            autocompletion=run_states,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List runs with recipe, track, loss, date and state: running, finished, stopped, damaged."""
    from speedrun.commands.runs import runs_command

    runs_command(folders or [], sort=sort, track=track, recipe=recipe, state=state, as_json=as_json)


@app.command(epilog="Example:  speedrun compare runs/first runs/second")
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders; those that differ in the seed alone are one side.",
            autocompletion=run_folders,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What differs between runs and by how much, what must not be compared, what would decide it.

    Set against the first: losses at the end and after equal tokens, cost to the target, speed,
    memory. Several seeds of a side are put together, with intervals.
    """
    from speedrun.commands.compare import compare_command

    compare_command(runs, as_json)


@app.command(epilog='Example:  speedrun sample runs/first --prompt "def main" --tokens 200')
def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.")] = "",
    tokens: Annotated[int, typer.Option(help="Write at most so many tokens.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0: all.", min=0)] = 50,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest that sum to p; 1: all.", min=0, max=1)
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of the text so far are less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text; may be given several times.", show_default=False),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Texts at once, with seeds SEED, SEED + 1, ...", min=1, max=1024)
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the draw.", min=0)] = 0,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Type prompts, one after the other.")
    ] = False,
) -> None:
    """Stream text from a trained run; a seed gives the same text, however many are written."""
    from speedrun.commands.sample import sample_command
    from speedrun.serve.sampling import Sampling

    sample_command(
        run,
        prompt=prompt,
        tokens=tokens,
        sampling=Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        ),
        stop=stop or [],
        samples=samples,
        interactive=interactive,
    )


@app.command("eval", epilog="Example:  speedrun eval runs/first notes.txt wiki.test.raw --json")
def evaluate(
    runs_and_texts: Annotated[
        list[str],
        typer.Argument(
            help="One run folder or two, then text files, folders, globs, or a built dataset.",
            metavar="RUN [RUN] TEXT...",
            autocompletion=run_folders,
        ),
    ],
    context: Annotated[
        int, typer.Option(help="Most tokens of context; 0: as many as it was trained on.", min=0)
    ] = 0,
    stride: Annotated[
        int, typer.Option(help="Tokens between two contexts; 0: they do not overlap.", min=0)
    ] = 0,
    split: Annotated[str, typer.Option(help="Of a dataset: val (by default), train or test.")] = "",
    tasks: Annotated[
        Path | None,
        typer.Option(help="Multiple choice: JSON lines with context, choices and answer."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="JSONL field or parquet column.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """The loss of a run on any text: nats per token, bits per byte, perplexity, with errors.

    With two runs also their paired difference over documents, the second less the first.
    """
    from speedrun.commands.evaluate import evaluate_command

    evaluate_command(
        runs_and_texts, context=context, stride=stride, split=split, tasks=tasks,
        text_field=text_field, as_json=as_json,
    )  # fmt: skip


@app.command(epilog="Example:  speedrun serve runs/first runs/second --port 8000")
def serve(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders; two are shown side by side.", autocompletion=run_folders),
    ],
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's own see it then.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name that requests may call this server by.", show_default=False
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(help="Texts of a run written at a time.", min=1, max=256)
    ] = 16,
    queue: Annotated[
        int, typer.Option(help="Texts that may wait; more are told to come back.", min=0)
    ] = 512,
    context: Annotated[
        int, typer.Option(help="Tokens of context; 0: as trained, at most 4,096.", min=0)
    ] = 0,
) -> None:
    """A page to write with a run or two, and the completions call that OpenAI's clients speak."""
    from speedrun.commands.serve import serve_command

    serve_command(
        runs, host=host, port=port, allow_hosts=allow_host or [], slots=slots, queue=queue,
        context=context,
    )  # fmt: skip


@app.command(epilog="Example:  speedrun export runs/first --to hf exported")
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="DIR")],
    to: Annotated[
        str, typer.Option(help="hf: transformers loads it; weights: plain safetensors.")
    ] = "hf",
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Take the model elsewhere: weights, tokenizer, a model card and what loads them."""
    from speedrun.commands.export import export_command

    export_command(run, out, to=to, force=force)
