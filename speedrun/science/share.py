"""How many runs of a race share the machine at a time, and on how many threads.

Seconds compare only where each run has the machine to itself, so a race goes one run at a time
unless it is asked for more. An ablation is about losses and tokens: it makes as many runs at a time
as there are cores, on one thread each, which on two cores are more runs an hour than one at a time
on both (`speedrun bench race`). What began one way goes on that way, for matrix products on another
number of threads may round differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from speedrun.config.schema import Config
from speedrun.errors import ConfigError, SpeedrunError
from speedrun.limits import cores, idle_cores, memory_bytes, memory_shares, threads
from speedrun.science.jobs import Job, RunSet
from speedrun.train.build import choose_device
from speedrun.train.estimate import estimate, vocab_size_of
from speedrun.train.run import RunFolder

ONE_A_CORE = 0  # of --jobs


class Share(NamedTuple):
    """`jobs` runs at a time on `threads` each. One at a time has what its config says."""

    jobs: int = 1
    threads: int = 0

    def of(self, job: Job) -> Job:
        if self.jobs == 1:
            return job
        threads = job.config.machine.threads or self.threads
        return job.with_settings(f"machine.jobs={self.jobs}", f"machine.threads={threads}")

    def __str__(self) -> str:
        if self.jobs == 1:
            return "one at a time"
        return f"{self.jobs} at a time on {self.threads} thread{'s' if self.threads > 1 else ''}"


def share_machine(
    runs: RunSet,
    jobs: Sequence[Job],
    asked: int | None,
    otherwise: int,
    say: Callable[[str], None],
) -> Share:
    """The share of the machine for a job: as asked, as they were begun, or `otherwise`."""
    begun = _begun(runs, jobs)
    if asked is None and begun:
        share = begun.most_common(1)[0][0]
    else:
        share = _choose(jobs, otherwise if asked is None else asked)
    for other in begun.keys() - {share}:
        say(f"{begun[other]} of these runs are here, made {other}; now they are made {share}")
    if share.jobs > 1:
        say(f"runs are made {share} each; seconds of a shared machine are not compared")
        idle = idle_cores(share.jobs) if share.threads < cores() // share.jobs else ""
        if idle and not any(job.config.machine.threads for job in jobs):
            say(idle)
    return share


def _begun(runs: RunSet, jobs: Sequence[Job]) -> Counter[Share]:
    """In which ways runs of these jobs have been begun, with the number of such runs."""
    shares = {Share()}
    for path in sorted((runs.root / "runs").glob("*")):
        with suppress(SpeedrunError):  # something else, or damaged: its job is made anew
            machine = RunFolder(path).load_config().machine
            shares.add(Share(machine.jobs, machine.threads) if machine.jobs > 1 else Share())
    counts = {
        share: sum(runs.folder(share.of(job)).config.exists() for job in jobs) for share in shares
    }
    return Counter({share: count for share, count in counts.items() if count})


def _choose(jobs: Sequence[Job], asked: int) -> Share:
    configs = [job.config for job in jobs if job.seed == jobs[0].seed]  # seeds do not matter here
    if asked != 1 and any(choose_device(one.machine.device).type == "cuda" for one in configs):
        if asked > 1:
            raise ConfigError(
                f"--jobs {asked} cannot be used: a GPU is for one run at a time; use --jobs 1"
            )
        return Share()
    each = max(config.machine.threads for config in configs)
    count = asked or max(1, min(len(jobs), cores() // (each or 1)))
    fitting = _that_fit(configs, count)
    if asked > fitting:
        raise ConfigError(
            f"--jobs {asked} cannot be used: the memory that is free holds {fitting}; ask for fewer"
        )
    return Share(fitting, each or threads(fitting)) if fitting > 1 else Share()


def _that_fit(configs: Sequence[Config], most: int) -> int:
    """So many runs at a time are within the memory that is free, by estimate; at least one."""

    def need(config: Config, jobs: int) -> int:
        machine = config.machine.model_copy(update={"jobs": jobs})
        shared = config.model_copy(update={"machine": machine})
        return estimate(shared, vocab_size_of(shared), 1, memory_bytes()).memory_bytes

    if most == 1:
        return 1
    largest = max(configs, key=lambda config: need(config, most))
    fitting = (n for n in range(most, 1, -1) if need(largest, n) <= _free_for_each_of(n))
    return next(fitting, 1)


def _free_for_each_of(runs: int) -> int:
    return min(limit.free for limit in memory_shares(runs))
