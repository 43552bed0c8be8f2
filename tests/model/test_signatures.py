"""No call reaches C++ with a tensor that its sizes do not fit, not even under `python -O`."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speedrun.model import block_sparse, decode, fused, native, products, steps
from speedrun.model.native import signatures
from speedrun.model.native.build import SOURCES
from speedrun.model.native.signatures import ROUTINES, Parameter, parameters_of
from speedrun.serve import sampling

from .twins import native_only

OWN_CHECKS = {"attention_forward", "attention_backward", "pack_rows", "decode", "write_tokens",
              "draw", "lanes", "openmp"}  # fmt: skip
SIZE = 32  # which everything can be computed with


def declared() -> dict[str, list[tuple[str, str]]]:
    """The types and names of each routine's parameters, as C++ declares them."""
    text = "".join(path.read_text() for path in SOURCES)
    found = re.findall(r'extern "C" int (\w+)\(([^)]*)\)', text)
    return {
        name: [
            (kind.strip(), parameter)
            for kind, parameter in re.findall(
                r"([\w:* ]+?[ *])(\w+)(?:,|$)", " ".join(rest.split())
            )
        ]
        for name, rest in found
    }


def kind_of(one: Parameter) -> str:
    if one.dtype is None:
        return "float" if one.real else "int64_t"
    element = "int64_t*" if one.dtype == torch.int64 else "float*"
    return element if one.written else f"const {element}"


def test_the_table_says_what_cpp_declares() -> None:
    routines = declared()
    assert routines.keys() - OWN_CHECKS == set(ROUTINES)
    for routine in ROUTINES:
        stated = [(kind_of(one), one.name) for one in parameters_of(routine)]
        assert routines[routine] == [*stated, ("int", "threads")], routine


def arguments_of(routine: str) -> list[Any]:
    parameters = parameters_of(routine)
    sizes = {one.name: SIZE for one in parameters if one.dtype is None and not one.real}
    sizes |= {name: 1 for name in ("gram", "count", "N") if name in sizes}

    def made(one: Parameter) -> Tensor | float:
        if one.dtype is None:
            return 0.5 if one.real else sizes[one.name]
        count = math.prod(sizes[part] if isinstance(part, str) else part for part in one.size)
        return torch.zeros(count // (1 + one.halved), dtype=one.dtype)

    return [*map(made, parameters)]


@native_only
@pytest.mark.parametrize("routine", ROUTINES)
def test_what_does_not_fit_is_refused(routine: str) -> None:
    right = arguments_of(routine)
    native.run(routine, *right)
    for place, one in enumerate(parameters_of(routine)):
        fits = right[place]
        wrong: list[Any] = [torch.ones(1), None] if one.real else [-1, 0.5]
        wrong += [] if one.real or one.name == "gram" else [10**6]  # which is no size
        if isinstance(fits, Tensor):
            wrong = [fits[1:], torch.cat([fits, fits]), fits.double(), 0.5]
            wrong += [] if one.optional else [None]
            wrong += [torch.stack([fits, fits], -1)[:, 0]] if one.written and len(fits) > 2 else []
        for other in wrong:
            with pytest.raises((ValueError, TypeError), match=routine):
                native.run(routine, *right[:place], other, *right[place + 1 :])
    with pytest.raises(TypeError, match="arguments"):
        native.run(routine, *right[:-1])


@native_only
@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 6])
def test_attention_is_given_what_fits(place: int) -> None:
    kernel = native.load()
    assert isinstance(kernel, native.Kernel)
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    first = torch.zeros(1, 8, dtype=torch.int32)
    right = [q, k, k.clone(), first, 0.2, q.clone(), torch.zeros(1, 4, 8)]
    kernel.attention("attention_forward", *right)  # type: ignore[arg-type]
    whole = right[place]
    assert isinstance(whole, Tensor)
    turned = torch.stack([whole, whole], -1)[..., 0]
    for other in (whole[..., 1:], whole.double(), turned):
        with pytest.raises(ValueError, match="attention_forward takes"):
            kernel.attention("attention_forward", *right[:place], other, *right[place + 1 :])  # type: ignore[arg-type]


@native_only
@pytest.mark.parametrize("shape", [(1, 1, 2, 272), (1, 1, 2, 8), (1, 3, 2, 16)])
def test_shapes_that_attention_cannot_compute_are_refused_by_cpp(shape: tuple[int, ...]) -> None:
    """Wider than a tile, not whole vectors, heads that do not share evenly."""
    kernel = native.load()
    assert isinstance(kernel, native.Kernel)
    q, k = torch.zeros(shape), torch.zeros(1, 2 if shape[1] == 3 else 1, *shape[2:])
    first, sums = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(shape[:3])
    with pytest.raises(ValueError, match="cannot compute with"):
        kernel.attention("attention_forward", q, k, k, first, 0.2, q.clone(), sums)


@native_only
def test_operators_do_not_read_beyond_their_tensors() -> None:
    """Torch's own code would broadcast or refuse; the kernels are told one size for all."""
    x, one = torch.randn(1, 40, 2, 8), torch.ones(())
    with pytest.raises(ValueError, match="blend_forward"):
        fused.blend(x, x[:, 1:], one, one)
    with pytest.raises(ValueError, match="offset_keys_forward"):
        fused.offset_keys(x, torch.zeros(1, 39, dtype=torch.bool))
    with pytest.raises(ValueError, match="linear_forward"):
        products.linear(torch.randn(64, 32), torch.randn(16, 48))


@native_only
def test_logits_that_are_not_what_they_should_be_are_not_drawn_from() -> None:
    def texts(*rows: Any) -> list[Any]:
        return [(sampling.Sampler(sampling.Sampling()), row) for row in rows]

    good = np.zeros(8, np.float32)
    assert len(sampling.draw(texts(good, good))) == 2
    for bad in (np.zeros(7, np.float32), np.zeros(8), np.zeros((8, 2), np.float32)[:, 0]):
        with pytest.raises(ValueError, match="logits"):
            sampling.draw(texts(good, bad))
    with pytest.raises(ValueError, match="cannot compute with"):
        sampling.draw(texts(good[:0]))


@pytest.mark.parametrize(
    "module", [native, signatures, steps, decode, fused, products, block_sparse, sampling]
)
def test_no_check_is_lost_without_asserts(module: Any) -> None:
    """`python -O` drops them; those that stay tell a type to whoever reads, and check nothing."""
    tree = ast.parse(Path(module.__file__).read_text())
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert [
        ast.unparse(one) for one in tests if not ast.unparse(one).startswith("isinstance(")
    ] == []
