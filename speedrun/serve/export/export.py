"""`speedrun export`: from a run folder to a folder that others read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speedrun.errors import ConfigError, quoted
from speedrun.serve.export.architecture import architecture_of
from speedrun.serve.export.facts import facts_of
from speedrun.serve.export.folder import refuse_if_taken, write_folder
from speedrun.serve.export.hf import write_hf
from speedrun.serve.export.weights import write_plain
from speedrun.serve.load import load_run

HF, WEIGHTS = "hf", "weights"


@dataclass(frozen=True)
class Exported:
    kind: str
    own_code: bool
    parameters: int
    bytes: int


def export(
    run: Path,
    out: Path,
    to: str = HF,
    *,
    force: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Exported:
    """Write `out` whole or not at all, from the newest whole weights of a run."""
    if to not in (HF, WEIGHTS):
        raise ConfigError(f"--to {quoted(to)} is not known: use {HF} or {WEIGHTS}")
    refuse_if_taken(out.resolve(), force=force)  # before minutes are spent on losses
    loaded = load_run(run)
    loaded.run.read_forced()  # which is refused if it was changed, likewise
    if to == HF and loaded.model.custom:
        code = ", ".join(dict.fromkeys(map(str, loaded.model.custom.values())))
        raise ConfigError(
            f"{run} cannot be exported for transformers: its model is in part {code}, which no "
            f"modelling file there has; --to {WEIGHTS} writes its tensors with that code"
        )
    say("evaluating its weights on its validation rows, for the card")
    facts = {"format": to, **facts_of(loaded, out, to)}
    parameters = facts["parameters"]
    if to == WEIGHTS:
        size = write_folder(out, facts, lambda folder: write_plain(folder, loaded), force=force)
        return Exported("plain weights with a table of names", False, parameters, size)
    architecture = architecture_of(loaded)
    facts["architecture"] = architecture.title
    size = write_folder(
        out, facts, lambda folder: write_hf(folder, loaded, architecture, facts), force=force
    )
    return Exported(architecture.title, architecture.own_code, parameters, size)
