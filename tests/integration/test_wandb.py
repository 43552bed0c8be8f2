"""`train --log wandb` with the real package, offline; `make integration` installs it."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from speedrun.config.resolve import resolve
from speedrun.data.loader import Batch
from speedrun.train.request import Interval
from speedrun.train.run import RunFolder
from speedrun.train.trainer import Trainer
from tests.conftest import TINY
from tests.train.heard import Heard, Make, train

WANDB: dict[str, Any] = {"log": ("wandb",)}
BLOCK, HEAD = 32768, struct.Struct("<IHB")  # checksum, size, kind
WHOLE, LAST = 1, 4  # kinds of a piece that ends a record


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="NOT TESTED: wandb, which `make integration` installs")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no login of whoever runs this


@dataclass
class Log:
    """What one process left in its file."""

    run_id: str = ""
    name: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(row["step"], row[name]) for row in self.rows if name in row]


def pieces(data: bytes) -> Iterator[bytes]:
    """The records of a file: LevelDB's log format after a header of seven bytes."""
    place, record = 7, b""
    while place + HEAD.size <= len(data):
        room = BLOCK - place % BLOCK
        if room < HEAD.size:
            place += room
            continue
        _, size, kind = HEAD.unpack_from(data, place)
        record += data[place + HEAD.size : place + HEAD.size + size]
        place += HEAD.size + size
        if kind in (WHOLE, LAST):
            yield record
            record = b""


def read(path: Path) -> Log:
    message, log = import_module("wandb.proto.wandb_internal_pb2").Record, Log()
    for data in pieces(path.read_bytes()):
        record = message()
        record.ParseFromString(data)
        if record.HasField("run"):
            run = record.run
            log.run_id, log.name, log.project = run.run_id, run.display_name, run.project
            log.config |= {each.key: json.loads(each.value_json) for each in run.config.update}
        elif record.HasField("metric"):
            log.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif record.HasField("history"):
            items = record.history.item
            log.rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
        elif record.HasField("summary"):
            changes = [each for each in record.summary.update if each.key]
            log.summary |= {each.key: json.loads(each.value_json) for each in changes}
        elif record.HasField("exit"):
            log.exit_code = record.exit.exit_code
    return log


def logs(folder: Path) -> list[Log]:
    """Of all processes of a run, in order."""
    found = [read(path) for path in (folder / "wandb").glob("offline-run-*/*.wandb")]
    return sorted(found, key=lambda log: log.rows[0]["_step"])


def recorded(folder: Path, kind: str, key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in RunFolder(folder).read_metrics(kind)]


def test_wandb_gets_curves_config_summary_and_the_end(tiny: Make, tmp_path: Path) -> None:
    config, folder, heard = tiny(), tmp_path / "run", Heard()
    summary = train(config, folder, heard, **WANDB)
    assert import_module("wandb").run is None  # it is finished
    assert not any("wandb" in line for line in heard.lines)
    (log,) = logs(folder)
    assert (log.name, log.project, log.exit_code) == ("run", "speedrun", 0)
    assert log.config.items() >= config.model_dump(mode="json").items()
    for kind, keys in (
        ("train", ("loss", "grad_norm", "lr_multiplier", "tokens", "seconds", "ms")),
        ("val", ("loss", "bits_per_byte", "tokens")),
    ):
        for key in keys:
            assert log.curve(f"{kind}/{key}") == recorded(folder, kind, key)
    assert log.axes == {"step": "", "*": "step"}
    assert [row["_step"] for row in log.rows] == [*range(len(log.rows))]
    assert log.summary.items() >= summary.as_dict().items()


def test_a_resumed_run_is_the_same_one_and_its_records_count_on(tiny: Make, tmp_path: Path) -> None:
    """It dies after step 7 and goes on from step 4; is stopped in step 10; and comes to its end."""

    def die() -> None:
        raise RuntimeError("died")

    config = tiny("train.steps=12")
    how: dict[str, Any] = {"checkpoint_every": Interval(steps=4), **WANDB}
    with pytest.raises(RuntimeError, match="died"):
        train(config, tmp_path, Heard(at={7: die}), **how)
    train(config, tmp_path, Heard(9), resume=True, **how)
    summary = train(config, tmp_path, resume=True, **how)
    died, stopped, ended = found = logs(tmp_path)
    assert len({log.run_id for log in found}) == 1
    assert [log.exit_code for log in found] == [1, 130, 0]
    steps = [[step for step, _ in log.curve("train/loss")] for log in found]
    assert steps == [[*range(1, 8)], [*range(5, 11)], [11, 12]]
    # `wandb sync` joins files whose records do not overlap.
    for earlier, later in ((died, stopped), (stopped, ended)):
        assert earlier.rows[-1]["_step"] < later.rows[0]["_step"]
    assert ended.summary.items() >= summary.as_dict().items()


def test_a_rewind_loses_no_record(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Trainer.training_loss

    def spoilt(self: Trainer, batch: Batch) -> Tensor:
        return honest(self, batch) * (math.nan if self.loader.position in (5, 6, 7) else 1.0)

    monkeypatch.setattr(Trainer, "training_loss", spoilt)
    train(tiny(), tmp_path, checkpoint_every=Interval(steps=2), **WANDB)
    (log,) = logs(tmp_path)
    expected = recorded(tmp_path, "train", "loss")
    curve = log.curve("train/loss")
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]
    assert [None if math.isnan(loss) else loss for _, loss in curve] == [
        loss for _, loss in expected
    ]
    told = [(row["step"], row["event"]) for row in log.rows if "event" in row]
    assert [step for step, _ in told] == [5, 6, 7, 4]
    assert "back to the checkpoint of step 4" in told[-1][1]


def test_names_of_the_environment_are_kept_to(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PROJECT", "ours"), ("NAME", "first"), ("RUN_ID", "abc123")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    train(tiny("train.steps=1"), tmp_path, **WANDB)
    (log,) = logs(tmp_path)
    assert (log.project, log.name, log.run_id) == ("ours", "first", "abc123")


# In processes of their own: W&B reads its settings once, and keeps a run that it cannot finish.


def train_and_tell(dataset: str, folder: str, kill: bool) -> None:
    """Eight steps, after the third without W&B's service if asked; says what was told of W&B."""
    config = resolve("modern", "nano", [*TINY, f"data.dir={dataset}"]).config
    heard = Heard(at={3: kill_service} if kill else {})
    summary = train(config, Path(folder), heard, **WANDB)
    print(json.dumps([summary.steps, [line for line in heard.lines if "wandb" in line]]))


def kill_service() -> None:
    for child in psutil.Process().children(recursive=True):
        if child.name() == "wandb-core":
            child.kill()
            child.wait()


def told_by_a_child(dataset: Path, folder: Path, *, kill: bool = False) -> list[str]:
    arguments = f"{str(dataset)!r}, {str(folder)!r}, {kill}"
    code = f"from {__name__} import train_and_tell; train_and_tell({arguments})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    steps, told = json.loads(child.stdout.splitlines()[-1])
    assert steps == len(RunFolder(folder).read_metrics("train")) == 8
    return [*told]


def test_without_a_login_the_run_goes_on(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    (told,) = told_by_a_child(tiny_dataset, tmp_path / "run")
    assert told.startswith("wandb cannot be opened: UsageError: ")
    assert "WANDB_MODE=offline" in told


def test_a_service_that_dies_does_not_end_the_run(tiny_dataset: Path, tmp_path: Path) -> None:
    written, closed = told_by_a_child(tiny_dataset, tmp_path / "run", kill=True)
    assert written.startswith("wandb cannot be written: ")
    assert closed.startswith("wandb cannot be closed: ")
