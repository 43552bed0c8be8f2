"""The dataset a config asks for, found or built, and made ready to train on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from speedrun.config.resolve import Resolved
from speedrun.config.schema import Config
from speedrun.data.build import build_dataset, checked_options
from speedrun.data.corpus import HUB, open_corpus
from speedrun.data.dataset import MANIFEST, Dataset
from speedrun.data.fit import Fitted, fit, room_of
from speedrun.data.known import recall, remember, stamp_of
from speedrun.data.shards import KEEP_BYTES
from speedrun.data.splits import TRAIN, VAL
from speedrun.data.stream import ProgressCallback
from speedrun.data.tokenizer import Tokenizer
from speedrun.data.verify import verify
from speedrun.errors import DataError
from speedrun.files import NoHomeError, cache_home


def find_dataset(config: Config, progress: ProgressCallback = lambda *_: None) -> Path:
    """The folder that the config names, or that of its corpus under $SPEEDRUN_HOME, built once.

    The latter ends in a hash of the options and of what the files hold (hub datasets count by
    name), so a changed corpus is a new dataset. Processes that ask at once wait for the one that
    builds.
    """
    data = config.data
    if (known := known_dataset(config)) is not None:
        return known
    _, options = checked_options(data.tokenizer, data.val_fraction, data.test_fraction)
    facts, stamp = _facts_and_stamp(config)
    corpus = open_corpus(data.sources)
    text = f"{corpus.content_hash()} Options({facts})"
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    names = [source if source.startswith(HUB) else Path(source).name for source in data.sources]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join([*names, options.tokenizer]))
    out = cache_home() / "datasets" / f"{readable[:80].strip('-.')}-{key}"
    if not (out / MANIFEST).exists():
        build_dataset(
            data.sources,
            out,
            data.tokenizer,
            val_fraction=data.val_fraction,
            test_fraction=data.test_fraction,
            progress=progress,
            wait=True,
        )
    if stamp:
        remember(stamp, out)
    return out


def built_datasets() -> list[Path]:
    """Folders under $SPEEDRUN_HOME that may be datasets; none where there is no home."""
    with suppress(NoHomeError, OSError):
        return sorted((cache_home() / "datasets").glob("[!.]*/"))
    return []


def known_dataset(config: Config) -> Path | None:
    """The same where it is known without reading any text: a folder that is named, or built."""
    if config.data.dir:
        return Path(config.data.dir).expanduser()
    _, stamp = _facts_and_stamp(config)
    known = recall(stamp) if stamp else None
    return known if known and (known / MANIFEST).exists() else None


def _facts_and_stamp(config: Config) -> tuple[str, str | None]:
    data = config.data
    _, options = checked_options(data.tokenizer, data.val_fraction, data.test_fraction)
    # Spelled out: names of datasets that are built already must not change with a class's name.
    facts = ", ".join(f"{name}={value!r}" for name, value in asdict(options).items())
    return facts, stamp_of(data.sources, facts)


def fit_to_dataset(resolved: Resolved, progress: ProgressCallback = lambda *_: None) -> Fitted:
    """A config as it fits its dataset, which is looked at where a user named the text."""
    if not resolved.for_other_text:
        return Fitted(resolved)
    dataset = Dataset.open(find_dataset(resolved.config, progress))
    return fit(resolved, room_of(dataset, resolved))


def open_dataset(folder: Path, splits: Sequence[str] = (TRAIN, VAL)) -> Dataset:
    """A dataset ready to be used; one that is small is re-hashed first, which takes no time.

    Files of other splits are not opened: who trains does not touch the test.
    """
    dataset = Dataset.open(folder)
    held = [dataset.splits[name] for name in splits if name in dataset.splits]
    paths = [path for split in held for path in split.paths]
    size = sum(path.stat().st_size for path in paths if path.exists())
    problems = verify(folder, splits).problems if dataset.manifest and size <= KEEP_BYTES else ()
    if problems:
        raise DataError(problems[0])
    return dataset


def load_tokenizer_if_any(dataset: Dataset) -> tuple[Tokenizer | None, list[str]]:
    """Public shards can be trained on where GPT-2's tokenizer is out of reach."""
    try:
        return dataset.tokenizer(), []
    except DataError as error:
        if dataset.manifest is not None:
            raise
        return None, [str(error)]
