"""From the shell to the first step, against `import torch`, each in a process of its own.

All take turns. Seconds count from the start of a process, as the kernel stamps it, to

    import_torch   the line after `import torch` (and, apart, to the end of such a process)
    first_step     the end of the first step of `train`, whose own seconds are given apart: `start`
                   is what comes before it
    race_child     the same, as a race starts its runs
    sample         the first byte of text
    report         the end of the process, against `python -c 'import torch'` to its end

Datasets and kernels are there beforehand. For the cold figures the files of Python's packages and
of this one are first dropped from the page cache, which the system grants for files that no other
process has mapped; what stayed is looked up and told. This module imports no torch, to map none.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median

from speedrun.bench.timing import Figures, seconds_of
from speedrun.errors import RunError

IMPORT = (
    "import torch, time; now = time.time(); from speedrun.hardware import process_start; "
    "print(now - process_start())"
)
# As science/jobs.py starts a run.
OF_A_RACE = ("--checkpoint-every", "30s", "--keep", "1")
PATIENCE = 300.0  # seconds for a child
STAYED = 0.1  # share of torch's library that may stay in the page cache of a cold start

Seconds = dict[str, float]


def measure_start(
    repeats: int = 5, cold_repeats: int = 2, recipe: str = "best", overrides: Sequence[str] = ()
) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        rivals = _rivals(Path(folder), recipe, overrides)
        figures: Figures = {"turns": repeats, **_ratios(_turns(rivals, repeats, lambda: None))}
        left = _evict() if cold_repeats else 1.0
        if not cold_repeats or left is None or left > STAYED:
            known = "how much stayed cannot be told" if left is None else f"{left:.0%} stayed"
            figures["cold"] = f"not measured: of torch's library in the page cache {known}"
        else:
            cold = _ratios(_turns(rivals, cold_repeats, _evict))
            figures |= {f"cold_{key}": value for key, value in cold.items()}
            figures["cold"] = f"the page cache was emptied: {left:.0%} of torch's library stayed"
    return figures


def _rivals(
    folder: Path, recipe: str, overrides: Sequence[str]
) -> Mapping[str, Callable[[], Seconds]]:
    """Each runs once in a child and gives its seconds by name."""
    numbers = iter(range(1 << 30))
    train = ["train", recipe, *overrides, "--track", "nano", "--sample-tokens", "0"]
    whole = folder / "whole"
    _speedrun([*train, "--steps", "1", "--run", str(whole)])  # builds what is not there yet

    def step(name: str, words: Sequence[str]) -> Seconds:
        row = _first_step([*train, *words], folder / f"run-{next(numbers)}")
        own = row["ms"] / 1000
        return {
            f"{name}_seconds": row["wall_seconds"],
            f"{name}_own_seconds": own,
            f"{name}_start_seconds": row["wall_seconds"] - own,
        }

    def report() -> Seconds:
        words = ["report", str(whole), "--out", str(folder / "page.html")]
        return {"report_seconds": seconds_of(lambda: _speedrun(words))}

    def whole_import() -> Seconds:
        words = [sys.executable, "-c", "import torch"]
        return {"import_torch_to_exit_seconds": seconds_of(lambda: _run(words))}

    return {
        "import": lambda: {"import_torch_seconds": float(_run([sys.executable, "-c", IMPORT]))},
        "whole_import": whole_import,
        "train": lambda: step("first_step", ()),
        "race": lambda: step("race_child", OF_A_RACE),
        "sample": lambda: {"sample_seconds": _first_byte(["sample", str(whole), "--tokens", "8"])},
        "report": report,
    }


def _turns(
    rivals: Mapping[str, Callable[[], Seconds]], turns: int, before: Callable[[], object]
) -> list[Seconds]:
    """The seconds of each turn, the rivals in another order each time."""
    order, random, found = list(rivals), Random(0), []
    for _ in range(turns):
        random.shuffle(order)
        seconds: Seconds = {}
        for name in order:
            before()
            seconds |= rivals[name]()
        found.append(seconds)
    return found


def _ratios(turns: Sequence[Seconds]) -> Figures:
    """Medians over the turns, of seconds and of the ratios within a turn."""
    figures: Figures = {key: median(turn[key] for turn in turns) for key in sorted(turns[0])}
    for name in ("first_step_start", "first_step", "race_child_start", "race_child", "sample"):
        figures[f"{name}_ratio"] = median(
            turn[f"{name}_seconds"] / turn["import_torch_seconds"] for turn in turns
        )
    for name in ("first_step", "report"):
        figures[f"{name}_to_exit_ratio"] = median(
            turn[f"{name}_seconds"] / turn["import_torch_to_exit_seconds"] for turn in turns
        )
    return figures


def _run(words: Sequence[str]) -> str:
    child = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
    if child.returncode:
        raise RunError(f"{' '.join(words)} failed: {child.stderr.strip()[-500:]}")
    return child.stdout


def _speedrun(words: Sequence[str]) -> str:
    return _run([sys.executable, "-m", "speedrun", *words])


def _first_step(words: Sequence[str], run: Path) -> dict[str, float]:
    """What a run logs of its first step; it is ended then."""
    command = [sys.executable, "-m", "speedrun", *words, "--run", str(run)]
    log, deadline = run / "metrics.jsonl", time.monotonic() + PATIENCE
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        while time.monotonic() < deadline:
            ended = child.poll() is not None
            for line in log.read_text().splitlines() if log.exists() else ():
                row: dict[str, float] = json.loads(line)
                if row["kind"] == "train":  # type: ignore[comparison-overlap]
                    return row
            if ended:
                break
            time.sleep(0.02)  # the row says when it was: looking late adds nothing
    finally:
        child.kill()
        child.wait()
    raise RunError(f"{' '.join(words)} came to no step: {child.stderr.read().strip()[-500:]}")


def _first_byte(words: Sequence[str]) -> float:
    """Seconds until a command has said something on its standard output."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "speedrun", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        said = child.stdout.read(1)
        seconds = time.perf_counter() - begun
        child.stdout.read()
        if not said:
            raise RunError(f"{' '.join(words)} said nothing: {child.stderr.read().decode()[-500:]}")
    return seconds


def _evict() -> float | None:
    """Drop the files of packages from the page cache; the share of torch's library that stayed."""
    if not hasattr(os, "posix_fadvise"):
        return None
    for path in _package_files():
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    found = find_spec("torch")  # finds it without importing it
    assert found is not None
    assert found.origin is not None
    libraries = [*(Path(found.origin).parent / "lib").glob("libtorch_cpu.*")]
    return resident_share(libraries[0]) if libraries else None


def _package_files() -> Iterator[str]:
    here = str(Path(__file__).parent.parent)
    for top in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], here}:
        for parent, _, names in os.walk(top):
            yield from (f"{parent}/{name}" for name in names)


def resident_share(path: Path) -> float | None:
    """The share of a file's pages that are in the page cache; None where that cannot be asked."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    size = path.stat().st_size
    if mincore is None or not size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = (ctypes.c_char * size).from_buffer(mapped)
        failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
        del start  # or the map could not be closed
    return None if failed else sum(page & 1 for page in pages) / len(pages)
