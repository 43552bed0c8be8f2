from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speedrun.config.resolve import resolve
from speedrun.config.schedule import settings_at
from speedrun.data.tokenizer import load_tokenizer
from speedrun.errors import RunError
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.serve.sample import Writer, generate, load_run
from tests.conftest import TINY
from tests.train.heard import Make, train

EVERYTHING = (
    "model.layers=4", "model.kv_heads=1", "model.x0_mixing=true", "model.value_embeddings=ends",
    "model.value_tables=1", "model.value_weights=pair", "model.unet_skips=true",
    "model.attention_free=[2]", "model.positions=half-rotary", "model.softcap=15.0",
    "model.key_offset=true", "model.bigram_rows=500",
    "model.zero_init_projections=false", "model.zero_init_head=false", "batch.length=512",
    "batch.tokens=1024", "validation.tokens=1024", "attention.documents=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = resolve("modern", "nano", [*TINY, f"data.dir={tiny_dataset}"]).config
    folder = tmp_path_factory.mktemp("run")
    train(config, folder)
    return folder


BLOCKS = ("attention.window=blocks", "attention.window_start=128", "attention.window_end=256")
TOKENS = ("attention.window=tokens", "attention.window_start=64", "attention.window_end=192")
GPT2 = (
    "model.positions=learned", "model.norm=layer", "model.bias=true", "model.tied_head=true",
    "model.activation=gelu", "model.fused_qkv=true", "model.value_residual=true",
)  # fmt: skip


@pytest.mark.parametrize(
    "switches",
    [EVERYTHING, (*EVERYTHING, *BLOCKS), (*EVERYTHING, *TOKENS), GPT2],
    ids=["everything", "block-window", "token-window", "gpt2-like"],
)
def test_cached_logits_equal_the_full_forward(tiny: Make, switches: tuple[str, ...]) -> None:
    config = tiny(*switches)
    torch.manual_seed(0)
    model = GPT(config.model, 257, config.batch.length).eval()
    length = config.batch.length - 3
    ids = torch.randint(0, 256, (length,)).tolist()
    attention = AttentionPlanner(config, torch.device("cpu"))
    attention.apply_settings(settings_at(config, config.steps))
    plan = attention.plan(torch.zeros(1, length, dtype=torch.int32))
    with torch.no_grad():
        full = model(torch.tensor([ids]), plan)[0, :, :257]
    writer = Writer(model, config, config.steps)
    cut = length - 40
    torch.testing.assert_close(writer.feed(ids[:cut]), full[cut - 1], atol=2e-5, rtol=1e-4)
    for index in range(cut, length):
        torch.testing.assert_close(writer.feed([ids[index]]), full[index], atol=2e-5, rtol=1e-4)


def test_text_is_a_function_of_the_seed(trained: Path) -> None:
    def text(seed: int, temperature: float = 1.0) -> str:
        writer, tokenizer = load_run(trained)
        pieces = generate(
            writer, tokenizer, "1 + ", tokens=20, temperature=temperature, top_k=0, seed=seed
        )
        return "".join(pieces)

    assert text(0) == text(0)
    assert text(0) != text(1)
    assert text(0, temperature=0.0) == text(1, temperature=0.0)


def test_a_text_may_outgrow_the_context(trained: Path) -> None:
    writer, tokenizer = load_run(trained)
    pieces = generate(writer, tokenizer, "1" * 100, tokens=150, temperature=1.0, top_k=5, seed=0)
    assert len("".join(pieces)) > 60


def test_top_k_of_one_is_the_likeliest_token(trained: Path) -> None:
    texts = []
    for temperature, top_k in ((0.0, 0), (1.0, 1)):
        writer, tokenizer = load_run(trained)
        pieces = generate(
            writer, tokenizer, "2", tokens=10, temperature=temperature, top_k=top_k, seed=3
        )
        texts.append("".join(pieces))
    assert texts[0] == texts[1]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, trained: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        load_run(tmp_path)
    assert load_tokenizer(trained / "tokenizer").vocab_size == 257
