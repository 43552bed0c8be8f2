"""Drawing: the native way against the slow one, each option against its definition."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedrun.errors import ConfigError, RunError
from speedrun.model import native
from speedrun.serve.sampling import (
    Logits,
    Sampler,
    Sampling,
    best,
    draw,
    drawn,
    log_probabilities,
)

PLAIN = Sampling(temperature=1.0, top_k=0)


def logits_of(*odds: float) -> Logits:
    return np.log(np.maximum(np.array(odds, dtype=np.float32), 1e-30))


def counted(odds: Logits, options: Sampling, count: int = 4000) -> list[float]:
    """How often each token is drawn."""
    tokens = Counter(draw([(Sampler(replace(options, seed=s)), odds)])[0] for s in range(count))
    return [tokens[token] / count for token in range(len(odds))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PLAIN, [0.1, 0.0, 0.4, 0.2, 0.3]),
        (replace(PLAIN, top_k=3), [0.0, 0.0, 4 / 9, 2 / 9, 3 / 9]),
        (replace(PLAIN, top_p=0.65), [0.0, 0.0, 4 / 7, 0.0, 3 / 7]),
        (replace(PLAIN, top_p=0.75), [0.0, 0.0, 4 / 9, 2 / 9, 3 / 9]),
        (replace(PLAIN, top_k=2, top_p=0.5), [0.0, 0.0, 1.0, 0.0, 0.0]),
        (replace(PLAIN, top_p=0.0), [0.0, 0.0, 1.0, 0.0, 0.0]),
        (replace(PLAIN, temperature=0.5), [1 / 30, 0.0, 16 / 30, 4 / 30, 9 / 30]),
        (replace(PLAIN, temperature=0.0), [0.0, 0.0, 1.0, 0.0, 0.0]),
        (replace(PLAIN, temperature=1e-320), [0.0, 0.0, 1.0, 0.0, 0.0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_by_their_odds(options: Sampling, expected: list[float]) -> None:
    found = counted(logits_of(0.1, 0.0, 0.4, 0.2, 0.3), options)
    np.testing.assert_allclose(found, expected, atol=0.035)
    assert [share == 0 for share in found] == [share == 0 for share in expected]


def test_a_penalty_makes_what_was_seen_less_likely() -> None:
    """Positive logits are divided by it, negative ones multiplied; the prompt counts as seen."""
    logits, greedy = np.array([2.0, 1.9, -1.0], dtype=np.float32), Sampling(temperature=0.0)
    penalised = replace(greedy, repetition_penalty=1.3)
    assert draw([(Sampler(greedy, [0]), logits)]) == [0]
    sampler = Sampler(penalised, [0])
    assert sampler.scores(logits).tolist() == pytest.approx([2.0 / 1.3, 1.9, -1.0])
    assert draw([(sampler, logits)]) == [1]
    assert sampler.scores(logits).tolist() == pytest.approx([2.0 / 1.3, 1.9 / 1.3, -1.0])
    assert draw([(sampler, logits)]) == [0]
    assert Sampler(penalised, [2]).scores(logits).tolist() == pytest.approx([2.0, 1.9, -1.3])
    assert logits.tolist() == pytest.approx([2.0, 1.9, -1.0]), "others read them too"


@given(
    st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 4.0, -200.0]), min_size=1, max_size=70),
    st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    st.integers(0, 80),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.integers(0, 999_999).map(lambda n: n / 1e6),
)
def test_the_native_draw_is_that_of_numpy(
    values: list[float], temperature: float, top_k: int, top_p: float, uniform: float
) -> None:
    """Many of the values are equal: of those the first counts as likelier.

    Of all tokens it draws by odds in fp32, so a number right between two may fall on either.
    """
    logits = np.array([1.0, *values], dtype=np.float32)
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    near = {drawn(logits, options, min(max(uniform + x, 0), 1 - 1e-9)) for x in (-1e-6, 0, 1e-6)}

    class Given(Sampler):
        def uniform(self) -> float:
            return uniform

    found, *others = draw([(Given(options), logits)] * 3)
    assert found in near
    assert others == [found] * 2


def test_without_a_compiler_the_same_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(40, 300)).astype(np.float32) * 3

    def all_of() -> list[int]:
        return draw([(Sampler(Sampling(seed=seed)), row) for seed, row in enumerate(rows)])

    with_kernels = all_of()
    monkeypatch.setattr(native, "load", lambda: "the test says so")
    assert all_of() == with_kernels
    assert len(set(with_kernels)) > 10


def test_a_draw_is_a_matter_of_the_text_alone() -> None:
    row, other = logits_of(0.2, 0.3, 0.5), logits_of(0.9, 0.05, 0.05)
    alone, together = Sampler(replace(PLAIN, seed=7)), Sampler(replace(PLAIN, seed=7))
    company = Sampler(replace(PLAIN, seed=8))
    expected = [draw([(alone, row)])[0] for _ in range(30)]
    assert [draw([(company, other), (together, row)])[1] for _ in range(30)] == expected
    assert len(set(expected)) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_that_diverged_is_one_sentence(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array([0.0, bad, 1.0], dtype=np.float32)
    for _ in range(2):
        with pytest.raises(RunError, match="diverged"):
            draw([(Sampler(PLAIN), logits)])
        monkeypatch.setattr(native, "load", lambda: "the test says so")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": math.nan}, {"temperature": -1.0}, {"temperature": math.inf}, {"top_k": -1},
        {"top_p": 1.1}, {"top_p": math.nan}, {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf}, {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300}, {"seed": -1},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_any_seed_will_do_and_samples_have_their_own() -> None:
    huge = Sampling(seed=2**70)
    assert draw([(Sampler(huge), logits_of(0.5, 0.5))])[0] in (0, 1)
    assert [huge.of_sample(n).seed - huge.seed for n in range(3)] == [0, 1, 2]


def test_probabilities_are_the_models_own() -> None:
    odds = log_probabilities(logits_of(0.1, 0.2, 0.7))
    assert np.exp(odds) == pytest.approx([0.1, 0.2, 0.7])
    assert [token for token, _ in best(odds, 2)] == [2, 1]
    assert best(odds, 9) == [(i, float(odds[i])) for i in (2, 1, 0)]
    assert best(odds, 0) == []
    assert np.isfinite(log_probabilities(np.array([1e30, 0.0], dtype=np.float32))[0])
