"""Every parameter declares what it is to the optimizer."""

import pytest
import torch
from torch import nn

from speedrun.config.architecture import ModelConfig
from speedrun.errors import ConfigError
from speedrun.model.gpt import GPT

from .test_gpt import SWITCHES, T, V, small


class Gate(nn.Module):
    """A module as someone new to the code would write it."""

    def __init__(self, **roles: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
        if roles:
            self.parameter_roles = roles


@pytest.mark.parametrize(("record", "scalars"), [(15, 54), (18, 52)])
def test_scalars_of_the_records(record: int, scalars: int) -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig(**SWITCHES[record]), 50257, 1024)
    roles = model.roles()
    assert sum(p.numel() for n, p in model.named_parameters() if roles[n] == "scalar") == scalars


def test_every_parameter_has_the_role_of_what_it_is() -> None:
    model = GPT(small(value_embeddings="each", x0_mixing=True, norm="layer", bias=True), V, T)
    roles = model.roles()
    assert roles.keys() == dict(model.named_parameters()).keys()
    assert roles["embedding.weight"] == "embedding"
    assert roles["value_embeddings.tables.0.weight"] == "value_embedding"
    assert roles["head.weight"] == "head"
    assert roles["blocks.0.mlp.up.weight"] == "hidden"
    assert [roles[f"blocks.0.attention.qkv.{i}.weight"] for i in range(3)] == ["q", "k", "hidden"]
    for name in ("blocks.0.mlp.up.bias", "blocks.1.mix", "norm.gain", "blocks.0.attention.blend"):
        assert roles[name] == "scalar"
    assert GPT(small(positions="learned"), V, T).roles()["positions.weight"] == "embedding"


@pytest.mark.parametrize(
    ("roles", "complaint"),
    [
        ({}, r"blocks.1.gate.weight has the role None; .*Gate.parameter_roles\['weight'\]"),
        ({"weight": "hidden"}, "blocks.1.gate.bias has the role None"),
        ({"weight": "hiden", "bias": "scalar"}, "blocks.1.gate.weight has the role 'hiden'"),
    ],
)
def test_a_parameter_without_a_known_role_is_refused(roles: dict[str, str], complaint: str) -> None:
    model = GPT(small(), V, T)
    model.blocks[1].gate = Gate(**roles)
    with pytest.raises(ConfigError, match=complaint + r".* one of hidden, qkv, .*, scalar$"):
        model.roles()


def test_a_parameter_with_a_role_joins_the_others() -> None:
    model = GPT(small(), V, T)
    model.blocks[1].gate = Gate(weight="hidden", bias="scalar")
    roles = model.roles()
    assert (roles["blocks.1.gate.weight"], roles["blocks.1.gate.bias"]) == ("hidden", "scalar")
