"""Run folders made up for a page, written by the project's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.science.results import Trial, Tuning
from speedrun.science.space import Budget, Range
from speedrun.train.run import RunFolder
from speedrun.train.summary import Summary

HEAD = Range.parse("optimizer.head.lr=0.001..0.1:log")


def made_config(*overrides: str, recipe: str = "modern", track: str = "nano") -> Config:
    config = resolve("modern", "nano", ["train.steps=40", "train.target=4.0", *overrides]).config
    return config.model_copy(update={"recipe": recipe, "track": track})


def made_summary(**stated: Any) -> Summary:
    """The result of a run that was not made; `stated` replaces what stands here."""
    facts: dict[str, Any] = {
        "recipe": "modern", "track": "nano", "params": 1234, "steps": 40, "tokens": 327_680,
        "train_seconds": 20.0, "wall_seconds": 27.0, "val_loss": 3.0, "seed": 0,
        "dataset_fingerprint": "d" * 64,
    }  # fmt: skip
    return Summary(**(facts | stated))


def begun_run(path: Path, config: Config) -> RunFolder:
    """A run that has logged nothing yet."""
    run = RunFolder(path)
    run.create(config)
    return run


def made_run(
    path: Path, config: Config, *, slope: float = 0.1, every: int = 10, dataset: str = "none"
) -> RunFolder:
    """A run whose loss falls in a line."""
    run = begun_run(path, config)
    run.log("start", step=0, dataset_fingerprint=dataset)
    for step in range(config.steps + 1):
        where = {
            "step": step, "tokens": step * config.batch.tokens, "seconds": 0.5 * step,
            "wall_seconds": 3.0 + 0.6 * step,
        }  # fmt: skip
        loss = 7.0 - slope * step - 0.001 * config.train.seed
        if step:
            run.log("train", **where, loss=loss, ms=500.0, wait_seconds=0.005 * step,
                    peak_share=0.4)  # fmt: skip
        if step % every == 0 or step == config.steps:
            run.log("peak", **where, peak_flops=1e11, peak_share=0.4, peak_seconds=0.03)
            run.log("val", **where, loss=loss, bits_per_byte=loss / 2, val_tokens=4096)
    run.log("checkpoint", step=config.steps, folder="step-000040")
    run.log(
        "sample",
        prompt="def ",
        text="def <img src=x onerror='window.boom=1'>():</script><script>boom()</script>",
    )
    run.write_summary(made_summary(steps=config.steps, val_loss=loss, recipe=config.recipe,
                                   tokens_per_second=16384.0))  # fmt: skip
    return run


def made_tuning(**stated: Any) -> Tuning:
    """A search of four trials, the third the best and the last diverged."""
    trials = [
        (0, 0.008, (4.0, 4.2), 4.1), (1, 0.02, (3.9, 4.0), 3.95), (2, 0.0989, (3.8, 3.9), 3.85),
        (3, 0.05, (None, 4.0), None),
    ]  # fmt: skip
    facts: dict[str, Any] = {
        "recipe": "modern", "track": "nano", "over": (HEAD,), "budget": Budget(trials=4),
        "seeds": (1000, 1001), "rows": "between", "file": "modern-tuned.toml", "best": 2,
        "trials": tuple(
            Trial(number=number, values={HEAD.key: value}, box=1.0 if number else None,
                  losses=losses, loss=loss, diverged=loss is None)
            for number, value, losses, loss in trials
        ),
    }  # fmt: skip
    return Tuning(**(facts | stated))
