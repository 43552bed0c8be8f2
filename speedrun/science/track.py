"""Whether runs are of their track: held to its settings, and trained on its very text.

The text of a built-in track is what its corpus makes, so its dataset is built once more from the
corpus, which takes seconds, and compared by fingerprint: what lies under $SPEEDRUN_HOME can be put
there, manifest and all. Two texts cannot be checked so. Public shards are trusted, for no hash of
them is known here; they are hashed whole, and entries are listed by that. And the library of
another Python is not on this machine; its runs are listed apart as unchecked.
"""

from __future__ import annotations

import hashlib
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun.config.experiment import experiment
from speedrun.config.files import names
from speedrun.config.fixed import of_track
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.data.build import build_dataset
from speedrun.data.dataset import Dataset
from speedrun.data.stream import ProgressCallback
from speedrun.data.verify import verify
from speedrun.errors import SpeedrunError
from speedrun.files import sha256_of
from speedrun.science.records import Broken, Records
from speedrun.train.evaluate import dataset_of

# What a track decides and a run may not; how wide and how often a run is validated is a recipe's.
TRACKS_OWN = ("data", "validation")
RECIPES_OWN = ("validation.window", "validation.every")
TARGET = "train.target"
NOT_HERE = "its text is not on this machine"
RULE = "the track's text"


class Text(NamedTuple):
    """What this machine can tell of the text of a set of runs."""

    unchecked: str = ""  # why nothing can be told
    shards: str | None = None  # SHA-256 over all public shards, to the last byte


def setting_broken(run: Records) -> Broken | None:
    """A built-in track is held to its file; of a user's own track only its name is known here."""
    if run.config.track not in names("track"):
        return None
    own, found = experiment(resolve(None, run.config.track).config), experiment(run.config)
    fixed = of_track(run.config.track)
    for key in {**own, **found}:
        value = own.get(key)
        held = key.partition(".")[0] in TRACKS_OWN and key not in RECIPES_OWN
        held = held or (fixed is not None and fixed.holds(key))
        if (held or key == TARGET) and found.get(key) != value:
            return Broken("the track's own", f"{key} is {found.get(key)!r}, not {value!r}")
    return None


def text_of(runs: Sequence[Records], progress: ProgressCallback) -> Text | Broken:
    """Of runs on one dataset, by fingerprint; what this machine can tell is other text is refused.

    `progress` is told what is being built or read, for it may take a minute.
    """
    track = runs[0].config.track
    own = resolve(None, track).config if track in names("track") else None
    try:
        if own and not own.data.dir:
            made = _made_again(own, progress)
            for run in runs:
                if run.summary.dataset_fingerprint != made:
                    return Text(NOT_HERE) if _from_elsewhere(runs) else _other_text(run, made)
        return _as_stored(runs, own is not None and bool(own.data.dir), progress)
    except SpeedrunError as error:
        return Broken(RULE, f"it cannot be had here: {error}")


def _made_again(config: Config, progress: ProgressCallback) -> str:
    """The fingerprint of what a track's corpus makes on this machine, whatever is stored."""

    def report(stage: str, done: int, total: int) -> None:
        progress(f"building the text of {config.track} again to compare: {stage}", done, total)

    data = config.data
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dataset"
        build_dataset(data.sources, out, data.tokenizer, val_fraction=data.val_fraction,
                      test_fraction=data.test_fraction, progress=report)  # fmt: skip
        return Dataset.open(out).fingerprint


def _from_elsewhere(runs: Sequence[Records]) -> bool:
    """The text may be that of Python's own library: another one has another, by right.

    A folder that was named has no such excuse.
    """
    here = platform.python_version()
    return all(
        run.environment.python not in (None, here) and not run.config.data.dir for run in runs
    )


def _other_text(run: Records, made: str) -> Broken:
    stated, track = run.summary.dataset_fingerprint, run.config.track
    return Broken(
        RULE,
        f"{run.run.path} is of dataset {stated[:12]}, and {track} makes {made[:12]} here, with "
        f"Python {platform.python_version()}",
    )


def _as_stored(runs: Sequence[Records], public: bool, progress: ProgressCallback) -> Text | Broken:
    """The runs' own folders, which have the fingerprint: every byte of them."""
    whole: set[str] = set()
    for folder in sorted({dataset_of(run.run).resolve() for run in runs}):
        dataset = Dataset.open(folder)
        if dataset.manifest is None:
            whole.add(_hash_of_all(dataset, progress))
        elif public:
            return Broken(RULE, f"{folder} is not of public shards, as that of the track is")
        elif problems := verify(folder).problems:
            return Broken(RULE, problems[0])
    if len(whole) > 1:
        return Broken("same data", f"found shards {', '.join(sorted(one[:12] for one in whole))}")
    return Text(shards=whole.pop() if whole else None)


def _hash_of_all(dataset: Dataset, progress: ProgressCallback) -> str:
    """A dataset's fingerprint takes the ends of public shards alone: all of 103 take a minute."""
    shards = [(name, path) for name, split in sorted(dataset.splits.items())
              for path in split.paths]  # fmt: skip
    total, done, digest = sum(path.stat().st_size for _, path in shards), 0, hashlib.sha256()
    for name, path in shards:
        progress("hashing all public shards", done, total)
        digest.update(f"{name} {sha256_of(path)}\n".encode())
        done += path.stat().st_size
    progress("hashing all public shards", done, total)
    return digest.hexdigest()
