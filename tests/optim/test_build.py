"""From a recipe to an optimizer: every role has options, and a recipe's options arrive."""

from typing import get_args

import pytest
import torch
from torch.nn import Parameter

from speedrun.config.optimizer import Role
from speedrun.config.resolve import resolve
from speedrun.optim import Muon, OptimError, orthogonalize
from speedrun.optim.build import build_optimizer

SPLIT = "optimizer.muon.split_qkv"


def parameters() -> list[tuple[str, Parameter, Role]]:
    return [(role, Parameter(torch.zeros(576, 192)), role) for role in get_args(Role)]


@pytest.mark.parametrize(("recipe", "kind"), [("record-02", "adam"), ("record-18", "muon")])
def test_every_role_gets_the_options_of_the_recipe(recipe: str, kind: str) -> None:
    config = resolve(recipe, "nano").config
    groups = {group["role"]: group for group in build_optimizer(parameters(), config).param_groups}
    assert set(groups) == set(get_args(Role)) - {"q", "k"}
    assert groups["hidden"]["param_names"] == ["hidden", "q", "k"]
    for role, group in groups.items():
        matrix = role in ("hidden", "qkv")
        section = "muon" if matrix and kind == "muon" else "hidden" if matrix else role
        assert group["kind"] == (kind if matrix else "adam")
        options = getattr(config.optimizer, section)
        expected = options.values()
        if "dtype" in expected:
            expected["dtype"] = None  # auto: what the device does well
        assert {name: group[name] for name in options.names()} == expected
        assert group["initial_lr"] == options.lr


@pytest.mark.parametrize(
    ("word", "dtype"), [("auto", None), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_the_numbers_of_muon_are_those_of_the_recipe(word: str, dtype: torch.dtype | None) -> None:
    config = resolve("record-18", "nano", [f"optimizer.muon.dtype={word}"]).config
    matrix = Parameter(torch.zeros(192, 192))
    optimizer = build_optimizer([("matrix", matrix, "hidden")], config)
    assert optimizer.param_groups[0]["dtype"] == dtype
    (muon,) = optimizer.optimizers
    assert isinstance(muon, Muon)
    (bucket,) = muon.buckets
    assert bucket.update.dtype == (dtype or torch.float32)
    assert Muon([matrix], dtype=word).param_groups[0]["dtype"] == dtype
    with pytest.raises(OptimError, match="dtype is 'fp8'"):
        Muon([matrix], dtype="fp8")


def test_a_fused_matrix_is_split_by_its_heads_where_the_recipe_says_so() -> None:
    roles: tuple[Role, ...] = ("hidden", "qkv")
    for words, split in (
        (["optimizer.muon.split_qkv=true"], (192, 192, 192)),
        (["optimizer.muon.split_qkv=true", "model.kv_heads=1"], (192, 64, 64)),
        (["optimizer.muon.split_qkv=false"], 1),
    ):
        config = resolve("record-04", "nano", [*words]).config
        rows = 192 + 2 * 64 if split == (192, 64, 64) else 576
        listed = [(role, Parameter(torch.zeros(rows, 192)), role) for role in roles]
        hidden, qkv = build_optimizer(listed, config).param_groups
        assert (hidden["split_rows"], qkv["split_rows"]) == (1, split)


@pytest.mark.parametrize(("together", "kv_heads"), [(2, 0), (1, 2), (2, 2)])
def test_heads_of_q_and_k_are_taken_apart_fused_or_not(together: int, kv_heads: int) -> None:
    """Both move as if every block of heads were a parameter, and v as a whole."""
    width, size = 32, 8
    words = [
        *(f"model.width={width}", "model.heads=4", f"model.kv_heads={kv_heads}"),
        *(f"optimizer.muon.heads_together={together}", "optimizer.muon.scale=spectral"),
    ]
    configs = [
        resolve(
            "record-04", "nano", [*words, f"model.fused_qkv={fused}", f"{SPLIT}={fused}"]
        ).config
        for fused in ("true", "false")
    ]
    of_q, of_k = 4 * size, (kv_heads or 4) * size
    grad = torch.randn(of_q + 2 * of_k, width)
    fused, q, k, v = (
        Parameter(torch.zeros_like(part)) for part in (grad, *torch.split(grad, [of_q, of_k, of_k]))
    )
    fused.grad = grad
    q.grad, k.grad, v.grad = torch.split(grad.clone(), [of_q, of_k, of_k])
    build_optimizer([("qkv", fused, "qkv")], configs[0]).step()
    build_optimizer([("q", q, "q"), ("k", k, "k"), ("v", v, "hidden")], configs[1]).step()
    blocks = [*torch.split(grad[: of_q + of_k], together * size), grad[of_q + of_k :]]
    expected = torch.cat([orthogonalize(block) for block in blocks])
    expected *= -configs[0].optimizer.muon.lr
    torch.testing.assert_close(fused.detach(), expected)
    torch.testing.assert_close(torch.cat([q.detach(), k.detach(), v.detach()]), expected)


def test_the_loop_looks_for_nans_itself() -> None:
    assert not build_optimizer(parameters(), resolve("record-18", "nano").config).check_finite
