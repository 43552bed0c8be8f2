"""What is known of an exported model, as plain data: for its card, and for programs beside it.

Nothing in it names a place on this machine: of a path only the last part is kept.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speedrun import __version__
from speedrun.config.architecture import BLOCK
from speedrun.config.own_code import own_code, with_code
from speedrun.config.schema import Config
from speedrun.data.tokenizer import parse_spec
from speedrun.errors import RunError
from speedrun.serve.export.losses import losses_of
from speedrun.serve.load import LoadedRun
from speedrun.train.checkpoint import MODEL
from speedrun.train.evaluate import read_test
from speedrun.train.summary import Environment

ABSOLUTE = re.compile(r"(?<![\w.\-:/])(?:~|/)[^\s\"',;()\[\]]*")


def without_places(text: str) -> str:
    """With every absolute path cut down to its last part."""

    def name(match: re.Match[str]) -> str:
        path = match.group()
        return Path(path.rstrip("/:.")).name + path[len(path.rstrip("/:.")) :].replace("/", "")

    return ABSOLUTE.sub(name, text)


def portable(config: Config) -> Config:
    """The config with names in the place of folders of this machine."""
    data = config.data
    config = with_code(config, {table: {"place": ""} for table in config.used_code()})
    return config.model_copy(update={"data": data.model_copy(update={
        "sources": tuple(without_places(source) for source in data.sources),
        "dir": without_places(data.dir),
        "tokenizer": str(parse_spec(data.tokenizer)),
    })})  # fmt: skip


def facts_of(loaded: LoadedRun, out: Path, to: str) -> dict[str, Any]:
    run, config, found = loaded.run, portable(loaded.config), loaded.trained.checkpoint
    summary = run.readable_summary()
    same_step = summary is not None and summary.steps == found.step
    losses = asdict(losses_of(run, loaded.model))
    if losses["why_no_range"]:
        losses["why_no_range"] = without_places(losses["why_no_range"])
    window = loaded.planner.window
    return {
        "made_by": f"speedrun {__version__}",
        "name": loaded.name,
        "recipe": config.recipe,
        "track": config.track,
        "seed": config.train.seed,
        "parameters": sum(each.numel() for each in loaded.model.parameters()),
        "step": found.step,
        "steps_of_schedule": config.steps,
        "training_tokens": found.step * config.batch.tokens,
        "context": loaded.model.length,
        "window": window_text(loaded.config.attention.window, window),
        "documents": config.attention.documents,
        "tokenizer": {
            "spec": str(parse_spec(loaded.tokenizer.spec)),
            "ids": loaded.tokenizer.vocab_size,
            "ids_with_padding": len(loaded.model.head_weight),
            "fingerprint": loaded.tokenizer.fingerprint,
        },
        "data": {
            "sources": [] if config.data.dir else list(config.data.sources),
            "dataset": config.data.dir or None,
            "dataset_fingerprint": found.meta.get("dataset_fingerprint"),
            "corpus_sha256": summary.corpus_sha256 if summary else None,
        },
        "validation": losses,
        "test": _test(loaded),
        "train_seconds": summary.train_seconds if summary and same_step else None,
        "forced": [without_places(sentence) for sentence in run.read_forced()],
        "own_code": own_code(config),
        "weights_sha256": found.meta["sha256"][MODEL],
        **_environment(loaded),
        "export_command": f"speedrun export {loaded.name} --to {to} {out.resolve().name}",
    }


def window_text(unit: str, window: Any) -> str:
    """How far back a token sees, in words."""
    if window is None:
        return "the whole text"
    if unit == "blocks":
        return f"{int(window)} blocks of {BLOCK} tokens, its own among them"
    also = f", and no further than its own block of {BLOCK} and those before it that hold them"
    return f"{int(window)} tokens" + (also if unit == "tokens_in_blocks" else "")


def _test(loaded: LoadedRun) -> dict[str, Any] | None:
    """What is recorded of these very weights; the test itself is not looked at."""
    try:
        tested = read_test(loaded.run)
    except RunError:
        return None
    weights = loaded.trained.checkpoint.meta["sha256"][MODEL]
    for one in tested.all if tested else ():
        if one.weights_sha256 == weights:
            return {"loss": one.loss, "bits_per_byte": one.bits_per_byte, "tokens": one.tokens}
    return None


def _environment(loaded: LoadedRun) -> dict[str, Any]:
    try:
        here = Environment.read(loaded.run.environment)
    except RunError:
        here = None
    if here is None:
        return {"code": {}, "machine": {}, "command": None}
    command = here.recorded.get("command")
    return {
        "code": {
            "speedrun": here.recorded.get("speedrun"),
            "git_commit": here.git_commit,
            "changed_since_commit": bool(here.git_diff) if here.git_commit else None,
            "sha256": here.code_sha256,
        },
        "machine": {
            "torch": here.torch, "python": here.python, "cpu": here.cpu, "cores": here.cores,
            "gpu": here.gpu,
        },
        "command": without_places(command) if isinstance(command, str) else None,
    }  # fmt: skip
