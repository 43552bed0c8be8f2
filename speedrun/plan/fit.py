"""Fitting the shares of a chip's rates that are reached, on the step times of published runs.

Seven shares, and what an older compiler cost, from the mean steps of records 4 to 18 on 8 x H100.
Least squares of the logarithm of predicted over measured; as some shares go together in all
records (products and passes over memory), each is held weakly, by a factor of 1.6 either way, to
what such kernels usually reach. Every record is predicted as well by a fit without it.

    python -m speedrun.plan.fit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from speedrun.config.resolve import resolve
from speedrun.data.shards import PUBLIC_VOCAB
from speedrun.files import write_json
from speedrun.plan.chips import CHIPS
from speedrun.plan.predict import rate
from speedrun.plan.work import Limit, work_of_run
from speedrun.science.published import curves
from speedrun.train.estimate import without_storage
from speedrun.train.memory import Systems

UNTIMED = 10  # first steps, by the rule of those days
RANKS = 8
# What such kernels usually reach on an H100, and how many steps could wait in a second.
USUAL: Mapping[Limit, float] = {
    "products": 0.6, "attention": 0.4, "masked": 0.2, "memory": 0.8, "orthogonal": 0.07,
    "link": 0.7, "steps": 200.0,  # 5 ms each
}  # fmt: skip
USUAL_FACTOR = 0.5  # deviation of a share's logarithm from that
USUAL_ERROR = 0.03  # of a step's
OLDER = 6  # the last record made with PyTorch 2.4; 7 changed nothing but that
USUAL_OLDER = 0.1  # deviation of what that costs


def measured() -> dict[int, float]:
    """Seconds of a step, by record."""
    return {
        record: curve.points[-1].seconds / (curve.steps - UNTIMED)
        for record, curve in curves().items()
    }


def systems_of(record: int) -> Systems:
    """How a record's own script did what its recipe does not say."""
    return Systems(
        ranks=RANKS,
        moment=4 if record < 10 else 2,  # moments had their table's precision
        shares_muon=record >= 6,
        shares_tables=False,
        shares_gradients=False,
    )


def at_full_rate(record: int) -> dict[Limit, float]:
    """Seconds of a record's mean step by what limits them, if all of each rate were reached."""
    config = resolve(f"record-{record:02d}", "small").config
    model = without_storage(config, PUBLIC_VOCAB)
    found = dict.fromkeys(USUAL, 0.0)
    for work in work_of_run(config, model, systems_of(record)):
        found[work.limit] += work.amount / rate(CHIPS["h100"], work.limit)
    return found


class Fit:
    """Shares and the cost of the older compiler, from some records."""

    def __init__(self, records: Sequence[int], full: Mapping[int, Mapping[Limit, float]]) -> None:
        self._full = full
        self._limits = [*USUAL]
        usual = np.log([USUAL[limit] for limit in self._limits])
        times = measured()

        def errors(x: np.ndarray) -> np.ndarray:
            logs = [np.log(self._predict(x, record) / times[record]) for record in records]
            return np.concatenate([
                np.array(logs) / USUAL_ERROR,
                (x[:-1] - usual) / USUAL_FACTOR,
                x[-1:] / USUAL_OLDER,
            ])  # fmt: skip

        self._x = least_squares(errors, np.append(usual, 0.0)).x

    def _predict(self, x: np.ndarray, record: int) -> float:
        full = np.array([self._full[record][limit] for limit in self._limits])
        return float((full @ np.exp(-x[:-1])) * (1 + x[-1] * (record <= OLDER)))

    def predict(self, record: int) -> float:
        """Seconds of a step."""
        return self._predict(self._x, record)

    @property
    def reached(self) -> dict[Limit, float]:
        return {limit: float(np.exp(x)) for limit, x in zip(self._limits, self._x, strict=False)}

    @property
    def older_compiler(self) -> float:
        return float(self._x[-1])


def fit(leave_out: Sequence[int] = ()) -> dict[str, Any]:
    """What shares.json holds; of the records named here nothing is used."""
    records = [record for record in measured() if record not in leave_out]
    full = {record: at_full_rate(record) for record in measured()}
    whole, times = Fit(records, full), measured()
    return {
        "reached": whole.reached,
        "older_compiler": whole.older_compiler,
        "fitted_ms": {record: 1000 * whole.predict(record) for record in records},
        "left_out_ms": {
            record: [
                1000 * times[record],
                1000 * Fit([one for one in records if one != record], full).predict(record),
            ]
            for record in times
        },
    }


if __name__ == "__main__":
    write_json(Path(__file__).with_name("shares.json"), fit())
