"""lm-evaluation-harness reads an export and finds what our own logits say: choices and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.serve.export.export import export
from speedrun.serve.load import LoadedRun, load_run
from tests.integration.clean import clean_python, run_clean
from tests.integration.test_transformers import logits_of
from tests.serve.exporting import make_run, small

CHILD = Path(__file__).with_name("harness_child.py")
CHOICES = """task: sums
dataset_path: json
dataset_kwargs:
  data_files: {{"test": {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
TEXTS = """task: texts
dataset_path: json
dataset_kwargs:
  data_files: {{"test": {data}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["<|endoftext|>"]
  do_sample: false
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""


def documents() -> list[dict[str, Any]]:
    """Sums with a right and two wrong answers of one length, in turn at each place."""
    found = []
    for n in range(12):
        answers = [f" {n + n + 10}", f" {90 - n}", f" {37 * n % 80 + 11}"]
        place = n % 3
        answers[0], answers[place] = answers[place], answers[0]
        question = "7 + 7 = 14\n" * n + f"{n + 10} + {n} ="
        found.append({"question": question, "choices": answers, "answer": place})
    return found


def log_likelihood(loaded: LoadedRun, context: str, continuation: str) -> float:
    """By our own model: the continuation after the context, which end-of-text opens."""
    begin = [loaded.tokenizer.eot, *loaded.tokenizer.encode(context).tolist()]
    ids = begin + loaded.tokenizer.encode(continuation).tolist()
    log_odds = logits_of(loaded, torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    return sum(float(log_odds[at - 1, ids[at]]) for at in range(len(begin), len(ids)))


def text_after(loaded: LoadedRun, context: str, tokens: int) -> str:
    ids = [loaded.tokenizer.eot, *loaded.tokenizer.encode(context).tolist()]
    begin = len(ids)
    for _ in range(tokens):
        last = logits_of(loaded, torch.tensor([ids]))[0, -1, : loaded.tokenizer.vocab_size]
        ids.append(int(last.argmax()))
        if ids[-1] == loaded.tokenizer.eot:
            break
    return loaded.tokenizer.decode(ids[begin:])


@pytest.mark.parametrize("recipe", ["best", "baseline"])
def test_the_harness_agrees_with_us(recipe: str, tiny_dataset: Path, tmp_path: Path) -> None:
    python = clean_python("torch", "transformers", "lm_eval", "datasets")
    run = make_run(small(recipe, tiny_dataset), tmp_path / "run")
    export(run.path, tmp_path / "exported")
    tasks, rows = tmp_path / "tasks", documents()
    tasks.mkdir()
    data = tasks / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("sums", CHOICES), ("texts", TEXTS)):
        (tasks / f"{name}.yaml").write_text(text.format(data=json.dumps(str(data))))
    words = (str(CHILD), str(tmp_path / "exported"), str(tasks), "sums", "texts")
    found = json.loads(run_clean(python, *words, home=tmp_path).splitlines()[-1])

    loaded = load_run(run.path)
    right = 0
    for number, responses in found["samples"]["sums"]:
        row = rows[number]
        ours = [log_likelihood(loaded, row["question"], each) for each in row["choices"]]
        theirs = [float(response[0][0]) for response in responses]
        assert theirs == pytest.approx(ours, abs=1e-3)
        right += ours.index(max(ours)) == row["answer"]
    assert found["results"]["sums"]["acc,none"] == pytest.approx(right / len(rows))
    assert 0 < right < len(rows), "a test that could not fail"
    for number, responses in found["samples"]["texts"]:
        assert responses[0][0] == text_after(loaded, rows[number]["question"], 8)
