"""Plans: whose rates are asked, how many passes a step takes, what is refused."""

from __future__ import annotations

import pytest

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.plan.chips import CHIPS, Chip, Node
from speedrun.plan.predict import Shares, plan, rate
from speedrun.plan.work import Work
from speedrun.train.memory import USABLE

VOCAB = 50_257


def small(recipe: str = "record-18", *words: str) -> Config:
    return resolve(recipe, "small", words).config


@pytest.mark.parametrize(
    ("text", "chip", "count"),
    [("8xH100", "H100", 8), ("h100", "H100", 1), (" 2 x rtx 4090 ", "RTX4090", 2),
     ("1xRTX-4090", "RTX4090", 1), ("16xA100", "A100", 16)],
)  # fmt: skip
def test_machines_are_read(text: str, chip: str, count: int) -> None:
    node = Node.parse(text)
    assert (node.chip.name, node.count) == (chip, count)


@pytest.mark.parametrize(
    "text", ["", "8", "0xH100", "8xTPU", "H100x8", "-1xH100", "x", "8x", "٣xH100"]
)
def test_machines_that_are_not_known_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the kinds are H100, A100, RTX4090"):
        Node.parse(text)


def test_time_is_the_amount_over_what_is_reached_of_the_rate() -> None:
    chip = Chip("one", flops=100.0, memory_rate=10.0, link_rate=2.0, memory=1)
    shares = Shares({"products": 0.5, "memory": 0.25, "link": 1.0, "steps": 200.0}, {})
    assert shares.seconds(chip, Work("", "products", 100.0)) == 2.0
    assert shares.seconds(chip, Work("", "memory", 10.0)) == 4.0
    assert shares.seconds(chip, Work("", "link", 4.0)) == 2.0
    assert shares.seconds(chip, Work("", "steps", 1)) == 0.005
    assert [rate(chip, limit) for limit in ("attention", "masked", "orthogonal")] == [100.0] * 3


def test_what_is_said_of_a_plan_follows_from_its_parts() -> None:
    found = plan(small(), VOCAB, Node.parse("8xH100"))
    said = found.as_dict()
    assert said["step_ms"] == pytest.approx(sum(said["parts"].values()))
    assert said["memory_mib"] == pytest.approx(sum(said["memory"].values()))
    assert said["train_seconds"] == pytest.approx(1390 * said["step_ms"] / 1000)
    assert said["tokens_per_second"] == pytest.approx(524_288_000 / said["step_ms"])
    peak = 8 * CHIPS["h100"].flops
    assert said["mfu"] == pytest.approx(found.flops_per_token * said["tokens_per_second"] / peak)
    assert said["first_step_ms"] < said["step_ms"] < said["last_step_ms"]


def test_a_step_takes_the_fewest_passes_that_fit() -> None:
    for text, passes in (("8xH100", 1), ("4xH100", 1), ("1xH100", 4), ("8xA100", 1)):
        found = plan(small(), VOCAB, Node.parse(text))
        assert (found.microbatches, found.fits) == (passes, True), text
    one, eight = (plan(small(), VOCAB, Node.parse(f"{n}xH100")) for n in (1, 8))
    assert one.parts["waits"] == pytest.approx(4 * eight.parts["waits"])
    fewer = plan(small("record-18", "machine.microbatch=1"), VOCAB, Node.parse("1xH100"))
    assert fewer.microbatches == 8, "what the config states"
    asked = plan(small("record-18", "machine.microbatch=8"), VOCAB, Node.parse("1xH100"))
    assert (asked.microbatches, asked.fits) == (1, False)


def test_a_row_that_is_too_long_for_a_gpu_does_not_fit() -> None:
    found = plan(small(), VOCAB, Node.parse("RTX4090"))
    assert (found.microbatches, found.fits) == (8, False)
    assert found.memory_bytes > USABLE * found.node.chip.memory
    shorter = plan(small("record-18", "batch.length=32768"), VOCAB, Node.parse("RTX4090"))
    assert shorter.fits


def test_what_is_computed_again_costs_a_pass_and_saves_memory() -> None:
    kept, again = (
        plan(small("record-18", f"machine.recompute={word}"), VOCAB, Node.parse("8xH100"))
        for word in ("false", "true")
    )
    blocks = "products of the blocks"
    assert again.parts[blocks] == pytest.approx(kept.parts[blocks] * 4 / 3)
    assert again.parts["attention"] == pytest.approx(kept.parts["attention"] * 9 / 7)
    assert kept.step < again.step < 4 / 3 * kept.step
    for what, size in kept.memory.items():
        if what != "activations":
            assert again.memory[what] == size
    assert again.memory["activations"] < kept.memory["activations"] / 4


def test_ranks_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="its 8 sequences must divide by the 3 ranks"):
        plan(small(), VOCAB, Node.parse("3xH100"))
