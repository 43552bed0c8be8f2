"""Every bench runs, in small, and gives the figures that the log and the claims quote by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from speedrun.bench.attention import measure_attention, mixed_documents
from speedrun.bench.checkpoint import measure_checkpoint
from speedrun.bench.claims import measure_gather, measure_masks, state_bytes
from speedrun.bench.fused import measure_fused
from speedrun.bench.loader import measure_loader
from speedrun.bench.mask import library_mask, measure_mask, same_blocks
from speedrun.bench.plan import measure_plan
from speedrun.bench.race import measure_race
from speedrun.bench.ranks import measure_ranks
from speedrun.bench.sample import measure_sample
from speedrun.bench.start import measure_start, resident_share
from speedrun.bench.step import (
    MODELS,
    Timed,
    measure_step,
    nano_trainer,
    optimizer_share,
    visible,
)
from speedrun.bench.timing import Figures, seconds_of
from speedrun.commands.bench import BENCHES, machine, print_step
from speedrun.model import native
from speedrun.model.plan import AttentionPlan, plan_layer
from speedrun.train.estimate import flops_per_token
from tests.conftest import TINY


@pytest.fixture
def tiny_words(tiny_dataset: Path) -> tuple[str, ...]:
    return (*TINY, f"data.dir={tiny_dataset}", "train.steps=1000")


def assert_figures(figures: Figures, *names: str) -> None:
    assert figures.keys() >= set(names)
    for name, value in figures.items():
        if not isinstance(value, str):
            assert math.isfinite(value), name
            assert value >= 0, name


def test_every_bench_of_the_folder_is_a_name_of_the_command() -> None:
    folder = Path(__file__).parents[2] / "speedrun/bench"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "timing"}
    assert modules == set(BENCHES)


def test_step(tiny_words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    models = ("best", "record_18", "modern", "small")
    words = (*tiny_words, "model.layers=4", "batch.length=512", "batch.tokens=512")
    figures = measure_step(1, {name: (MODELS[name][0], words) for name in models})
    keys = ("peak_share", "tokens_per_second", "step_seconds", "peak_flops")
    assert_figures(figures, *(f"{key}_{model}" for key in keys for model in models),
                   "compile_seconds_cold", "compile_seconds_warm", "compiled")  # fmt: skip
    for model in models:
        speed = 512 / float(figures[f"step_seconds_{model}"])
        assert figures[f"tokens_per_second_{model}"] == pytest.approx(speed)
        shares = [float(v) for key, v in figures.items() if key.startswith(f"share_{model}_")]
        assert sum(shares) == pytest.approx(1, abs=0.02)
    print_step({**figures, **machine()})
    assert "record-18" in (text := capsys.readouterr().out)
    assert torch.backends.cpu.get_cpu_capability() in text


def test_flops_of_a_step_are_counted_over_the_keys_it_sees(tiny_words: tuple[str, ...]) -> None:
    timed = Timed("modern", tiny_words)
    with timed.trainer.loader:
        timed.step()
    trainer = timed.trainer
    whole = flops_per_token(trainer.config, trainer.model) * trainer.config.batch.tokens
    assert 0 < timed.flops[0] <= whole, "documents hide some of the keys of a row"
    documents = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    assert (
        visible(AttentionPlan((plan_layer("blocks", documents, None),))) == (1 + 2 + 3 + 1 + 10) / 8
    )


def test_a_timed_step_is_a_step(tiny_words: tuple[str, ...]) -> None:
    trainer = nano_trainer("modern", tiny_words)
    with trainer.loader:
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        assert seconds_of(trainer.step) > 0
    assert trainer.progress.step == 1
    changed = [n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])]
    assert "head.weight" in changed


def test_the_optimizers_share_is_a_share(tiny_words: tuple[str, ...]) -> None:
    words = (*tiny_words, "model.layers=4", "batch.length=512", "batch.tokens=512")
    assert 0 < optimizer_share("record-18", 2, words) < 1


def test_checkpoint(tiny_words: tuple[str, ...]) -> None:
    figures = measure_checkpoint(1, tiny_words)
    assert_figures(figures, "share_of_step", "slowdown", "thread_seconds", "writer_seconds")
    assert float(figures["checkpoint_bytes"]) > 100_000


def test_sample(tiny_words: tuple[str, ...]) -> None:
    figures = measure_sample(1, ("modern", "baseline"), tiny_words)
    for ending in ("", "_baseline"):
        names = ("tokens_per_second", "tokens_per_second_recomputing", "cache_speedup",
                 "times_of_products", "prompt_tokens_per_second", "speedup_of_8_texts")  # fmt: skip
        assert_figures(figures, *(f"{name}{ending}" for name in names))
        assert figures[f"prompt_tokens{ending}"] == 64
        assert figures[f"prompt_passes{ending}"] == 1


@pytest.mark.slow
def test_ranks(tiny_words: tuple[str, ...]) -> None:
    figures = measure_ranks(1, 2, (*tiny_words, "model.layers=4"))
    assert_figures(figures, "ratio", "tokens_per_second_one_rank", "tokens_per_second_ranks",
                   "averaged_over_shared_seconds")  # fmt: skip
    assert figures["ranks"] == 2


@pytest.mark.slow
def test_race(tiny_words: tuple[str, ...]) -> None:
    words = (*tiny_words, "model.layers=4", "batch.length=512", "batch.tokens=512", "train.steps=2")
    figures = measure_race(1, ["best"], words, at_once=2)
    assert_figures(figures, "gain", "gain_best", "gain_of_steps_best", "least_gain_best",
                   "runs_per_hour_one_best", "runs_per_hour_side_by_side_best")  # fmt: skip
    one, together = (float(figures[f"runs_per_hour_{way}_best"]) for way in ("one", "side_by_side"))
    assert figures["gain"] == pytest.approx(together / one)


def test_plan(tiny_words: tuple[str, ...]) -> None:
    figures = measure_plan(1, {"tiny": ("record-18", "nano", (*tiny_words, "model.layers=4"))})
    assert_figures(figures, "planned_over_real_tiny", "step_ms_tiny")


def test_loader() -> None:
    figures = measure_loader(tokens=90_000, seq_len=64, batch_tokens=512, repeats=1)
    assert_figures(figures, "tokens_per_second", "seconds_per_batch")
    assert figures["batch_tokens"] == 512


def test_documents_of_the_benches_are_250_to_750_tokens() -> None:
    lengths = torch.unique_consecutive(mixed_documents(20_000)[0], return_counts=True)[1]
    assert lengths.sum() == 20_000
    assert lengths[:-1].min() >= 250
    assert lengths[:-1].max() <= 750


def test_equal_masks_are_told_from_different_ones() -> None:
    documents, window = mixed_documents(1024), torch.tensor(2, dtype=torch.int32)
    ours = library_mask(documents, window)
    assert same_blocks(ours, library_mask(documents, window))
    assert not same_blocks(ours, library_mask(documents, window + 1))


def test_mask() -> None:
    figures = measure_mask(1, (512, 1024))
    assert_figures(figures, "speedup_512", "speedup_512_block_mask", "ms_512", "ms_1024",
                   "ms_1024_block_mask", "library_ms_512")  # fmt: skip


@pytest.mark.slow
def test_attention() -> None:
    figures = measure_attention(1, (256, 512, 8192))
    assert_figures(figures, "speedup_256", "speedup_512", "per_token_growth_8192",
                   "extra_bytes_8192", "threads", "backend")  # fmt: skip
    assert float(figures["extra_bytes_8192"]) > 0


def test_fused() -> None:
    if isinstance(native.load(), str):
        pytest.skip(f"NOT TESTED: bench fused, which measures native kernels: {native.load()}")
    figures = measure_fused(1, tokens=64)
    assert_figures(figures, "loss_times_products", "loss_over_torch", "native_products_ms",
                   "torch_products_ms", "relu_squared_forward_over_negation",
                   "memory_gigabytes_per_second")  # fmt: skip


@pytest.mark.slow
def test_claims() -> None:
    assert_figures(measure_masks(1), "token_mask_over_block_mask", "mixed_mask_over_block_mask")
    assert_figures(measure_gather(1), "blocking_gather_over_async")
    adam, muon = state_bytes("record-02"), state_bytes("record-03")
    assert muon < adam


def test_start(tiny_words: tuple[str, ...]) -> None:
    figures = measure_start(1, 0, "modern", tiny_words)
    assert_figures(
        figures, "import_torch_seconds", "import_torch_to_exit_seconds", "first_step_seconds",
        "first_step_own_seconds", "first_step_start_seconds", "first_step_ratio",
        "first_step_start_ratio", "race_child_seconds", "race_child_ratio", "sample_seconds",
        "sample_ratio", "report_seconds", "report_to_exit_ratio", "cold",
    )  # fmt: skip
    start, own = (
        float(figures["first_step_start_seconds"]),
        float(figures["first_step_own_seconds"]),
    )
    assert start + own == pytest.approx(float(figures["first_step_seconds"]))
    assert figures["first_step_start_ratio"] == pytest.approx(
        start / float(figures["import_torch_seconds"])
    )


def test_a_file_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    assert resident_share(file) in (None, 1.0)  # None: this system does not tell
