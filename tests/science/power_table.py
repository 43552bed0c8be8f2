"""How many pairs the watched test wants: `python -m tests.science.power_table` prints docs' table.

All in standard deviations of a paired difference, one switch, alpha 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from speedrun.science.bets import log_stake, log_stakes
from speedrun.science.stats import paired_power

SIMULATIONS = 20_000
AT_ONCE = 1000
EFFECTS = (0.0, 0.5, 1.0, 2.0, 4.0)
PAIRS = (10, 20, 30)
FIXED = (5, 10, 20)
MARGINS = (0.5, 1.0, 2.0)
EQUAL_PAIRS = (10, 20, 40, 80)
ALPHA = 0.05

Floats = NDArray[np.float64]


def pairs_until(stakes: Callable[[Floats], Floats], draws: Floats) -> Floats:
    """Pairs until the log of the stake reaches 20 in each row of draws; infinite for never."""
    found = []
    for rows in np.array_split(draws, math.ceil(len(draws) / AT_ONCE)):
        reached = stakes(rows) >= -math.log(ALPHA)
        found.append(np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, np.inf))
    return np.concatenate(found)


def pairs_to_effect(effect: float, simulations: int, pairs: int) -> Floats:
    draws = np.random.default_rng(1).normal(effect, 1.0, size=(simulations, pairs))
    return pairs_until(log_stake, draws)


def pairs_to_equal(margin: float, simulations: int, pairs: int) -> Floats:
    draws = np.random.default_rng(2).normal(0.0, 1.0, size=(simulations, pairs))
    return pairs_until(
        lambda rows: np.minimum(log_stakes(rows, margin)[1], log_stakes(rows, -margin)[0]), draws
    )


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
