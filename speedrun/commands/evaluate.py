"""`speedrun eval`: a run's loss on any text and its answers to multiple choice; or two runs'."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speedrun.data.corpus import Notes
from speedrun.errors import ConfigError
from speedrun.files import finite
from speedrun.serve.estimates import Difference, Interval
from speedrun.serve.evaluate import (
    NATS_PER_TOKEN,
    Loss,
    Scored,
    by_file,
    difference,
    score,
    total,
)
from speedrun.serve.load import LoadedRun, load_run
from speedrun.serve.tasks import (
    PER_BYTE,
    PER_TOKEN,
    SUM,
    Answers,
    accuracies,
    answer_items,
    compare_answers,
    read_items,
)
from speedrun.serve.texts import Texts
from speedrun.terminal.console import print_table
from speedrun.terminal.progress import stage_progress
from speedrun.train.run import RunFolder

MOST_CONTEXT = 1 << 20
MOST_FILES = 40  # listed in the terminal; --json has all
KEYS = {
    SUM: "accuracy",
    PER_BYTE: "accuracy_normalized",
    PER_TOKEN: "accuracy_per_token",
}
SHOWN = {SUM: "sum", PER_BYTE: "sum / bytes", PER_TOKEN: "sum / tokens"}


@dataclass(frozen=True)
class Judged:
    """One run, and what it makes of the texts and of the tasks."""

    path: Path
    run: LoadedRun
    context: int
    stride: int
    scored: Scored | None
    answers: Answers | None

    def as_dict(self) -> dict[str, Any]:
        """The keys that are always there come first, null where no text was named."""
        loss = asdict(total(self.scored)) if self.scored else dict.fromkeys(_LOSS_KEYS)
        found: dict[str, Any] = {
            "run": str(self.path),
            "step": self.run.trained.checkpoint.step,
            "tokenizer": self.run.tokenizer.spec,
            **loss,
            "documents": loss["documents"] or 0,
            "context": self.context,
            "stride": self.stride if self.scored else None,
            "trained_context": self.run.config.batch.length,
        }
        if self.scored:
            found["notes"] = _notes(self.scored.notes)
            files = by_file(self.scored)
            found["files"] = [{"file": name, **asdict(one)} for name, one in files]
        if self.answers:
            found["tasks"] = _tasks_as_dict(self.answers)
        return found


_LOSS_KEYS = tuple(Loss.__dataclass_fields__)


def evaluate_command(
    runs_and_texts: Sequence[str],
    *,
    context: int,
    stride: int,
    split: str,
    tasks: Path | None,
    text_field: str,
    as_json: bool,
) -> None:
    paths, names = _runs_first(runs_and_texts)
    if not names and tasks is None:
        raise ConfigError("nothing to judge it on: name text files, a dataset, or --tasks FILE")
    _refuse_idle(names, stride=stride, split=split)
    context, stride = _window(paths, context, stride)
    runs = [load_run(path, length=context) for path in paths]
    texts = Texts(names, split=split, text_field=text_field, runs=runs) if names else None
    items = read_items(tasks) if tasks else None
    judged = []
    for path, run in zip(paths, runs, strict=True):
        scored = answers = None
        if texts:
            with _bar(f"{path}", texts.total_bytes) as progress:
                scored = score(run, texts, context, stride, progress)
        if items:
            with _bar(f"{path}: tasks", sum(len(item.choices) for item in items)) as progress:
                answers = answer_items(run, items, context, progress)
        judged.append(Judged(path, run, context, stride, scored, answers))
    if as_json:
        print(json.dumps(finite(_as_dict(judged)), indent=2))
    else:
        _print(judged, tasks)


def _runs_first(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Run folders lead, and what follows is text."""
    count = next((i for i, word in enumerate(words) if not _is_run(word)), len(words))
    if not count:
        RunFolder(Path(words[0])).load_config()  # says what is wrong with it
    late = [word for word in words[count:] if _is_run(word)]
    if late:
        raise ConfigError(f"{late[0]} is a run folder: name the runs first, then the texts")
    if count > 2:
        raise ConfigError(f"eval takes one run or two, and {count} are named: leave some out")
    return [Path(word) for word in words[:count]], list(words[count:])


def _is_run(word: str) -> bool:
    return RunFolder(Path(word)).config.is_file()


def _refuse_idle(names: Sequence[str], *, stride: int, split: str) -> None:
    """Options that nothing would come of."""
    for option, given in (("--stride", stride), ("--split", split)):
        if given and not names:
            raise ConfigError(f"{option} is for texts, and none is named: leave it out")


def _window(paths: Sequence[Path], context: int, stride: int) -> tuple[int, int]:
    """Two runs are given the same context, by default what both were trained on."""
    trained = [RunFolder(path).load_config().batch.length for path in paths]
    context = context or min(trained)
    if context > MOST_CONTEXT:
        raise ConfigError(f"--context takes at most {MOST_CONTEXT:,} tokens, not {context:,}")
    if stride > context:
        raise ConfigError(
            f"with a --stride of {stride:,} and a context of {context:,}, tokens between would "
            f"not be predicted: use a stride of at most {context:,}"
        )
    return context, stride or context


@contextmanager
def _bar(stage: str, whole: int) -> Iterator[Callable[[int], None]]:
    """On a terminal alone: what is piped gets the result and nothing else."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with stage_progress() as progress:
        yield lambda done: progress(stage, done, whole)


def _as_dict(judged: Sequence[Judged]) -> dict[str, Any]:
    first = judged[0].as_dict()
    if len(judged) == 1:
        return first
    whole = {**first, "runs": [one.as_dict() for one in judged]}
    before, after = judged
    if before.scored and after.scored:
        whole["difference"] = _difference_as_dict(after, before)
    if before.answers and after.answers:
        found = compare_answers(after.answers, before.answers)
        whole["tasks_difference"] = {
            KEYS[rule]: {"difference": one.value, "interval": one.interval, "p": one.p}
            for rule, one in found.items()
        }
    return whole


def _compared(after: Judged, before: Judged) -> tuple[str, Difference]:
    assert after.scored
    assert before.scored
    same = after.run.tokenizer.fingerprint == before.run.tokenizer.fingerprint
    return difference(after.scored, before.scored, same_tokenizer=same)


def _difference_as_dict(after: Judged, before: Judged) -> dict[str, Any]:
    of, found = _compared(after, before)
    better = after.path if found.value < 0 else before.path
    return {
        "of": of,
        "difference": found.value,
        "stderr": found.stderr,
        "interval": found.interval,
        "p": found.p,
        "documents": len(before.scored.nats) if before.scored else 0,
        "better": str(better) if found.told_apart else None,
    }


def _tasks_as_dict(answers: Answers) -> dict[str, Any]:
    found: dict[str, Any] = {
        "items": answers.items, "choices": answers.choices, "chance": answers.chance,
    }  # fmt: skip
    for rule, (share, interval) in accuracies(answers).items():
        found |= {KEYS[rule]: share, f"{KEYS[rule]}_interval": interval}
    return found | {"truncated": answers.truncated}


def _notes(notes: Notes) -> list[str]:
    return [f"{count:,} {what}" for what, count in notes.items() if count]


# Below: the same for people.


def _print(judged: Sequence[Judged], tasks: Path | None) -> None:
    for index, one in enumerate(judged):
        print("\n" * bool(index) + _headline(one))
        if one.scored:
            _print_losses(one.scored)
        if one.answers and tasks:
            _print_accuracies(one.answers, tasks)
    if len(judged) == 2:
        _print_differences(judged[0], judged[1], tasks)


def _headline(one: Judged) -> str:
    trained = one.run.config.batch.length
    longer = f" (trained on {trained:,})" if one.context != trained else ""
    stride = f", stride {one.stride:,}" if one.scored and one.stride != one.context else ""
    step, tokenizer = one.run.trained.checkpoint.step, one.run.tokenizer.spec
    return (
        f"{one.path}, step {step:,}, tokenizer {tokenizer}, context {one.context:,}{longer}{stride}"
    )


def _print_losses(scored: Scored) -> None:
    files, whole = by_file(scored), total(scored)
    rows = [_row(name, loss) for name, loss in files[:MOST_FILES]]
    if len(files) > MOST_FILES:
        rest = f"and {len(files) - MOST_FILES:,} more files, all in --json"
        rows.append((rest, *[""] * (len(rows[0]) - 1)))
    if len(files) > 1:
        rows.append(_row("total", whole))
    header = ("file", "documents", "tokens", "bytes", "nats/token", "stderr", "bits/byte", "stderr")
    print_table((*header, "perplexity"), rows)
    for note in _notes(scored.notes):
        print(f"note: {note}")
    if whole.interval is None:
        print("one document gives no standard error: name more, or a file of several")
    else:
        print(
            f"{whole.nats_per_token:.4f} nats per token, 95% interval {_span(whole.interval)}, "
            f"over {whole.documents:,} documents"
        )


def _row(name: str, loss: Loss) -> tuple[str, ...]:
    return (
        name, f"{loss.documents:,}", f"{loss.tokens:,}", f"{loss.bytes:,}",
        f"{loss.nats_per_token:.4f}", _error(loss.stderr),
        f"{loss.bits_per_byte:.4f}", _error(loss.bits_per_byte_stderr), f"{loss.perplexity:,.2f}",
    )  # fmt: skip


def _error(stderr: float | None) -> str:
    return "-" if stderr is None else f"{stderr:.4f}"


def _span(interval: Interval, form: str = ".4f") -> str:
    return " to ".join(format(end, form) for end in interval)


def _print_accuracies(answers: Answers, tasks: Path) -> None:
    print(
        f"{tasks}: {answers.items:,} items with {answers.choices / answers.items:.1f} choices on "
        f"average, chance {answers.chance:.1%}"
    )
    rows = [
        (SHOWN[rule], f"{share:.1%}", _span(interval, ".1%"))
        for rule, (share, interval) in accuracies(answers).items()
    ]
    print_table(("log-likelihood", "accuracy", "95% interval"), rows)
    if answers.truncated:
        print(f"note: the contexts of {answers.truncated:,} choices were cut to fit")


def _print_differences(before: Judged, after: Judged, tasks: Path | None) -> None:
    print(f"\n{after.path} less {before.path}")
    if before.scored and after.scored:
        print(_sentence(before, after))
    if before.answers and after.answers and tasks:
        found = compare_answers(after.answers, before.answers)
        rows = [
            (SHOWN[rule], f"{one.value:+.1%}", _span(one.interval, "+.1%") if one.interval else "-",
             f"{one.p:.3g}")
            for rule, one in found.items()
        ]  # fmt: skip
        print_table(("log-likelihood", "accuracy", "95% interval", "p"), rows)


def _sentence(before: Judged, after: Judged) -> str:
    of, found = _compared(after, before)
    unit = "nats per token" if of == NATS_PER_TOKEN else "bits per byte"
    why = "" if of == NATS_PER_TOKEN else " (their tokenizers differ, so tokens cannot be compared)"
    text = f"{found.value:+.4f} {unit}{why}"
    if found.interval is None or found.p is None:
        return f"{text}: " + (
            "one document gives no error for it"
            if math.isfinite(found.value)
            else "one of them has no finite loss"
        )
    better = after.path if found.value < 0 else before.path
    verdict = f"{better} is better" if found.told_apart else "they are not told apart"
    return f"{text}, 95% interval {_span(found.interval, '+.4f')}, p = {found.p:.3g}: {verdict}"
