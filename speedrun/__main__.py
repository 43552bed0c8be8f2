"""The `speedrun` command, and `python -m speedrun`."""

from __future__ import annotations

import os
import sys

HASHES = "PYTHONHASHSEED"


def start() -> None:
    """Begin the command, a run with the hashes of texts that all its processes have.

    Python draws them anew for each process, and with them the order of sets: code of a user's own
    that goes by it would do something else when the run is resumed.
    """
    words = sys.argv[1:]
    ours = sys.orig_argv[-len(words) :] == words  # and not those of a program around it
    if words[:1] == ["train"] and ours and HASHES not in os.environ and os.name == "posix":
        os.environ[HASHES] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    from speedrun.cli import main

    main()


if __name__ == "__main__":
    start()
