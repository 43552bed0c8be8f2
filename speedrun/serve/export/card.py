"""The model card: README.md with what is known of the model, how to load it, and what it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speedrun.serve.export.architecture import MODELLING, Architecture

HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- speedrun
- nanogpt
{extra}---

# {name}

A small GPT of {parameters:,} parameters, trained by Speedrun with the recipe `{recipe}` on the
track `{track}`: {step:,} steps, {training_tokens:,} tokens.

"""

USE = """
## How to use it

{code}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this one
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = AutoModelForCausalLM.from_pretrained(folder{trust})
inputs = tokenizer("def main", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=60)[0]))
```

```python
from transformers import pipeline

write = pipeline("text-generation", model="."{trust})
print(write("def main", max_new_tokens=60)[0]["generated_text"])
```

lm-evaluation-harness: `lm_eval --model hf --model_args pretrained=.{harness} --tasks ...`

- The tokenizer opens every text with `<|endoftext|>`, as in training. The same string inside of a
  text is that token too; with `split_special_tokens=True` it is plain text.
{notes}
## What it is not

It is the result of a training race: it goes on from a text in the manner of its training data and
knows nothing else. It follows no instructions, it was not aligned or filtered, and what it says is
not to be relied on. Beyond {context:,} tokens it was never trained.
"""


def card(facts: dict[str, Any], architecture: Architecture) -> str:
    own = architecture.own_code
    parts = [
        HEADER.format(extra="- custom_code\n" if own else "", **facts),
        "| | |\n|---|---|\n",
        *(f"| {name} | {value} |\n" for name, value in rows(facts, architecture)),
        USE.format(
            code=(
                f"The model is one readable file, `{MODELLING}`, which transformers runs if you "
                "let it (`trust_remote_code=True`). It needs transformers 4.57 or newer."
                if own
                else f"The model is {architecture.title}: no code comes with it."
            ),
            trust=", trust_remote_code=True" if own else "",
            harness=",trust_remote_code=True" if own else "",
            context=facts["context"],
            notes="".join(f"- {note}\n" for note in notes(facts, own)),
        ),
    ]
    return "".join(parts)


def rows(facts: dict[str, Any], architecture: Architecture) -> Iterator[tuple[str, str]]:
    data, tokenizer, code = facts["data"], facts["tokenizer"], facts["code"]
    validation, machine = facts["validation"], facts["machine"]
    yield "recipe, track, seed", f"`{facts['recipe']}`, `{facts['track']}`, {facts['seed']}"
    yield "architecture", architecture.title
    yield "training", f"{facts['step']:,} steps of {facts['steps_of_schedule']:,}"
    yield "validation loss", with_range(validation, "loss", "nats per token")
    yield "", with_range(validation, "bits_per_byte", "bits per byte")
    if validation["rows"]:
        each = validation["tokens"] // validation["rows"]
        how = f"over {validation['rows']:,} rows of {each:,} tokens; not over other seeds"
        yield "the intervals", f"95%, {how}"
    else:
        yield "the intervals", f"none: {validation['why_no_range']}"
    if facts["test"]:
        test = facts["test"]
        bits = test["bits_per_byte"]
        second = f", {bits:.4f} bits per byte" if bits else ""
        yield "test loss", f"{test['loss']:.4f} nats per token{second}"
    yield "data", ", ".join(f"`{name}`" for name in data["sources"] or [data["dataset"]])
    yield "dataset fingerprint", f"`{data['dataset_fingerprint']}`"
    if data["corpus_sha256"]:
        yield "corpus SHA-256", f"`{data['corpus_sha256']}`"
    yield "tokenizer", f"`{tokenizer['spec']}`, {tokenizer['ids']:,} ids"
    yield "context", f"{facts['context']:,} tokens"
    inside = ", inside of its document" if facts["documents"] else ""
    yield "a token sees", facts["window"] + inside
    if code:
        changed = " with changes" if code["changed_since_commit"] else ""
        yield "code", f"speedrun {code['speedrun']}, commit `{code['git_commit']}`{changed}"
        where = [machine["cpu"], machine["gpu"], f"{machine['cores']} cores"]
        yield "trained on", ", ".join(str(each) for each in where if each)
        yield "with", f"torch {machine['torch']}, Python {machine['python']}"
    for table, code in facts["own_code"].items():
        yield f"its own {table}", f"`{code}`"
    if facts["command"]:
        yield "trained by", f"`{facts['command']}`"
    if facts["forced"]:
        yield "forced on resuming", "; ".join(facts["forced"])
    yield "exported by", f"`{facts['export_command']}`"


def with_range(validation: dict[str, Any], key: str, unit: str) -> str:
    value, ends = validation[key], validation[f"{key}_range"]
    if value is None:
        return f"{unit}: not known"
    return f"{value:.4f} {unit}" + (f" ({ends[0]:.4f} to {ends[1]:.4f})" if ends else "")


def notes(facts: dict[str, Any], own: bool) -> Iterator[str]:
    tokenizer = facts["tokenizer"]
    padded = tokenizer["ids_with_padding"] - tokenizer["ids"]
    if padded:
        yield (
            f"Logits have {padded} columns more than there are tokens: the softmax of training "
            "had them. `generation_config.json` keeps them from being written."
        )
    if own:
        yield (
            "The cache is a `DynamicCache`; `generate` makes one. It holds the ids of the text "
            "too, from which documents follow, so no other kind of cache will do."
        )
