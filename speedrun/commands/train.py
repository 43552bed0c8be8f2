"""`speedrun train`: from words on the command line to a finished run and its last lines."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from speedrun.commands.sample import sample_command
from speedrun.config.idle import idle
from speedrun.config.own_code import own_code_text, with_installed
from speedrun.config.resolve import Resolved, change, is_commands_own, resolve, toml_text
from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.fit import Fitted, name_of
from speedrun.errors import ConfigError, DataError, RunError, quoted, shortened
from speedrun.processes import OF_A_COMMAND
from speedrun.terminal.console import console, print_table, size_text
from speedrun.terminal.program import command
from speedrun.train.request import Request
from speedrun.train.run import RunFolder
from speedrun.train.summary import Summary
from speedrun.train.trained_on import TrainedOn

MUCH = 0.2  # share of the wall time spent on validation that is worth a word


def train_command(request: Request) -> None:
    resolved, run = _resolve(request)
    config = resolved.config
    if not resolved.for_other_text:  # else its batch is known when its dataset is
        config.microbatches(request.ranks or int(os.environ.get("WORLD_SIZE", "1")))
    if request.dry_run:
        print_dry_run(resolved, request)
        return
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and request.folder is None:
        raise ConfigError("torchrun --max-restarts needs --run-dir DIR, to find the run again")
    if request.resume and run.finished(config):
        if os.environ.get("RANK", "0") == "0":
            print(_nothing_to_resume(config, run))
        return
    if request.resume:
        _refuse_paths_elsewhere(config, run)
    if request.ranks:
        from speedrun.train.launch import launch

        if not request.resume:
            run.refuse_if_taken()
        fitted, _ = _dataset(resolved, talk=True)  # built once, before the ranks ask for it
        fitted.config.microbatches(request.ranks)
        launch(request, run)
    if request.max_restarts:
        raise ConfigError(
            "--max-restarts cannot be used without --ranks: add --ranks N, or "
            "give it to torchrun, which then restarts"
        )
    _train(resolved, run, request)


def _resolve(request: Request) -> tuple[Resolved, RunFolder]:
    """The config of a new run, or of the one to resume with what the request changes in it."""
    asked = {"train.seed": request.seed, "train.steps": request.steps}
    options = {key: value for key, value in asked.items() if value is not None}
    if request.steps is not None and request.steps < 1:
        raise ConfigError(f"--steps {request.steps} cannot be used: at least 1")
    if request.resume:
        if request.folder is None or (request.recipe and "=" not in request.recipe):
            raise ConfigError(
                "--resume continues a run with the recipe it has: give it --run DIR and no recipe"
            )
        run = RunFolder(request.folder)
        overrides = [*([request.recipe] if request.recipe else []), *request.overrides]
        stored = with_installed(run.seen_from_here(run.load_config()))
        return change(stored, overrides, options), run
    if not request.recipe:
        raise ConfigError(
            "train needs a recipe, for example: speedrun train best; `speedrun recipes` lists them"
        )
    if "=" in request.recipe and not request.recipe.endswith(".toml"):
        raise ConfigError(
            f"the recipe comes before the overrides, and {quoted(request.recipe)} is "
            "none: write speedrun train RECIPE KEY=VALUE..."
        )
    for word in request.overrides:
        if is_commands_own(word) and OF_A_COMMAND not in os.environ:
            raise ConfigError(
                f"{quoted(word)} cannot be used: key:=value is what race, ablate, tune and ladder "
                "write for their own runs; write key=value"
            )
    resolved = resolve(request.recipe, request.track, request.overrides, options)
    folder = request.folder
    return resolved, RunFolder(folder) if folder else RunFolder.default(resolved.config)


def _train(resolved: Resolved, run: RunFolder, request: Request) -> None:
    """As the only process, or as one of the ranks that torchrun has started."""
    from speedrun.terminal.display import choose_display
    from speedrun.train.build import choose_device
    from speedrun.train.launch import exit_of_rank
    from speedrun.train.log import Display
    from speedrun.train.session import run_training
    from speedrun.train.world import World

    world = World.join(choose_device(resolved.config.machine.device))
    display = choose_display(console()) if world.first else Display()
    try:
        with world.watching_peers():
            if request.folder is None:
                run = RunFolder(Path(world.text_from_first(str(run.path))))
            # A rank that torchrun started again goes on from what the last attempt left.
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and run.config.exists():
                request = replace(request, resume=True)
            with world.together():
                if world.first and not request.resume:
                    run.refuse_if_taken()  # before the work of building a dataset
                fitted, dataset = _dataset(resolved, talk=world.first)
                config = fitted.config
                config.microbatches(world.size)
            known, damage = _trained_on(run) if request.resume else (None, [])
            usual = known.usual_text if known else fitted.usual_text
            display.note(_header(config, run, request, usual))
            told = () if request.resume else idle(fitted.resolved)  # it was, when the run began
            for note in (*damage, *resolved.notes, *fitted.notes, *told):
                display.note(note)
            summary, code = run_training(config, run, dataset, display, world, request, fitted)
    finally:
        display.close()
        world.leave()
    if world.first:
        _say_result(config, run, summary, request.sample_tokens)
    # Of several the first has the code: torchrun would end it for those of the others.
    world.end(exit_of_rank(code) if world.first else 0)


def _refuse_paths_elsewhere(config: Config, run: RunFolder) -> None:
    """A run resumed where its text is not found is told from which folder its paths count."""
    if not (paths := run.paths_elsewhere(config)):
        return
    known, _ = _trained_on(run)
    begun = known.begun_in if known else ""
    there = shlex.quote(begun) if begun else "there"
    change = ", or add data.dir=/its/whole/path" if config.data.dir else ""
    raise DataError(
        f"{shortened(paths[0])} is not here: paths of {run.path} count from the folder it was "
        f"begun in{f', {begun}' if begun else ''}; cd {there} first{change}"
    )


def _dataset(resolved: Resolved, *, talk: bool) -> tuple[Fitted, Path]:
    """The config as it fits its dataset, and that dataset, built if need be."""
    from speedrun.data.find import find_dataset, fit_to_dataset
    from speedrun.terminal.progress import stage_progress

    if not talk:
        return fit_to_dataset(resolved), find_dataset(resolved.config)
    with stage_progress() as progress:
        found = find_dataset(resolved.config, progress)
    return fit_to_dataset(resolved), found


def _header(config: Config, run: RunFolder, request: Request, usual: bool) -> str:
    steps = f"{config.steps}"
    if request.stop_after is not None and request.stop_after < config.steps:
        steps = f"{request.stop_after} of {config.steps}"
    text = config.track if usual else f"{name_of(config)}, sized as {config.track}"
    tokens = f"{config.batch.tokens:,} tokens"
    own = f"; code of your own: {used}" if (used := own_code_text(config)) else ""
    return f"{config.recipe} on {text}: {steps} steps of {tokens}, run folder {run.path}{own}"


def _trained_on(run: RunFolder) -> tuple[TrainedOn | None, list[str]]:
    """What is known of the run's text; a damaged record is a note, for nothing depends on it."""
    try:
        return run.trained_on(), []
    except RunError as error:
        return None, [str(error)]


def _say_result(config: Config, run: RunFolder, summary: Summary, sample_tokens: int) -> None:
    print_result(config, run, summary)
    on = _how_to_go_on(config, run, summary)
    if summary.exit_code:
        print(f"stopped at step {summary.steps}; continue with: {on}")
        return
    can_write = run.tokenizer.exists()
    known, _ = _trained_on(run)
    prompt = known.prompt if known else ""
    if sample_tokens and can_write:
        from speedrun.serve.sampling import Sampling

        print("\nwhat it writes:")
        sampling = Sampling(temperature=1.0, top_k=40)
        text = sample_command(run.path, prompt=prompt, tokens=sample_tokens, sampling=sampling)
        run.log("sample", prompt=prompt, text=text)
    print(f"\nrun folder: {run.path}")
    if can_write:
        print(f"more text:  {command('sample', str(run.path), '--prompt', prompt)}")
    if summary.steps < config.steps:
        print(f"go on:      {on}")
        exactly = "" if _on_a_gpu(config) else "bit for bit "
        print(f"            from step {summary.steps} to {config.steps}, {exactly}as if it had not "
              "stopped")  # fmt: skip


def _on_a_gpu(config: Config) -> bool:
    """Where sums may be taken in another order each time."""
    from speedrun.train.build import choose_device

    return choose_device(config.machine.device).type == "cuda"


def _nothing_to_resume(config: Config, run: RunFolder) -> str:
    summary = run.read_summary()
    if summary is not None and summary.steps < config.steps:
        return (
            f"{run.path} reached its target in {summary.steps} of {config.steps} steps: nothing to "
            f"resume; for the others: {_how_to_go_on(config, run, summary)}"
        )
    return (
        f"{run.path} is complete after {config.steps} steps: nothing to resume; --steps makes a "
        "run longer"
    )


def _how_to_go_on(config: Config, run: RunFolder, summary: Summary) -> str:
    """The command that goes on with a run that has steps left."""
    at_target = config.train.stop == "target" and summary.reached_target
    stop = ["train.stop=steps"] if at_target else []
    return command("train", *stop, "--resume", "--run", str(run.path))


def print_result(config: Config, run: RunFolder, summary: Summary) -> None:
    from speedrun.terminal.curve import draw

    if sys.stdout.isatty():  # a log keeps the lines of the steps instead
        rows = run.read_metrics("train")
        points = [(row["tokens"], row["loss"]) for row in rows if row["loss"] is not None]
        dotted = f", dotted: the target {config.train.target:g}" if config.train.target else ""
        print(f"\ntraining loss (nats per token) over tokens{dotted}")
        print(draw(points, config.train.target))
    known, _ = _trained_on(run)
    speed = f"{summary.tokens_per_second:,.0f} tokens/s"
    validating = ""
    if (share := (summary.val_seconds or 0.0) / summary.wall_seconds) > MUCH:
        validating = (
            f"; {summary.val_seconds:.1f} s of it ({share:.0%}) validating every "
            f"{config.validation.every} steps on {config.validation.tokens:,} tokens"
        )
    facts = {} if known is None or known.usual_text else {"text": known.told}
    facts |= {
        "parameters": f"{summary.params:,}",
        "steps, tokens": f"{summary.steps:,}, {summary.tokens:,}",
        "training time": f"{summary.train_seconds:.1f} s ({speed})",
        "wall time": f"{summary.wall_seconds:.1f} s, from the start of the process{validating}",
    }
    if summary.peak_memory_bytes is not None:
        facts["peak memory"] = size_text(summary.peak_memory_bytes)
    if summary.val_loss is not None:
        bits = "" if summary.val_bpb is None else f", {summary.val_bpb:.4f} bits/byte"
        loss = f"{summary.val_loss:.4f} nats/token{bits}"
        rows = run.read_metrics("val")
        older = rows and rows[-1]["step"] < summary.steps
        when = f" at step {rows[-1]['step']:,}" if older else ""
        facts["validation"] = f"{loss}{when} ({summary.val_tokens:,} tokens)"
    if summary.target:
        verdict = "not reached"
        if summary.tokens_to_target is not None:
            cost = f"{summary.tokens_to_target:,} tokens, {summary.seconds_to_target:.1f} s"
            verdict = f"reached after {cost}"
        facts["target"] = f"{summary.target} {verdict}"
        if summary.reached_target and (race := _beside_the_race(config)):
            facts["in the race"] = race
    print()
    for name, text in facts.items():
        print(f"{name + ':':15} {text}")


def _beside_the_race(config: Config) -> str:
    from speedrun.science.committed import beside_the_race  # which loads scipy

    return beside_the_race(config)


def print_dry_run(resolved: Resolved, request: Request) -> None:
    from speedrun.config.schedule import try_schedule
    from speedrun.limits import memory_shares
    from speedrun.train.estimate import beyond, estimate, recomputed

    fitted, vocab_size, about = before_it_is_built(resolved)
    config, ranks = fitted.config, request.ranks or 1
    config.microbatches(ranks)
    rows = [(key, toml_text(value), origin) for key, value, origin in fitted.resolved.rows()]
    print_table(("key", "value", "from"), rows)
    memory = memory_shares(ranks)[0]
    cost = estimate(config, vocab_size, ranks, memory.amount)
    try_schedule(config)
    print()
    parameters = {**cost.parameters, "total": sum(cost.parameters.values())}
    tokens = config.steps * config.batch.tokens
    print_table(("parameters", "count"), [(role, f"{n:,}") for role, n in parameters.items()])
    print(f"\nvocabulary:            {vocab_size:,}")
    print(f"FLOPs per token:       {cost.flops_per_token:,}")
    print(f"steps, tokens:         {config.steps:,}, {tokens:,}")
    print(f"FLOPs in all:          {cost.flops_per_token * tokens:.3g}")
    print(f"microbatches per step: {cost.microbatches}")
    rank = " a rank" if ranks > 1 else ""
    print(f"estimated peak memory: {size_text(cost.memory_bytes)}{rank}")
    print(f"time:                  {_planned(config, vocab_size, request)}")
    for use in cost.guessed:
        print(f"{use} is taken to keep as much state as AdamW; how much it keeps shows in a run")
    for note in (*resolved.notes, *fitted.notes, *idle(fitted.resolved), *about):
        print(note)
    least = estimate(recomputed(config), vocab_size, ranks, memory.amount).memory_bytes
    if text := beyond(cost.memory_bytes, memory, least):
        print(text)


def _planned(config: Config, vocab_size: int, request: Request) -> str:
    """How long it would take on the GPUs of this host; a CPU is not kept busy for a dry run."""
    if not _on_a_gpu(config):
        if request.resume or request.ranks:
            return "not planned: on a CPU only new runs of one process are"
        words = [str(request.recipe), *request.overrides, "--track", request.track, "--on", "cpu"]
        return f"some seconds of trying tell: {command('plan', *words)}"
    import torch

    from speedrun.plan.chips import CHIPS, Node
    from speedrun.plan.predict import duration, plan

    found = torch.cuda.get_device_name()
    node = Node.of_device(found, request.ranks or 1)
    if node is None:
        known = ", ".join(chip.name for chip in CHIPS.values())
        return f"not planned: {found} is none of {known}"
    planned = plan(config, vocab_size, node)
    return (
        f"{1000 * planned.step:,.1f} ms a step, {duration(config.steps * planned.step)} in all, by "
        f"`speedrun plan` for {node.name}"
    )


def before_it_is_built(resolved: Resolved) -> tuple[Fitted, int, list[str]]:
    """What can be told of a run whose dataset need not be there: config, vocabulary, notes."""
    from speedrun.data.find import fit_to_dataset, known_dataset
    from speedrun.data.shards import PUBLIC_VOCAB
    from speedrun.train.estimate import vocab_size_of

    config = resolved.config
    folder = known_dataset(config)
    if folder is None:
        notes = []
        if resolved.for_other_text:
            notes = [f"{name_of(config)} is not built yet: values that do not fit it will be made "
                     "smaller when the run begins"]  # fmt: skip
        return Fitted(resolved), vocab_size_of(config), notes
    if not folder.exists() and config.data.dir == resolved.usual_text.get("data.dir"):
        fetch = command("data", "download", folder.name, "--out", config.data.dir)
        note = f"{folder} is not here; the public vocabulary is assumed; to fetch it: {fetch}"
        return Fitted(resolved), PUBLIC_VOCAB, [note]
    return fit_to_dataset(resolved), Dataset.open(folder).vocab_size, []
