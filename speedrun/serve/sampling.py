"""From logits to a token: temperature, top-k, top-p, repetition penalty, and a seed.

In the order that others apply them too, so the same options mean the same elsewhere: the penalty on
the logits, the temperature, the k likeliest, then the likeliest that sum to p. What is drawn is a
function of the logits and of how many tokens the text has drawn before; no other text matters.

The tokens of all texts are drawn in one native call (native/draw.h): numpy takes 30 us for each, a
fifth of the time in which a small model computes one. `drawn` is the same in numpy, for machines
without a compiler.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from speedrun.errors import ConfigError, RunError
from speedrun.model import native
from speedrun.model.decode import Draws

Logits = NDArray[np.float32]


MOST_PENALTY = 1e6  # logits times this are still numbers


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; what cannot be meant is refused."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"a temperature is 0 or more, not {self.temperature}: try 0.8")
        if not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top-k is 0 (all tokens) to {2**31 - 1}, not {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"top-p is a share between 0 and 1, not {self.top_p}")
        if not 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            raise ConfigError(
                f"a repetition penalty is {1 / MOST_PENALTY:g} to {MOST_PENALTY:g}, and 1 for "
                f"none, not {self.repetition_penalty}"
            )
        if self.seed < 0:
            raise ConfigError(f"a seed is 0 or more, not {self.seed}")

    def of_sample(self, number: int) -> Sampling:
        """For the text of that number among several: each is that of a seed of its own."""
        return replace(self, seed=self.seed + number)


class Sampler:
    """What one text needs to draw its tokens."""

    def __init__(self, options: Sampling, ids: Iterable[int] = ()) -> None:
        """`ids`: the tokens of the prompt, which the repetition penalty counts too."""
        self.options, self._random = options, random.Random(options.seed)
        self._ahead: deque[float] = deque()  # random numbers that were looked at and not used
        self._seen = set(ids)

    def scores(self, logits_V: Logits) -> Logits:
        """Logits after the repetition penalty."""
        penalty = self.options.repetition_penalty
        return logits_V if penalty == 1 else penalised(logits_V, self._seen, penalty)

    def uniform(self) -> float:
        """The next random number of this text."""
        return self._ahead.popleft() if self._ahead else self._random.random()

    def remember(self, token: int) -> None:
        self._seen.add(token)

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from logits as they are, so that several can be in one call."""
        return self.options.repetition_penalty == 1

    def draws(self, count: int) -> Draws:
        """How the next `count` tokens are to be drawn; `used` says how many were."""
        while len(self._ahead) < count:
            self._ahead.append(self._random.random())
        options = self.options
        ahead = [*islice(self._ahead, count)]
        return Draws(options.temperature, options.top_k, options.top_p, ahead)

    def used(self, count: int) -> None:
        for _ in range(count):
            self._ahead.popleft()


class _Draw(ctypes.Structure):
    """struct Draw of draw.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "uniform")),
        *((name, ctypes.c_int64) for name in ("top_k", "token")),
    )


def draw(texts: Sequence[tuple[Sampler, Logits]]) -> list[int]:
    """The next token of each text."""
    scores = [sampler.scores(logits_V) for sampler, logits_V in texts]
    uniform = [sampler.uniform() for sampler, _ in texts]
    options = [sampler.options for sampler, _ in texts]
    kernel = native.load()
    if isinstance(kernel, str):
        tokens = [*map(drawn, scores, options, uniform)]
    else:
        asked = (_Draw * len(texts))(*(
            _Draw(row_V.ctypes.data, one.temperature, one.top_p, number, one.top_k)
            for row_V, one, number in zip(scores, options, uniform, strict=True)
        ))  # fmt: skip
        for row_V in scores:
            if row_V.shape != scores[0].shape or row_V.ndim != 1 or row_V.dtype != np.float32:
                raise ValueError("logits are one row in float32 for each text, all of one size")
            if not row_V.flags.c_contiguous:
                raise ValueError("logits of a text lie in one piece")
        places = [ctypes.addressof(asked), len(texts), len(scores[0]) if texts else 1]
        native.refuse("draw", kernel.invoke("draw", places), "there are logits to draw from")
        tokens = [one.token for one in asked]
    refuse_no_numbers(tokens)
    for (sampler, _), token in zip(texts, tokens, strict=True):
        sampler.remember(token)
    return tokens


def refuse_no_numbers(tokens: Iterable[int]) -> None:
    """What is drawn from logits that are no numbers is -1."""
    if min(tokens, default=0) < 0:
        raise RunError("the model's logits are not finite: its training diverged; train it again")


def drawn(logits_V: Logits, options: Sampling, uniform: float) -> int:
    """The token on which a random number in [0, 1) falls; -1 if a logit is no number."""
    scores = logits_V.astype(np.float64)
    if not np.isfinite(scores).all():
        return -1
    if options.temperature == 0:
        return int(scores.argmax())
    few = 0 < options.top_k < len(scores)
    order = np.arange(len(scores))
    if few or options.top_p < 1:  # the likelier first, of equal ones the first
        order = np.argsort(-scores, kind="stable")[: options.top_k if few else len(scores)]
    with np.errstate(over="ignore"):  # a temperature next to 0 leaves the likeliest alone
        sums = np.exp((scores[order] - scores.max()) / options.temperature).cumsum()
    if options.top_p < 1:
        sums = sums[: int(sums.searchsorted(options.top_p * sums[-1])) + 1]
    place = int(sums.searchsorted(uniform * sums[-1], side="right"))
    return int(order[min(place, len(sums) - 1)])


def penalised(logits_V: Logits, seen: set[int], penalty: float) -> Logits:
    """Logits of tokens seen before made smaller: divided where positive, multiplied where not."""
    places, scores_V = np.fromiter(seen, np.int64, len(seen)), logits_V.copy()
    there = scores_V[places]
    scores_V[places] = np.where(there > 0, there / penalty, there * penalty)
    return scores_V


def log_probabilities(logits_V: Logits) -> NDArray[np.float64]:
    """Of every token by the model itself, whatever the options of drawing are."""
    scores = logits_V.astype(np.float64)
    scores -= scores.max()
    scores -= math.log(np.exp(scores).sum())
    return scores


def best(log_odds_V: NDArray[np.float64], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens with their log-probabilities, the likeliest first."""
    count = min(count, len(log_odds_V))
    if not count:
        return []
    places = np.argpartition(log_odds_V, -count)[-count:]
    ordered = sorted(places.tolist(), key=lambda token: (-log_odds_V[token], token))
    return [(token, float(log_odds_V[token])) for token in ordered]
