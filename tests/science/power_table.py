"""How many pairs the watched test wants: `python -m tests.science.power_table` prints docs' table.

All in standard deviations of a paired difference, one switch, alpha 0.05. The stake reaches 20
exactly where |t| reaches `critical_t`, which lets numpy watch all experiments at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from speedrun.science.sequential import critical_t, fewest_pairs
from speedrun.science.stats import paired_power

SIMULATIONS = 20_000
EFFECTS = (0.0, 0.5, 1.0, 2.0, 4.0)
PAIRS = (10, 20, 30)
FIXED = (5, 10, 20)
MARGINS = (0.5, 1.0, 2.0)
EQUAL_PAIRS = (10, 20, 40, 80)
ALPHA = 0.05

Floats = NDArray[np.float64]


def moments(draws: Floats) -> tuple[Floats, Floats]:
    """Mean and its standard error after each pair; columns are pairs, and the first has none."""
    n = np.arange(1, draws.shape[1] + 1)
    mean = np.cumsum(draws, axis=1) / n
    squares = np.cumsum(draws**2, axis=1) - n * mean**2
    return mean[:, 1:], np.sqrt(squares[:, 1:] / (n[1:] - 1) / n[1:])


def critical(pairs: int) -> Floats:
    """The |t| to reach after 2, 3, ... pairs, infinite where none is enough or no look counts."""
    fewest = fewest_pairs(ALPHA, 1)
    needed = (critical_t(n, ALPHA) if n >= fewest else None for n in range(2, pairs + 1))
    return np.array([math.inf if t is None else t for t in needed])


def decided_at(found: NDArray[np.bool_]) -> Floats:
    """Pairs until the first look that found it; infinite for none. Looks begin with two pairs."""
    return np.where(found.any(axis=1), found.argmax(axis=1) + 2, np.inf)


def pairs_to_effect(effect: float, simulations: int, pairs: int) -> Floats:
    draws = np.random.default_rng(1).normal(effect, 1.0, size=(simulations, pairs))
    mean, error = moments(draws)
    return decided_at(np.abs(mean) / error >= critical(pairs))


def pairs_to_equal(margin: float, simulations: int, pairs: int) -> Floats:
    draws = np.random.default_rng(2).normal(0.0, 1.0, size=(simulations, pairs))
    mean, error = moments(draws)
    return decided_at((margin - np.abs(mean)) / error >= critical(pairs))


def percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table() -> str:
    heads = ("true effect", "median pairs", *(f"decided by {n}" for n in PAIRS))
    lines = [row(*heads, *(f"t-test with {n}" for n in FIXED))]
    lines.append("|" + "---:|" * (len(heads) + len(FIXED)))
    for effect in EFFECTS:
        at = pairs_to_effect(effect, SIMULATIONS, max(PAIRS))
        median = float(np.median(at))
        shares = (percent(float((at <= n).mean())) for n in PAIRS)
        power = (percent(paired_power(effect, 1.0, n, ALPHA)) for n in FIXED)
        middle = f"{median:.0f}" if median <= max(PAIRS) else f"over {max(PAIRS)}"
        lines.append(row(f"{effect:g}", middle, *shares, *power))
    lines += ["", row("margin", *(f"equal by {n}" for n in EQUAL_PAIRS))]
    lines.append("|" + "---:|" * (1 + len(EQUAL_PAIRS)))
    for margin in MARGINS:
        at = pairs_to_equal(margin, SIMULATIONS, max(EQUAL_PAIRS))
        lines.append(row(f"{margin:g}", *(percent(float((at <= n).mean())) for n in EQUAL_PAIRS)))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
