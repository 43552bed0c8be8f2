"""What a run leaves behind besides its log: `summary.json`, its result, and `environment.json`.

Races, ablations, `verify`, the leaderboard and the page are all computed from these two files. Each
is read here and nowhere else, so that a damaged one, or one written by something else, is told in a
sentence that names the file and the key.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from speedrun.errors import RunError, SpeedrunError, quoted
from speedrun.files import finite, parse_json, write_json

Model = TypeVar("Model", bound=BaseModel)
Error = type[SpeedrunError]
MOST = 1e40  # more than a 32-bit float holds, and than 64 bits count


class Summary(BaseModel, frozen=True, strict=True):
    """The result of a run, in the order of its file, where a loss that is not finite is null."""

    recipe: str
    track: str
    dataset: str | None = None  # what its text is called: a folder, or sources
    params: int
    steps: int
    tokens: int
    train_seconds: float
    wall_seconds: float
    val_loss: float | None
    val_bpb: float | None = None
    val_tokens: int | None = None
    target: float | None = None
    reached_target: bool = False
    # Where the validation curve crosses the target, and the steps between the two validations
    # around it, in which the crossing lies somewhere (train/crossing.py).
    tokens_to_target: int | None = None
    steps_to_target: float | None = None
    seconds_to_target: float | None = None
    wall_seconds_to_target: float | None = None
    cell_steps: int | None = None
    # The public speedrun's rule: the first validation at or below the target.
    first_validation_tokens: int | None = None
    tokens_per_second: float = 0.0
    peak_share: float | None = None  # of the matmul peak, measured beside the steps
    peak_seconds: float | None = None  # what measuring it cost, off the clock
    val_seconds: float | None = None  # what validations cost, off the clock
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None  # CUDA only
    corpus_sha256: str | None = None
    dataset_fingerprint: str
    seed: int
    world_size: int = 1
    device: str | None = None
    threads: int | None = None
    torch: str | None = None
    rewinds: int = 0
    forced: list[str] = []  # what resumes with --force overrode
    own_code: dict[str, str] = {}  # of users' own: name and hash by the table that names it
    metrics_sha256: str | None = None  # of metrics.jsonl up to the row of its end
    stopped_early: bool = False
    exit_code: int = 0

    @property
    def loss(self) -> float:
        """The last validation loss, NaN for a run that diverged."""
        return math.nan if self.val_loss is None else self.val_loss

    def as_dict(self) -> dict[str, Any]:
        """The keys the run stated, as in its file."""
        stated: dict[str, Any] = finite(self.model_dump(exclude_unset=True))
        return stated

    def write(self, path: Path) -> None:
        write_json(path, self.as_dict())

    @staticmethod
    def read(path: Path) -> Summary | None:
        """None: the run has not come to an end, or never began."""
        if not path.exists():
            return None
        try:
            return validated(Summary, read_json(path), path, "a run's summary")
        except RunError as error:
            again = "delete it and resume the run, which writes it again"
            raise RunError(f"{error}; {again}") from None


class Environment(BaseModel, frozen=True, strict=True):
    """Where and with which code a run was made; what was not recorded is None."""

    code_sha256: str | None = None
    git_commit: str | None = None
    git_diff: str | None = None
    cpu: str | None = None
    cores: int | None = None
    threads: int | None = None
    gpu: str | None = None
    kernels: str | None = None
    torch: str | None = None
    python: str | None = None
    earlier: list[dict[str, Any]] = []  # machines the run was resumed from, where they differ
    recorded: dict[str, Any]  # the whole file

    @property
    def machine(self) -> dict[str, Any]:
        """What seconds depend on."""
        keys = ("cpu", "cores", "threads", "gpu", "kernels", "torch")
        return {key: getattr(self, key) for key in keys}

    @staticmethod
    def read(path: Path) -> Environment | None:
        if not path.exists():
            return None
        found = read_json(path)
        values = found
        if isinstance(found, dict):
            libraries = found.get("libraries")
            version = libraries.get("torch") if isinstance(libraries, dict) else None
            values = {**found, "torch": version, "recorded": found}
        return validated(Environment, values, path, "a record of where a run was made")


def read_json(path: Path, error: Error = RunError) -> Any:
    try:
        found = parse_json(path.read_bytes())
        _refuse_huge(found)
        return found
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise error(f"{path} cannot be read as JSON: {problem}") from None


def _refuse_huge(found: Any) -> None:
    """Numbers that no run has, of which squares and sums would be none at all."""
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    for value in inside:
        _refuse_huge(value)
    if isinstance(found, (int, float)) and MOST <= abs(found) < math.inf:
        raise ValueError(f"a number in it is beyond {MOST:g}")


def validated(
    model: type[Model], found: Any, path: Path, what: str, error: Error = RunError
) -> Model:
    """What was read from `path` as `model`, or a sentence on the first key that does not fit."""
    try:
        return model.model_validate(found)
    except ValidationError as problem:
        first = problem.errors()[0]
    *inside, key = first["loc"] or ("",)
    if key == "" and first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
    elif key == "":
        reason = "it holds no JSON object"
    elif first["type"] == "missing":
        reason = f"{_place(inside) or 'it'} has no {key!r}"
    else:
        place, rule = _place([*inside, key]), first["msg"]
        reason = f"{place} is {quoted(first['input'])}, but {rule[0].lower()}{rule[1:]}"
    raise error(f"{path} is not {what}: {reason}")


def _place(parts: list[int | str]) -> str:
    """`effects[0].p` of ("effects", 0, "p")."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")
