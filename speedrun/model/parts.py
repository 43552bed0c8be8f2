"""Code of a user's own in place of a block, the attention, the MLP or the loss of training.

A recipe names it (`custom.mlp.use`, config/code.py) and is checked here, so that what does not fit
is told in a sentence that names the code and its line. Two forms:

    a subclass of ours    takes its place, and is made as ours is: MLP(config, **args),
                          Attention(config, **args), Block(config, layer, **args),
                          Loss(config, **args)
    anything else         a function or a class that gets the module built so far:
                          wrap(inner, layer, **args) gives a module with the same forward; of the
                          loss f(logits_BTV, targets_BT, **args), a number

The model is built whole first and parts are put in afterwards, each with random numbers of its own.
So all other weights start as they do without it, and pairs of runs with one seed stay pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from speedrun.config.architecture import ModelConfig
from speedrun.config.calling import call, line_of, told
from speedrun.config.code import UsedCode, load
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, SpeedrunError, quoted
from speedrun.model.attention import Attention
from speedrun.model.block import MLP, Block
from speedrun.model.fused import softcap
from speedrun.model.initial import init_as_gpt2
from speedrun.model.loss import Loss
from speedrun.model.products import linear
from speedrun.streams import Streams

JUDGED = ("forward", "validation_loss", "of_each")  # of the loss: what validation reports


@dataclass(frozen=True)
class Part:
    """What a recipe names for one kind of module."""

    key: str  # custom.mlp
    used: UsedCode
    made: Any  # a class or a function

    def __str__(self) -> str:
        return f"{self.key} ({self.used.use})"

    def replaces(self, ours: type[nn.Module]) -> bool:
        return isinstance(self.made, type) and issubclass(self.made, ours)

    def make(self, *given: Any, doing: str) -> nn.Module:
        """What it makes must be a module; what is random in it follows from the run's seed."""
        found = call(self.key, self.used, self.made, *given, doing=doing)
        if not isinstance(found, nn.Module):
            what = f"gives {quoted(found)} where a torch.nn.Module is needed"
            raise ConfigError(f"{self} {what}: return one")
        return found


@dataclass(frozen=True)
class Parts:
    """All code of the kind that a config names; none by default."""

    block: Part | None = None
    attention: Part | None = None
    mlp: Part | None = None
    loss: Part | None = None

    @staticmethod
    def of(config: Config, *, trains: bool = True) -> Parts:
        """Imports what the config names; the loss of training only for those who train."""
        named = {
            field.name: getattr(config.custom, field.name)
            for field in fields(Parts)
            if trains or field.name != "loss"
        }
        return Parts(**{
            name: Part(f"custom.{name}", used, load(used))
            for name, used in named.items()
            if used.use
        })  # fmt: skip

    def loss_of(self, config: ModelConfig) -> Loss:
        return Loss(config) if self.loss is None else CustomLoss(config, self.loss)

    def fit(self, blocks: nn.ModuleList, config: ModelConfig) -> dict[str, Part]:
        """Put the parts of the blocks into their places; gives them by the names they have there.

        The names are relative to `blocks`.
        """
        found: dict[str, Part] = {}
        for layer, block in enumerate(blocks):
            if self.block and self.block.replaces(Block):
                block = self._made(self.block, layer, config, config, layer)
            for name, part, ours in (
                ("attention", self.attention, Attention), ("mlp", self.mlp, MLP),
            ):  # fmt: skip
                if part is None or (name == "attention" and layer in config.attention_free):
                    continue
                if not isinstance(inner := getattr(block, name, None), nn.Module):
                    raise ConfigError(
                        f"{self.block} has no {name} that {part} could take the place of: leave "
                        "one of them out"
                    )
                given = (config,) if part.replaces(ours) else (inner, layer)
                block.add_module(name, self._made(part, layer, config, *given))
                found[f"{layer}.{name}"] = part
            if self.block and not self.block.replaces(Block):
                block = self._made(self.block, layer, config, block, layer)
            if self.block:
                blocks[layer] = block
                found[f"{layer}"] = self.block
        return found

    @staticmethod
    def _made(part: Part, layer: int, config: ModelConfig, *given: Any) -> nn.Module:
        """By random numbers of its own, which follow from those of the model."""
        with Streams.of(torch.initial_seed(), part.key, layer).used():
            made = part.make(*given, doing=f"for layer {layer}")
            if config.init == "gpt2" and given[0] is config:
                init_as_gpt2(made, config.layers)
        return made


OURS = Parts()


class CustomLoss(Loss):
    """Trains by a user's own loss, and is judged by ours."""

    def __init__(self, config: ModelConfig, part: Part) -> None:
        super().__init__(config)
        self.part = part
        self.own: Loss | None = None
        if not part.replaces(Loss):
            return
        changed = [name for name in JUDGED if getattr(part.made, name) is not getattr(Loss, name)]
        if changed:
            raise ConfigError(
                f"{part} overrides {' and '.join(changed)}, which validation is computed by, and "
                "all recipes are judged by the same: override training_loss alone"
            )
        made = part.make(config, doing="to be built")
        assert isinstance(made, Loss)
        self.own = made

    def apply_settings(self, settings: Any) -> None:
        if self.own is not None:
            self.own.apply_settings(settings)

    def training_loss(self, x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
        if self.own is not None:
            return self.own.training_loss(x_BTD, head_VD, targets_BT)
        logits_BTV = softcap(linear(x_BTD, head_VD), self.softcap)
        loss: Tensor = self.part.made(logits_BTV.float(), targets_BT, **self.part.used.args)
        return loss


@contextmanager
def telling(parts: Iterable[Part], doing: str) -> Iterator[None]:
    """An error out of users' code as a sentence; one that is not of that code stays as it is."""
    try:
        yield
    except SpeedrunError:
        raise
    except (Exception, SystemExit) as error:
        for part in parts:
            if line_of(error, part.made)[0]:
                raise ConfigError(told(str(part), error, part.made, doing)) from error
        raise


def named(parts: Mapping[str, Part]) -> dict[str, str]:
    """What the code in each place is called."""
    return {place: str(part) for place, part in parts.items()}
