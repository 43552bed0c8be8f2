"""One token of each text through the model in one native call (native/decode.cpp), for sampling.

Torch takes 150 operators for a token, and to call them takes ten times as long as to multiply the
weights with a vector. So the computation is written down once, as a list of steps on vectors with
fixed places in memory, and each token runs the list. `steps_of` makes it, following `GPT.forward`
line by line. Prompts go through the model itself, which reads them in one pass.

Texts that are written at the same time have a slot each and share the reading of the weights, which
is what a token's time goes into.

Shapes: S slots, D width, H query heads, G key/value heads, T time, K head dim, F hidden MLP width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedrun.model import native
from speedrun.model.attention import Attention
from speedrun.model.block import Block
from speedrun.model.cache import Cache, LayerCache
from speedrun.model.embeddings import Table, hash_pair
from speedrun.model.gpt import GPT
from speedrun.model.linear import Linear
from speedrun.model.rotary import Rotary
from speedrun.model.steps import ID, PAIR, POSITION, PackedWeights, Step, Steps, require

SEEN = "a token sees itself at least"


class Token(ctypes.Structure):
    """struct Token of decode.cpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("slot", "id", "pair", "position", "first"))


class WrittenText(ctypes.Structure):
    """struct Text of decode.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("slot", "before", "position", "start")),
        *((name, ctypes.c_double) for name in ("temperature", "top_p")),
        ("top_k", ctypes.c_int64),
        ("given", ctypes.c_void_p),
        ("givens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("uniform", "drawn")),
        ("count", ctypes.c_int64),
    )


class WritingModel(ctypes.Structure):
    """struct Model of decode.cpp."""

    _fields_ = (
        ("steps", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("vocab_size", "pairs", "eot")),
        ("first", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Draws:
    """How the next tokens of a text are drawn, one for each random number in [0, 1)."""

    temperature: float
    top_k: int
    top_p: float
    uniform: Sequence[float]


def steps_of(model: GPT, cache: Cache, weights: PackedWeights) -> tuple[Steps, Tensor]:
    """The steps of one token of each text, and where they leave its logits, (S, V)."""
    config, steps = model.config, Steps(weights, len(cache.last_B1))
    x = steps.row(steps.vector(config.width), model.embedding, ID)
    if model.positions is not None:
        steps.row(x, model.positions, POSITION, add=True)
    if model.bigrams is not None:
        steps.row(x, model.bigrams.table, PAIR, add=True)
    if config.embedding_norm:
        steps.rms_norm(x, x, config.width, config.norm_eps)
    x0 = copy(steps, x)
    values = value_inputs(steps, model)
    encoded: list[Tensor] = []
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if model.skips is not None and layer >= len(model.skips):
            weight = model.skips[layer - len(model.skips)].item()
            steps.mix(x, 1.0, x, weight, encoded.pop())
        own = add_block(steps, x, x0, values[layer], block, model.rotary, cache.layers[layer])
        if model.skips is not None and layer < len(model.skips):
            encoded.append(copy(steps, x))
        if config.value_residual and layer == 0:
            values = [own] * len(model.blocks)
    head = model.head_weight[: model.vocab_size]
    scores = steps.product(steps.norm(x, model.norm), [head], [None])
    return steps, steps.softcap(scores, config.softcap)


def copy(steps: Steps, x: Tensor) -> Tensor:
    return steps.mix(torch.zeros_like(x), 1.0, x, 0.0, x)


def value_inputs(steps: Steps, model: GPT) -> list[Tensor | None]:
    """For each layer the row of its value table, if it reads one."""
    rows = []
    for table in model.value_embeddings.tables:
        assert isinstance(table, Table)
        rows.append(steps.row(steps.vector(table.weight.size(1)), table, ID))
    return [None if t is None else rows[t] for t in model.value_embeddings.table_of_layer]


def add_block(
    steps: Steps,
    x: Tensor,
    x0: Tensor,
    value_input: Tensor | None,
    block: Block,
    rotary: Rotary | None,
    cache: LayerCache,
) -> Tensor | None:
    """Block.forward, x changed in place; returns the attention's own values, if there are any."""
    values = None
    if block.mix is not None:
        steps.mix(x, block.mix[0].item(), x, block.mix[1].item(), x0)
    if block.attention is not None and block.norm1 is not None:
        h = steps.norm(x, block.norm1)
        y, values = add_attention(steps, h, value_input, block.attention, rotary, cache)
        steps.add_product(x, block.attention.factor, y, block.attention.output)
    up = block.mlp.up
    hidden = steps.product(steps.norm(x, block.norm2), [up.weight], [up.bias])
    steps.add_product(x, 1.0, steps.activate(hidden, gelu=block.mlp.gelu), block.mlp.down)
    return values


def add_attention(
    steps: Steps,
    x: Tensor,
    value_input: Tensor | None,
    attention: Attention,
    rotary: Rotary | None,
    cache: LayerCache,
) -> tuple[Tensor, Tensor]:
    """Attention.forward up to its output matrix."""
    layers = [layer for layer in attention.qkv if isinstance(layer, Linear)]
    matrices, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    qkv = steps.product(x, matrices, biases)
    q, k, own_values = torch.split(qkv, attention.splits, 1)
    if attention.residual and value_input is None:
        value_input = own_values
    v = own_values
    if attention.blend is not None:
        other = attention.blend[-1].item()
        own = attention.blend[0].item() if len(attention.blend) == 2 else 1 - other
        y, share = (v, 0.0) if value_input is None else (value_input, other)
        v = steps.mix(torch.zeros_like(v), own, v, share, y)
    for part in (q, k):
        if attention.qk_norm:
            steps.rms_norm(part, part, attention.head_dim, attention.eps)
        if rotary is not None:
            steps.rotate(part, rotary, attention.head_dim)
    if attention.key_offset:
        steps.offset_keys(k, cache)
    steps.remember(cache.keys, k)
    steps.remember(cache.values, v)
    return steps.attend(q, cache, attention.scale), own_values


class Decoder:
    """A model and the caches of some texts; call it with a token of each to get the next's logits.

    A text's logits depend on nothing but the text: in any company they are the same to the bit.
    """

    def __init__(
        self, model: GPT, cache: Cache, kernel: native.Kernel, weights: PackedWeights
    ) -> None:
        self.texts = [cache.row(slot) for slot in range(len(cache.last_B1))]
        self._kernel, self._room = kernel, cache.layers[0].keys.size(2)
        self._pairs = 0 if model.bigrams is None else len(model.bigrams.table.weight)
        self._ids = len(model.embedding.weight)
        for layer in cache.layers:
            require(layer.keys.size(2) == self._room, "one room for all layers")
        angles = None if model.rotary is None else model.rotary.cos
        learned = None if model.positions is None else model.positions.weight
        for table in (angles, learned):
            require(table is None or len(table) >= self._room, "every place has its position")
        self.listed, self._logits_SV = steps_of(model, cache, weights)
        self._steps = (Step * len(self.listed.steps))(*self.listed.steps)

    def __call__(self, tokens: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits (S, V) of all slots, those given a token renewed in place.

        A token is its slot, its id, and the first key it sees.
        """
        listed = (Token * len(tokens))(*(Token(*self._token(*token)) for token in tokens))
        require(len({slot for slot, _, _ in tokens}) == len(tokens), "one token a slot")
        program = ctypes.addressof(self._steps), len(self._steps)
        tokens_at = ctypes.addressof(listed), len(tokens)
        native.refuse("decode", self._kernel.invoke("decode", [*program, *tokens_at]), SEEN)
        for slot, token, _ in tokens:
            self.texts[slot].advance_to(self.texts[slot].length + 1, token)
        return self._logits_SV

    def _token(self, slot: int, token: int, first: int) -> tuple[int, int, int, int, int]:
        require(0 <= slot < len(self.texts), "there is such a slot")
        cache, pair = self.texts[slot], self._pairs - 1
        require(0 <= token < self._ids, "a token is a row of the embedding")
        require(0 <= first <= cache.length < self._room, "there is room for it")
        if self._pairs and cache.length:
            pair = hash_pair(token, int(cache.last_B1), self._pairs - 1)
        return slot, token, pair, cache.length, first

    def write(
        self,
        texts: Mapping[int, tuple[Sequence[int], int, Draws]],
        first_T: Tensor,
        eot: int,
    ) -> dict[int, list[int]]:
        """Several tokens of each slot, each drawn from the logits after the one before it.

        A text is the tokens it is fed first, where its document starts, and how tokens are drawn;
        it ends early after end-of-text. `first_T`: the first key that each position sees. The last
        token drawn has not been fed. Logits that are no numbers give the token -1.
        """
        model = WritingModel(
            ctypes.addressof(self._steps), len(self._steps), self._logits_SV.data_ptr(),
            self._logits_SV.size(1), self._pairs, eot, first_T.data_ptr(),
        )  # fmt: skip
        require(first_T.dtype == torch.int64 and first_T.is_contiguous(), "first keys in int64")
        require(len(first_T) >= self._room, "a first key for every place")
        listed = (WrittenText * len(texts))()
        arrays = []  # held here while their places are in use
        for one, (slot, (ids, start, draws)) in zip(listed, texts.items(), strict=True):
            cache, most = self.texts[slot], len(draws.uniform)
            require(slot >= 0 and 0 <= start <= cache.length, "a document starts before its end")
            require(0 <= min(ids) <= max(ids) < self._ids, "a token is a row of the embedding")
            require(most > 0, "something is to be drawn")
            require(len(ids) - 1 + most <= self._room - cache.length, "there is room for them")
            given, uniform = (
                (ctypes.c_int64 * len(ids))(*ids),
                (ctypes.c_double * most)(*draws.uniform),
            )
            drawn = (ctypes.c_int64 * most)()
            arrays.append((given, uniform, drawn))
            one.slot, one.before, one.position = slot, int(cache.last_B1), cache.length
            one.temperature, one.top_p, one.top_k = draws.temperature, draws.top_p, draws.top_k
            one.start, one.givens, one.count = start, len(ids), most
            one.given, one.uniform = ctypes.addressof(given), ctypes.addressof(uniform)
            one.drawn = ctypes.addressof(drawn)
        places = [ctypes.addressof(model), ctypes.addressof(listed), len(texts)]
        native.refuse("write_tokens", self._kernel.invoke("write_tokens", places), SEEN)
        written = {}
        for one, (_, _, drawn) in zip(listed, arrays, strict=True):
            written[one.slot] = [*drawn[: one.count]] if one.count >= 0 else [-1]
            self.texts[one.slot].advance_to(one.position, one.before)
        return written


def decoder_for(model: GPT, cache: Cache, weights: PackedWeights | None = None) -> Decoder | None:
    """None where it cannot be native: no compiler, weights that are not fp32 on a CPU, or blocks
    of a user's own, which nobody has written down as steps.

    Decoders of one model can share its packed weights.
    """
    kernel = native.load()
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters()}
    native_weights = kinds == {("cpu", torch.float32)}
    native_weights = native_weights and model.dtype == torch.float32
    if isinstance(kernel, str) or not native_weights or not model.blocks_are_ours:
        return None
    return Decoder(model, cache, kernel, weights or PackedWeights(kernel))
