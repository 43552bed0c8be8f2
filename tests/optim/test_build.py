"""From a recipe to an optimizer: every role has options, and a recipe's options arrive."""

from typing import get_args

import pytest
import torch
from torch.nn import Parameter

from speedrun.config.optimizer import Role
from speedrun.config.resolve import resolve
from speedrun.optim.build import build_optimizer


def parameters() -> list[tuple[str, Parameter, str]]:
    return [(role, Parameter(torch.zeros(576, 192)), role) for role in get_args(Role)]


@pytest.mark.parametrize(("recipe", "kind"), [("record-02", "adam"), ("record-18", "muon")])
def test_every_role_gets_the_options_of_the_recipe(recipe: str, kind: str) -> None:
    config = resolve(recipe, "nano").config
    groups = {group["role"]: group for group in build_optimizer(parameters(), config).param_groups}
    assert set(groups) == set(get_args(Role))
    for role, group in groups.items():
        matrix = role in ("hidden", "qkv")
        section = "muon" if matrix and kind == "muon" else "hidden" if matrix else role
        assert group["kind"] == (kind if matrix else "adam")
        options = getattr(config.optimizer, section)
        assert {name: group[name] for name in options.names()} == options.values()
        assert group["initial_lr"] == options.lr


def test_a_fused_matrix_is_split_by_its_heads_where_the_recipe_says_so() -> None:
    for words, split in (
        (["optimizer.muon.split_qkv=true"], (192, 192, 192)),
        (["optimizer.muon.split_qkv=true", "model.kv_heads=1"], (192, 64, 64)),
        (["optimizer.muon.split_qkv=false"], 1),
    ):
        config = resolve("record-04", "nano", [*words]).config
        rows = 192 + 2 * 64 if split == (192, 64, 64) else 576
        listed = [(role, Parameter(torch.zeros(rows, 192)), role) for role in ("hidden", "qkv")]
        hidden, qkv = build_optimizer(listed, config).param_groups
        assert (hidden["split_rows"], qkv["split_rows"]) == (1, split)


def test_the_loop_looks_for_nans_itself() -> None:
    assert not build_optimizer(parameters(), resolve("record-18", "nano").config).check_finite
