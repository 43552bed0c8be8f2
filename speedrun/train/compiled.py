"""What torch.compile has made of a run: graphs, breaks in them, and graphs made again.

A graph is made when training or validation first needs one. Any later one means that something
which should be data was taken for a constant, and costs a minute at a step nobody expects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from speedrun.errors import RunError

# Errors of torch._dynamo.exc that say the code cannot be captured; others are about what it does.
NOT_CAPTURED = ("Unsupported", "UserError", "FailOnRecompileLimitHit")
USES = 2  # of the model: training and validation


class Compilations:
    """Counted by looking, around each use of the model, at what the compiler has made."""

    def __init__(self, *, few_guards: bool = False) -> None:
        self._few_guards = few_guards
        self.made = 0  # graphs, of the model alone
        self.again = 0  # of these, for a use that had its own already
        self._uses: set[str] = set()

    @contextmanager
    def running(self, use: str) -> Iterator[None]:
        """Around a use of the model, for training or for validation: its graphs are counted, what
        it checks before it runs is said, and so is what cannot be compiled.

        With few guards it checks no more than which graph it is, once training and validation have
        theirs, as in records 16 and 17.
        """
        few, before = self._few_guards and len(self._uses) == USES, graphs()
        stance = torch.compiler.set_stance("default", skip_guard_eval_unsafe=True) if few else None
        try:
            with stance or nullcontext():
                yield
        except Exception as error:  # of many kinds, but those of the compiler are known
            if text := _of_the_compiler(error):
                raise RunError(text) from error
            raise
        made = graphs() - before
        self.made += made
        self.again += made if use in self._uses else 0
        self._uses.add(use)

    def as_dict(self) -> dict[str, int]:
        broken = sum(_counters().get("graph_break", {}).values())
        return {"graphs": self.made, "graph_breaks": broken, "recompilations": self.again}

    @property
    def complaint(self) -> str:
        """What to say of them at the end of a run; nothing where all is well."""
        if not self.again:
            return ""
        return (
            f"torch.compile had to make {self.again} graphs anew on the way; TORCH_LOGS=recompiles "
            "says which value has changed"
        )


def _of_the_compiler(error: Exception) -> str:
    """What to say of an error if it is torch.compile's; else nothing."""
    if "skip_guard_eval_unsafe" in str(error):
        return (
            "a value that was a constant to compiled code has changed, and with "
            "machine.guards=few no graph is made anew for it; set machine.guards=all"
        )
    kind = type(error)
    if kind.__module__ != "torch._dynamo.exc" or kind.__name__ not in NOT_CAPTURED:
        return ""
    place = ""
    if stack := getattr(error, "real_stack", None):
        last = stack[-1]
        place = f" {Path(last.filename).name}, line {last.lineno} ({last.line})"
    gist = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
    return (
        f"torch.compile cannot take{place or ' the model'}: {gist}; where Python "
        "asks for a tensor's number, compute with the tensor itself (torch.where), or run without "
        "compiled code (machine.compile=none)"
    )


def graphs() -> int:
    """Made in this process so far."""
    return _counters().get("stats", {}).get("unique_graphs", 0)


def _counters() -> Mapping[str, Mapping[str, int]]:
    """The compiler's own; a process that has compiled nothing has not imported it."""
    module = sys.modules.get("torch._dynamo.utils")
    return {} if module is None else module.counters
