"""What is around a run: limits, folders, disks. Each fact with what to set where it is in the way.

Folders are tried by writing to them: permissions say little where a disk is full, mounted to be
read, or on another machine that does not trust our root.
"""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speedrun.errors import SpeedrunError
from speedrun.files import cache_home
from speedrun.hardware import cpu_name
from speedrun.limits import (
    PROCESS,
    asked_threads,
    core_limits,
    cores,
    machine_cores,
    machine_memory,
    memory_available,
    memory_bytes,
    memory_limits,
    threads,
)
from speedrun.terminal.console import size_text

TRIED_BYTES = 1 << 16  # written to see whether there is room
LITTLE_DISK = 1 << 30  # a dataset of a few hundred megabytes and some checkpoints
LITTLE_SHARED = 64 << 20  # what Docker gives
FEW_FILES = 256


@dataclass(frozen=True)
class Fact:
    name: str
    found: str
    advice: str = ""  # what to set or do, where something is wrong or slow
    values: dict[str, Any] = field(default_factory=dict)  # for `doctor --json`


def limits_here() -> list[Fact]:
    return [_cpu(), _threads(), _memory()]


def folders_here(gpu: bool) -> list[Fact]:
    """`gpu`: ranks will talk to each other through shared memory."""
    return [
        _cache(),
        _folder("this folder", Path.cwd, "change to another folder, or name one with --run DIR"),
        _temporary_files(),
        _shared_memory(gpu),
        _open_files(),
        _process_files(),
    ]


def _cpu() -> Fact:
    limits, machine = core_limits(), machine_cores()
    values = {"cores": cores(), "machine_cores": machine, "limits": [x._asdict() for x in limits]}
    if not limits:
        return Fact("cpu", f"{cpu_name()}, {machine} cores", values=values)
    least = min(limits, key=lambda limit: limit.amount)
    exactly = "" if least.amount == int(least.amount) else f", {least.amount:g} cores"
    found = f"{cpu_name()}, {cores()} of {machine} cores: {least.source}{exactly}"
    advice = ""
    if least.amount < 1:
        advice = "less than one core: every step waits for its share; ask for a whole one"
    return Fact("cpu", found, advice, values)


def _threads() -> Fact:
    asked = asked_threads()
    values = {"threads": threads(), "OMP_NUM_THREADS": asked}
    if asked is None or asked > cores():
        return Fact(
            "threads", f"{threads()}, one a core; the ranks of a host share them", "", values
        )
    advice = ""
    if asked < cores():
        advice = f"{asked} of {cores()} cores work: unset OMP_NUM_THREADS, or set machine.threads"
    return Fact("threads", f"{threads()}: OMP_NUM_THREADS={asked}", advice, values)


def _memory() -> Fact:
    limits, machine = memory_limits(), machine_memory()[0]
    values = {
        "bytes": memory_bytes(),
        "free_bytes": memory_available(),
        "machine_bytes": machine,
        "limits": [limit._asdict() for limit in limits],
    }
    free = f"{size_text(memory_available())} free"
    if not limits:
        return Fact("memory", f"{size_text(machine)}, {free}", values=values)
    least = min(limits, key=lambda limit: limit.amount)
    found = f"{size_text(least.amount)}: {least.source}, the machine has {size_text(machine)}"
    return Fact("memory", f"{found}; {free}", values=values)


def _cache() -> Fact:
    instead = "set SPEEDRUN_HOME to a folder that can be written, for datasets and kernels"
    try:
        home = cache_home()
    except SpeedrunError as error:
        return Fact("cache folder", "none", str(error), {"path": None, "writable": False})
    fact = _folder("cache folder", lambda: home, instead)
    if fact.values["writable"] and not _locks_here(_existing(home)):
        return Fact(
            fact.name,
            f"{fact.found}; no file locks there",
            "where two machines share it, each waits a few seconds for a sign of the other",
            {**fact.values, "locks": False},
        )
    return fact


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above that is there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())


def _temporary_files() -> Fact:
    asked = os.environ.get("TMPDIR")
    instead = "set TMPDIR to a folder that can be written"
    fact = _folder("temporary files", lambda: Path(tempfile.gettempdir()), instead)
    if asked and fact.values["path"] != str(Path(asked).absolute()):
        return replace(fact, advice=f"TMPDIR={asked} cannot be used: {instead}")
    return fact


def _folder(name: str, find: Callable[[], Path], instead: str) -> Fact:
    try:
        path = find()
        there = _existing(path)
        free = shutil.disk_usage(there).free
    except OSError as error:  # no place for temporary files, or our own folder was removed
        return Fact(name, f"none: {error.strerror}", instead, {"path": None, "writable": False})
    why = _why_not(there)
    values = {"path": str(path), "writable": not why, "free_bytes": free}
    if why:
        return Fact(name, f"{path} cannot be written: {why}", instead, values)
    advice = f"little room: free some, or {instead}" if free < LITTLE_DISK else ""
    return Fact(name, f"{path}, {size_text(free)} free", advice, values)


def _why_not(folder: Path) -> str:
    """Why a file cannot be written there; nothing if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            if file.write(bytes(TRIED_BYTES)) < TRIED_BYTES:
                return "no space left"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _locks_here(folder: Path) -> bool:
    """Can this machine lock a file there? Whether others see such a lock, it cannot tell."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _shared_memory(gpu: bool) -> Fact:
    place = Path("/dev/shm")
    instead = "NCCL needs it for several GPUs: docker run --shm-size=1g, or NCCL_SHM_DISABLE=1"
    if not place.is_dir():
        return Fact("shared memory", f"no {place}", instead if gpu else "", {"bytes": 0})
    size = shutil.disk_usage(place).total
    advice = instead if gpu and size <= LITTLE_SHARED else ""
    return Fact("shared memory", f"{size_text(size)} in {place}", advice, {"bytes": size})


def _open_files() -> Fact:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = {"soft": soft, "hard": hard}
    advice = "few for servers and many shards: ulimit -n 1024" if soft < FEW_FILES else ""
    return Fact("open files", f"{soft:,} at a time", advice, values)


def _process_files() -> Fact:
    there = os.access(PROCESS / "status", os.R_OK)
    advice = "" if there else "mount it: limits of control groups and the peak of memory are in it"
    return Fact("/proc", "there" if there else "not mounted", advice, {"there": there})
