"""Run folders made up for a page, written by the project's own writer."""

from __future__ import annotations

from pathlib import Path

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.train.run import RunFolder


def made_config(*overrides: str, recipe: str = "modern", track: str = "nano") -> Config:
    config = resolve("modern", "nano", ["train.steps=40", "train.target=4.0", *overrides]).config
    return config.model_copy(update={"recipe": recipe, "track": track})


def made_run(
    path: Path, config: Config, *, slope: float = 0.1, every: int = 10, dataset: str = "none"
) -> RunFolder:
    """A run folder written by the project's own writer, with a loss that falls in a line."""
    run = RunFolder(path)
    path.mkdir(parents=True)
    run.create(config)
    run.log("start", step=0, peak_flops=1e11, dataset_fingerprint=dataset)
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
            run.log("val", **where, loss=loss, bits_per_byte=loss / 2, val_tokens=4096)
    run.log("checkpoint", step=config.steps, folder="step-000040")
    run.log("sample", prompt="def ", text="def <b>f</b>():</script><script>boom()</script>")
    run.write_summary({"steps": config.steps, "val_loss": loss, "params": 1234, "seed": 0,
                       "recipe": config.recipe, "tokens_per_second": 16384.0})  # fmt: skip
    return run
