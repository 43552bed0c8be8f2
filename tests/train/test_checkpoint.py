"""Checkpoints: whole or not there, whatever crashes, rots or runs full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from speedrun.errors import RunError, SpeedrunError
from speedrun.train import checkpoint
from speedrun.train.checkpoint_writer import CheckpointWriter
from speedrun.train.request import Interval
from speedrun.train.run import RunFolder
from tests.room import fill, protect, small_disk
from tests.train.heard import (
    Heard,
    Make,
    losses,
    newest,
    quiet_log,
    same_bits,
    tensors,
    train,
    values,
    writer_into,
)
from tests.waiting import wait_for

Tensors = dict[str, torch.Tensor]


def state(value: float) -> Tensors:
    return {"w": torch.full((4, 4), value), "b": torch.full((3,), -value)}


def meta(step: int, **progress: Any) -> dict[str, Any]:
    plain = {"step": step, "val_step": -1, "val_loss": None, "nonfinite": 0, "seconds": 0.1 * step}
    return {"step": step, "progress": plain | progress}


def save(root: Path, step: int, value: float = 0.0) -> Path:
    return checkpoint.save(root, meta(step), state(value or step), state(value or step))


def step_and_value(root: Path) -> tuple[int, float]:
    found, _ = checkpoint.latest(root)
    assert found is not None
    return found.step, found.model()["w"][0, 0].item()


class Crash(BaseException):
    """The machine stops; nothing below catches it."""


def crashing_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Stop before the `call`-th thing that changes the disk."""
    left = [call]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return function(*arguments, **named)

        return step

    monkeypatch.setattr(safetensors.torch, "save_file", counted(safetensors.torch.save_file))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    for name in ("mkdir", "rename", "write_text"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))


@pytest.mark.parametrize("replacing", [False, True])
def test_a_crash_at_any_call_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacing: bool
) -> None:
    crashes, finished = 0, False
    while not finished:
        root = tmp_path / str(crashes)
        save(root, 6 if replacing else 4, 4.0)
        with monkeypatch.context() as patch:
            crashing_at(patch, crashes + 1)
            try:
                save(root, 6, 6.0)
                finished = True
            except Crash:
                crashes += 1
        before = checkpoint.latest(root)
        checkpoint.tidy(root)
        after = step_and_value(root)
        assert after in ((6, 4.0) if replacing else (4, 4.0), (6, 6.0))
        assert before[1] == []  # nothing that bears a checkpoint's name was ever torn
        assert all(path.name.startswith("step-") for path in root.iterdir())
    assert crashes > 8
    assert step_and_value(root) == (6, 6.0)


def test_no_byte_that_matters_can_change_unnoticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    original = checkpoint.read(folder)
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        for place in range(0, len(data), 1 if file.suffix == ".json" else 5):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with suppress(RunError):
                # Only layout may differ, in JSON alone.
                assert checkpoint.read(folder).meta == original.meta
                assert file.suffix == ".json"
                assert chr(data[place]) in " \n"
        file.write_bytes(data)
    assert checkpoint.read(folder).meta == original.meta


def flip_last_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: (f / "checkpoint.json").unlink(), "checkpoint.json is missing"),
        (lambda f: os.truncate(f / "optimizer.safetensors", 40), "has 40 bytes, not"),
        (lambda f: os.truncate(f / "checkpoint.json", 40), "checkpoint.json is not what was"),
        (lambda f: (f / "checkpoint.json").write_text("[]"), "checkpoint.json is not what was"),
        (lambda f: (f / "checkpoint.json").write_bytes(b"\xff\xfe"), "checkpoint.json is not what"),
        (lambda f: [p.unlink() for p in f.iterdir()], "checkpoint.json is missing"),
        (lambda f: flip_last_bit(f / "model.safetensors"), "model.safetensors does not match its"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(
    tmp_path: Path, harm: Callable[[Path], object], words: str
) -> None:
    save(tmp_path, 2)
    harm(save(tmp_path, 4))
    found, skipped = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 2
    (sentence,) = skipped
    assert "step-000004 is damaged" in sentence
    assert words in sentence


def test_checkpoints_are_ordered_by_step_not_by_name(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        save(tmp_path, step)
    (tmp_path / "step-notes").mkdir()
    assert step_and_value(tmp_path)[0] == 1_000_000
    assert kept(tmp_path) == [5, 999_999, 1_000_000]


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    """Names that read as the number of a step, but that no step is ever given."""
    for name in ("step-000004", "step-0000007", "step-٠٠٠٠٠٨", f"step-{'9' * 200}", "step-5"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint.folders(tmp_path)] == ["step-000004"]


def test_a_checkpoint_is_safetensors_and_json(tiny: Make, tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run")
    folder = tmp_path / "run/checkpoints/step-000008"
    names = {"model.safetensors", "optimizer.safetensors", "checkpoint.json"}
    assert {path.name for path in folder.iterdir()} == names
    json.loads((folder / "checkpoint.json").read_text())


def kept(root: Path) -> list[int]:
    return [checkpoint.step_of(folder) for folder in checkpoint.folders(root)]


def keep_all(writer: CheckpointWriter, val_losses: dict[int, float]) -> None:
    """Validation of a step comes after its checkpoint, as news of the next one."""
    last: dict[str, Any] = {}
    for step in (10, 20, 30, 40, 50):
        writer.save(meta(step, **last), state(step), state(step))
        last = {"val_step": step, "val_loss": val_losses[step]}
    writer.close()


def test_the_last_k_and_the_best_are_kept(tmp_path: Path) -> None:
    said: list[str] = []
    val_losses = {10: 5.0, 20: 3.0, 30: 4.0, 40: float("nan"), 50: 6.0}
    for keep, expected in ((1, [20, 50]), (2, [20, 40, 50]), (9, [10, 20, 30, 40, 50])):
        root = tmp_path / str(keep)
        writer = writer_into(root, keep, on_event=lambda kind, **_: said.append(kind))
        keep_all(writer, val_losses)
        assert kept(root) == expected
    # A resumed run knows earlier losses from its records.
    resumed = writer_into(tmp_path / "1", 1, val_losses={20: 3.0})
    resumed.save(meta(60), state(6), state(6))
    resumed.close()
    assert kept(tmp_path / "1") == [20, 60]
    assert set(said) == {"checkpoint"}


def test_a_damaged_later_checkpoint_does_not_push_out_good_ones(tmp_path: Path) -> None:
    (save(tmp_path, 90) / "checkpoint.json").unlink()
    writer = writer_into(tmp_path, 1)
    for step in (10, 20):
        writer.save(meta(step), state(step), state(step))
    writer.close()
    assert kept(tmp_path) == [20, 90]
    assert step_and_value(tmp_path)[0] == 20


def test_the_copy_is_taken_before_training_goes_on(tmp_path: Path) -> None:
    writer = writer_into(tmp_path, 1)
    model = state(1.0)
    writer.save(meta(1), model, state(1.0))
    model["w"].fill_(2.0)
    writer.close()
    assert step_and_value(tmp_path) == (1, 1.0)


def test_when_a_checkpoint_is_due(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def writer(text: str) -> CheckpointWriter:
        return writer_into(tmp_path, every=Interval.parse(text))

    steps = writer("50")
    assert [step for step in range(1, 201) if steps.due(step)] == [50, 100, 150, 200]
    assert not writer("").due(50)
    assert not writer("5m").due(50)
    assert writer("0s").due(1)


@pytest.fixture(name="small_disk")
def a_small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB; a run of the tiny model and two checkpoints take about 2."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        yield disk


def wait_for_checkpoint(run: Path, step: int) -> None:
    """It is written behind the steps that follow it."""
    wait_for(lambda: step in values(run, "checkpoint"), f"checkpoint {step}")


def test_a_full_disk_costs_a_checkpoint_not_the_run(
    tiny: Make, tmp_path: Path, small_disk: Path
) -> None:
    """Full from step 5 to step 9."""
    config = tiny("train.steps=12")
    run = small_disk / "run"

    def fill_up() -> None:
        wait_for_checkpoint(run, 4)
        fill(small_disk)

    watcher = Heard(at={5: fill_up, 10: (small_disk / "ballast").unlink})
    train(config, run, watcher, checkpoint_every=Interval(steps=2))
    failed = values(run, "checkpoint_failed")
    assert failed
    assert set(failed) <= {6, 8, 10}
    sentences = [line for line in watcher.lines if "could not be written" in line]
    assert len(sentences) == len(failed)
    assert "No space left on device" in sentences[0]
    assert "goes on with the older checkpoints" in sentences[0]
    assert values(run, "train") == list(range(1, 13))
    train(config, tmp_path / "roomy")
    assert losses(run) == losses(tmp_path / "roomy")
    assert newest(run / "checkpoints").step == 12


def test_records_wait_for_room(tiny: Make, small_disk: Path) -> None:
    records, watcher = RunFolder(small_disk / "run"), Heard()
    records.create(tiny())
    log = quiet_log(tiny(), records, display=watcher)
    fill(small_disk)
    for step in range(200):  # more than the rest of a block
        log.event("note", step=step, text="x" * 50)
    written = [row["step"] for row in records.read_metrics()]
    assert written == list(range(len(written)))  # no line is torn
    assert len(written) < 200
    assert sum("metrics cannot be written" in line for line in watcher.lines) == 1
    (small_disk / "ballast").unlink()
    log.event("note", step=200, text="")
    assert [row["step"] for row in records.read_metrics()] == list(range(201))


def test_a_disk_full_to_the_end_keeps_the_older_checkpoint(
    tiny: Make, tmp_path: Path, small_disk: Path
) -> None:
    config, run = tiny(), small_disk / "run"

    def fill_up() -> None:
        wait_for_checkpoint(run, 4)
        fill(small_disk)

    watcher = Heard(at={5: fill_up})
    with pytest.raises(RunError, match=r"came to step 8, but checkpoint .* could not be written"):
        train(config, run, watcher, checkpoint_every=Interval(steps=4))
    assert newest(run / "checkpoints").step == 4
    (small_disk / "ballast").unlink()
    train(config, run, resume=True)
    train(config, tmp_path / "roomy")
    assert newest(run / "checkpoints").step == 8
    assert same_bits(tensors(run), tensors(tmp_path / "roomy"))
    assert values(run, "train") == list(range(1, 9))


def test_a_result_that_finds_no_room_is_made_again(
    tiny: Make, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the last checkpoint on."""
    config, run = tiny(), small_disk / "run"
    finish = CheckpointWriter.close

    def close(writer: CheckpointWriter) -> None:
        finish(writer)
        fill(small_disk)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "close", close)
        with pytest.raises(SpeedrunError, match=r"cannot write .*summary\.json: No space left"):
            train(config, run)
    assert not (run / "summary.json").exists()
    assert not list(run.glob("*.tmp"))
    (small_disk / "ballast").unlink()
    train(config, run, resume=True)
    train(config, tmp_path / "roomy")
    assert same_bits(tensors(run), tensors(tmp_path / "roomy"))
    assert losses(run) == losses(tmp_path / "roomy")
    assert RunFolder(run).finished(config)


def test_a_read_only_folder_is_refused_before_training(tiny: Make, small_disk: Path) -> None:
    run = small_disk / "run"
    train(tiny("schedule.cooldown=0"), run)
    before = sorted(path for path in run.rglob("*"))
    protect(small_disk)
    for folder, how in ((run, {"resume": True}), (small_disk / "new", {})):
        with pytest.raises(RunError, match=r"cannot be written: Read-only file system; .*--run"):
            train(tiny("schedule.cooldown=0", "train.steps=12"), folder, **how)  # type: ignore[arg-type]
    assert sorted(path for path in run.rglob("*")) == before


def test_a_folder_that_turns_read_only_keeps_the_older_checkpoint(
    tiny: Make, small_disk: Path
) -> None:
    run = small_disk / "run"

    def protect_checkpoints() -> None:
        wait_for_checkpoint(run, 4)
        folder = str(run / "checkpoints")
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

    watcher = Heard(at={7: protect_checkpoints})
    with pytest.raises(RunError, match=r"came to step 8, but .* Read-only file system"):
        train(tiny(), run, watcher, checkpoint_every=Interval(steps=4))
    assert newest(run / "checkpoints").step == 4
