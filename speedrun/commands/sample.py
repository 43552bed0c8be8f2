"""`speedrun sample`: text from a trained run, as it is drawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speedrun.errors import ConfigError, DataError
from speedrun.terminal.console import as_written

if TYPE_CHECKING:
    from speedrun.serve.load import LoadedRun
    from speedrun.serve.sampling import Sampling

AT_ONCE = 16  # texts that are written at a time


def sample_command(
    run: Path,
    *,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    samples: int = 1,
    interactive: bool = False,
) -> str:
    """Print the prompt and what follows, of each sample; gives the first."""
    import torch

    from speedrun.limits import threads
    from speedrun.serve.load import load_run

    if interactive and (samples > 1 or prompt == "-"):
        raise ConfigError("--interactive writes one text after the other, from what is typed: "
                          "leave out --samples and --prompt -")  # fmt: skip
    if prompt == "-":
        prompt = _standard_input()
    torch.set_num_threads(threads())
    loaded = load_run(run)
    if interactive:
        from speedrun.commands.interactive import talk

        talk(loaded, prompt, tokens, sampling, tuple(stop))
        return ""
    return print_samples(loaded, prompt, tokens, sampling, tuple(stop), samples)


def print_samples(
    loaded: LoadedRun,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    stop: tuple[str, ...],
    samples: int = 1,
) -> str:
    """They are written together; the first is shown as it comes, the others after it in turn."""
    from speedrun.serve.writing import Wanted, Writer, prompt_ids, write

    ids = prompt_ids(loaded.tokenizer, prompt)
    wanted = [Wanted(ids, tokens, sampling.of_sample(n), stop) for n in range(samples)]
    texts, ended, shown = [prompt] * samples, [False] * samples, -1

    def show_next() -> None:
        nonlocal shown
        shown += 1
        if samples > 1:
            print(f"--- sample {shown + 1}, seed {wanted[shown].sampling.seed}")
        print(as_written(texts[shown]), end="", flush=True)

    show_next()
    # No more than these texts will have: a model of 65,536 tokens keeps 5 GB of keys and values.
    writer = Writer(loaded, min(samples, AT_ONCE), room=len(ids) + tokens)
    for number, piece in write(writer, wanted):
        texts[number] += piece.text
        ended[number] = piece.finish is not None
        if number == shown:
            print(as_written(piece.text), end="", flush=True)
        while ended[shown]:
            print()
            if shown + 1 == samples:
                break
            show_next()
    return texts[0]


def _standard_input() -> str:
    """All of it, without the line end that `echo` puts there."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"standard input is not UTF-8 at byte {error.start}: convert it to UTF-8"
        ) from None
