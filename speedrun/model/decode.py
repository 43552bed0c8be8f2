"""One token through the model in one native call (native/decode.cpp), for sampling.

Torch takes 150 operators for a token, and to call them takes ten times as long as to multiply the
weights with a vector. So the computation is written down once, as a list of steps on vectors with
fixed places in memory, and each token runs the list. `steps_of` makes it, following `GPT.forward`
line by line. Prompts go through the model itself, which reads them in one pass.

Shapes: D width, H query heads, G key/value heads, T time, K head dim, F hidden MLP width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

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
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "group")),
        *((name, ctypes.c_float) for name in ("a", "b")),
    )


class Steps:
    """A list of steps, and the tensors whose places they name."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.tensors: list[Tensor] = []  # held here, for a place is good as long as its tensor

    def _add(self, kind: int, places: Mapping[str, Tensor | None], **numbers: float) -> None:
        step = Step(kind=kind, **numbers)
        for name, tensor in places.items():
            if tensor is not None:
                assert tensor.is_contiguous(), "steps know no strides"
                assert tensor.dtype == torch.float32, "steps compute in fp32"
                self.tensors.append(tensor.detach())
                setattr(step, name, tensor.data_ptr())
        self.steps.append(step)

    def row(self, to: Tensor, table: Table, by: int, *, add: bool = False) -> Tensor:
        """to (+)= the token's row of a table."""
        places = {"to": to, "y": table.weight}
        self._add(ADD_ROW, places, columns=table.weight.size(1), group=by, a=float(add))
        return to

    def mix(self, to: Tensor, a: float, x: Tensor, b: float, y: Tensor) -> Tensor:
        """to = a x + b y"""
        self._add(MIX, {"to": to, "x": x, "y": y}, columns=len(to), a=a, b=b)
        return to

    def rms_norm(self, to: Tensor, x: Tensor, columns: int, eps: float) -> Tensor:
        """Each `columns` numbers over their root mean square."""
        self._add(NORM, {"to": to, "x": x}, rows=len(x) // columns, columns=columns, a=eps)
        return to

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        to = torch.zeros_like(x)
        places = {"to": to, "x": x, "y": norm.gain, "z": norm.bias}
        self._add(NORM, places, rows=1, columns=len(x), a=norm.eps)
        return to

    def rotate(self, x: Tensor, rotary: Rotary, head_dim: int) -> None:
        """x turned as its position asks, in place."""
        places = {"to": x, "y": rotary.cos, "z": rotary.sin}
        self._add(TURN, places, rows=len(x) // head_dim, columns=head_dim)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """weight x + bias"""
        to = torch.zeros(len(weight))
        places = {"to": to, "x": x, "y": weight, "z": bias}
        self._add(PRODUCT, places, rows=len(weight), columns=len(x), b=1.0)
        return to

    def add_product(self, to: Tensor, factor: float, x: Tensor, linear: Linear) -> None:
        """to += factor linear(x)"""
        places = {"to": to, "x": x, "y": linear.weight, "z": linear.bias}
        self._add(PRODUCT, places, rows=len(to), columns=len(x), a=1.0, b=factor)

    def activate(self, x: Tensor, *, gelu: bool) -> Tensor:
        self._add(GELU if gelu else RELU_SQUARED, {"to": x, "x": x}, columns=len(x))
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if cap:
            self._add(SOFTCAP, {"to": x, "x": x}, columns=len(x), a=cap)
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
        H, to = len(q) // K, torch.zeros_like(q)
        places = {"to": to, "x": q, "y": cache.keys, "z": cache.values}
        sizes = {"rows": H, "columns": K, "stride": T * K, "group": H // G}
        self._add(ATTEND, places, **sizes, a=scale)
        return to


def steps_of(model: GPT, cache: Cache) -> tuple[Steps, Tensor]:
    """The steps of one token, and where they leave its logits."""
    config, steps = model.config, Steps()
    x = steps.row(torch.zeros(config.width), model.embedding, ID)
    if model.positions is not None:
        steps.row(x, model.positions, POSITION, add=True)
    if model.bigrams is not None:
        steps.row(x, model.bigrams.table, PAIR, add=True)
    if config.embedding_norm:
        steps.rms_norm(x, x, len(x), config.norm_eps)
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
    scores = steps.product(steps.norm(x, model.norm), model.head_weight[: model.vocab_size])
    return steps, steps.softcap(scores, config.softcap)


def copy(steps: Steps, x: Tensor) -> Tensor:
    return steps.mix(torch.zeros_like(x), 1.0, x, 0.0, x)


def value_inputs(steps: Steps, model: GPT) -> list[Tensor | None]:
    """For each layer the row of its value table, if it reads one."""
    rows = []
    for table in model.value_embeddings.tables:
        assert isinstance(table, Table)
        rows.append(steps.row(torch.zeros(table.weight.size(1)), table, ID))
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
    hidden = steps.product(steps.norm(x, block.norm2), up.weight, up.bias)
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
    parts = []
    for project in attention.qkv:
        assert isinstance(project, Linear)
        parts.append(steps.product(x, project.weight, project.bias))
    q, k, own_values = parts if len(parts) == 3 else torch.split(parts[0], attention.splits)
    if attention.residual and value_input is None:
        value_input = own_values
    v = own_values
    if attention.blend is not None:
        other = attention.blend[-1].item()
        own = attention.blend[0].item() if len(attention.blend) == 2 else 1 - other
        y, weight = (v, 0.0) if value_input is None else (value_input, other)
        v = steps.mix(torch.zeros_like(v), own, v, weight, y)
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
    """A model and its cache of one row; call it with a token to get the next one's logits."""

    def __init__(self, model: GPT, cache: Cache, kernel: native.Kernel) -> None:
        self._cache, self._kernel = cache, kernel
        self._pairs = 0 if model.bigrams is None else len(model.bigrams.table.weight)
        self._ids = len(model.embedding.weight)
        self.listed, self._logits = steps_of(model, cache)
        self._steps = (Step * len(self.listed.steps))(*self.listed.steps)

    def __call__(self, token: int, first: int) -> Tensor:
        """Logits (V,) after a token, which sees the keys from `first` on."""
        cache, pair, position = self._cache, self._pairs - 1, self._cache.length
        assert 0 <= token < self._ids, "a token is a row of the embedding"
        assert 0 <= first <= position < cache.layers[0].keys.size(2), "there is room for it"
        if self._pairs and position:
            pair = hash_pair(token, int(cache.last_B1), self._pairs - 1)
        program = ctypes.addressof(self._steps), len(self._steps)
        self._kernel.invoke("decode", [*program, token, pair, position, first])
        cache.advance(torch.tensor([[token]]))
        return self._logits.clone()


def decoder_for(model: GPT, cache: Cache) -> Decoder | None:
    """None where it cannot be native: no compiler, or weights that are not fp32 on a CPU."""
    kernel = native.load()
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters()}
    if isinstance(kernel, str) or kinds != {("cpu", torch.float32)}:
        return None
    return Decoder(model, cache, kernel)
