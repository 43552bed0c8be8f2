"""The steps of one token against the model itself, as every compiler builds them."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from speedrun.model import native
from speedrun.model.cache import Cache
from speedrun.model.decode import Decoder, Draws, Token, decoder_for
from speedrun.model.gpt import GPT
from speedrun.model.steps import PackedWeights, Step, Steps
from speedrun.serve.sampling import Sampler, Sampling, draw

from . import builds
from .test_gpt import SWITCH_SETS, T, V, causal, ids_of, lively

ODD: list[dict[str, Any]] = [
    {"width": 50, "heads": 5, "positions": "learned", "qk_norm": True, "softcap": 2.0},
    {"width": 36, "heads": 3, "kv_heads": 1, "value_residual": True, "embedding_norm": False},
    {"width": 80, "heads": 2, "head_dim": 20, "positions": "half-rotary", "key_offset": True,
     "unet_skips": True, "x0_mixing": True, "value_embeddings": "each", "bigram_rows": 7},
]  # fmt: skip


def cache_for(model: GPT, slots: int = 1) -> Cache:
    sizes = model.config
    return Cache(sizes.layers, slots, sizes.groups, T, sizes.size_of_head)


def decoder_of(model: GPT, slots: int = 1) -> Decoder:
    decoder = decoder_for(model, cache_for(model, slots))
    assert decoder is not None
    return decoder


def decoded(decoder: Decoder, ids: list[int], slot: int = 0) -> Tensor:
    return torch.stack([decoder([(slot, token, 0)])[slot].clone() for token in ids])


def assert_close(found: Tensor, expected: Tensor) -> None:
    size = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * size)


def expected_of(model: GPT, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids]), causal(length=len(ids)))[0, :, :V]
    return logits


@pytest.mark.parametrize("name", builds.HERE_NAMES)
@pytest.mark.parametrize("switches", SWITCH_SETS + ODD)
def test_every_switch(switches: dict[str, Any], name: str) -> None:
    model, ids = lively(**switches), ids_of(length=70)[0].tolist()
    with builds.used(name):
        assert_close(decoded(decoder_of(model), ids), expected_of(model, ids))


class OneArray(native.Kernel):
    """An emulated CPU's kernels, which see none of our memory: it goes there in one array."""

    def __init__(self, kernel: native.Kernel, steps: Steps) -> None:
        self._kernel = kernel
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in steps.tensors}
        self._parts = [torch.empty(0).set_(x) for x in storages.values()]
        places, end = {}, 64  # nothing lies at 0, which means no place
        for part in self._parts:
            places[part.data_ptr()] = end
            end += part.nbytes
        moved = (Step * len(steps.steps))(*steps.steps)
        for step in moved:
            for field in ("to", "x", "y", "z"):
                if address := getattr(step, field):
                    start = max(place for place in places if place <= address)
                    setattr(step, field, address - start + places[start])
        self._steps = torch.frombuffer(bytearray(moved), dtype=torch.int64)

    def invoke(self, name: str, arguments: Sequence[native.Argument]) -> int:
        assert name == "decode"
        array = torch.cat([torch.zeros(16), *self._parts])
        count, place, texts = arguments[1:]
        assert isinstance(place, int)
        assert isinstance(texts, int)
        tokens = ctypes.string_at(place, texts * ctypes.sizeof(Token))
        rest = [count, torch.frombuffer(bytearray(tokens), dtype=torch.int64), texts]
        code = self._kernel.invoke("decode_within", [array, self._steps.clone(), *rest])
        sizes = [part.numel() for part in self._parts]
        for part, after in zip(self._parts, torch.split(array[16:], sizes), strict=True):
            part.copy_(after)
        return code


@pytest.mark.parametrize("switches", [SWITCH_SETS[2], SWITCH_SETS[-1], ODD[-1]])
def test_on_an_emulated_cpu(switches: dict[str, Any]) -> None:
    model, ids = lively(**switches), ids_of(length=40)[0].tolist()
    with builds.used("aarch64"):
        kernel = native.load()
        assert isinstance(kernel, native.Kernel)
        decoder = decoder_of(model)
        decoder._kernel = OneArray(kernel, decoder.listed)
        found = decoded(decoder, ids)
    assert_close(found, expected_of(model, ids))


@pytest.mark.parametrize("name", builds.HERE_NAMES)
@pytest.mark.parametrize("switches", [SWITCH_SETS[0], SWITCH_SETS[-1], *ODD])
def test_a_text_is_the_same_to_the_bit_in_any_company(switches: dict[str, Any], name: str) -> None:
    """Texts of other lengths come and go in other slots while one is written."""
    model, texts = lively(**switches), ids_of(rows=11, length=40).tolist()
    with builds.used(name):
        alone = [decoded(decoder_of(model), ids) for ids in texts]
        together = decoder_of(model, slots=len(texts))
        found: list[list[Tensor]] = [[] for _ in texts]
        order = torch.Generator().manual_seed(0)
        while any(len(rows) < len(ids) for rows, ids in zip(found, texts, strict=True)):
            left = [slot for slot, ids in enumerate(texts) if len(found[slot]) < len(ids)]
            some = torch.randperm(len(left), generator=order)[: torch.randint(
                1, len(left) + 1, (), generator=order)]  # fmt: skip
            slots = [left[int(i)] for i in some]
            logits_SV = together([(slot, texts[slot][len(found[slot])], 0) for slot in slots])
            for slot in slots:
                found[slot].append(logits_SV[slot].clone())
    for rows, expected in zip(found, alone, strict=True):
        assert torch.stack(rows).equal(expected)


@pytest.mark.parametrize("name", builds.HERE_NAMES)
@pytest.mark.parametrize("switches", [SWITCH_SETS[0], SWITCH_SETS[-1], *ODD])
def test_several_tokens_in_one_call_are_those_of_one_by_one(
    switches: dict[str, Any], name: str
) -> None:
    """Texts that begin with other tokens, ask for other numbers, and stand elsewhere."""
    model, texts = lively(**switches), ids_of(rows=5, length=9).tolist()
    source = random.Random(0)
    first_T = torch.arange(T).sub(30).clamp(min=0)
    firsts = first_T.tolist()
    how = [Sampling(temperature=t, top_k=k) for t, k in ((1, 0), (0.7, 5), (0, 0), (2, 0), (1, 3))]
    with builds.used(name):
        slow, quick = decoder_of(model, 5), decoder_of(model, 5)
        for turn in range(3):
            asked, expected = {}, {}
            for slot, given in enumerate(texts):
                ids = given[: slot + 1] if turn == 0 else given[-1:]
                uniform = [source.random() for _ in range(4 + slot)]
                one = how[slot]
                draws = Draws(one.temperature, one.top_k, one.top_p, uniform)
                asked[slot] = ids, 2 if turn else 0, draws
                tokens: list[int] = []
                for token in ids[:-1]:
                    slow([(slot, token, max(firsts[slow.texts[slot].length], asked[slot][1]))])
                for number in uniform:
                    fed = tokens[-1] if tokens else ids[-1]
                    first = max(firsts[slow.texts[slot].length], asked[slot][1])
                    logits_V = slow([(slot, fed, first)])[slot].numpy()
                    tokens.append(draw([(Fixed(one, number), logits_V)])[0])
                expected[slot] = tokens
                texts[slot] = [*given, tokens[-1]]
            assert quick.write(asked, first_T, eot=V + 99) == expected
            for slot in range(5):
                assert quick.texts[slot].length == slow.texts[slot].length
                assert int(quick.texts[slot].last_B1) == int(slow.texts[slot].last_B1)


class Fixed(Sampler):
    """A sampler whose next random number is known."""

    def __init__(self, options: Sampling, number: float) -> None:
        super().__init__(options)
        self._number = number

    def uniform(self) -> float:
        return self._number


@pytest.mark.parametrize("name", builds.HERE_NAMES)
@pytest.mark.parametrize("slots", [1, 3, 8, 19])
def test_threads_share_large_products_and_change_no_bits(slots: int, name: str) -> None:
    """Enough rows for several chunks, enough weights for threads that have to be woken."""
    matrix, x, bias = torch.randn(2501, 419), torch.randn(slots, 419), torch.randn(2501)
    with builds.used(name):
        kernel = native.load()
        assert isinstance(kernel, native.Kernel)

        def product() -> tuple[Tensor]:
            steps = Steps(PackedWeights(kernel), slots)
            y = steps.product(x, [matrix], [bias])
            listed = (Step * 1)(*steps.steps)
            tokens = (Token * slots)(*(Token(slot, 0, 0, 0, 0) for slot in range(slots)))
            places = [ctypes.addressof(listed), 1, ctypes.addressof(tokens), slots]
            assert kernel.invoke("decode", places) == 0
            return (y,)

        builds.assert_threads_do_not_matter(product)
        torch.testing.assert_close(product()[0], x @ matrix.T + bias, rtol=1e-5, atol=1e-4)


def test_a_decoder_needs_fp32_and_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively()
    assert decoder_for(model.set_precision(torch.bfloat16), cache_for(model)) is None
    model.set_precision(torch.float32)
    with builds.used("this machine"):
        decoder_of(model)
    monkeypatch.setattr(native, "load", lambda: "the test says so")
    assert decoder_for(model, cache_for(model)) is None


def test_what_would_read_outside_of_memory_is_refused() -> None:
    with builds.used("this machine"):
        decoder = decoder_of(lively())
        rows = len(lively().embedding.weight)
        for token in (-1, rows):
            with pytest.raises(ValueError, match="row of the embedding"):
                decoder([(0, token, 0)])
        with pytest.raises(ValueError, match="room"):
            decoder([(0, 0, 1)])
        with pytest.raises(ValueError, match="one token a slot"):
            decoder([(0, 0, 0), (0, 0, 0)])
        decoded(decoder, [0] * T)
        with pytest.raises(ValueError, match="room"):
            decoder([(0, 0, 0)])
