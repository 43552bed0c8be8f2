"""What a tuning can search: refused before any run, or left out where a range has a hole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

from speedrun.config.architecture import ModelConfig
from speedrun.config.idle import RATE_KEYS
from speedrun.config.keys import is_argument
from speedrun.config.optimizer import MATRIX_TABLES, ROLES
from speedrun.config.resolve import parse_override, recipe_value, resolve, toml_text
from speedrun.config.schedule import try_schedule
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.science.space import Range, Values
from speedrun.train.estimate import vocab_size_of, without_storage

# What all trials have in common: the text, how long they train, and how they are judged.
SHARED = ("train", "validation", "data", "machine", "batch", "schedule.steps")
MOST_KEYS = 8


def as_overrides(values: Values) -> tuple[str, ...]:
    return tuple(f"{key}={toml_text(value)}" for key, value in values.items())


def refuse_ranges(
    over: Sequence[Range], base: Config, recipe: str, track: str, overrides: Sequence[str]
) -> None:
    """What cannot be searched is refused before any run, and so is what no run could be set to."""
    if not 1 <= len(over) <= MOST_KEYS:
        raise ConfigError(f"{len(over)} keys cannot be searched: 1 to {MOST_KEYS}")
    keys = [one.key for one in over]
    set_anew = {parse_override(word)[0] for word in overrides}
    unused = set(MATRIX_TABLES.values()) - {base.optimizer.table("hidden")}
    for one in over:
        if one.key.startswith(tuple(f"optimizer.{table}." for table in unused)):
            raise ConfigError(
                f"{one} cannot be searched: {base.recipe} trains its hidden matrices by "
                f"{base.optimizer.kind}, which does not read {one.key}; choose another key"
            )
        table = next((name for name in base.used_code() if one.key.startswith(f"{name}.")), None)
        if table and not is_argument(one.key):
            raise ConfigError(
                f"{one} cannot be searched: {table}.use names the code, which does not read "
                f"{one.key}; search one of its arguments, {table}.args.NAME"
            )
        if base.custom.schedule.use and one.key in [f"schedule.{name}" for name in RATE_KEYS]:
            raise ConfigError(
                f"{one} cannot be searched: custom.schedule.use names the schedule, which does not "
                f"read {one.key}; search one of its arguments, custom.schedule.args.NAME"
            )
        if one.key in SHARED or one.key.partition(".")[0] in SHARED:
            raise ConfigError(
                f"{one} cannot be searched: {one.key} belongs to what all trials have in common, "
                "such as data, length and validation; choose another key"
            )
        for value in one.some_values():  # a recipe must be able to state what is found
            recipe_value(one.key, value, track)
        if keys.count(one.key) > 1:
            raise ConfigError(f"--over {one.key} is given twice: give it once")
        if one.key in set_anew:
            raise ConfigError(
                f"{one.key} is searched by --over and cannot be --set as well: leave one out"
            )
    models: dict[ModelConfig, Config] = {}
    for corner in product(*((one.low, one.high) for one in over)):
        values = dict(zip(keys, corner, strict=True))
        config = resolve(recipe, track, (*overrides, *as_overrides(values))).config
        models[config.model] = config
        try_parts(config, keys)
    _refuse_idle(over, list(models.values()))


def try_parts(config: Config, keys: Iterable[str]) -> None:
    """Refuse values that code of a user's own cannot be built with, if such values are searched."""
    if any(key.startswith("custom.") for key in keys):
        without_storage(config, vocab_size_of(config))
        try_schedule(config)


def _refuse_idle(over: Sequence[Range], configs: Sequence[Config]) -> None:
    """Options of the optimizer for a role that no parameter has: all trials would be the same."""
    by_role = {
        one: role for one in over for role in ROLES if one.key.startswith(f"optimizer.{role}.")
    }
    if not by_role:
        return
    present = {
        role
        for config in configs
        for role in without_storage(config, vocab_size_of(config)).roles().values()
    }
    for one, role in by_role.items():
        if role not in present:
            raise ConfigError(
                f"{one} cannot be searched: no parameter of {configs[0].recipe} has the role "
                f"{role}, so {one.key} changes nothing; choose another key"
            )


def usable_values(
    recipe: str, track: str, overrides: Sequence[str], say: Callable[[str], None]
) -> Callable[[Values], bool]:
    """Whether a run can be set to some values and a recipe state them; what cannot is said once.

    The ends of all ranges can (`refuse_ranges`), but not always what lies between: of whole
    numbers a model may take the divisors of another, or all but one.
    """
    said: set[str] = set()

    def usable(values: Values) -> bool:
        try:
            for key, value in values.items():
                recipe_value(key, value, track)
            try_parts(resolve(recipe, track, (*overrides, *as_overrides(values))).config, values)
        except ConfigError as error:
            if str(error) not in said:
                say(f"left out: {error}")
            said.add(str(error))
            return False
        return True

    return usable
