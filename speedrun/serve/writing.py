"""Texts as they are written: what is asked for, one piece after the other, until a reason to end.

`Writer` writes any number of texts, as many at a time as there are slots, a token of each in a
step; the others wait in line. The terminal and the server both drive it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from speedrun.data.tokenizer import END_OF_TEXT, StreamDecoder, Tokenizer
from speedrun.model.steps import PackedWeights
from speedrun.serve.load import LoadedRun
from speedrun.serve.sampling import (
    Logits,
    Sampler,
    Sampling,
    best,
    draw,
    log_probabilities,
    refuse_no_numbers,
)
from speedrun.serve.slots import Sight, Slots

HURRY = 0.004  # seconds in which tokens may be written before they are shown
MOST_AT_ONCE = 32

# Why a text ended: it said so or a stop string came up, it is as long as asked for, or a fault.
Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Wanted:
    """A text to be written: what it goes on from, how long it may be and how tokens are drawn."""

    ids: Sequence[int]  # the prompt, opened by end-of-text
    tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    alternatives: int | None = None  # tokens to name beside each that is drawn; None: no odds


@dataclass(frozen=True)
class Piece:
    """What one token adds to a text."""

    token: int
    text: str  # what can be shown by now: a character or stop string may still be incomplete; or,
    # with the finish "error", what went wrong
    log_probability: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    offset: int = 0  # characters of the text before this token


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A prompt as the model knows documents: opened by end-of-text, and again where the text says.

    Prompts, unlike data, may name the token: whoever types it means it.
    """
    ids: list[int] = []
    for part in text.removeprefix(END_OF_TEXT).split(END_OF_TEXT):
        ids += [tokenizer.eot, *tokenizer.encode(part).tolist()]
    return ids


class StopStrings:
    """Holds back text that may be the beginning of a stop string, and cuts where one is whole."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def feed(self, text: str, *, last: bool = False) -> str:
        """What can be shown of the text so far; with `last` nothing more will come."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        keep = 0 if last else max(map(self._unfinished, self._stops))
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _unfinished(self, stop: str) -> int:
        """How much of the end of what is held is a beginning of this stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class Text:
    """One text while it is written."""

    def __init__(self, wanted: Wanted, tokenizer: Tokenizer) -> None:
        self.wanted, self.written, self._characters = wanted, 0, 0
        self._eot = tokenizer.eot
        self.sampler = Sampler(wanted.sampling, wanted.ids)
        self._decoder, self._stops = StreamDecoder(tokenizer), StopStrings(wanted.stop)

    @property
    def fed(self) -> int:
        """Tokens that the model was given to draw the last one."""
        return len(self.wanted.ids) + self.written - 1

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        return self.wanted.tokens - self.written

    def take(self, token: int, logits_V: Logits | None = None) -> Piece:
        """The next token, which was drawn from these logits; they are needed for odds alone."""
        self.written += 1
        odds: float | None = None
        others: tuple[tuple[int, float], ...] = ()
        if self.wanted.alternatives is not None and logits_V is not None:
            log_odds_V = log_probabilities(logits_V)
            odds = float(log_odds_V[token])
            others = tuple(best(log_odds_V, self.wanted.alternatives))
        ended, offset = token == self._eot, self._characters
        new = "" if ended else self._decoder.feed(token)
        self._characters += len(new)
        text = self._stops.feed(new)
        finish: Finish | None = "stop" if ended or self._stops.found else None
        if finish is None and self.written >= self.wanted.tokens:
            finish = "length"
        if finish and not self._stops.found:
            text += self._stops.feed(self._decoder.finish(), last=True)
            finish = "stop" if self._stops.found else finish
        return Piece(token, text, odds, others, finish, offset)


class Job:
    """A text in line or being written, and who is told of its pieces.

    A job that is cancelled, which any thread may do, is dropped at the next step.
    """

    def __init__(self, text: Text, tell: Callable[[Job, Piece], None]) -> None:
        self.text, self.tell = text, tell
        self.slot: int | None = None
        self.cancelled = False
        self.sight: Sight | None = None  # what the last token saw, once there is one

    @property
    def wanted(self) -> Wanted:
        return self.text.wanted

    @property
    def place(self) -> int:
        """The slot of a text that is being written."""
        assert self.slot is not None
        return self.slot


class Writer:
    """Texts in line and at work. One thread at a time may call it."""

    def __init__(
        self,
        loaded: LoadedRun,
        slots: int = 1,
        room: int = 0,
        weights: PackedWeights | None = None,
    ) -> None:
        self.tokenizer = loaded.tokenizer
        eot = loaded.tokenizer.eot
        self.slots = Slots(loaded.model, loaded.planner, eot, slots, room, weights)
        self._burst = 1  # tokens of a text written in one call
        self._line: deque[Job] = deque()
        self._next: dict[Job, Sequence[int]] = {}  # at work, with the tokens they are fed next

    @property
    def busy(self) -> bool:
        return bool(self._line or self._next)

    def add(self, wanted: Wanted, tell: Callable[[Job, Piece], None]) -> Job:
        job = Job(Text(wanted, self.tokenizer), tell)
        self._line.append(job)
        return job

    def step(self) -> None:
        """One token of every text at work, or a few where nobody has to look at each."""
        for job in [job for job in self._next if job.cancelled]:
            self._end(job)
        self._take_up()
        some = [job for job in self._next if self._can_hurry(job)]
        others = self._next.keys() - some
        self._single([job for job in self._next if job in others])
        self._several(some)

    def _take_up(self) -> None:
        """Texts in line, in their order, as far as there are slots.

        Of long prompts one a step, so that the texts at work wait for one reading and not for many.
        """
        long = 0
        while self._line and self.slots.free:
            long += len(self._line[0].wanted.ids) > self.slots.few
            if long > 1:
                break
            job = self._line.popleft()
            if not job.cancelled:
                job.slot = self.slots.take()
                self._next[job] = job.wanted.ids

    def _can_hurry(self, job: Job) -> bool:
        """Whether several tokens can be drawn before anybody looks at them."""
        plain = job.wanted.alternatives is None and job.text.sampler.plain
        return plain and self.slots.can_write(job.place, self._next[job]) > 0

    def _single(self, jobs: Sequence[Job]) -> None:
        """A token of each, drawn where its logits can be seen."""
        if not jobs:
            return
        logits = self.slots.feed({job.place: self._next[job] for job in jobs})
        tokens = draw([(job.text.sampler, logits[job.place]) for job in jobs])
        for job, token in zip(jobs, tokens, strict=True):
            self._take(job, token, logits[job.place])

    def _several(self, jobs: Sequence[Job]) -> None:
        """As many tokens of each as take HURRY seconds."""
        if not jobs:
            return
        begun, asked = time.perf_counter(), {}
        for job in jobs:
            ids = self._next[job]
            most = min(self._burst, job.text.left, self.slots.can_write(job.place, ids))
            asked[job.place] = ids, job.text.sampler.draws(most)
        written = self.slots.write(asked)
        longest = max(map(len, written.values()))
        fitting = HURRY * longest / max(time.perf_counter() - begun, 1e-6)
        self._burst = int(min(max(fitting, 1), MOST_AT_ONCE))
        for job in jobs:
            tokens = written[job.place]
            refuse_no_numbers(tokens)
            job.text.sampler.used(len(tokens))
            for token in tokens:
                self._take(job, token, None)
                if job not in self._next:  # a stop string came up: the rest is not asked for
                    break

    def _take(self, job: Job, token: int, logits: Logits | None) -> None:
        piece = job.text.take(token, logits)
        self._next[job] = [token]
        if piece.finish:
            job.sight = self.slots.sight(job.place, job.text.fed)
            self._end(job)
        job.tell(job, piece)

    def drop(self, reason: str) -> None:
        """End the texts at work, for whoever could not go on with them."""
        for job in [*self._next]:
            self._end(job)
            job.tell(job, Piece(-1, reason, finish="error"))

    def _end(self, job: Job) -> None:
        del self._next[job]
        self.slots.give_back(job.place)


def write(writer: Writer, texts: Sequence[Wanted]) -> Iterator[tuple[int, Piece]]:
    """All of them to their ends: each piece with the number of its text."""
    made: list[tuple[int, Piece]] = []
    for number, wanted in enumerate(texts):
        writer.add(wanted, lambda _, piece, number=number: made.append((number, piece)))  # type: ignore[misc]
    while writer.busy:
        writer.step()
        yield from made
        made.clear()
