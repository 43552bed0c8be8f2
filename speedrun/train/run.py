"""The folder of one run, and what is written into it.

config.toml       the resolved config, enough to repeat the run
environment.json  versions, hardware, code, the command
metrics.jsonl     one JSON object a line: kind, step, tokens, seconds, loss, ...
summary.json      the result
dataset.json      the text it was trained on: its name, how it begins, what was shrunk to fit it,
                  and the folder in which the run was begun
test.json         losses on the test split, each once somebody has asked for it
forced.json       what a resume with --force overrode, for ever
earlier-N/        records of an attempt that left no checkpoint to go on from
tokenizer/        a copy of the dataset's tokenizer, so that the run can be sampled anywhere
code/             copies of the files of users' own code that its config names, likewise
checkpoints/      step-NNNNNN folders
tensorboard/      event files, with `--log tensorboard`
wandb.json        with `--log wandb`, the id of the run there; its files are in wandb/

Whatever replaces a file appears whole or not at all, so a run can be killed at any instant and
resumed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from speedrun.config.code import keep
from speedrun.config.own_code import changed_since, with_copies, with_originals
from speedrun.config.resolve import from_toml, to_toml
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, RunError, SpeedrunError, shortened
from speedrun.files import finite, write_atomically, write_json
from speedrun.locks import InUseError, held, is_held
from speedrun.train import checkpoint
from speedrun.train.metrics import read_row
from speedrun.train.summary import Summary, read_json
from speedrun.train.trained_on import TrainedOn

LOCK = ".lock"
PIECE_BYTES = 65_536  # of metrics.jsonl at a time, for those who ask where a run stands
LAST = {"train", "val"}  # what they ask for


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.tokenizer = path / "tokenizer"
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.dataset = path / "dataset.json"
        self.test = path / "test.json"
        self.forced = path / "forced.json"
        self.code = path / "code"
        self._unwritten = ""
        self._logging = threading.Lock()  # the writer of checkpoints logs too

    @staticmethod
    def default(config: Config) -> RunFolder:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{config.recipe}-{config.track}-s{config.train.seed}-{stamp}"
        return RunFolder(Path("runs") / name)

    def checkpoint(self, step: int) -> checkpoint.Checkpoint:
        """The checkpoint of a step that has been found whole."""
        return checkpoint.read(checkpoint.folder_of(self.checkpoints, step), verify=False)

    def validation_losses(self) -> dict[int, float]:
        """By step."""
        return {row["step"]: row["loss"] for row in self.read_metrics("val") if row["loss"]}

    def refuse_if_taken(self) -> None:
        if not self.config.exists():
            return
        complete = False
        with suppress(SpeedrunError):  # a config that cannot be read is told by who resumes it
            complete = self.finished(self.load_config())
        if complete:
            raise RunError(
                f"run folder {self.path} already holds a run, which is complete; choose another "
                "--run"
            )
        raise RunError(
            f"run folder {self.path} already holds a run; continue it with "
            f"`{self.resume_command}`, or choose another --run"
        )

    @property
    def resume_command(self) -> str:
        return f"speedrun train --resume --run {shlex.quote(str(self.path))}"

    def read_summary(self) -> Summary | None:
        """The result; None while the run has none."""
        return Summary.read(self.summary)

    def write_summary(self, summary: Summary) -> None:
        summary.write(self.summary)

    def readable_summary(self) -> Summary | None:
        """The result for those who would write it anew: None also for a damaged one."""
        with suppress(RunError):
            return self.read_summary()
        return None

    def finished(self, config: Config) -> bool:
        """Whether the run has come to its end here, result and all."""
        summary = self.readable_summary()
        if summary is None or summary.stopped_early:
            return False
        early = config.train.stop == "target" and summary.reached_target
        return early or summary.steps == config.steps

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; refuse one that a live process holds, on any host."""
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.callback(self._leave_no_trace)
                try:
                    stack.enter_context(held(self.path / LOCK, wait=False))
                except FileNotFoundError:  # removed just now by one that has begun nothing in it
                    self.path.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(held(self.path / LOCK, wait=False))
            except InUseError as owner:
                raise RunError(
                    f"run folder {self.path} is in use by another process ({owner}); wait for it "
                    "or stop it"
                ) from None
            except OSError as error:
                raise RunError(
                    f"run folder {self.path} cannot be written: {error.strerror}; name another "
                    "with --run DIR"
                ) from None
            checkpoint.tidy(self.checkpoints)
            yield

    def _leave_no_trace(self) -> None:
        """Where nothing has begun."""
        if not self.config.exists():
            with suppress(OSError):
                self.path.rmdir()

    def in_use(self) -> bool:
        """Whether a process is at work in the folder."""
        return is_held(self.path / LOCK)

    def trained_on(self) -> TrainedOn | None:
        return TrainedOn.read(self.dataset)

    def told_text(self, track: str | None) -> str:
        """What a title calls the text: the track, or a text of the user's and its size."""
        with suppress(SpeedrunError):  # a damaged record is no reason to show no result
            known = self.trained_on()
            if known and not known.usual_text:
                return f"{known.name}, sized as {track}"
        return str(track)

    def seen_from_here(self, config: Config) -> Config:
        """Its config with the dataset's folder where it lies, wherever the run was begun.

        A resumed run compares the fingerprint, so that another dataset of the name is refused.
        """
        known = self.trained_on()
        begun = Path(known.begun_in) if known and known.begun_in else None
        if begun is None or not config.data.dir or not self.paths_elsewhere(config):
            return config
        there = begun / config.data.dir
        if not there.is_dir():
            return config
        data = config.data.model_copy(update={"dir": str(there)})
        return config.model_copy(update={"data": data})

    def paths_elsewhere(self, config: Config) -> list[str]:
        """Paths of its text that count from another folder than this one."""
        from speedrun.data.corpus import BUILT_IN, HUB  # with numpy, which a list of runs spares

        named = [config.data.dir] if config.data.dir else list(config.data.sources)
        paths = [path for path in named if path not in BUILT_IN and not path.startswith(HUB)]
        relative = [path for path in paths if not Path(path).expanduser().is_absolute()]
        return [path for path in relative if not Path(path).exists() and not any(Path().glob(path))]

    def create(
        self,
        config: Config,
        environment: Mapping[str, Any] | None = None,
        trained_on: TrainedOn | None = None,
    ) -> None:
        """Write what a run begins with; the config comes last, since it makes a folder a run.

        Records of an earlier attempt are put aside: nothing that was measured is ever deleted.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        records = (self.metrics, self.summary, self.test)
        if any(path.exists() and path.stat().st_size for path in records):
            aside = next(
                path
                for number in range(1, 10**6)
                if not (path := self.path / f"earlier-{number}").exists()
            )
            aside.mkdir()
            for path in (*records, self.environment):
                if path.exists():
                    path.rename(aside / path.name)
        write_atomically(self.metrics, b"")
        if trained_on is not None:
            trained_on.write(self.dataset)
        self.describe(config, environment or {})

    def describe(self, config: Config, environment: Mapping[str, Any]) -> None:
        write_json(self.environment, environment)
        if self.config.exists():
            config = with_originals(config, self.code, from_toml(self.config))
        write_atomically(self.config, to_toml(config).encode())

    def keep_code(self, config: Config) -> None:
        """Copy what a config names by files, before anything else is said of the run."""
        for used in config.used_code().values():
            keep(used, self.code)

    def code_changed(self) -> list[str]:
        """A sentence for each file that is not what it was when the run began."""
        return changed_since(from_toml(self.config)) if self.config.exists() else []

    def read_forced(self) -> list[str]:
        """What was ever forced in this run, as sentences."""
        if not self.forced.exists():
            return []
        found = read_json(self.forced)
        if isinstance(found, list) and all(isinstance(each, str) for each in found):
            return found
        raise RunError(f"{self.forced} is not a list of sentences: it was changed, so restore it")

    def write_forced(self, sentences: Sequence[str]) -> None:
        write_json(self.forced, [*dict.fromkeys([*self.read_forced(), *sentences])])

    def load_config(self) -> Config:
        """Its config, with code of users' own where the run has copies of it."""
        if not self.path.exists():
            raise RunError(
                f"run folder {self.path} does not exist; `speedrun runs` lists those there are"
            )
        if not self.config.is_file():
            raise RunError(
                f"{self.path} is not a run folder: it has no config.toml; `speedrun runs` lists "
                "those there are"
            )
        return with_copies(from_toml(self.config), self.code)

    def log(self, kind: str, **values: Any) -> None:
        """Append a line; one that does not fit on the disk is kept for the next attempt."""
        line = json.dumps({"kind": kind, **finite(values)}, allow_nan=False)
        with self._logging:
            self._unwritten += line + "\n"
            size = self.metrics.stat().st_size if self.metrics.exists() else 0
            try:
                with self.metrics.open("ab", buffering=0) as file:
                    data = self._unwritten.encode()
                    if file.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.metrics))
            except OSError:
                with suppress(OSError):
                    os.truncate(self.metrics, size)
                raise
            self._unwritten = ""

    def read_metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Logged objects in order; what is none, such as a line that a crash cut, is left out."""
        return _rows(self._metrics_bytes(), kind)

    def last_metrics(self) -> dict[str, dict[str, Any]]:
        """The last record of training and of validation, as far as there are.

        The file is read from its end in pieces, for validations may be far apart.
        """
        found: dict[str, dict[str, Any]] = {}
        if not self.metrics.is_file():
            return found
        with self.metrics.open("rb") as file:
            end, rest = self.metrics.stat().st_size, b""
            while end and len(found) < len(LAST):
                begin = max(0, end - PIECE_BYTES)
                file.seek(begin)
                lines = (file.read(end - begin) + rest).split(b"\n")
                # The first line may begin in the piece before; one without end is no record.
                rest = lines.pop(0)[:PIECE_BYTES] if begin else b""
                end = begin
                for line in reversed(lines):
                    if not any(b'"%s"' % kind.encode() in line for kind in LAST - found.keys()):
                        continue
                    row = read_row(line)
                    if row and row["kind"] in LAST:
                        found.setdefault(row["kind"], row)
        return found

    def _metrics_bytes(self) -> bytes:
        try:
            return self.metrics.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise RunError(
                f"{self.metrics} cannot be read: {error.strerror}; see who may read it"
            ) from None

    def metrics_digest(self) -> str | None:
        """SHA-256 of the records up to the row of the run's end; None: there is no such row.

        What follows it, such as a sample of text, is no part of the result.
        """
        data = self._metrics_bytes()
        begin = data.rfind(b'{"kind": "end"')
        end = data.find(b"\n", begin) + 1 if begin >= 0 else 0
        return hashlib.sha256(data[:end]).hexdigest() if end else None

    def truncate_metrics(self, step: int, val_step: int) -> None:
        """Forget what was logged after the checkpoint, which the resumed run does again.

        Lines that are no records stay: only what is known to be done again may go.
        """
        lines = self._metrics_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            last_line = lines.pop()
            if read_row(last_line) is not None:  # else a crash has cut it
                lines.append(last_line + b"\n")
        rows = [*map(read_row, lines)]
        done = [
            i
            for i, row in enumerate(rows)
            if row and row["kind"] == "train" and row["step"] <= step
        ]
        last = max(done, default=-1)  # after a rewind, steps are logged a second time
        limits = {"train": -1, "rewind": -1, "val": val_step}
        kept = [
            line
            for i, (line, row) in enumerate(zip(lines, rows, strict=True))
            if i <= last or row is None or row.get("step", 0) <= limits.get(row["kind"], step)
        ]
        write_atomically(self.metrics, b"".join(kept))


def given_once(paths: Sequence[Path]) -> None:
    """Refuse a list of runs that names one of them twice."""
    found: set[Path] = set()
    for path in paths:
        if path.resolve() in found:
            raise ConfigError(
                f"run {shortened(path)} is given twice: leave one out, for each run counts once"
            )
        found.add(path.resolve())


def _rows(data: bytes, kind: str | None = None) -> list[dict[str, Any]]:
    found = map(read_row, data.splitlines())
    return [row for row in found if row is not None and kind in (None, row["kind"])]
