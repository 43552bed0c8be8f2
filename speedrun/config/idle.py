"""Values that a user sets and that nothing reads, told before a run so that none is waited for.

A switch may do nothing beside another: what it belongs to is off. A recipe may well keep such a
value, to be there when the other is switched on; somebody who sets either by hand is told.
"""

from __future__ import annotations

import re

from speedrun.config.optimizer import RoleOptions
from speedrun.config.resolve import Resolved
from speedrun.config.schema import Config

SCALED = re.compile(r" x \S+ \(track .*\)$")
# What of [schedule] makes the course of the learning rate, unless code of a user's own does.
RATE_KEYS = ("shape", "warmup", "cooldown", "floor")


def idle(resolved: Resolved) -> list[str]:
    """A sentence for each value that does nothing, if it or what it needs is set by hand.

    So is a value in the very file that names code to be used in its place.
    """
    found = []
    for key, needed, unused in _unread(resolved.config):
        origins = {_stated(resolved.origin.get(one)) for one in (key, needed)}
        beside_code = needed.endswith(".use") and len(origins) == 1 and None not in origins
        if unused and (beside_code or {"override", "option"} & origins):
            found.append(f"{key} changes nothing here: nothing reads it with {needed} as it is")
    for key in sorted(resolved.config.optimizer.unread()):
        if resolved.origin.get(key) == "override" and not any(key in one for one in found):
            found.append(
                f"{key} changes nothing here: nothing reads it with optimizer.kind as it is"
            )
    return found


def _stated(origin: str | None) -> str | None:
    """Where a value is stated, though a track may have multiplied it."""
    return origin and SCALED.sub("", origin)


def _unread(config: Config) -> list[tuple[str, str, bool]]:
    """A key, the key that decides whether it is read, and whether it is set and not read."""
    model, schedule = config.model, config.schedule
    mixed = model.value_embeddings != "none" or model.value_residual
    usual = Config()
    by_code = [
        (f"optimizer.{table}.{name}", f"optimizer.{table}.use",
         getattr(options, name) != getattr(getattr(usual.optimizer, table), name))
        for table, options in config.optimizer
        if isinstance(options, RoleOptions) and f"optimizer.{table}" in config.used_code()
        for name in options.names()
    ]  # fmt: skip
    by_code += [
        (f"schedule.{name}", "custom.schedule.use",
         getattr(schedule, name) != getattr(usual.schedule, name))
        for name in RATE_KEYS
        if config.custom.schedule.use
    ]  # fmt: skip
    muon, options = config.optimizer.kind == "muon", config.optimizer.muon
    return [
        *by_code,
        ("optimizer.hidden.use", "optimizer.kind",
         bool(config.optimizer.hidden.use) and config.optimizer.kind != "own"),
        ("model.value_weights", "model.value_embeddings",
         model.value_weights != usual.model.value_weights and not mixed),
        ("model.value_tables", "model.value_embeddings",
         model.value_tables != usual.model.value_tables and model.value_embeddings != "ends"),
        ("schedule.momentum_warmup", "optimizer.kind",
         schedule.momentum_warmup != usual.schedule.momentum_warmup and not muon),
        ("schedule.momentum_cooldown", "optimizer.kind",
         schedule.momentum_cooldown > 0 and not muon),
        *((f"schedule.{key}", "optimizer.muon.momentum_start",
           getattr(schedule, key) > 0 and options.momentum_start == options.momentum)
          for key in ("momentum_warmup", "momentum_cooldown")),
        ("optimizer.muon.split_qkv", "model.fused_qkv",
         options.split_qkv and not model.fused_qkv),
        ("optimizer.muon.cautious", "optimizer.muon.weight_decay",
         options.cautious and not options.weight_decay),
        ("train.stop", "train.target", config.train.stop == "target" and not config.train.target),
    ]  # fmt: skip
