from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from speedrun.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from speedrun.errors import DataError
from speedrun.serve.load import LoadedRun
from speedrun.serve.tasks import (
    PER_BYTE,
    PER_TOKEN,
    RULES,
    SUM,
    Item,
    accuracies,
    answer_items,
    compare_answers,
    encode_pair,
    read_items,
)
from tests.serve.loaded import loaded, planner_of
from tests.train.heard import Make

BPE = train_bpe(["the cat sat on the hat, undo it  " * 40], 275)


def write(path: Path, *records: Any) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def item(context: Any = "a", choices: Any = (" b", " c"), answer: Any = 0) -> dict[str, Any]:
    return {"context": context, "choices": choices, "answer": answer, "id": "more is allowed"}


def test_an_answer_is_a_number_or_a_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        item(answer=1),
        "",
        item(answer=" c"),
        item(answer="c"),
        item(choices=["1", "0", " 0"], answer="0"),
        item(choices=["日本", "日"], answer="日"),
    )
    found = read_items(path)
    assert [one.answer for one in found] == [1, 1, 1, 1, 1]
    assert found[1].where == f"{path}, line 3"
    assert found[0].choices == (" b", " c")


def test_bad_lines_are_told_by_their_number(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ("[1]", "is a JSON list: each line must be an object such as .*context"),
        ("{", "is not JSON"),
        ({"context": "a", "choices": ["b", "c"]}, "has no 'answer'"),
        (item(context=3), "something other than text for its context"),
        (item(choices=["b", None]), "something other than text for choice 1"),
        (item(choices="bc"), "at least two texts"),
        (item(choices=[]), "at least two texts"),
        (item(choices=["b"]), "at least two texts"),
        (item(choices=["b", ""]), "an empty choice 1"),
        (item(choices=["b", "c", "b"]), "same text for choices 0 and 2"),
        (item(answer=2), "has the answer 2, but its 2 choices are numbered from 0 to 1"),
        (item(answer=-1), "has the answer -1"),
        (item(answer=True), "neither the number"),
        (item(answer=0.0), "neither the number"),
        (item(answer="d"), "'d', which is the text of none"),
        (item(choices=[" b", "b "], answer="b"), "the text of several"),
        ('{"context": "\\ud800", "choices": ["b", "c"], "answer": 0}', "half of a surrogate"),
    ]
    for record, sentence in cases:
        path = write(tmp_path / "t.jsonl", item(), record)
        with pytest.raises(DataError, match=sentence) as error:
            read_items(path)
        assert f"{path}, line 2" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_file_without_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no items"):
        read_items(write(tmp_path / "t.jsonl", ""))
    with pytest.raises(DataError, match="cannot be read"):
        read_items(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_items(tmp_path)


@pytest.mark.parametrize("context", ["the cat", "the cat ", "the cat \n ", "", "  ", "日"])
@pytest.mark.parametrize("choice", [" sat", "sat on", "é", " "])
def test_a_choice_is_what_follows_the_context(context: str, choice: str) -> None:
    """White space between the two is the choice's, so that a word's own space is in its token."""
    for tokenizer in (BPE, ByteTokenizer()):
        before, after = encode_pair(tokenizer, context, choice)
        assert before[0] == tokenizer.eot
        assert before[1:].tolist() == tokenizer.encode(context.rstrip()).tolist()
        whole = tokenizer.encode(context + choice).tolist()
        assert after.tolist() == whole[len(before) - 1 :]


def slow_scores(run: LoadedRun, one: Item, context: int) -> list[tuple[float, int]]:
    """Log-likelihood and tokens of each choice, one token at a time in float64."""
    planner, found = planner_of(run.config, "dense"), []
    for choice in one.choices:
        kept = one.context.rstrip()
        whole = run.tokenizer.encode(one.context + choice).tolist()
        before = run.tokenizer.encode(kept).tolist()
        ids = [run.tokenizer.eot, *before, *whole[len(before) :]]
        count, ids = len(whole) - len(before), ids[-context - 1 :]
        score = 0.0
        for place in range(len(ids) - count, len(ids)):
            row = torch.tensor([ids[:place]])
            plan = planner.plan(torch.zeros(row.shape, dtype=torch.int32))
            with torch.no_grad():
                odds = F.log_softmax(run.model(row, plan)[0, -1].double(), dim=-1)
            score += odds[ids[place]].item()
        found.append((score, count))
    return found


ITEMS = [
    Item("the cat", (" sat", " sat on", " sat on the hat"), 1, "1"),  # each begins the next
    Item("", ("the", "hat"), 0, "2"),
    Item("the hat " * 9, ("cat", "undo it", "é日"), 2, "3"),
    Item("undo", (" it", " the cat"), 0, "4"),
]


@pytest.mark.parametrize("context", [256, 12])
@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()], ids=["bpe", "byte"])
def test_scores_are_those_of_one_token_at_a_time(
    tiny: Make, tokenizer: Tokenizer, context: int
) -> None:
    config = tiny("batch.length=256", "batch.tokens=512", "model.zero_init_head=false")
    run = loaded(config, tokenizer=tokenizer)
    items = [one for one in ITEMS if context > 14 or tokenizer is BPE or one.where != "1"]
    answers = answer_items(run, items, context)
    slow = [slow_scores(run, one, context) for one in items]
    for mine, theirs in zip(answers.scores, slow, strict=True):
        assert mine == pytest.approx([score for score, _ in theirs], rel=2e-6)
    sizes = {
        SUM: [[1] * len(one.choices) for one in items],
        PER_BYTE: [[len(choice.encode()) for choice in one.choices] for one in items],
        PER_TOKEN: [[count for _, count in each] for each in slow],
    }
    for rule in RULES:
        best = [
            int(np.argmax([score / size for (score, _), size in zip(each, by, strict=True)]))
            for each, by in zip(slow, sizes[rule], strict=True)
        ]
        assert answers.right[rule] == [a == one.answer for a, one in zip(best, items, strict=True)]
    assert (answers.truncated > 0) == (context == 12)
    assert answers.chance == pytest.approx(
        math.fsum(1 / len(one.choices) for one in items) / len(items)
    )


def test_what_cannot_be_scored_is_told_by_its_line(tiny: Make) -> None:
    run = loaded(tiny("model.zero_init_head=false"), tokenizer=BPE)
    merged = next(
        (text[:cut], text[cut:])
        for text in ("the", "cat", "hat", "sat", "undo")
        for cut in range(1, len(text))
        if len(BPE.encode(text)) == len(BPE.encode(text[:cut]))
    )
    items = [
        Item("a", (" b", " c"), 0, "f, line 1"),
        Item(merged[0], (merged[1], " c"), 0, "f, line 2"),
    ]
    with pytest.raises(DataError, match=r"f, line 2: choice 0 .* adds no token"):
        answer_items(run, items, 64)
    long = [Item("a", (" b", " b" * 99), 0, "f, line 1")]
    with pytest.raises(DataError, match=r"f, line 1: choice 1 is .* longer --context"):
        answer_items(run, long, 8)


def test_a_tie_is_wrong_whichever_choice_comes_first(tiny: Make) -> None:
    """A head of zeros finds all bytes as likely."""
    run = loaded(tiny())
    with torch.no_grad():
        run.model.head_weight.zero_()
    items = [Item("a", ("b", "c"), answer, "1") for answer in (0, 1)]
    answers = answer_items(run, items, 64)
    assert answers.right == {rule: [False, False] for rule in RULES}
    shorter = answer_items(run, [Item("a", ("b", "cc"), 0, "1")], 64)
    assert shorter.right == {SUM: [True], PER_BYTE: [False], PER_TOKEN: [False]}


def test_accuracies_and_their_differences(tiny: Make) -> None:
    run = loaded(tiny("model.zero_init_head=false"))
    answers = answer_items(run, ITEMS, 64)
    for rule, (share, (low, high)) in accuracies(answers).items():
        assert share == sum(answers.right[rule]) / 4
        assert 0 <= low <= share <= high <= 1
        assert low < high
    assert {one.value for one in compare_answers(answers, answers).values()} == {0}
