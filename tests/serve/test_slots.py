"""Slots against the whole forward of the model: alone, together, full, with documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import speedrun.serve.slots
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.data.loader import document_ids
from speedrun.model import native
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.serve.slots import Slots
from tests.train.heard import Make

EOT = 256
EVERYTHING = (
    "model.layers=4", "model.kv_heads=1", "model.x0_mixing=true", "model.value_embeddings=ends",
    "model.value_tables=1", "model.value_weights=pair", "model.unet_skips=true",
    "model.attention_free=[2]", "model.positions=half-rotary", "model.softcap=15.0",
    "model.key_offset=true", "model.bigram_rows=500",
    "model.zero_init_projections=false", "model.zero_init_head=false", "batch.length=512",
    "batch.tokens=1024", "validation.tokens=1024", "attention.documents=true",
)  # fmt: skip


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


def slots_of(config: Config, *, native_decoder: bool = True, slots: int = 1) -> Slots:
    """A fresh model whose every weight matters."""
    torch.manual_seed(0)
    model = GPT(config.model, 257, config.batch.length).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    with pytest.MonkeyPatch.context() as patch:
        if not native_decoder:
            patch.setattr(speedrun.serve.slots, "decoder_for", lambda *_: None)
        made = Slots(model, planner_of(config), EOT, slots)
    assert native_decoder == (made._decoder is not None) or isinstance(native.load(), str)
    return made


def planner_of(config: Config) -> AttentionPlanner:
    planner = AttentionPlanner(config, torch.device("cpu"))
    planner.apply_settings(settings_at(config, config.steps))
    return planner


def logits_of(slots: Slots, config: Config, ids: list[int]) -> Tensor:
    """What the whole forward gives after each token."""
    documents = torch.from_numpy(document_ids(np.array([ids], dtype=np.uint16), EOT))
    plan = planner_of(config).plan(documents)
    with torch.no_grad():
        logits: Tensor = slots._model(torch.tensor([ids]), plan)[0, :, :257]
    return logits


def drawn(count: int) -> list[int]:
    ids: list[int] = torch.randint(0, 256, (count,)).tolist()
    return ids


def after(slots: Slots, slot: int, ids: list[int]) -> Tensor:
    """Logits after these tokens of a slot's text; a copy, since the next call changes them."""
    return torch.from_numpy(slots.feed({slot: ids})[slot].copy())


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@ALL
@EITHER_WAY
def test_cached_logits_equal_the_full_forward(
    tiny: Make, switches: tuple[str, ...], native_decoder: bool
) -> None:
    """The first tokens one at a time, then a part in one pass, then one at a time again."""
    config = tiny(*switches)
    slots = slots_of(config, native_decoder=native_decoder)
    slot, ids = slots.take(), drawn(config.batch.length - 3)
    full = logits_of(slots, config, ids)
    cut = len(ids) - 40
    for index in range(3):
        assert_close(after(slots, slot, [ids[index]]), full[index])
    assert_close(after(slots, slot, ids[3:cut]), full[cut - 1])
    for index in range(cut, len(ids)):
        assert_close(after(slots, slot, [ids[index]]), full[index])


@ALL
@EITHER_WAY
def test_a_full_cache_forgets_the_older_half(
    tiny: Make, switches: tuple[str, ...], native_decoder: bool
) -> None:
    config = tiny(*switches)
    room = config.batch.length
    slots = slots_of(config, native_decoder=native_decoder)
    slot, ids = slots.take(), drawn(room + 5)
    after(slots, slot, ids[: room - 2])
    for index in range(room - 2, room):
        last = after(slots, slot, [ids[index]])
    assert_close(last, logits_of(slots, config, ids[:room])[-1])
    expected = logits_of(slots, config, ids[room - room // 2 :])
    for index in range(5):
        assert_close(after(slots, slot, [ids[room + index]]), expected[room // 2 + index])
    assert slots.sight(slot, room + 5).read_from == room - room // 2


@EITHER_WAY
def test_of_a_prompt_longer_than_the_context_the_end_is_read(
    tiny: Make, native_decoder: bool
) -> None:
    config = tiny(*EVERYTHING)
    room = config.batch.length
    slots = slots_of(config, native_decoder=native_decoder)
    slot, ids = slots.take(), drawn(room + 20)
    passes: list[int] = []
    slots._model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].size(1)))
    found = after(slots, slot, ids)
    assert passes == [room], "in one pass"
    assert_close(found, logits_of(slots, config, ids[-room:])[-1])
    slots.give_back(slot)
    slot = slots.take()
    assert_close(after(slots, slot, ids[:9]), logits_of(slots, config, ids[:9])[-1])


@pytest.mark.parametrize("documents", ["true", "false"])
@EITHER_WAY
def test_documents_inside_of_a_text(tiny: Make, native_decoder: bool, documents: str) -> None:
    """They open with end-of-text: in a short prompt, in a longer one, between single tokens."""
    config = tiny(*EVERYTHING, *BLOCKS, f"attention.documents={documents}")
    slots = slots_of(config, native_decoder=native_decoder)
    slot, ids = slots.take(), drawn(100)
    ids[0] = ids[8] = ids[40] = ids[70] = EOT
    full = logits_of(slots, config, ids)
    assert_close(after(slots, slot, ids[:20]), full[19])  # as few as the decoder takes
    assert_close(after(slots, slot, ids[20:60]), full[59])
    for index in range(60, 100):
        assert_close(after(slots, slot, [ids[index]]), full[index])
    sight = slots.sight(slot, 100)
    assert sight.documents == (0, 8, 40, 70)
    assert sight.first == (70 if documents == "true" else 0)
    assert sight.read_from == 0
    earlier = slots.sight(slot, 45)
    assert (earlier.first, earlier.documents) == (40 if documents == "true" else 0, (0, 8, 40))


@EITHER_WAY
def test_a_text_is_the_same_to_the_bit_in_any_company(tiny: Make, native_decoder: bool) -> None:
    """Others come and go in other slots, with prompts short and long, and outgrow their room."""
    config = tiny(*EVERYTHING, "batch.length=128", "batch.tokens=256", "validation.tokens=1024")
    texts = [drawn(length) for length in (150, 3, 200, 60, 25, 140)]
    prompts = (7, 2, 90, 30, 1, 24)
    alone = []
    for ids, prompt in zip(texts, prompts, strict=True):
        slots = slots_of(config, native_decoder=native_decoder)
        slot = slots.take()
        rows = [after(slots, slot, ids[:prompt])]
        alone.append(rows + [after(slots, slot, [token]) for token in ids[prompt:]])
    slots = slots_of(config, native_decoder=native_decoder, slots=3)
    line, at_work = [*range(len(texts))], dict[int, int]()
    found: list[list[Tensor]] = [[] for _ in texts]
    while line or at_work:
        while line and slots.free:
            at_work[line.pop(0)] = slots.take()
        fed = {}
        for text, slot in at_work.items():
            done = prompts[text] + len(found[text]) - 1
            fed[slot] = (
                texts[text][done : done + 1] if found[text] else texts[text][: prompts[text]]
            )
        logits = slots.feed(fed)
        for text, slot in [*at_work.items()]:
            found[text].append(torch.from_numpy(logits[slot].copy()))
            if prompts[text] + len(found[text]) - 1 == len(texts[text]):
                slots.give_back(at_work.pop(text))
    for rows, expected in zip(found, alone, strict=True):
        assert torch.equal(torch.stack(rows), torch.stack(expected))
