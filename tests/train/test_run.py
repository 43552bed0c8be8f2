"""Whole runs on the tiny world: files, exactness, resume, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.config.schema import Config
from speedrun.data.build import build_dataset
from speedrun.errors import ConfigError, RunError
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder
from speedrun.train.session import Options, run_training
from speedrun.train.setup import prepare
from speedrun.train.validate import validate
from speedrun.train.world import World
from tests.train.heard import Heard

Make = Callable[..., Config]


ALONE = World.alone(torch.device("cpu"))


def run(config: Config, folder: Path, interrupt_at: int = -1, **how: Any) -> dict[str, Any]:
    display = Heard(interrupt_at)
    data = Path(config.data.dir)
    return run_training(config, RunFolder(folder), data, display, ALONE, Options(**how))[0]


def resumed(folder: Path, config: Config, **how: Any) -> dict[str, Any]:
    return run(config, folder, resume=True, **how)


def losses(folder: Path, kind: str = "train") -> list[float]:
    return [row["loss"] for row in RunFolder(folder).read_metrics(kind)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found, skipped = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    assert skipped == []
    return {**found.model(), **found.optimizer()}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_a_run_leaves_everything_needed_to_read_and_repeat_it(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    summary = run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert folder.load_config() == config
    assert json.loads(folder.summary.read_text()) == summary
    assert set(summary) >= {
        "recipe", "track", "params", "steps", "tokens", "train_seconds", "wall_seconds", "val_loss",
        "val_bpb", "target", "reached_target", "tokens_to_target", "seconds_to_target",
        "tokens_per_second", "peak_memory_bytes", "corpus_sha256", "seed", "world_size", "device",
        "torch",
    }  # fmt: skip
    assert (summary["steps"], summary["tokens"]) == (8, 2048)
    steps = [row["step"] for row in folder.read_metrics("train")]
    assert steps == list(range(1, 9))
    assert [row["step"] for row in folder.read_metrics("val")] == [0, 4, 8]
    for row in folder.read_metrics("train"):
        assert row.keys() >= {"kind", "step", "tokens", "seconds", "loss", "wall_seconds"}
        assert row["tokens"] == row["step"] * 256
    assert (tmp_path / "run/checkpoints/step-000008/model.safetensors").is_file()


def test_the_first_validation_is_ln_v_and_training_lowers_it(tiny: Make, tmp_path: Path) -> None:
    summary = run(tiny("optimizer.head.lr=0.03"), tmp_path / "run")
    first, *_, last = losses(tmp_path / "run", "val")
    assert first == pytest.approx(math.log(384), abs=1e-5)  # 257 ids padded to a multiple of 128
    assert last < first - 1
    assert summary["val_loss"] == last


def test_two_runs_are_equal_bit_for_bit(tiny: Make, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tiny(), tmp_path / name)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_another_seed_is_another_run(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "a")
    run(tiny("train.seed=1"), tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "b")


@pytest.mark.parametrize("microbatch", [1, 2])
def test_microbatches_do_not_change_the_result(tiny: Make, tmp_path: Path, microbatch: int) -> None:
    run(tiny(), tmp_path / "whole")
    run(tiny(f"batch.microbatch={microbatch}"), tmp_path / "cut")
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), abs=2e-5)


def test_an_interrupted_run_resumes_exactly(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    run(config, tmp_path / "whole")
    summary = run(config, tmp_path / "cut", interrupt_at=3)
    # The step under way is finished first.
    assert (summary["stopped_early"], summary["steps"]) == (True, 4)
    summary = resumed(tmp_path / "cut", config)
    assert (summary["stopped_early"], summary["steps"]) == (False, 8)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert losses(tmp_path / "cut", "val") == losses(tmp_path / "whole", "val")
    assert same_bits(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


def test_a_run_folder_in_use_is_refused(tiny: Make, tmp_path: Path) -> None:
    run(tiny("train.steps=1"), tmp_path / "run")
    with pytest.raises(RunError, match="already holds a run"):
        run(tiny("train.steps=1"), tmp_path / "run")


def test_resuming_on_other_data_is_refused(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run", interrupt_at=2)
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"other text {index}\n" * 400)
    build_dataset([str(tmp_path / "*.txt")], tmp_path / "other", "byte")
    with pytest.raises(RunError, match="the dataset has fingerprint"):
        resumed(tmp_path / "run", tiny(f"data.dir={tmp_path / 'other'}"))
    build_dataset([str(tmp_path / "*.txt")], tmp_path / "bpe", "bpe:270")
    with pytest.raises(RunError, match="the tokenizer has fingerprint"):
        resumed(tmp_path / "run", tiny(f"data.dir={tmp_path / 'bpe'}"))


def test_a_damaged_checkpoint_is_passed_over(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    run(config, tmp_path / "run", interrupt_at=2)
    good = tmp_path / "run/checkpoints/step-000003"
    bad = tmp_path / "run/checkpoints/step-000005"
    bad.mkdir()
    for file in good.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    data = bytearray((bad / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (bad / "model.safetensors").write_bytes(data)
    found, skipped = checkpoint.latest(tmp_path / "run/checkpoints")
    assert found is not None
    assert found.step == 3
    assert len(skipped) == 1
    assert "step-000005" in skipped[0]
    assert "model.safetensors does not match" in skipped[0]


def test_a_run_without_a_whole_checkpoint_cannot_resume(tiny: Make, tmp_path: Path) -> None:
    run(tiny("train.steps=1"), tmp_path / "run")
    (tmp_path / "run/checkpoints/step-000001/checkpoint.json").unlink()
    with pytest.raises(RunError, match="no whole checkpoint"):
        resumed(tmp_path / "run", tiny("train.steps=1"))


def test_validation_is_the_plain_token_mean(tiny: Make, tiny_dataset: Path) -> None:
    config = tiny("validation.tokens=1024")
    parts = prepare(config, tiny_dataset, ALONE)
    torch.nn.init.normal_(parts.model.head.weight)  # type: ignore[union-attr]
    with parts.loader, torch.no_grad():
        result = validate(parts.loss_of, parts.validation, parts.token_bytes, ALONE)
        nats, size = 0.0, 0
        for batch in parts.validation:
            plan = parts.attention.plan(batch.documents)
            odds = torch.log_softmax(parts.model(batch.inputs, plan).double(), dim=-1)
            nats -= float(odds.gather(-1, batch.targets[..., None]).sum())
            assert parts.tokenizer is not None
            texts = parts.tokenizer.decode_bytes(batch.targets.flatten().tolist())
            size += len(texts)
    assert result.tokens == 1024
    assert result.loss == pytest.approx(nats / 1024, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_validation_may_see_further_than_training(tiny: Make, tiny_dataset: Path) -> None:
    words = ("batch.length=512", "batch.tokens=1024", "validation.tokens=1024",
             "attention.window=blocks", "attention.window_start=128", "attention.window_end=128",
             "validation.window=384")  # fmt: skip
    config = tiny(*words)
    parts = prepare(config, tiny_dataset, ALONE)
    with parts.loader:
        parts.set_schedule(3)
        window = parts.attention.window
        assert window is not None
        assert window.item() == 1
        parts.attention.widen(config.validation.window)
        assert window.item() == 3
        parts.set_schedule(3)
        assert window.item() == 1
    with pytest.raises(ConfigError, match=r"validation.window = 384 .* no window to widen"):
        tiny("batch.length=512", "batch.tokens=1024", "validation.tokens=1024", words[-1])
