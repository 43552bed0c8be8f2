"""The rows of a run's metrics: read strictly, and told once more as the story of a run.

Every row must follow from the config and from those before it, and the result from all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from speedrun.config.experiment import run_hash
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.files import parse_json
from speedrun.train.crossing import Crossing, Look, crossing
from speedrun.train.run import RunFolder
from speedrun.train.summary import Summary

ROUNDED = 1e-6  # seconds: the log keeps six digits, of milliseconds three
WALL_ROUNDED = 1e-3  # seconds: of the wall clock it keeps three
WALL_BESIDE = 1.0  # seconds: it is read once for the log and once for the result
FACTS = {"config.toml": "config", "environment.json": "code"}


class Row(BaseModel):
    """A row of metrics, of which only what is checked is read."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)
    step: int


class Said(BaseModel, frozen=True, strict=True):
    """What a run says it is, at every start and in every checkpoint; older versions did not."""

    experiment_sha256: str | None = None
    code_sha256: str | None = None
    train_steps: int | None = None

    @property
    def whole(self) -> bool:
        return None not in (self.experiment_sha256, self.code_sha256, self.train_steps)

    def denied_by(self, config: Config, code: str | None) -> str | None:
        """The file that states other things than this; a length is not compared here."""
        if self.experiment_sha256 not in (None, run_hash(config)):
            return "config.toml"
        return None if self.code_sha256 in (None, code) else "environment.json"


class Begun(Row, Said):
    dataset_fingerprint: str


class Trained(Row):
    tokens: int
    seconds: float
    wall_seconds: float
    ms: float
    loss: float | None
    lr_multiplier: float


class Validated(Row):
    tokens: int
    seconds: float
    wall_seconds: float
    loss: float | None
    val_tokens: int


class Rewound(Row):
    from_step: int


class Ended(Row):
    code: int


ROWS: dict[str, type[Row]] = {
    "start": Begun, "resume": Begun, "train": Trained, "val": Validated, "rewind": Rewound,
    "end": Ended,
}  # fmt: skip
END = b'{"kind": "end"'


def read_rows(run: RunFolder) -> list[Row]:
    """The rows of metrics that are checked, up to the run's end; no line may be damaged there."""
    lines = run.metrics.read_bytes().splitlines() if run.metrics.is_file() else []
    last = max((i for i, line in enumerate(lines) if line.startswith(END)), default=-1)
    rows: list[Row] = []
    for number, line in enumerate(lines[: last + 1], 1):
        try:
            found = parse_json(line)
            model = ROWS.get(found["kind"])
            if model:
                rows.append(model.model_validate(found))
        except (ValueError, TypeError, KeyError) as error:
            why = "cannot be used"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                why = f"has no usable {'.'.join(map(str, first['loc']))!r}"
            raise RunError(f"line {number} of metrics.jsonl {why}") from None
    return rows


def wrong_rows(
    rows: Sequence[Row], config: Config, code: str | None, summary: Summary
) -> Iterator[str]:
    """The story of a run once more: every row follows from those before it, the result from all."""
    if not rows or not isinstance(rows[0], Begun):
        yield "its metrics do not begin with a start"
    at, seconds, wall, end = 0, 0.0, 0.0, None
    looks: list[Validated] = []
    for row in rows:
        if isinstance(row, Begun):
            if row.dataset_fingerprint != summary.dataset_fingerprint:
                then = row.dataset_fingerprint[:12]
                yield (
                    f"from step {row.step} it was trained on dataset {then}, not on "
                    f"{summary.dataset_fingerprint[:12]}"
                )
            if other := row.denied_by(config, code):
                what = FACTS[other]
                yield f"from step {row.step} it was made with another {what} than {other} has"
            if row.step != at:
                yield f"it goes on from step {row.step} when {at} steps are done"
        elif isinstance(row, Rewound):
            if row.from_step != at or not 0 < row.step < at:
                yield f"it goes back from step {row.from_step} when {at} steps are done"
            at = row.step  # what was logged after it counts no more
            looks = [look for look in looks if look.step <= at]
        elif isinstance(row, Trained):
            if row.step != at + 1:
                yield f"the row of step {at + 1} is missing: after step {at} comes {row.step}"
            if row.tokens != row.step * config.batch.tokens:
                yield f"step {row.step} stands at {row.tokens:,} tokens"
            if row.seconds < seconds:
                yield f"the clock falls from {seconds} to {row.seconds} s at step {row.step}"
            if abs(row.seconds - seconds - row.ms / 1000) > 2 * ROUNDED:
                took = f"{1000 * (row.seconds - seconds):.3f} ms by the clock"
                yield f"step {row.step} took {took} and {row.ms} by its own row"
            if row.lr_multiplier != settings_at(config, at).learning_rate_multiplier:
                yield f"step {row.step} has another learning rate than its config gives it"
            at, seconds, wall = row.step, row.seconds, row.wall_seconds
        elif isinstance(row, Validated):
            # The validation of step 0 is made after step 1 (train/loop.py).
            here = at if row.step or at != 1 else 0
            if row.step != here or (looks and row.step <= looks[-1].step):
                yield f"it is validated at step {row.step} when {at} steps are done"
            if abs(row.seconds - (seconds if row.step else 0.0)) > ROUNDED:
                yield f"it is validated at {row.seconds} s, when its clock stands at {seconds}"
            looks.append(row)
        elif isinstance(row, Ended):
            end = row
    if end is None or end is not rows[-1] or end.code or end.step != config.steps:
        yield "its metrics do not end with the last step and exit code 0"
    if at != config.steps:
        yield f"its metrics end at step {at}, its config at {config.steps}"
    if abs(seconds - summary.train_seconds) > ROUNDED:
        yield f"its last step ends at {seconds} s, and train_seconds is {summary.train_seconds}"
    if summary.wall_seconds < max(wall - WALL_ROUNDED, summary.train_seconds):
        yield (
            f"wall_seconds is {summary.wall_seconds}, its last step ends {wall} s after its start, "
            f"and train_seconds is {summary.train_seconds}"
        )
    if not looks or looks[-1].step != config.steps:
        yield "it was not validated at the last step"
    elif (looks[-1].loss, looks[-1].val_tokens) != (summary.val_loss, summary.val_tokens):
        last = f"{looks[-1].loss} on {looks[-1].val_tokens} tokens"
        yield f"its last validation gave {last}, its summary {summary.val_loss}"
    yield from _wrong_crossing(looks, config, summary)


def _wrong_crossing(looks: Sequence[Validated], config: Config, summary: Summary) -> Iterator[str]:
    """Where the validations cross the target, against what the summary says of it."""
    target, batch = config.train.target, config.batch.tokens
    found: Crossing | None = None
    below: int | None = None
    before: Look | None = None
    for row in looks:
        now = Look(row.step, row.loss, row.seconds, row.wall_seconds)
        if target and row.loss is not None and row.loss <= target:
            found, below = crossing(before, now, target), row.step * batch
            break
        before = now
    stated = (summary.reached_target, summary.tokens_to_target, summary.cell_steps,
              summary.first_validation_tokens)  # fmt: skip
    crossed = (True, found.tokens(batch), found.cell, below) if found else (False, None, None, None)
    if stated != crossed:
        yield (
            f"its validations reach the target after {crossed[1]} tokens, and tokens_to_target is "
            f"{stated[1]}"
        )
    elif found:
        for name, value, within in (
            ("seconds_to_target", found.seconds, ROUNDED),
            ("wall_seconds_to_target", found.wall_seconds, WALL_BESIDE),
            ("steps_to_target", found.steps, ROUNDED),
        ):
            stated_value = getattr(summary, name)
            if stated_value is None or not abs(value - stated_value) <= within:
                yield f"its validations give {value:.6f}, and {name} is {stated_value}"
