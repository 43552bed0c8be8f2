"""Where records go besides `metrics.jsonl`: TensorBoard and Weights & Biases, if asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedrun.errors import ConfigError
from speedrun.train.log import Sink

CURVES = ("train", "val")  # kinds whose numbers make curves over steps


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, kind: str, **values: Any) -> None:
        if kind in CURVES:
            for key, value in _numbers(values).items():
                self._writer.add_scalar(f"{kind}/{key}", value, values["step"])
            self._writer.flush()


class Wandb:
    def __init__(self, folder: Path) -> None:
        import wandb

        self._run = wandb.init(project="speedrun", name=folder.name, dir=str(folder))

    def log(self, kind: str, **values: Any) -> None:
        if kind in CURVES:
            numbers = {f"{kind}/{key}": value for key, value in _numbers(values).items()}
            self._run.log(numbers, step=values["step"])


SINKS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def open_sinks(names: tuple[str, ...], folder: Path) -> list[Sink]:
    made: list[Sink] = []
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"--log {name!r} is not known; use one of {', '.join(SINKS)}")
        try:
            made.append(SINKS[name](folder))
        except ImportError:
            raise ConfigError(
                f"--log {name} needs an extra: pip install 'speedrun[{name}]'"
            ) from None
    return made
