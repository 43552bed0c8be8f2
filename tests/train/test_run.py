"""Whole runs on the tiny world: files, exactness, resume, refusals."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from pathlib import Path

import pytest
import torch

from speedrun.data.build import build_dataset
from speedrun.data.find import open_dataset
from speedrun.errors import ConfigError, RunError
from speedrun.hardware import Probe
from speedrun.locks import Owner
from speedrun.report.page import page_data
from speedrun.train import build
from speedrun.train.environment import environment
from speedrun.train.progress import Progress
from speedrun.train.run import RunFolder
from speedrun.train.trainer import Trainer
from speedrun.train.world import World
from tests.train.heard import ALONE, Heard, Make, losses, same_bits, tensors, train, values


def test_a_run_leaves_everything_needed_to_read_and_repeat_it(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    summary = train(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert folder.load_config() == config
    stored = json.loads(folder.summary.read_text())
    assert stored == summary.as_dict()
    assert folder.read_summary() == summary
    assert set(stored) >= {
        "recipe", "track", "params", "steps", "tokens", "train_seconds", "wall_seconds", "val_loss",
        "val_bpb", "target", "reached_target", "tokens_to_target", "seconds_to_target",
        "tokens_per_second", "peak_memory_bytes", "corpus_sha256", "seed", "world_size", "device",
        "torch",
    }  # fmt: skip
    assert (summary.steps, summary.tokens) == (8, 2048)
    assert values(folder.path, "train") == list(range(1, 9))
    assert values(folder.path, "val") == [0, 4, 8]
    for row in folder.read_metrics("train"):
        assert row.keys() >= {"kind", "step", "tokens", "seconds", "loss", "wall_seconds"}
        assert row["tokens"] == row["step"] * 256
    assert (tmp_path / "run/checkpoints/step-000008/model.safetensors").is_file()
    (start,) = folder.read_metrics("start")
    dataset = open_dataset(Path(config.data.dir))
    for name in ("train", "val"):
        split = dataset.split(name)
        assert split.tokens > 0
        found = [start[f"{name}_{what}"] for what in ("tokens", "documents", "bytes")]
        assert found == [split.tokens, split.documents, split.bytes]


@pytest.mark.parametrize(
    ("program", "version"),
    [("echo 570.86.15; echo 570.86.15", "570.86.15"), ("echo no driver; exit 9", None)],
)
def test_the_driver_of_a_gpu_is_noted(
    program: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text(f"#!/bin/sh\n{program}\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert environment(torch.device("cuda"), "")["driver"] == version
    assert environment(torch.device("cpu"), "")["driver"] is None


@pytest.mark.parametrize(
    ("capability", "asked", "dtype"),
    [
        ((9, 0), "auto", torch.bfloat16),
        ((7, 5), "auto", torch.float32),
        ((7, 5), "bf16", torch.bfloat16),
        ((9, 0), "fp32", torch.float32),
    ],
)
def test_a_gpu_that_emulates_bf16_computes_in_fp32(
    capability: tuple[int, int], asked: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert build.choose_precision(asked, torch.device("cuda"))[0] == dtype


def test_switches_that_do_nothing_here_are_told(tiny: Make) -> None:
    words = ["bucket_views=false", "overlap_gathers=false", "pinned=false", "guards=few"]
    config = tiny(*(f"machine.{word}" for word in words), "machine.prefetch=0")
    trainer = Trainer(config, ALONE, Path(config.data.dir))
    with trainer.loader:
        told = [note for note in trainer.notes if "changes nothing here" in note]
    assert [note.split()[0] for note in told] == [f"machine.{w.split('=')[0]}" for w in words]
    several = World(0, 2, 2, torch.device("cuda"))
    assert build.unread_switches(config, several, compiles=True) == []


def test_a_cpu_that_is_slow_in_bf16_refuses_it_for_muon(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "probe_bf16", lambda: Probe(None, "it was killed by signal 4"))
    config = tiny("optimizer.muon.dtype=bf16", "model.layers=4", recipe="record-18")
    with pytest.raises(ConfigError, match=r"optimizer.muon.dtype = 'bf16' .* signal 4; set opt"):
        train(config, tmp_path / "run")
    train(tiny("optimizer.muon.dtype=bf16", recipe="modern"), tmp_path / "adamw")


def test_the_first_validation_is_ln_v_and_training_lowers_it(tiny: Make, tmp_path: Path) -> None:
    summary = train(tiny("optimizer.head.lr=0.03"), tmp_path / "run")
    first, *_, last = losses(tmp_path / "run", "val")
    assert first == pytest.approx(math.log(384), abs=1e-5)  # 257 ids padded to a multiple of 128
    assert last < first - 1
    assert summary.val_loss == last


def test_two_runs_are_equal_bit_for_bit(tiny: Make, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tiny(), tmp_path / name)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert same_bits(tensors(tmp_path / "a"), tensors(tmp_path / "b"))


def test_another_seed_is_another_run(tiny: Make, tmp_path: Path) -> None:
    train(tiny(), tmp_path / "a")
    train(tiny("train.seed=1"), tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "b")


@pytest.mark.parametrize("microbatch", [1, 2])
def test_microbatches_do_not_change_the_result(tiny: Make, tmp_path: Path, microbatch: int) -> None:
    train(tiny(), tmp_path / "whole")
    train(tiny(f"machine.microbatch={microbatch}"), tmp_path / "cut")
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), abs=2e-5)


def test_an_interrupted_run_resumes_exactly(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    train(config, tmp_path / "whole")
    summary = train(config, tmp_path / "cut", Heard(3))
    # The step under way is finished first.
    assert (summary.stopped_early, summary.steps) == (True, 4)
    summary = train(config, tmp_path / "cut", resume=True)
    assert (summary.stopped_early, summary.steps) == (False, 8)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert losses(tmp_path / "cut", "val") == losses(tmp_path / "whole", "val")
    assert same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


def test_damaged_records_are_passed_over(tiny: Make, tmp_path: Path) -> None:
    """Bytes that are no UTF-8 and half a line: the rest is read, shown and resumed from."""
    config, run = tiny(), RunFolder(tmp_path)
    train(config, tmp_path, Heard(3))
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    damaged = [b'{"kind": "tr\xffin", "step": 2}\n', lines[0].replace(b"{", b"{\xff", 1)]
    run.metrics.write_bytes(b"".join([damaged[0], *lines, damaged[1], b'{"kind": "tra']))
    assert run.read_metrics() == [json.loads(line) for line in lines]
    assert [row["kind"] for row in run.read_metrics("train")] == ["train"] * 4
    page_data([run])
    assert train(config, tmp_path, resume=True).steps == 8
    assert [row["step"] for row in run.read_metrics("train")] == [*range(1, 9)]


def test_records_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    RunFolder(tmp_path).metrics.mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be read: Is a directory"):
        RunFolder(tmp_path).read_metrics()


def test_resuming_on_other_data_is_refused(tiny: Make, tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run", Heard(2))
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"other text {index}\n" * 400)
    build_dataset([str(tmp_path / "*.txt")], tmp_path / "other", "byte")
    with pytest.raises(RunError, match="the dataset has fingerprint"):
        train(tiny(f"data.dir={tmp_path / 'other'}"), tmp_path / "run", resume=True)
    build_dataset([str(tmp_path / "*.txt")], tmp_path / "bpe", "bpe:270")
    with pytest.raises(RunError, match="the tokenizer has fingerprint"):
        train(tiny(f"data.dir={tmp_path / 'bpe'}"), tmp_path / "run", resume=True)


def test_a_run_without_a_whole_checkpoint_cannot_resume(tiny: Make, tmp_path: Path) -> None:
    train(tiny("train.steps=1"), tmp_path / "run")
    (tmp_path / "run/checkpoints/step-000001/checkpoint.json").unlink()
    with pytest.raises(RunError, match="no whole checkpoint"):
        train(tiny("train.steps=1"), tmp_path / "run", resume=True)


def test_validation_is_the_plain_token_mean(tiny: Make, tiny_dataset: Path) -> None:
    config = tiny("validation.tokens=1024")
    trainer = Trainer(config, ALONE, tiny_dataset)
    torch.nn.init.normal_(trainer.model.head.weight)  # type: ignore[union-attr]
    with trainer.loader, torch.no_grad():
        result = trainer.validate()
        nats, size = 0.0, 0
        for _, batch in trainer.data.validation.of_rank(0, 1):
            plan = trainer.planner.plan(batch.documents)
            odds = torch.log_softmax(trainer.model(batch.inputs, plan).double(), dim=-1)
            nats -= float(odds.gather(-1, batch.targets[..., None]).sum())
            assert trainer.data.tokenizer is not None
            texts = trainer.data.tokenizer.decode_bytes(batch.targets.flatten().tolist())
            size += len(texts)
    assert result.tokens == 1024
    assert result.loss == pytest.approx(nats / 1024, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_validation_may_see_further_than_training(tiny: Make, tiny_dataset: Path) -> None:
    words = ("batch.length=512", "batch.tokens=1024", "validation.tokens=1024",
             "attention.window=blocks", "attention.window_start=128", "attention.window_end=128",
             "validation.window=384")  # fmt: skip
    config = tiny(*words)
    trainer = Trainer(config, ALONE, tiny_dataset, Progress(step=3))
    with trainer.loader:
        trainer.apply_settings()
        window = trainer.planner.window
        assert window is not None
        assert window.item() == 1
        trainer.planner.widen(config.validation.window)
        assert window.item() == 3
        trainer.apply_settings()
        assert window.item() == 1
    with pytest.raises(ConfigError, match=r"validation.window = 384 .* no window to widen"):
        tiny("batch.length=512", "batch.tokens=1024", "validation.tokens=1024", words[-1])


def test_a_folder_in_use_on_another_host_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk without locks: what is left of them is refused only while it shows life."""

    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("speedrun.locks.SETTLE", 0.01)
    monkeypatch.setattr("speedrun.locks.BEAT", 0.05)
    monkeypatch.setattr("speedrun.locks.PATIENCE", 0.2)
    beats = iter(range(1000))

    def owner(_: Path) -> Owner:
        return Owner("node-7", 4711, next(beats))

    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("speedrun.locks._owner", owner)
        with pytest.raises(RunError, match=r"in use by another process \(process 4711 on node-7"):
            run.locked().__enter__()
    run.path.mkdir(exist_ok=True)
    (run.path / ".lock").write_text("node-7 4711 12\n")
    with run.locked():
        assert "node-7" not in (run.path / ".lock").read_text()


def test_a_folder_that_another_start_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, make = RunFolder(tmp_path / "run"), os.open
    removed: list[Path] = []

    def after_the_other(path: Path, *rest: int) -> int:
        if not removed:
            removed.append(path)
            run.path.rmdir()
        return make(path, *rest)

    monkeypatch.setattr(os, "open", after_the_other)
    with run.locked():
        assert run.in_use()
    assert removed
    assert not run.path.exists()
