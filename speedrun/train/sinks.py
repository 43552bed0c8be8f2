"""Where records go besides `metrics.jsonl`: TensorBoard and Weights & Biases, if asked for.

A logger that is not known or not installed is refused before a run begins. Whatever else goes wrong
with one, when it is opened, written or closed, is a note, and the run goes on (`guard.py`).
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from speedrun.config.resolve import to_toml
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, SpeedrunError, quoted
from speedrun.files import write_json
from speedrun.train.guard import Sink, attempt, gist
from speedrun.train.log import SENTENCES
from speedrun.train.summary import read_json

CURVES = ("train", "val")  # kinds whose numbers make curves over steps
TEXTS = {**SENTENCES, "gave_up": "{reason}"}  # kinds that are told in words


@dataclass(frozen=True)
class Start:
    """What a logger is told of its run."""

    folder: Path
    config: Config
    resumed_at: int | None = None  # step of the checkpoint; None: from the beginning
    records: int = 0  # lines of metrics.jsonl, those of steps that will be done again too


class Logger(Sink, Protocol):
    """A sink made of somebody else's library."""

    def close(self, code: int, summary: Mapping[str, Any] | None, /) -> None:
        """The run has ended with this exit code, and a summary if it came so far."""


def _numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """What makes curves, by name; NaN and infinities too, which both libraries can draw."""
    return {
        f"{kind}/{key}": float(value)
        for key, value in values.items()
        if key != "step" and isinstance(value, (int, float))
    }


def _as_code(text: str) -> str:
    """In Markdown."""
    return "".join(f"    {line}\n" for line in text.splitlines())


class TensorBoard:
    """Event files in the run's folder `tensorboard`, one for every process and every rewind.

    Steps that a resume or a rewind does again are hidden, or they would be drawn twice.
    """

    def __init__(self, start: Start) -> None:
        self._folder, self._failed = str(start.folder / "tensorboard"), False
        step = start.resumed_at
        self._open(hidden_from=0 if step is None else step + 1)
        self._writer.add_text("config", _as_code(to_toml(start.config)), step or 0)
        self._writer.flush()

    def _open(self, hidden_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=hidden_from)

    def log(self, kind: str, **values: Any) -> None:
        # After an error a writer is of no more use. A new one is worth a try where a checkpoint
        # could be written: then the disk has room again.
        if self._failed and kind == "checkpoint":
            attempt(self._writer.close)
            self._open(hidden_from=None)
        try:
            self._write(kind, values)
            self._failed = False
        except BaseException:
            self._failed = True
            raise

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind == "rewind":
            self._writer.close()
            self._open(hidden_from=values["step"] + 1)
        if kind in CURVES:
            for name, value in _numbers(kind, values).items():
                self._writer.add_scalar(name, value, values["step"])
        elif kind in TEXTS:
            self._writer.add_text("events", TEXTS[kind].format(**values), values["step"])
        # A run that is killed goes on from a checkpoint: the curve up to there must be on disk.
        self._writer.flush()

    def close(self, _: int, summary: Mapping[str, Any] | None) -> None:
        try:
            if summary is not None:
                text = _as_code(json.dumps(summary, indent=2))
                self._writer.add_text("summary", text, summary["steps"])
        finally:
            self._writer.close()


class Wandb:
    """A run of W&B, the same one after a resume: its id is in the run's folder, in `wandb.json`.

    W&B drops what is logged to a step before the last one, so its steps only count records, and our
    own step is a metric that its curves are drawn over: a rewind goes back there. Records count on
    over a resume, which offline leaves a file for each process, to be joined by `wandb sync`.
    """

    def __init__(self, start: Start) -> None:
        import wandb

        given = os.environ.get
        kept = start.folder / "wandb.json"
        run_id, self._record = given("WANDB_RUN_ID") or uuid.uuid4().hex[:12], 0
        if start.resumed_at is not None and kept.exists():
            before = read_json(kept)
            run_id, self._record = before["id"], before["first_record"] + start.records
        write_json(kept, {"id": run_id, "first_record": self._record})
        self._run = wandb.init(
            project=given("WANDB_PROJECT") or "speedrun",
            name=given("WANDB_NAME") or start.folder.resolve().name,
            dir=str(start.folder),
            id=run_id,
            resume="allow",
            config=start.config.model_dump(mode="json"),
            allow_val_change=True,  # a resumed run may be longer
            # It would put itself between us and the terminal, and keep every frame of the panel.
            settings={} if given("WANDB_CONSOLE") else {"console": "off"},
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, kind: str, **values: Any) -> None:
        if kind in CURVES:
            self._add(values["step"], _numbers(kind, values))
        elif kind in TEXTS:
            self._add(values["step"], {"event": TEXTS[kind].format(**values)})

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values}, step=self._record, commit=True)
        self._record += 1

    def close(self, code: int, summary: Mapping[str, Any] | None) -> None:
        try:
            self._run.summary.update(dict(summary or {}))
        finally:
            self._run.finish(exit_code=code)


class _Kind(NamedTuple):
    package: str  # as it is imported
    make: Callable[[Start], Logger]
    advice: str = ""  # to those who cannot open it


LOGGERS = {
    "tensorboard": _Kind("torch.utils.tensorboard", TensorBoard),
    "wandb": _Kind(
        "wandb", Wandb, "; WANDB_MODE=offline in the environment needs no login and no network"
    ),
}


def check_loggers(names: tuple[str, ...]) -> None:
    """Refuse what is not known or not installed, before anything is begun."""
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"--log {quoted(name)} is not known; use one of {', '.join(LOGGERS)}")
    for name in names:
        error = attempt(lambda name=name: import_module(LOGGERS[name].package))  # type: ignore[misc]
        if isinstance(error, ImportError):
            extra = f"'speedrun[{name}]'"
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                raise ConfigError(f"--log {name} needs an extra: pip install {extra}")
            raise ConfigError(
                f"--log {name} cannot be used as it is installed ({gist(error)}); install it anew: "
                f"pip install --force-reinstall {extra}"
            )


class Loggers:
    """Those of a run that could be opened, closed however the run ends."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._opened = note, dict[str, Logger]()
        self._code = 0
        self._summary: Mapping[str, Any] | None = None

    def open(self, names: tuple[str, ...], start: Start) -> Mapping[str, Sink]:
        for name in dict.fromkeys(names):
            error = attempt(lambda name=name: self._open(name, start))  # type: ignore[misc]
            if error is not None:
                self._note(
                    f"{name} cannot be opened: {gist(error)}; the run goes on without it"
                    f"{LOGGERS[name].advice}"
                )
        return self._opened

    def _open(self, name: str, start: Start) -> None:
        self._opened[name] = LOGGERS[name].make(start)

    def ended(self, code: int, summary: Mapping[str, Any]) -> None:
        """The run came to an end of its own, or to one that was asked for."""
        self._code, self._summary = code, summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        code = self._code if error is None else _exit_code(error)
        with ExitStack() as stack:  # Ctrl-C in one of them still closes the others
            for name in reversed(self._opened):
                stack.callback(self._close, name, code)

    def _close(self, name: str, code: int) -> None:
        error = attempt(lambda: self._opened[name].close(code, self._summary))
        if error is not None:
            self._note(f"{name} cannot be closed: {gist(error)}; its last records may be missing")


def _exit_code(error: BaseException) -> int:
    """What the process will exit with."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return error.exit_code if isinstance(error, SpeedrunError) else 1
