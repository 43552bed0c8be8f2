"""What of a config is too large for a dataset, made smaller: a text of a few kilobytes trains.

A track's sizes are for its own text. Where a user names another one, whatever was set before that
(by defaults, the recipe, the track) and does not fit is made smaller, and the run says so; what the
user sets along with the text, or over it, is used as it is or refused with the largest that fits.
A target is a loss on one text, so another text has none until somebody sets it.

It is a function of the config and the dataset alone. So ranks, the runs of a race and the command
that plans them come to the same values, which are stored with the run; a resumed run reads them
there and nothing is fitted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

from speedrun.config.files import flatten
from speedrun.config.resolve import WINDOWS, Resolved
from speedrun.config.schema import Config, DataConfig
from speedrun.data.dataset import Dataset
from speedrun.data.splits import TRAIN, VAL
from speedrun.errors import ConfigError, DataError

ROWS = 4  # sequences that a batch should have before a sequence is as long as the track's
SHORTEST = 8  # tokens of a sequence, unless somebody asks for less
PASSES = 10  # over the text, after which a model knows it by heart and validation gets worse
EVERY = "validation.every"
VALIDATIONS = 5  # of a run that was made shorter


@dataclass(frozen=True)
class Room:
    """What a dataset has room for; a batch is taken from one shard."""

    name: str
    train: int  # tokens of the largest shard
    val: int
    all: int  # tokens to train on
    usual_text: bool = False  # it holds the text of the track after all, in another folder


@dataclass(frozen=True)
class Fitted:
    """A config that fits its dataset."""

    resolved: Resolved
    shrunk: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by key: from what to what
    notes: tuple[str, ...] = ()  # the same as sentences
    usual_text: bool = True  # that of the track, for which its target stands

    @property
    def config(self) -> Config:
        return self.resolved.config


def room_of(dataset: Dataset, resolved: Resolved) -> Room:
    train, val = dataset.split(TRAIN), dataset.split(VAL)
    largest = max(train.counts, default=0)
    usual = _is_usual(dataset, resolved)
    return Room(name_of(resolved.config), largest, val.tokens, train.tokens, usual)


def name_of(config: Config) -> str:
    """What people call the text of a config: the folder as it was given, or the sources."""
    return config.data.dir or ", ".join(_short(source) for source in config.data.sources)


def _short(source: str) -> str:
    return Path(source).name if Path(source).is_absolute() else source


def _is_usual(dataset: Dataset, resolved: Resolved) -> bool:
    """Whether a folder that was named holds what the built-in files would train on anyway."""
    usual = {f"data.{key}": value for key, value in DataConfig().model_dump().items()}
    usual |= resolved.usual_text
    if dataset.manifest is None or usual["data.dir"]:  # public shards, wherever they lie
        return dataset.manifest is None and bool(usual["data.dir"])
    made = dataset.manifest.sources, dataset.manifest.tokenizer
    return made == (tuple(usual["data.sources"]), usual["data.tokenizer"])


def fit(resolved: Resolved, room: Room) -> Fitted:
    """The config as it fits a dataset, changed in nothing that a user set for it."""
    if not resolved.for_other_text:
        return Fitted(resolved)
    config, free = resolved.config, resolved.for_other_text
    length = _length(config, free, room)
    found: dict[str, int] = {"batch.length": length}
    found["batch.tokens"] = _batch(config, free, room, length)
    found["validation.tokens"] = _validation(config, free, room, length)
    values = dict(flatten(config.model_dump())) | {"train.steps": config.steps}
    found |= _steps(config, free, room, found["batch.tokens"])
    for key in WINDOWS:
        if values[key] > length and key not in free:
            start, end = WINDOWS[:2]
            grows = key == end and values[start] > length  # at most to the end, says the schema
            along = f"{start}={length} " if grows else ""
            what = f"a sequence of {room.name} has {length} tokens"
            _refuse(key, values[key], length, what, along)
        found[key] = min(values[key], length)
    shrunk = {key: (values[key], now) for key, now in found.items() if values[key] != now}
    origin = resolved.origin
    changes: dict[str, tuple[Any, str]] = {
        key: (now, f"shrunk to fit {room.name}, from {was} of {origin.get(key, 'default')}")
        for key, (was, now) in shrunk.items()
    }
    notes = [_sentence(shrunk, room)] if shrunk else []
    target = config.train.target
    if target and not room.usual_text and "train.target" in free:
        why = f"{target:g} of {origin.get('train.target', 'default')} is for another text"
        changes["train.target"] = (0.0, why)
        notes.append(f"no target: {why} than {room.name}; train.target=LOSS sets one")
    return Fitted(resolved.with_values(changes), shrunk, tuple(notes), room.usual_text)


def _length(config: Config, free: frozenset[str], room: Room) -> int:
    """Of a sequence: the track's, or a half, a quarter, ... of it."""
    most = min(room.val, room.train) - 1
    length, tokens = config.batch.length, config.batch.tokens
    if "batch.length" not in free:
        if length > most:
            part = "validation" if room.val < room.train else "training"
            whole = gcd(tokens, config.validation.tokens)  # both have whole sequences of any length
            largest = next((n for n in range(most, 0, -1) if whole % n == 0), 0)
            what = f"{part} of {room.name} has {most + 1:,} tokens"
            _refuse("batch.length", length, largest, what)
        return length
    rows = min(ROWS, tokens // length)
    judged = room.val - 1
    if "validation.tokens" in free:  # two rows, one of them to tune on, unless they get too short
        judged = max(judged // 2, min(judged, SHORTEST))
    wanted = [judged, (room.train - 1) // rows]
    fixed = {"batch.tokens": tokens, "validation.tokens": config.validation.tokens}
    held = [value for key, value in fixed.items() if key not in free]
    while length > min(wanted) or any(value % length for value in held):
        length //= 2
        if length < SHORTEST:
            raise DataError(
                f"{room.name} is too small to train on: it has {room.train:,} tokens for training "
                f"and {room.val:,} for validation, and a sequence has {SHORTEST} at least; build "
                "it from more text, or with --tokenizer byte"
            )
    return length


def _batch(config: Config, free: frozenset[str], room: Room, length: int) -> int:
    most, tokens = room.train - 1, config.batch.tokens
    if "batch.tokens" not in free:
        if tokens > most:
            what = f"the training text of {room.name} has {room.train:,} tokens"
            _refuse("batch.tokens", tokens, most // length * length, what, _shorter(config, length))
        return tokens
    rows = tokens // length
    while rows * length > most:
        rows //= 2
    return rows * length


def _validation(config: Config, free: frozenset[str], room: Room, length: int) -> int:
    """At most half of the rows there are: `science/tune.py` chooses by others than are judged."""
    rows, tokens = (room.val - 1) // length, config.validation.tokens
    if "validation.tokens" in free:
        return min(tokens // length, max(1, rows // 2)) * length
    if tokens > rows * length:
        what = f"the validation text of {room.name} has {room.val:,} tokens"
        _refuse("validation.tokens", tokens, rows * length, what, _shorter(config, length))
    return tokens


def _steps(config: Config, free: frozenset[str], room: Room, batch: int) -> dict[str, int]:
    """No more passes over the text than teach something, and validations to see them by."""
    steps = min(config.steps, PASSES * room.all // batch)  # a batch is less than the text
    if "train.steps" not in free or steps == config.steps:
        return {}
    every = min(config.validation.every, max(1, steps // VALIDATIONS))
    return {"train.steps": steps} | ({EVERY: every} if EVERY in free else {})


def _shorter(config: Config, length: int) -> str:
    """What to set along with tokens that are whole sequences of the fitted length alone."""
    return f"batch.length={length} " if length != config.batch.length else ""


def _refuse(key: str, value: int, largest: int, why: str, along: str = "") -> None:
    if largest < 1:
        raise DataError(f"{key} = {value} cannot be used: {why}; build the dataset from more text")
    raise ConfigError(f"{key} = {value} cannot be used: {why}, so at most {along}{key}={largest}")


def _sentence(shrunk: Mapping[str, tuple[int, int]], room: Room) -> str:
    values = ", ".join(f"{key} {was:,} -> {now:,}" for key, (was, now) in shrunk.items())
    return (
        f"shrunk to fit {room.name} ({room.all:,} tokens to train on, {room.val:,} to validate): "
        f"{values}"
    )
