from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speedrun.config.resolve import resolve
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.data.tokenizer import load_tokenizer
from speedrun.errors import RunError
from speedrun.model import native
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.serve import sample
from speedrun.serve.sample import Writer, draw, generate, load_run
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


ALL = pytest.mark.parametrize(
    "switches",
    [EVERYTHING, (*EVERYTHING, *BLOCKS), (*EVERYTHING, *TOKENS), GPT2],
    ids=["everything", "block-window", "token-window", "gpt2-like"],
)
# Off: torch takes the single tokens too, as where there is no compiler.
EITHER_WAY = pytest.mark.parametrize("native_decoder", [True, False], ids=["native", "torch"])


def writer_of(config: Config, *, native_decoder: bool = True) -> Writer:
    """A writer with a fresh model whose every weight matters."""
    torch.manual_seed(0)
    model = GPT(config.model, 257, config.batch.length).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    with pytest.MonkeyPatch.context() as patch:
        if not native_decoder:
            patch.setattr(sample, "decoder_for", lambda *_: None)
        writer = Writer(model, config, config.steps)
    assert native_decoder == (writer._decoder is not None) or isinstance(native.load(), str)
    return writer


def logits_of(writer: Writer, config: Config, ids: list[int]) -> Tensor:
    """What the whole forward gives after each token."""
    attention = AttentionPlanner(config, torch.device("cpu"))
    attention.apply_settings(settings_at(config, config.steps))
    plan = attention.plan(torch.zeros(1, len(ids), dtype=torch.int32))
    with torch.no_grad():
        logits: Tensor = writer._model(torch.tensor([ids]), plan)[0, :, :257]
    return logits


def drawn(count: int) -> list[int]:
    ids: list[int] = torch.randint(0, 256, (count,)).tolist()
    return ids


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@ALL
@EITHER_WAY
def test_cached_logits_equal_the_full_forward(
    tiny: Make, switches: tuple[str, ...], native_decoder: bool
) -> None:
    """The first tokens one at a time, then a part in one pass, then one at a time again."""
    config = tiny(*switches)
    writer = writer_of(config, native_decoder=native_decoder)
    ids = drawn(config.batch.length - 3)
    full = logits_of(writer, config, ids)
    cut = len(ids) - 40
    for index in range(3):
        assert_close(writer.feed([ids[index]]), full[index])
    assert_close(writer.feed(ids[3:cut]), full[cut - 1])
    for index in range(cut, len(ids)):
        assert_close(writer.feed([ids[index]]), full[index])


@ALL
@EITHER_WAY
def test_a_full_cache_forgets_the_older_half(
    tiny: Make, switches: tuple[str, ...], native_decoder: bool
) -> None:
    config = tiny(*switches)
    room = config.batch.length
    writer = writer_of(config, native_decoder=native_decoder)
    ids = drawn(room + 5)
    writer.feed(ids[: room - 2])
    for index in range(room - 2, room):
        last = writer.feed([ids[index]])
    assert_close(last, logits_of(writer, config, ids[:room])[-1])
    expected = logits_of(writer, config, ids[room - room // 2 :])
    for index in range(5):
        assert_close(writer.feed([ids[room + index]]), expected[room // 2 + index])


@EITHER_WAY
def test_of_a_prompt_longer_than_the_context_the_end_is_read(
    tiny: Make, native_decoder: bool
) -> None:
    config = tiny(*EVERYTHING)
    room = config.batch.length
    writer = writer_of(config, native_decoder=native_decoder)
    ids = drawn(room + 20)
    passes: list[int] = []
    writer._model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].size(1)))
    found = writer.feed(ids)
    assert passes == [room], "in one pass"
    assert_close(found, logits_of(writer, config, ids[-room:])[-1])
    writer.forget()
    assert_close(writer.feed(ids[:9]), logits_of(writer, config, ids[:9])[-1])


def test_native_and_torch_write_the_same_text(tiny: Make, tiny_dataset: Path) -> None:
    config, tokenizer = tiny(*EVERYTHING), load_tokenizer(tiny_dataset / "tokenizer")
    texts = [
        list(generate(writer_of(config, native_decoder=way), tokenizer, "1 + ", tokens=60,
                      temperature=0.8, top_k=20, seed=4))
        for way in (True, False)
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert len(texts[0]) > 20


@pytest.mark.parametrize("top_k", [0, 3])
def test_tokens_are_drawn_by_their_odds(top_k: int) -> None:
    odds_V = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])
    source, count = torch.Generator().manual_seed(0), 20_000
    tokens = torch.tensor([draw(odds_V.log(), 1.0, top_k, source) for _ in range(count)])
    expected_V = odds_V if top_k == 0 else torch.tensor([0.0, 0.0, 0.4, 0.2, 0.3]) / 0.9
    found_V = torch.bincount(tokens, minlength=5) / count
    torch.testing.assert_close(found_V, expected_V, atol=0.015, rtol=0.0)
    assert found_V[1] == 0
    sharper = [draw(odds_V.log(), 0.1, top_k, source) for _ in range(500)]
    assert sharper.count(2) > 450


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
