"""`speedrun sample --interactive`: type a text, see it go on; a few commands change how."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace

from speedrun.errors import SpeedrunError
from speedrun.serve.load import LoadedRun
from speedrun.serve.sampling import Sampling
from speedrun.serve.writing import Wanted, Writer, prompt_ids, write
from speedrun.terminal.console import as_written, printable, sentence

HELP = """\
a text             is continued; a backslash at the end of a line goes on to the next
(an empty line)    writes on where the last text ended
:again             the last prompt with the next seed
:temperature 0.8   0: always the likeliest token
:top-k 50          draw from the k likeliest; 0: all
:top-p 1           draw from the likeliest that sum to p
:repetition-penalty 1
:seed 0
:tokens 200        most tokens of an answer
:stop TEXT         end before TEXT; without a text: no stop
:show              the values in use
:quit              or Ctrl-D; Ctrl-C stops the text that is being written"""
NUMBERS = {
    "temperature": float, "top-k": int, "top-p": float, "repetition-penalty": float, "seed": int,
}  # fmt: skip


class Talk:
    """A conversation with a model that only ever goes on with a text."""

    def __init__(
        self, loaded: LoadedRun, tokens: int, sampling: Sampling, stop: tuple[str, ...]
    ) -> None:
        self._tokenizer, self._writer = loaded.tokenizer, Writer(loaded)
        self._tokens, self._sampling, self._stop = tokens, sampling, stop
        self._prompt = self._text = ""

    def answer(self, line: str) -> bool:
        """What a line asks for; False ends the conversation."""
        if not line.startswith(":"):
            self._prompt = line if line else self._text
            self._write()
            return True
        word, _, rest = line[1:].strip().partition(" ")
        if word in ("quit", "q", "exit"):
            return False
        if word == "again":
            self._sampling = self._sampling.of_sample(1)
            self._write()
        elif word == "show":
            stop = ", ".join(map(repr, self._stop)) or "none"
            print(f"{self._sampling}, tokens={self._tokens}, stop={stop}")
        elif word == "stop":
            self._stop = (rest,) if rest else ()
        elif word in NUMBERS or word == "tokens":
            self._set(word, rest)
        else:
            unknown = f":{printable(word)} is not known; :help lists all"
            print(HELP if word in ("help", "h", "?") else unknown)
        return True

    def _set(self, word: str, rest: str) -> None:
        try:
            if not rest.isascii():  # Python also reads the digits of other scripts
                raise ValueError
            if word == "tokens":
                self._tokens = max(1, int(rest))
            else:
                value = NUMBERS[word](rest)
                self._sampling = replace(self._sampling, **{word.replace("-", "_"): value})
        except ValueError:
            print(f":{word} takes a number, not {rest!r}")
        except SpeedrunError as error:
            print(sentence(str(error)))

    def _write(self) -> None:
        ids = prompt_ids(self._tokenizer, self._prompt)
        self._text = self._prompt
        print(as_written(self._prompt), end="", flush=True)
        try:
            for _, piece in write(
                self._writer, [Wanted(ids, self._tokens, self._sampling, self._stop)]
            ):
                self._text += piece.text
                print(as_written(piece.text), end="", flush=True)
        except KeyboardInterrupt:
            self._writer.drop("stopped")
            print(" (stopped)", end="")
        print()


def talk(
    loaded: LoadedRun, prompt: str, tokens: int, sampling: Sampling, stop: tuple[str, ...]
) -> None:
    """Read lines until there are no more; a prompt given beforehand is the first of them."""
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` editing and a history)
    asks = sys.stdin.isatty()
    if asks:
        print(f"{loaded.name}: type a text and it goes on; :help lists what else can be said")
    conversation = Talk(loaded, tokens, sampling, stop)
    going = conversation.answer(prompt) if prompt else True
    while going:
        try:
            line = _read(asks)
        except (EOFError, KeyboardInterrupt):
            print()
            break
        going = conversation.answer(line)


def _read(asks: bool) -> str:
    line = input("> " if asks else "")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(". " if asks else "")
    return line
