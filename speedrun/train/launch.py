"""`--ranks N`: the same command again, once per rank, by torchrun's own launcher.

The `--` before our words keeps torchrun from reading `--run` as its own `--run-path`. What torchrun
reports as a traceback of its own is said here in a sentence; the ranks have spoken for themselves.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from speedrun.errors import ConfigError, RunError
from speedrun.train.run import RunFolder
from speedrun.train.signals import STOPS


def without(words: list[str], option: str) -> list[str]:
    """`words` less `option VALUE` or `option=VALUE`."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith(f"{option}="):
            skip = False
        elif word == option:
            skip = True
        else:
            kept.append(word)
    return kept


def launch(ranks: int, max_restarts: int, run: RunFolder) -> None:
    """Become torchrun; returns when all ranks are done, exits as they did otherwise."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "--ranks starts torchrun, which has started this process already; leave --ranks out"
        )
    words = sys.argv[1:]
    for option in ("--ranks", "--max-restarts", "--run", "--run-dir"):
        words = without(words, option)
    signal.signal(signal.SIGUSR1, _pass_on)
    try:
        torchrun(
            [
                "--standalone", "--nproc-per-node", str(ranks),
                "--max-restarts", str(max_restarts),
                "-m", "speedrun", "--", *words, "--run", str(run.path),
            ]
        )  # fmt: skip
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in STOPS:
            sys.exit(failure.exitcode)
        died = failure.exitcode < 0
        how = f"signal {-failure.exitcode}" if died else f"exit code {failure.exitcode}"
        raise RunError(
            f"rank {rank} ended first, with {how}, and took the others with it; what it said is "
            f"above, and `speedrun train --resume --run {run.path}` goes on from the last "
            "checkpoint"
        ) from None
    sys.exit(run.read_summary().get("exit_code", 0))


def exit_of_rank(code: int) -> int:
    """The exit code of a rank that was asked to stop.

    torchrun takes any code but 0 for a failure and starts the ranks again while it may, so then the
    code is 0; the summary has the real one.
    """
    left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    left -= int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return 0 if left > 0 else code


def _pass_on(number: int, _: FrameType | None) -> None:
    """Hand a signal that torchrun does not know to the ranks."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(pid), number)
