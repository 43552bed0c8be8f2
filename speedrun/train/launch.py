"""`--ranks N`: the same command again, once per rank, by torchrun's own launcher.

The `--` before our words keeps torchrun from reading `--run` as its own `--run-path`.
"""

from __future__ import annotations

import sys
from pathlib import Path


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


def launch(ranks: int, max_restarts: int, run: Path) -> None:
    """Become torchrun; returns when all ranks are done, exits with its code if one failed."""
    from torch.distributed.run import main as torchrun

    words = sys.argv[1:]
    for option in ("--ranks", "--max-restarts", "--run", "--run-dir"):
        words = without(words, option)
    torchrun(
        [
            "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts),
            "-m", "speedrun", "--", *words, "--run", str(run),
        ]
    )  # fmt: skip
