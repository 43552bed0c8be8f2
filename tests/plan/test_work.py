"""What a step does, against counts that are made in another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.model import native
from speedrun.model.gpt import GPT
from speedrun.model.mask import dense_mask
from speedrun.model.plan import AttentionPlan, plan_layer
from speedrun.plan.work import (
    MEAN_DOCUMENT,
    SAMPLES,
    Work,
    document_numbers,
    visited_keys,
    work_of_run,
    work_of_step,
)
from speedrun.train.estimate import without_storage
from speedrun.train.memory import Systems

VOCAB = 512


def small(recipe: str, *words: str) -> Config:
    return resolve(recipe, "nano", ["batch.tokens=1024", "batch.length=256", *words]).config


def by_part(works: list[Work]) -> dict[str, float]:
    return {work.part: work.amount for work in works}


@pytest.mark.parametrize("recipe", ["record-03", "record-11", "record-18", "best"])
def test_products_are_those_that_torch_counts(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real forward and backward; its counter leaves a CPU's attention out."""
    monkeypatch.setattr(native, "load", lambda: "the counter knows torch's products alone")
    config = small(recipe)
    model = GPT(config.model, VOCAB, 256)
    ids = torch.zeros(4, 256, dtype=torch.int64)
    plan = AttentionPlan((plan_layer("dense", ids, None),))
    with FlopCounterMode(display=False) as counter:
        model(ids, plan, ids).backward()
    found = by_part(work_of_run(config, model, Systems()))
    products = found["products of the blocks"] + found["products of the head"]
    assert products == counter.get_total_flops()


def test_rows_that_are_not_aligned_are_read_at_half_the_rate() -> None:
    """50,257 columns of bf16 do not begin at 16 bytes; the padded head of record 5 does."""
    odd, padded = (
        by_part(work_of_run(config, without_storage(config, 50_257), Systems()))
        for config in (resolve(f"record-0{n}", "small").config for n in (4, 5))
    )
    share = odd["products of the head"] / padded["products of the head"]
    assert share == pytest.approx(2 * 50_257 / 50_304)


def test_keys_are_those_of_whole_blocks() -> None:
    """Of 1,024 tokens the query blocks compute 1 to 8 blocks of 128 keys."""
    assert visited_keys(resolve("record-11", "small").config, 0) == 128 * 4.5


@pytest.mark.parametrize(("step", "blocks"), [(0, 1), (600, 6), (1389, 14)])
def test_a_window_and_documents_bound_the_keys(step: int, blocks: int) -> None:
    """By the slow twin: every pair of tokens, in the first 4,096 of a row."""
    tokens = 4096
    words = [f"batch.length={tokens}", "train.steps=1390"]
    config = resolve("record-18", "small", words).config
    numbers = document_numbers(tokens)[None]
    pairs = dense_mask(numbers, torch.tensor(blocks), "blocks")[0]
    tiles = pairs.view(tokens // 128, 128, tokens // 128, 128).any(3).any(1)
    assert visited_keys(config, step) == 128 * tiles.sum().item() / len(tiles)


def test_documents_are_as_long_as_the_public_ones() -> None:
    tokens = 2**20
    lengths = torch.bincount(document_numbers(tokens).long()).double()
    assert lengths.mean().item() == pytest.approx(MEAN_DOCUMENT, rel=0.02)
    assert lengths.median().item() == pytest.approx(MEAN_DOCUMENT / math.exp(0.5), rel=0.02)
    assert len(document_numbers(1000)) == 1000


def test_the_mean_step_lies_between_the_first_and_the_last() -> None:
    config = resolve("record-18", "small").config
    model = without_storage(config, 50_257)
    steps = [by_part(work_of_step(config, model, Systems(8), step)) for step in (0, 1389)]
    mean = by_part(work_of_run(config, model, Systems(8)))
    assert steps[0]["attention"] < mean["attention"] < steps[1]["attention"]
    changing = {part for part in mean if steps[0][part] != steps[1][part]}
    assert changing == {"attention"}, "the window is all that changes"
    each = [config.steps * (i + 0.5) / SAMPLES for i in range(SAMPLES)]
    found = [by_part(work_of_step(config, model, Systems(8), int(s)))["attention"] for s in each]
    assert mean["attention"] == pytest.approx(sum(found) / SAMPLES)


def test_ranks_share_what_they_share() -> None:
    config = resolve("record-18", "small").config
    model = without_storage(config, 50_257)
    one, eight = (by_part(work_of_run(config, model, Systems(ranks))) for ranks in (1, 8))
    for part in ("products of the blocks", "attention", "loss", "orthogonalisation"):
        assert eight[part] == pytest.approx(one[part] / 8)
    # Of tables the step, not the dense gradients.
    tables, adam = 4 * 50_304 * 768, "Adam of tables and head"
    assert one[adam] - eight[adam] == pytest.approx(7 / 8 * (one[adam] - 3 * 2 * tables))
    sent = {part for part in eight if part.endswith("sent")}
    assert sent == eight.keys() - one.keys()
    # bf16 gradients of four tables of 50,304 rows, in a ring: seven eighths, to their owners; what
    # comes of them, and of an fp32 head, to all.
    head = 50_304 * 768
    assert eight["rows of tables, sent"] == pytest.approx(7 / 8 * (tables * 2 + head * 4))
    assert eight["gradients of tables, sent"] == pytest.approx(7 / 8 * tables * 2)
    systems = Systems(8, shares_muon=False, shares_tables=False, shares_gradients=False)
    alone = by_part(work_of_run(config, model, systems))
    for part in ("orthogonalisation", adam):
        assert alone[part] == one[part]
    assert "rows of tables, sent" not in alone
    assert alone["gradients of tables, sent"] == 2 * eight["gradients of tables, sent"]


def test_every_technique_that_moves_bytes_is_counted() -> None:
    """Each makes a step longer, or is said here not to be seen."""
    plain = ["model.x0_mixing=false", "model.unet_skips=false", "model.value_embeddings=none",
             "model.softcap=0.0", "model.bigram_rows=0", "model.value_weights=blend"]  # fmt: skip
    config = small("record-18", *plain)
    less = sum(by_part(_memory(config)).values())
    for word in ("model.x0_mixing=true", "model.unet_skips=true", "model.value_embeddings=ends",
                 "model.softcap=15.0", "model.value_residual=true", "model.mlp_ratio=8",
                 "model.bigram_rows=999"):  # fmt: skip
        more = sum(by_part(_memory(small("record-18", *plain, word))).values())
        assert more > less, word


def _memory(config: Config) -> list[Work]:
    model = without_storage(config, VOCAB)
    return [one for one in work_of_run(config, model, Systems()) if one.limit == "memory"]
