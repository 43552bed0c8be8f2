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
from speedrun.model.linear import Linear, Norm
from speedrun.model.rotary import Rotary

# The kinds of steps, and by which number of a token a table is read, both as decode.cpp counts.
ADD_ROW, MIX, NORM, TURN, PRODUCT, RELU_SQUARED, GELU, SOFTCAP, OFFSET, REMEMBER, ATTEND = range(11)
ID, PAIR, POSITION = range(3)


class Step(ctypes.Structure):
    """struct Step of decode.cpp: to = f(x, y, z)."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("to", "x", "y", "z")),
        *((name, ctypes.c_int64) for name in ("next_to", "next_x", "next_y", "next_z")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "group")),
        *((name, ctypes.c_float) for name in ("a", "b")),
    )


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


class PackedWeights:
    """A model's matrices in the order in which products read them; decoders may share them."""

    def __init__(self, kernel: native.Kernel) -> None:
        self._kernel = kernel
        self._packed: dict[tuple[int, ...], Tensor] = {}

    def of(self, matrices: Sequence[Tensor]) -> Tensor:
        """Some matrices below each other."""
        key = tuple(matrix.data_ptr() for matrix in matrices)
        if key not in self._packed:
            matrix = torch.cat([*matrices]).detach()
            rows, columns = matrix.shape
            vectors = -(-rows // self._kernel.lanes)
            packed = torch.zeros(vectors * self._kernel.lanes * columns)
            self._kernel.invoke("pack_rows", [matrix, rows, columns, packed])
            self._packed[key] = packed
        return self._packed[key]


class Steps:
    """A list of steps, and the tensors whose places they name.

    A vector of the computation is a tensor (S, n): every slot has its own. Weights are for all.
    """

    def __init__(self, weights: PackedWeights, slots: int = 1) -> None:
        self._weights, self.slots = weights, slots
        self.steps: list[Step] = []
        self.tensors: list[Tensor] = []  # held here, for a place is good as long as its tensor

    def _add(
        self,
        kind: int,
        own: Mapping[str, Tensor],
        shared: Mapping[str, Tensor | None] | None = None,
        **numbers: float,
    ) -> None:
        """`own`: places of which each slot has one; `shared`: weights and tables."""
        step = Step(kind=kind, **numbers)
        for name, tensor in own.items():
            assert len(tensor) == self.slots, "one for each slot"
            assert tensor[0].is_contiguous(), "steps know no strides but that between slots"
            setattr(step, f"next_{name}", tensor.stride(0))
            self._place(step, name, tensor)
        for name, weight in (shared or {}).items():
            if weight is not None:
                assert weight.is_contiguous(), "steps know no strides"
                self._place(step, name, weight)
        self.steps.append(step)

    def _place(self, step: Step, name: str, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32, "steps compute in fp32"
        self.tensors.append(tensor.detach())
        setattr(step, name, tensor.data_ptr())

    def vector(self, size: int) -> Tensor:
        return torch.zeros(self.slots, size)

    def row(self, to: Tensor, table: Table, by: int, *, add: bool = False) -> Tensor:
        """to (+)= the token's row of a table."""
        shared = {"y": table.weight}
        self._add(ADD_ROW, {"to": to}, shared, columns=to.size(1), group=by, a=float(add))
        return to

    def mix(self, to: Tensor, a: float, x: Tensor, b: float, y: Tensor) -> Tensor:
        """to = a x + b y"""
        self._add(MIX, {"to": to, "x": x, "y": y}, columns=to.size(1), a=a, b=b)
        return to

    def rms_norm(self, to: Tensor, x: Tensor, columns: int, eps: float) -> Tensor:
        """Each `columns` numbers over their root mean square."""
        rows = x.size(1) // columns
        self._add(NORM, {"to": to, "x": x}, rows=rows, columns=columns, a=eps)
        return to

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        to, shared = torch.zeros_like(x), {"y": norm.gain, "z": norm.bias}
        self._add(NORM, {"to": to, "x": x}, shared, rows=1, columns=x.size(1), a=norm.eps)
        return to

    def rotate(self, x: Tensor, rotary: Rotary, head_dim: int) -> None:
        """x turned as its position asks, in place."""
        shared = {"y": rotary.cos, "z": rotary.sin}
        self._add(TURN, {"to": x}, shared, rows=x.size(1) // head_dim, columns=head_dim)

    def product(
        self, x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Tensor:
        """matrix x + bias, of several matrices one after the other."""
        to = self.vector(sum(map(len, matrices)))
        self._product(to, x, matrices, biases, b=1.0)
        return to

    def add_product(self, to: Tensor, factor: float, x: Tensor, linear: Linear) -> None:
        """to += factor linear(x)"""
        self._product(to, x, [linear.weight], [linear.bias], a=1.0, b=factor)

    def _product(
        self,
        to: Tensor,
        x: Tensor,
        matrices: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        **factors: float,
    ) -> None:
        added = [bias for bias in biases if bias is not None]
        assert len(added) in (0, len(matrices)), "all of them have a bias, or none"
        shared = {"y": self._weights.of(matrices), "z": torch.cat(added) if added else None}
        sizes = {"rows": to.size(1), "columns": x.size(1)}
        self._add(PRODUCT, {"to": to, "x": x}, shared, **sizes, **factors)

    def activate(self, x: Tensor, *, gelu: bool) -> Tensor:
        self._add(GELU if gelu else RELU_SQUARED, {"to": x, "x": x}, columns=x.size(1))
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if cap:
            self._add(SOFTCAP, {"to": x, "x": x}, columns=x.size(1), a=cap)
        return x

    def offset_keys(self, k: Tensor, cache: LayerCache) -> None:
        """The unrotated half of each key from the token before, in place."""
        G, K = cache.last_key.size(1), cache.last_key.size(3)
        self._add(OFFSET, {"to": k, "y": cache.last_key}, rows=G, columns=K)

    def remember(self, cached: Tensor, x: Tensor) -> None:
        """Keys or values of the token to their place in the cache."""
        _, G, T, K = cached.shape
        self._add(REMEMBER, {"to": cached, "x": x}, rows=G, columns=K, stride=T * K)

    def attend(self, q: Tensor, cache: LayerCache, scale: float) -> Tensor:
        _, G, T, K = cache.keys.shape
        H, to = q.size(1) // K, self.vector(q.size(1))
        places = {"to": to, "x": q, "y": cache.keys, "z": cache.values}
        sizes = {"rows": H, "columns": K, "stride": T * K, "group": H // G}
        self._add(ATTEND, places, {}, **sizes, a=scale)
        return to


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
        self.listed, self._logits_SV = steps_of(model, cache, weights)
        self._steps = (Step * len(self.listed.steps))(*self.listed.steps)

    def __call__(self, tokens: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits (S, V) of all slots, those given a token renewed in place.

        A token is its slot, its id, and the first key it sees.
        """
        listed = (Token * len(tokens))(*(Token(*self._token(*token)) for token in tokens))
        assert len({slot for slot, _, _ in tokens}) == len(tokens), "one token a slot"
        program = ctypes.addressof(self._steps), len(self._steps)
        tokens_at = ctypes.addressof(listed), len(tokens)
        self._kernel.invoke("decode", [*program, *tokens_at])
        for slot, token, _ in tokens:
            self.texts[slot].advance_to(self.texts[slot].length + 1, token)
        return self._logits_SV

    def _token(self, slot: int, token: int, first: int) -> tuple[int, int, int, int, int]:
        cache, pair = self.texts[slot], self._pairs - 1
        assert 0 <= token < self._ids, "a token is a row of the embedding"
        assert 0 <= first <= cache.length < self._room, "there is room for it"
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
        listed = (WrittenText * len(texts))()
        arrays = []  # held here while their places are in use
        for one, (slot, (ids, start, draws)) in zip(listed, texts.items(), strict=True):
            cache, most = self.texts[slot], len(draws.uniform)
            assert 0 <= min(ids) <= max(ids) < self._ids, "a token is a row of the embedding"
            assert most > 0, "something is to be drawn"
            assert len(ids) - 1 + most <= self._room - cache.length, "there is room for them"
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
        self._kernel.invoke(
            "write_tokens", [ctypes.addressof(model), ctypes.addressof(listed), len(texts)]
        )
        written = {}
        for one, (_, _, drawn) in zip(listed, arrays, strict=True):
            written[one.slot] = [*drawn[: one.count]] if one.count >= 0 else [-1]
            self.texts[one.slot].advance_to(one.position, one.before)
        return written


def decoder_for(model: GPT, cache: Cache, weights: PackedWeights | None = None) -> Decoder | None:
    """None where it cannot be native: no compiler, or weights that are not fp32 on a CPU.

    Decoders of one model can share its packed weights.
    """
    kernel = native.load()
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters()}
    if isinstance(kernel, str) or kinds != {("cpu", torch.float32)}:
        return None
    return Decoder(model, cache, kernel, weights or PackedWeights(kernel))
