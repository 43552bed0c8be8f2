"""What came of one input, and the rule that a command line must keep whatever it is given.

A command gives a result, or one sentence and an exit code of those that are documented. It never
ends in a traceback or a warning of a library's, leaves nothing half-written and no input changed.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from speedrun.cli import main

LONGEST = 2000  # characters of what is said on stderr
TRACEBACK = "Traceback (most recent call last)"
SENTENCES = ("speedrun: error: ", "speedrun: usage error: ")
TEMPORARY = (".tmp", ".partial", ".replaced")


@dataclass(frozen=True)
class Outcome:
    """A fault's `about` opens with a line that is the same for faults of one cause."""

    kind: Literal["result", "sentence", "fault"]
    about: str = ""


@dataclass(frozen=True)
class Command:
    """Words for `speedrun`, said in a folder of their own."""

    words: Sequence[str]
    stdin: bytes = b""
    writes: Sequence[str] = ()  # what a result may make or change, below the folder
    leaves: Sequence[str] = ()  # what may be there after a failure too, such as a run that began
    codes: Sequence[int] = (0, 1, 2)
    damaged: str = ""  # what a hash tells to be damaged: the result may not be as if it were not


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str
    raised: str = ""  # the traceback of what came through


class Streams:
    """This process's standard streams, put into files for good: also what C++ and Rust write."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / "stdin", folder / "stdout", folder / "stderr"]
        for number, path in enumerate(self._paths):
            path.write_bytes(b"")
            how = os.O_RDONLY if number == 0 else os.O_RDWR | os.O_APPEND
            os.dup2(os.open(path, how), number)

    def begin(self, stdin: bytes) -> None:
        self._paths[0].write_bytes(stdin)
        os.lseek(0, 0, os.SEEK_SET)
        for number in (1, 2):
            os.truncate(self._paths[number], 0)
        # As Python opens them in a locale of UTF-8.
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8", "strict")
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "strict")
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True
        )

    def end(self) -> tuple[str, str]:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        out, err = (path.read_bytes().decode(errors="replace") for path in self._paths[1:])
        return out, err


def run(command: Command, folder: Path, streams: Streams) -> Said:
    """The real entry point in this process."""
    os.chdir(folder)
    streams.begin(command.stdin)
    sys.argv = ["speedrun", *command.words]
    code, raised = 0, ""
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a panic of Rust's is no Exception
        raised = traceback.format_exc()
    try:
        out, err = streams.end()
    except UnicodeEncodeError:
        out, err, raised = "", "", raised or traceback.format_exc()
    return Said(code, out, err, raised)


Files = dict[str, tuple[int, int, int]]


def files_of(folder: Path) -> Files:
    """Every file below by name, size, time and number: enough to see one replaced or written to."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            state = path.lstat()
            found[str(path.relative_to(folder))] = state.st_size, state.st_mtime_ns, state.st_ino
    return found


def judge(command: Command, folder: Path, streams: Streams) -> Outcome:
    before = files_of(folder)
    said = run(command, folder, streams)
    wrong = _wrong(command, said) or _changed(command, said, before, files_of(folder))
    if wrong:
        words = " ".join(short(ascii(word), 200) for word in command.words)
        heard = f"exit {said.code}\nstdout: {short(said.out)}\nstderr: {short(said.err)}"
        return Outcome("fault", f"{wrong}\n$ speedrun {words}\n{short(said.raised, 2500)}\n{heard}")
    return Outcome("sentence" if said.err and said.code else "result")


def short(text: str, most: int = 600) -> str:
    """Its two ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} [...] {text[-half:]}"


def _wrong(command: Command, said: Said) -> str:
    if said.raised:
        return f"traceback: {cause(said.raised)}"
    if TRACEBACK in said.err:
        return f"traceback on stderr: {cause(said.err)}"
    if said.code not in command.codes:
        return f"exit code {said.code}"
    if len(said.err) > LONGEST:
        return f"stderr is longer than {LONGEST} characters"
    odd = {char for char in said.err if char != "\n" and not char.isprintable()}
    if odd:
        return "stderr has characters that a terminal acts on"
    lines = [line for line in said.err.splitlines() if line.strip()]
    if said.code == 0:
        if command.damaged and not lines:
            return f"{command.words[0]} accepted damage in {command.damaged}"
        return next((f"a result with a warning: {line}" for line in lines if "arning" in line), "")
    first = lines[0] if lines else ""
    if first.startswith("Usage: ") or (first.startswith("Error: ") and len(lines) == 1):
        return "" if said.code == 2 else f"usage with exit code {said.code}"
    if command.words[:2] == ["data", "verify"]:
        lines = lines[-1:]  # after a sentence on each thing that is wrong
    if not lines and said.out and command.words[0] == "verify" and said.code == 1:
        return ""  # the claim does not hold
    told = [line for line in lines if line.startswith(SENTENCES)]
    if len(lines) != 1 or len(told) != 1:
        return f"{len(told)} sentences in {len(lines)} lines of stderr"
    return ""


def cause(trace: str) -> str:
    """The exception's kind, and the last line of ours that it came through."""
    lines = trace.strip().splitlines()
    ours = [
        line.strip() for line in lines if "/speedrun/" in line and line.lstrip().startswith("File")
    ]
    where = ours[-1].rpartition("/speedrun/")[2].replace('"', "") if ours else ""
    kinds = [
        line for line in lines if line and not line.startswith((" ", "Traceback", "speedrun:"))
    ]
    return f"{kinds[-1].partition(':')[0] if kinds else ''} {where}"


def _changed(command: Command, said: Said, before: Files, after: Files) -> str:
    may = (*command.leaves, *(command.writes if said.code == 0 else ()))

    def allowed(path: str) -> bool:
        return any(path == one or path.startswith(f"{one}/") for one in may)

    for path, state in before.items():
        if after.get(path) != state and not allowed(path):
            return f"{Path(path).name} was {'changed' if path in after else 'removed'}, an input"
    for path in after.keys() - before.keys():
        if any(part.endswith(TEMPORARY) for part in Path(path).parts):
            return f"{Path(path).name} was left half-written"
        if not allowed(path):
            return f"{Path(path).name} was written" + (" by a failure" if said.code else "")
    return ""
