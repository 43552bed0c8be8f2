"""The statistics of a comparison: who has a mean, and how ratios pair runs."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from speedrun.science.compare import METRICS, PUBLIC, Entry, cell_width, statistics
from speedrun.science.stats import ratio_of_means


def entries(recipe: str, tokens: Mapping[int, int | None]) -> list[Entry]:
    """A run a seed, with its tokens to the target."""
    return [Entry(recipe=recipe, seed=s, tokens_to_target=n, val_loss=3.0)
            for s, n in tokens.items()]  # fmt: skip


def test_a_recipe_whose_seeds_did_not_all_arrive_has_no_mean() -> None:
    runs = [*entries("a", {0: 100, 1: 120}), *entries("b", {0: 55, 1: None}),
            *entries("c", {0: None, 1: None})]  # fmt: skip
    table = statistics(["a", "b", "c"], runs)
    assert table["b"]["tokens_to_target"].as_dict() == {"n": 1, "of": 2}
    assert table["c"]["tokens_to_target"].as_dict() == {"n": 0, "of": 2}
    assert table["a"]["tokens_to_target"].ratio == 1.0
    assert table["a"].keys() == set(METRICS)
    # Nor has any recipe a ratio to one without a mean.
    assert statistics(["b", "a"], runs)["a"]["tokens_to_target"].ratio is None


def test_ratios_are_paired_by_seed_where_the_seeds_are_the_same() -> None:
    first = {0: 10, 1: 14, 2: 21}
    for second, method in (
        ({2: 11, 0: 5, 1: 7}, "paired"),  # the seeds decide, not the order
        ({0: 5, 1: 7, 3: 11}, "Welch"),
        ({0: 5, 1: 7}, "Welch"),
    ):
        runs = entries("a", first) + entries("b", second)
        row = statistics(["a", "b"], runs)["b"]["tokens_to_target"]
        values = [float(second[seed]) for seed in sorted(second)]
        expected = ratio_of_means(values, [10.0, 14.0, 21.0], paired=method == "paired")
        assert row.ratio_method == method
        assert row.mean == fmean(values)
        assert (row.ratio, row.ratio_low, row.ratio_high) == (
            expected.ratio, expected.low, expected.high,
        )  # fmt: skip
    twice = [*entries("a", first), *entries("a", {0: 10}), *entries("b", first),
             *entries("b", {0: 9})]  # fmt: skip
    assert statistics(["a", "b"], twice)["b"]["tokens_to_target"].ratio_method == "Welch"


def test_a_loss_has_no_ratio_and_a_target_met_at_once_none_either() -> None:
    table = statistics(["a", "b"], [*entries("a", {0: 0, 1: 0}), *entries("b", {0: 5, 1: 6})])
    assert table["b"]["tokens_to_target"].as_dict().keys() == {
        "n", "of", "mean", "std", "low", "high",
    }  # fmt: skip
    assert table["b"]["val_loss"].mean == 3.0
    assert table["b"]["val_loss"].ratio is None


def test_the_cell_of_the_public_figure_is_as_wide_as_that_of_the_crossing() -> None:
    """Validations at steps 0 and 100, the crossing at 1: by the public rule 100 steps."""
    run = Entry(recipe="r", seed=0, steps_to_target=1.0, tokens_to_target=256, cell_steps=100,
                first_validation_tokens=25_600)  # fmt: skip
    assert cell_width([run], PUBLIC) == cell_width([run], "tokens_to_target") == 25_600
