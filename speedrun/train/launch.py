"""`--ranks N`: the same request, once per rank, by torchrun's own launcher.

The `--` before our words keeps torchrun from reading `--run` as its own `--run-path`. What torchrun
reports as a traceback of its own is said here in a sentence; the ranks have spoken for themselves.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from speedrun.errors import ConfigError, RunError
from speedrun.processes import same_code
from speedrun.train.request import Request
from speedrun.train.run import RunFolder
from speedrun.train.signals import STOPS

# torchrun kills ranks that have not ended so many seconds after a signal, 30 by itself: a step and
# a checkpoint of a large model take longer. The variable is torchrun's, and the user's to set.
SHUTDOWN, PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300"


def launch(request: Request, run: RunFolder) -> NoReturn:
    """Become torchrun: start the ranks of a request and exit as they did."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "--ranks starts torchrun, which has started this process already; leave --ranks out"
        )
    os.environ.setdefault(SHUTDOWN, PATIENCE)
    os.environ.update(same_code())
    signal.signal(signal.SIGUSR1, _pass_on)
    try:
        torchrun(
            [
                "--standalone", "--nproc-per-node", str(request.ranks),
                "--max-restarts", str(request.max_restarts),
                "-m", "speedrun", "--", *request.words_of_a_rank(run.path),
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
            f"above, and `{run.resume_command}` goes on from the last checkpoint"
        ) from None
    summary = run.read_summary()
    sys.exit(summary.exit_code if summary else 0)


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
    import psutil

    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            child.send_signal(number)
