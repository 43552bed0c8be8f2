"""The steps of one token against the model itself, as every compiler builds them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from speedrun.model import native
from speedrun.model.cache import Cache
from speedrun.model.decode import Decoder, Step, Steps, decoder_for
from speedrun.model.gpt import GPT

from . import builds
from .test_gpt import SWITCH_SETS, T, V, causal, ids_of, lively

ODD: list[dict[str, Any]] = [
    {"width": 50, "heads": 5, "positions": "learned", "qk_norm": True, "softcap": 2.0},
    {"width": 36, "heads": 3, "kv_heads": 1, "value_residual": True, "embedding_norm": False},
    {"width": 80, "heads": 2, "head_dim": 20, "positions": "half-rotary", "key_offset": True,
     "unet_skips": True, "x0_mixing": True, "value_embeddings": "each", "bigram_rows": 7},
]  # fmt: skip


def cache_for(model: GPT) -> Cache:
    sizes = model.config
    return Cache(sizes.layers, 1, sizes.groups, T, sizes.size_of_head)


def decoder_of(model: GPT) -> Decoder:
    decoder = decoder_for(model, cache_for(model))
    assert decoder is not None
    return decoder


def decoded(decoder: Decoder, ids: list[int]) -> Tensor:
    return torch.stack([decoder(token, 0) for token in ids])


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
        code = self._kernel.invoke("decode_within", [array, self._steps.clone(), *arguments[1:]])
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
def test_threads_share_large_products_and_change_no_bits(name: str) -> None:
    """Enough rows for several chunks, enough weights for threads that have to be woken."""
    matrix, x, bias = torch.randn(2501, 419), torch.randn(419), torch.randn(2501)
    with builds.used(name):
        kernel = native.load()
        assert isinstance(kernel, native.Kernel)

        def product() -> tuple[Tensor]:
            steps = Steps()
            y = steps.product(x, matrix, bias)
            listed = (Step * 1)(*steps.steps)
            assert kernel.invoke("decode", [ctypes.addressof(listed), 1, 0, 0, 0, 0]) == 0
            return (y,)

        builds.assert_threads_do_not_matter(product)
        torch.testing.assert_close(product()[0], matrix @ x + bias, rtol=1e-5, atol=1e-4)


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
            with pytest.raises(AssertionError, match="row of the embedding"):
                decoder(token, 0)
        with pytest.raises(AssertionError, match="room"):
            decoder(0, 1)
        decoded(decoder, [0] * T)
        with pytest.raises(AssertionError, match="room"):
            decoder(0, 0)
