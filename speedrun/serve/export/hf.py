"""`--to hf`: a folder that transformers loads, written without it and read back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from speedrun.errors import RunError
from speedrun.serve.export.architecture import MODELLING, Architecture
from speedrun.serve.export.card import card
from speedrun.serve.export.tokenizer import library_of, settings
from speedrun.serve.load import LoadedRun

WEIGHTS = "model.safetensors"


def write_hf(
    folder: Path, loaded: LoadedRun, architecture: Architecture, facts: dict[str, Any]
) -> None:
    """Everything but the facts themselves, which the folder's writer adds."""
    write_weights(folder / WEIGHTS, loaded, architecture)
    _json(folder / "config.json", architecture.config)
    _json(folder / "generation_config.json", generation(loaded))
    library_of(loaded.tokenizer).save(str(folder / "tokenizer.json"))
    _json(folder / "tokenizer_config.json", settings(loaded.model.length))
    if architecture.own_code:
        shutil.copyfile(Path(__file__).with_name(MODELLING), folder / MODELLING)
    (folder / "README.md").write_text(card(facts, architecture), encoding="utf-8")


def generation(loaded: LoadedRun) -> dict[str, Any]:
    """Columns of the logits that are no token are never written."""
    eot, tokens = loaded.tokenizer.eot, loaded.tokenizer.vocab_size
    padded = list(range(tokens, len(loaded.model.head_weight)))
    found = {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    return {**found, "suppress_tokens": padded} if padded else found


def write_weights(path: Path, loaded: LoadedRun, architecture: Architecture) -> None:
    """All tensors of the model in fp32 at their places, read back from the disk and compared."""
    state = loaded.model.state_dict()
    placed = {name: place.moved(state[place.ours]) for name, place in architecture.places.items()}
    save_file({name: tensor.float() for name, tensor in placed.items()}, path, {"format": "pt"})
    found, unseen = load_file(path), set(state)
    for name, tensor in found.items():
        place = architecture.places[name]
        unseen.discard(place.ours)
        if not torch.equal(place.moved(tensor), state[place.ours]):
            raise RunError(f"{path.name} does not read back as written: {name} differs, try again")
    assert not unseen, f"tensors without a place: {unseen}"


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
