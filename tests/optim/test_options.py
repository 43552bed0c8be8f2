"""What an optimizer shows of its declared options."""

import inspect
import pydoc

import pytest

from speedrun.config.optimizer import AdamOptions, MuonOptions
from speedrun.optim import Adam, Muon
from speedrun.optim.base import SlotOptimizer
from speedrun.optim.muon import MuonArguments


@pytest.mark.parametrize(("optimizer", "declared"), [(Muon, MuonArguments), (Adam, AdamOptions)])
def test_signature_and_help_show_every_option_with_its_default(
    optimizer: type[SlotOptimizer], declared: type[AdamOptions | MuonOptions]
) -> None:
    shown = inspect.signature(optimizer).parameters
    assert list(shown)[:2] == ["params", "lr"]
    page = pydoc.plain(pydoc.render_doc(optimizer))
    for name in declared.names():
        field = declared.model_fields[name]
        assert shown[name].default == field.default
        assert f"{field.description} ({field.default!r})" in page
    assert set(shown) - set(declared.names()) <= {"params", "process_group", "check_finite"}


def test_a_recipe_and_the_optimizer_mean_the_same() -> None:
    """What Muon adds to a recipe's options changes none of them but the kinds of two."""
    for name in MuonOptions.names():
        recipe, ours = MuonOptions.model_fields[name], MuonArguments.model_fields[name]
        assert ours.default == recipe.default
        if name not in ("coefficients", "dtype"):
            assert ours.metadata == recipe.metadata
            assert ours.annotation == recipe.annotation
