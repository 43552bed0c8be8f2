"""Threads that write the texts of all runs, one a core, and their ends in the event loop.

A thread writes some texts by itself, a token of each in a step, and waits for no other thread:
while one computes, another may draw and decode. After a step it hands what was written to the event
loop, in one call for all its texts: waking the loop for every token of every text would cost more
than the tokens do. A request takes what has come in since it last looked, so one that is slow gets
longer pieces, not a longer queue.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from speedrun.errors import SpeedrunError
from speedrun.serve.slots import Sight
from speedrun.serve.writing import Job, Piece, Wanted, Writer

PACE = 0.012  # seconds between pieces of a stream: what comes faster, nobody sees come


class BusyError(Exception):
    """As many texts wait as may."""


class TextError(Exception):
    """A text could not be written; the message is for whoever asked for it."""


class Stream:
    """Pieces of one text on their way to the request that asked for it."""

    def __init__(self, wanted: Wanted, worker: Worker, *, whole: bool) -> None:
        """`whole`: nobody looks before the text has ended."""
        self.wanted, self.worker, self.whole = wanted, worker, whole
        self.job: Job | None = None
        self.closed = False  # ended or cancelled; set in the event loop, read in the thread too
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()

    @property
    def sight(self) -> Sight | None:
        """What the last token saw, once the text has ended."""
        return self.job.sight if self.job else None

    def put(self, pieces: Sequence[Piece]) -> None:
        self._pieces += pieces
        self._news.set()

    async def pieces(self) -> list[Piece]:
        """All that were written since the last call, one at least."""
        await self._news.wait()
        self._news.clear()
        taken, self._pieces = self._pieces, []
        if taken[-1].finish == "error":
            raise TextError(taken[-1].text)
        return taken


Made = Mapping[Stream, Sequence[Piece]]  # what a step added to some texts


class Worker:
    """A thread that writes its share of the texts, a token of each at a time."""

    def __init__(self, writers: Mapping[str, Writer]) -> None:
        self._writers = writers
        self.open_texts = 0  # at work and in line, counted in the event loop
        self._asked: deque[tuple[str, Stream]] = deque()
        self._wake, self._stopped = threading.Event(), False
        self._made: dict[Stream, list[Piece]] = {}  # and not handed over yet
        self._shown = 0.0  # when pieces of texts that go on were last handed over
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._hand: Callable[[Made], None] | None = None

    def start(self, hand: Callable[[Made], None]) -> None:
        """`hand` takes what was made over to the event loop."""
        self._hand = hand
        self._thread.start()

    def ask(self, run: str, stream: Stream) -> None:
        self._asked.append((run, stream))
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()

    # What follows runs in the thread.

    def _run(self) -> None:
        torch.set_num_threads(1)  # there is a worker for each core
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            while not self._stopped and (self._asked or self._busy()):
                self._take_up()
                for writer in self._busy():
                    self._step(writer)
                self._hand_over()

    def _busy(self) -> list[Writer]:
        return [writer for writer in self._writers.values() if writer.busy]

    def _take_up(self) -> None:
        while self._asked:
            run, stream = self._asked.popleft()
            stream.job = self._writers[run].add(stream.wanted, partial(self._keep, stream))
            if stream.closed:  # asked after the job can be seen by whoever closes it
                stream.job.cancelled = True

    def _keep(self, stream: Stream, _: Job, piece: Piece) -> None:
        self._made.setdefault(stream, []).append(piece)

    def _step(self, writer: Writer) -> None:
        try:
            writer.step()
        except Exception as error:
            # Whatever it was, it ends the texts that met it; those in line begin anew.
            traceback.print_exception(error)
            known = isinstance(error, SpeedrunError)
            writer.drop(str(error) if known else f"a fault of the server: {error!r}")

    def _hand_over(self) -> None:
        """What was made, but for texts that are asked for whole and have not ended."""
        show = time.monotonic() >= self._shown + PACE
        ready = [
            stream
            for stream, pieces in self._made.items()
            if stream.closed or pieces[-1].finish or (show and not stream.whole)
        ]
        if ready and self._hand:
            self._hand({stream: self._made.pop(stream) for stream in ready})
        if show:
            self._shown = time.monotonic()


class Engine:
    """Texts of any number of requests, shared out to the workers.

    `most` bounds the texts at work and in line together, so that a flood is refused at the door.
    """

    def __init__(self, workers: Sequence[Worker], most: int) -> None:
        self._workers, self.most = workers, most
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def open_texts(self) -> int:
        return sum(worker.open_texts for worker in self._workers)

    def start(self) -> None:
        """From inside the event loop that requests live in."""
        self._loop = asyncio.get_running_loop()
        for worker in self._workers:
            worker.start(self._hand)

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()

    def ask(self, run: str, texts: Sequence[Wanted], *, whole: bool) -> list[Stream]:
        """Put texts in line; all of them or, where there is no room, none."""
        if self.open_texts + len(texts) > self.most:
            raise BusyError
        streams = []
        for wanted in texts:
            worker = min(self._workers, key=lambda worker: worker.open_texts)
            worker.open_texts += 1
            streams.append(Stream(wanted, worker, whole=whole))
            worker.ask(run, streams[-1])
        return streams

    def close(self, streams: Iterable[Stream]) -> None:
        """Nobody waits for these any more; what is still to be written of them is not."""
        for stream in streams:
            if not stream.closed:
                stream.closed = True
                stream.worker.open_texts -= 1
            if stream.job is not None:
                stream.job.cancelled = True

    def _hand(self, made: Made) -> None:
        """From a worker's thread to the event loop."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._receive, made)

    def _receive(self, made: Made) -> None:
        for stream, pieces in made.items():
            stream.put(pieces)
            if pieces[-1].finish:
                self.close([stream])
