"""The space of a tuning: ranges, budgets, the sequence that fills a box, a box that shrinks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import qmc

from speedrun.errors import ConfigError
from speedrun.science.space import Budget, Range, box_size, point, round_of, spread

RATE = Range.parse("optimizer.head.lr=0.001..0.1:log")
LAYERS = Range.parse("model.value_tables=2..5")


@pytest.mark.parametrize("dimensions", [1, 2, 3, 5])
def test_the_sequence_fills_the_cube_better_than_chance(dimensions: int) -> None:
    random = np.random.default_rng(0)
    for count in (8, 20, 64):
        points = np.array([spread(index, dimensions) for index in range(1, count + 1)])
        assert ((points >= 0) & (points < 1)).all()
        for method, share in (("CD", 0.5), ("WD", 0.05)):  # of the cube, and of a torus
            drawn = [
                qmc.discrepancy(random.random((count, dimensions)), method=method)
                for _ in range(100)
            ]
            assert qmc.discrepancy(points, method=method) < np.quantile(drawn, share)
        assert points.tolist() == [spread(index, dimensions) for index in range(1, count + 1)]


def test_one_dimension_is_the_golden_ratio() -> None:
    golden = (np.sqrt(5) - 1) / 2
    for index in range(1, 30):
        assert spread(index, 1)[0] == pytest.approx((0.5 + index * golden) % 1, abs=1e-9)


@given(st.integers(0, 10_000).map(lambda part: part / 10_000), st.booleans())
def test_values_are_in_the_range_and_places_lead_back(place: float, log: bool) -> None:
    one = Range(key="optimizer.head.lr", low=0.00123456789, high=0.0987654321, log=log)
    value = one.value(place)
    assert one.low <= value <= one.high
    assert one.place(value) == pytest.approx(place, abs=1e-4)
    assert [one.value(0), one.value(1)] == pytest.approx([one.low, one.high], rel=1e-5)


def test_whole_numbers_come_equally_often() -> None:
    values = [LAYERS.value(place) for place in np.linspace(0, 1, 4001)]
    assert {type(value) for value in values} == {int}
    counts = np.unique(values, return_counts=True)
    assert counts[0].tolist() == [2, 3, 4, 5]
    assert np.ptp(counts[1]) <= 2


def test_what_lies_outside_is_placed_at_the_end() -> None:
    assert [RATE.place(value) for value in (0.0, 0.0001, 0.01, 7.0)] == [
        0,
        0,
        pytest.approx(0.5),
        1,
    ]
    assert [RATE.at_edge(value) for value in (0.0001, 0.00101, 0.01, 0.098, 1.0)] == [
        True, True, False, True, True,
    ]  # fmt: skip
    assert [LAYERS.at_edge(value) for value in (1, 2, 3, 4, 5)] == [True, True, False, False, True]


def test_the_budget_is_explored_and_then_closed_in_on() -> None:
    for trials in range(2, 60):
        budget = Budget(trials=trials)
        sizes = [box_size(round_of(budget.spent(number, 0))) for number in range(1, trials)]
        assert sizes == sorted(sizes, reverse=True)
        assert set(sizes) <= {1, 1 / 3, 1 / 6}
        assert sizes.count(1) == int(np.ceil(0.6 * len(sizes) - 1e-9))
        assert budget.spent(trials, 0) == 1
        # All trials of a size are begun together, the recipe as it stands with the first.
        begun, together = 0, []
        while begun < trials:
            together.append(budget.alike(begun, at_once=2))
            begun += together[-1]
        assert begun == trials
        assert together == [
            sizes.count(size) + (size == 1) for size in (1, 1 / 3, 1 / 6) if size in sizes
        ]
    hour = Budget(seconds=3600)
    assert [round_of(hour.spent(9, seconds)) for seconds in (0, 2159, 2161, 3059, 3061)] == [
        0, 0, 1, 1, 2,
    ]  # fmt: skip
    assert hour.alike(5, at_once=3) == 3


@given(st.integers(1, 500), st.sampled_from([1, 1 / 3, 1 / 6]), st.floats(0.0001, 1.0))
def test_points_lie_in_the_box_around_the_best(index: int, size: float, best: float) -> None:
    over = [RATE, LAYERS]
    rate, tables = point(over, index, size, [best, 3])
    assert RATE.low <= rate <= RATE.high
    assert 2 <= tables <= 5
    if size < 1:
        assert abs(RATE.place(rate) - RATE.place(best)) <= size / 2 + 1e-5
    assert [rate, tables] == point(over, index, size, [best, 3])


def test_a_box_at_the_end_of_a_range_is_cut_off_there() -> None:
    places = sorted(
        RATE.place(point([RATE], index, 1 / 3, [0.1])[0]) for index in range(1, 200)
    )  # fmt: skip
    assert places[0] == pytest.approx(5 / 6, abs=0.01)
    assert places[-1] == pytest.approx(1, abs=0.01)
    assert max(b - a for a, b in pairwise(places)) < 0.005  # none piled up at the end


def test_ranges_are_read() -> None:
    assert Range(key="optimizer.head.lr", low=0.001, high=0.1, log=True) == RATE
    assert str(RATE) == "optimizer.head.lr=0.001..0.1:log"
    assert str(Range.parse("model.softcap=5..30")) == "model.softcap=5..30"
    assert isinstance(Range.parse("model.softcap=5..30").low, float)
    assert isinstance(LAYERS.low, int)
    assert Range.parse("optimizer.muon.lr=1e-3...5:log").high == 0.5
    assert Range.model_validate_json(LAYERS.model_dump_json()) == LAYERS
    assert Range.model_validate_json(RATE.model_dump_json()) == RATE


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optimizer.head.rl=1..2", r"'optimizer.head.rl' \(--over\); nearest known: '"),
        ("optimizer.hiden.lr=1..2", r"nearest known: 'optimizer.hidden.lr'"),
        ("optimizer.head=1..2", "is a table"),
        ("train.threads=1..2", "is now called 'machine.threads'"),
        ("optimizer.head.lr=0.1..0.1", "0.1 is not below 0.1"),
        ("optimizer.head.lr=0.2..0.1", "0.2 is not below 0.1"),
        ("optimizer.head.lr=0..0.1:log", "needs a LOW above 0"),
        ("optimizer.head.lr=-1..0.1:log", "needs a LOW above 0"),
        ("optimizer.kind=1..2", "optimizer.kind is not a number"),
        ("model.qk_norm=0..1", "model.qk_norm is not a number"),
        ("optimizer.head.betas=0..1", "betas is not a number"),
        ("model.value_tables=1.5..3", "takes whole numbers"),
        ("optimizer.head.lr=0.1:log", "write KEY=LOW..HIGH"),
        ("optimizer.head.lr", "write KEY=LOW..HIGH"),
        ("=1..2", "write KEY=LOW..HIGH"),
        ("optimizer.head.lr=a..b", "write KEY=LOW..HIGH"),
        ("optimizer.head.lr=1..inf", "write KEY=LOW..HIGH"),
        ("optimizer.head.lr=1..2:lin", "write KEY=LOW..HIGH"),
        (f"optimizer.head.lr=1..{'9' * 400}", "write KEY=LOW..HIGH"),
        (f"model.value_tables=-{'9' * 400}..5", "write KEY=LOW..HIGH"),
    ],
)
def test_ranges_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Range.parse(text)


def test_budgets_are_read() -> None:
    assert Budget.parse("12") == Budget(trials=12)
    assert Budget.parse("30m") == Budget(seconds=1800)
    assert Budget.parse("2h") == Budget(seconds=7200)
    for text, sentence in [
        ("1", "2 at least"), ("0", "2 at least"), ("-3", "number of trials"), ("0m", "no time"),
        ("soon", r"trials \(12\) or a time \(30m, 2h\)"), ("", "number of trials"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=sentence):
            Budget.parse(text)
    with pytest.raises(ConfigError, match="one of both"):
        Budget()


@pytest.mark.parametrize(
    ("text", "stated", "ends"),
    [
        ("1..4", 3.0, (1.0, 4.0)),
        ("1..4", 3, (1, 4)),
        ("0.5..4:log", 1, (0.5, 4)),
    ],
)
def test_an_argument_has_the_type_that_the_recipe_gives_it(
    text: str, stated: float, ends: tuple[float, float]
) -> None:
    key = "custom.mlp.args.ratio"
    found = Range.parse(f"{key}={text}").checked({key: stated})
    assert (found.low, found.high) == ends
    assert type(found.low) is type(ends[0])


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({}, "the recipe does not state custom.mlp.args.ratio"),
        ({"custom.mlp.args.ratio": True}, "is not a number"),
        ({"custom.mlp.args.ratio": "high"}, "is not a number"),
    ],
)
def test_an_argument_that_is_no_number_cannot_be_searched(
    stated: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Range.parse("custom.mlp.args.ratio=1..4").checked(stated)
