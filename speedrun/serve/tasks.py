"""Multiple choice: which of the choices does a run find the likeliest after a context?

A file holds JSON lines, each with a `context`, `choices` and an `answer`: the number of a choice,
counted from 0, or its text. The log-likelihood of a choice is the sum over its tokens, each given
end-of-text, the context and the choice's tokens before it. Which tokens are the choice's is decided
as in lm-evaluation-harness: those of context + choice that follow as many as the context alone has,
where white space at the end of a context counts as the beginning of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speedrun.data.readers import COMPRESSIONS, read_records, text_of
from speedrun.data.shards import TOKEN_DTYPE, Tokens
from speedrun.data.tokenizer import Tokenizer
from speedrun.errors import DataError, quoted
from speedrun.serve.estimates import Difference, Interval, difference_of_shares, wilson
from speedrun.serve.evaluate import Row, Scorer
from speedrun.serve.load import LoadedRun

EXAMPLE = '{"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}'
SUM, PER_BYTE, PER_TOKEN = RULES = ("sum", "per byte", "per token")


@dataclass(frozen=True)
class Item:
    """One question; `where` is its file and line."""

    context: str
    choices: tuple[str, ...]
    answer: int
    where: str


def read_items(path: Path) -> list[Item]:
    """All items of a file, or the first thing that is wrong with it, by its line."""
    records = read_records(path, COMPRESSIONS.get(path.suffix.lower()), EXAMPLE)
    items = [_item(record, where) for record, where, _ in records]
    if not items:
        raise DataError(f"{path} holds no items: each line must be an object such as {EXAMPLE}")
    return items


def _item(record: dict[str, Any], where: str) -> Item:
    missing = [key for key in ("context", "choices", "answer") if key not in record]
    if missing:
        raise DataError(f"{where} has no {missing[0]!r}: each line must be like {EXAMPLE}")
    context, choices = _text(record["context"], "its context", where), record["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(
            f"{where} needs a list of at least two texts under 'choices': write it like {EXAMPLE}"
        )
    texts = tuple(_text(one, f"choice {number}", where) for number, one in enumerate(choices))
    for number, one in enumerate(texts):
        if not one:
            raise DataError(f"{where} has an empty choice {number}: give every choice a text")
        if one in texts[:number]:
            raise DataError(
                f"{where} has the same text for choices {texts.index(one)} and {number}: leave one "
                "out, for they cannot be told apart"
            )
    return Item(context, texts, _answer(record["answer"], texts, where), where)


def _text(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} has something other than text for {what}: write it in quotes")
    return text_of({what: value}, what, where)  # refuses what UTF-8 cannot hold


def _answer(answer: Any, choices: Sequence[str], where: str) -> int:
    """A number of a choice, or the text of one; white space around it may be left out."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < len(choices):
            return answer
        raise DataError(
            f"{where} has the answer {answer}, but its {len(choices)} choices are numbered from 0 "
            f"to {len(choices) - 1}"
        )
    if not isinstance(answer, str):
        raise DataError(
            f"{where} has an answer that is neither the number of a choice, from 0, nor its text"
        )
    if answer in choices:
        return choices.index(answer)
    alike = [number for number, one in enumerate(choices) if one.strip() == answer.strip()]
    if len(alike) != 1:
        how = "several" if alike else "none"
        raise DataError(
            f"{where} has the answer {quoted(answer)}, which is the text of {how} of its "
            "choices: give "
            "the number of one, from 0"
        )
    return alike[0]


def encode_pair(tokenizer: Tokenizer, context: str, choice: str) -> tuple[Tokens, Tokens]:
    """The ids of the context, end-of-text first, and those of the choice."""
    kept = context.rstrip()
    of_context = tokenizer.encode(kept)
    whole = tokenizer.encode(context + choice)
    opened = np.concatenate([np.array([tokenizer.eot], TOKEN_DTYPE), of_context])
    return opened, whole[len(of_context) :]


@dataclass(frozen=True)
class Answers:
    """Of every item and rule, whether the run's best choice is the answer."""

    items: int
    choices: int
    chance: float
    truncated: int  # choices whose context had to be cut
    scores: list[list[float]]  # the log-likelihood of each item's choices
    right: dict[str, list[bool]]


def answer_items(
    run: LoadedRun,
    items: Sequence[Item],
    context: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Answers:
    """An item is right if its answer scores higher than every other choice: a tie is wrong.

    Of an item longer than the context its last ids are kept.
    """
    scores = [[0.0] * len(item.choices) for item in items]
    counts = [[0] * len(item.choices) for item in items]
    places = [(i, j) for i, item in enumerate(items) for j in range(len(item.choices))]
    cut = 0

    def rows() -> Iterator[Row]:
        nonlocal cut
        for owner, (i, j) in enumerate(places):
            before, after = encode_pair(run.tokenizer, items[i].context, items[i].choices[j])
            _refuse_lengths(items[i], j, len(after), context)
            ids = np.concatenate([before, after])
            cut += len(ids) - 1 > context
            counts[i][j] = len(after)
            yield Row(owner, ids[-context - 1 :], len(after), 1.0)

    for done, (row, nats) in enumerate(Scorer(run)(rows()), start=1):
        i, j = places[row.owner]
        scores[i][j] = -nats
        progress(done)
    sizes = {
        SUM: [[1] * len(item.choices) for item in items],
        PER_BYTE: [[len(choice.encode()) for choice in item.choices] for item in items],
        PER_TOKEN: counts,
    }
    right = {
        rule: [
            _is_best(item.answer, [score / size for score, size in zip(*both, strict=True)])
            for item, *both in zip(items, scores, sizes[rule], strict=True)
        ]
        for rule in RULES
    }
    chance = sum(1 / len(item.choices) for item in items) / len(items)
    return Answers(len(items), len(places), chance, cut, scores, right)


def _refuse_lengths(item: Item, number: int, tokens: int, context: int) -> None:
    choice = item.choices[number]
    if not tokens:
        raise DataError(
            f"{item.where}: choice {number} ({choice[:20]!r}) adds no token to its context under "
            "this run's tokenizer, which makes one of both: let the choice begin with a space"
        )
    if tokens > context:
        raise DataError(
            f"{item.where}: choice {number} is {tokens:,} tokens long, and the context takes "
            f"{context:,}: use a longer --context, or leave the item out"
        )


def _is_best(answer: int, scores: Sequence[float]) -> bool:
    others = [score for number, score in enumerate(scores) if number != answer]
    return scores[answer] > max(others)


def accuracies(answers: Answers) -> dict[str, tuple[float, Interval]]:
    """By rule, the share of items that are right and its interval."""
    found = {}
    for rule in RULES:
        right = sum(answers.right[rule])
        found[rule] = right / answers.items, wilson(right, answers.items)
    return found


def compare_answers(second: Answers, first: Answers) -> dict[str, Difference]:
    """By rule, the second run's accuracy less the first's on the same items."""
    found = {}
    for rule in RULES:
        pairs = list(zip(second.right[rule], first.right[rule], strict=True))
        gained, lost = pairs.count((True, False)), pairs.count((False, True))
        found[rule] = difference_of_shares(gained, lost, len(pairs))
    return found
