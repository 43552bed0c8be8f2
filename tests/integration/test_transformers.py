"""Exports in the real transformers, in an environment without our package: all recipes.

One child loads all of them, since importing transformers takes seconds. Our side is `GPT.forward`
with the plan of the documents that are in the ids, computed here beforehand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from speedrun.config.files import names
from speedrun.data.loader import document_ids
from speedrun.serve.export.export import export
from speedrun.serve.export.tokenizer import PROBES
from speedrun.serve.load import LoadedRun, load_run
from tests.integration.clean import clean_python, run_clean
from tests.serve.exporting import make_run, small

ROWS, TOKENS, NEW = 3, 300, 16
CHILD = Path(__file__).with_name("transformers_child.py")

# Switches that no recipe has together, or at all.
MORE: dict[str, tuple[str, ...]] = {
    "shared-heads": (
        "record-18", "model.heads=4", "model.head_dim=16", "model.kv_heads=2",
        "model.key_offset=true", "model.bigram_rows=300", "attention.window=tokens",
    ),
    "learned-values": (
        "baseline", "model.value_residual=true", "model.embedding_norm=true",
        "attention.documents=true", "model.softcap=20.0",
    ),
    "no-bias": ("baseline", "model.bias=false", "model.qk_norm=true"),
    "rows-differ": ("modern", "model.pad_embeddings=false", "model.vocab_multiple=64"),
    "grouped": ("modern", "model.kv_heads=1", "model.softcap=15.0", "model.mlp_ratio=3"),
    "tied": ("modern", "model.tied_head=true"),
    "first-layer-free": ("best", "model.attention_free=[0, 1]", "model.value_embeddings=each"),
    "no-attention": (
        "best", "model.attention_free=[0, 1, 2, 3]", "model.value_embeddings=none",
    ),
}  # fmt: skip
ALL = [*names("recipe"), *MORE]
STOCK = {
    "baseline": "GPT2LMHeadModel",
    **dict.fromkeys(("modern", "modern-cosine", "record-08", "grouped", "tied"),
                    "NanoChatForCausalLM"),
}  # fmt: skip
THOROUGH = ("baseline", "record-03", "modern", "best")  # one of each kind


def logits_of(loaded: LoadedRun, ids_BT: Tensor) -> Tensor:
    documents = document_ids(ids_BT.numpy().astype(np.uint16), loaded.tokenizer.eot)
    with torch.no_grad():
        logits: Tensor = loaded.model(ids_BT, loaded.planner.plan(torch.from_numpy(documents)))
    return logits.float()


def written(loaded: LoadedRun, prompt: list[int]) -> list[int]:
    """The likeliest text by whole passes of our model."""
    ids = list(prompt)
    for _ in range(NEW):
        last = logits_of(loaded, torch.tensor([ids]))[0, -1, : loaded.tokenizer.vocab_size]
        if int(last.argmax()) == loaded.tokenizer.eot:
            break
        ids.append(int(last.argmax()))
    return ids[len(prompt) :]


def prepare(name: str, root: Path, dataset: Path) -> Path:
    """An export, with what it should compute beside it."""
    recipe, *overrides = MORE.get(name, (name,))
    run = make_run(small(recipe, dataset, *overrides), root / "run")
    export(run.path, root / "exported")
    loaded = load_run(run.path)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (ROWS, TOKENS), generator=draw)
    ids[0, 0] = ids[0, 140] = ids[1, 200] = ids[1, 201] = ids[2, 20] = loaded.tokenizer.eot
    save_file({"ids": ids, "logits": logits_of(loaded, ids)}, root / "expected.safetensors")
    prompts = [ids[0, :150].tolist(), ids[1, :40].tolist(), ids[2, :7].tolist()]
    facts = {
        "prompts": prompts,
        "greedy": [written(loaded, prompt) for prompt in prompts],
        "new": NEW,
        "tokens": loaded.tokenizer.vocab_size,
        "length": loaded.model.length,
        "texts": [(text, loaded.tokenizer.encode(text).tolist()) for text in PROBES],
        "thorough": name in THOROUGH,
    }
    (root / "expected.json").write_text(json.dumps(facts))
    return root / "exported"


@pytest.fixture(scope="module")
def found(
    tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the child says of every export, by its name."""
    python = clean_python("torch", "transformers")
    root = tmp_path_factory.mktemp("transformers")
    folders = {}
    for name in ALL:
        (root / name).mkdir()
        folders[name] = prepare(name, root / name, tiny_dataset)
    lines = run_clean(python, str(CHILD), *map(str, folders.values()), home=root).splitlines()
    return dict(zip(folders, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_transformers_computes_what_we_do(found: dict[str, dict[str, Any]], name: str) -> None:
    here = found[name]
    assert here["class"] == STOCK.get(name, "SpeedrunForCausalLM")
    for key in ("whole", "in parts", "in parts, cache given", "left", "right", "saved again"):
        assert here[key] < 5e-5, key
    assert here.get("eager", 0.0) < 5e-5
    assert here["loss"] < 1e-5


@pytest.mark.parametrize("name", ALL)
def test_generate_writes_what_we_write(found: dict[str, dict[str, Any]], name: str) -> None:
    here = found[name]
    for key in ("greedy", "greedy without cache", "greedy one at a time", "guessed ahead",
                "beams", "sampled"):  # fmt: skip
        assert here[key], key
    assert here["said"] == [], "nothing to complain about"


@pytest.mark.parametrize("name", ALL)
def test_sixteen_bits_and_the_tokenizer(found: dict[str, dict[str, Any]], name: str) -> None:
    here = found[name]
    assert here["tokens"]
    assert here["bfloat16"] < 0.05
    assert here.get("float16", 0.0) < 0.01
    assert here.get("piped", True)
    assert here.get("untrusted", True)


def test_ours_says_what_it_cannot_do(found: dict[str, dict[str, Any]]) -> None:
    said = found["best"]["refused"]
    assert len(said) == 5
    for sentence, word in zip(
        said,
        ("position_ids", "output_attentions", "attention_mask", "input_ids", "DynamicCache"),
        strict=True,
    ):
        assert word in sentence
