"""The optimizers' section of the schema: roles, and combinations that are refused."""

from typing import get_args

import pytest

from speedrun.config.optimizer import (
    MATRIX_ROLES,
    MATRIX_TABLES,
    MuonOptions,
    OptimizerConfig,
    Role,
    RoleOptions,
)
from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError


def test_roles_and_sections_agree() -> None:
    sections = {name for name, options in OptimizerConfig() if isinstance(options, RoleOptions)}
    assert sections == set(get_args(Role)) - set(MATRIX_ROLES) | {"hidden"}
    adam, muon, head = RoleOptions(lr=0.5), MuonOptions(lr=0.3), RoleOptions(lr=0.7)
    for config, chosen in (
        (OptimizerConfig(kind="adamw", hidden=adam, muon=muon, head=head), adam),
        (OptimizerConfig(kind="muon", hidden=adam, muon=muon, head=head), muon),
    ):
        assert all(config.of(role) is chosen for role in MATRIX_ROLES)
        assert config.of("head") is head
    assert set(MATRIX_TABLES) == set(get_args(OptimizerConfig.model_fields["kind"].annotation))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["optimizer.muon.coefficients=polar_express", "optimizer.muon.iterations=6"],
            "optimizer.muon.iterations = 6 (override) cannot be used: polar_express has 5 triples",
        ),
        (
            ["optimizer.muon.iterations=101"],
            "optimizer.muon.iterations = 101 (override) cannot be used: 'classic' takes 1 to 100",
        ),
        (["optimizer.head.lr=0"], "optimizer.head.lr = 0.0 cannot be used: it must be greater"),
        (["optimizer.muon.lr=0.0"], "optimizer.muon.lr = 0.0 cannot be used: it must be greater"),
        (["optimizer.scalar.eps=0"], "optimizer.scalar.eps = 0.0 cannot be used: it must be"),
        (["optimizer.muon.momentum=1.0"], "optimizer.muon.momentum = 1.0 (override) cannot"),
        (
            ["optimizer.muon.heads_together=2"],
            "optimizer.muon.heads_together = 2 cannot be used: it must divide the 3 heads of q and "
            "the 3 of k; 0 takes all together",
        ),
        (
            ["optimizer.muon.heads_together=3", "model.kv_heads=1"],
            "it must divide the 3 heads of q and the 1 of k",
        ),
        (
            ["optimizer.muon.heads_together=3", "model.fused_qkv=true"],
            "in one matrix with v it needs optimizer.muon.split_qkv = true",
        ),
    ],
)
def test_what_no_run_can_use_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("record-18", "nano", words)
    assert sentence in str(caught.value)


def test_the_tables_of_five_run_for_five() -> None:
    words = ["optimizer.muon.coefficients=polar_express"]
    assert resolve("record-18", "nano", words).config.optimizer.muon.iterations == 5
