"""What a user can do wrong, as exceptions whose text is the whole message.

The command line prints the text and exits with `exit_code`; a traceback means a bug of ours.
"""


class SpeedrunError(Exception):
    """A mistake the user can mend: one sentence that says what to change."""

    exit_code = 1


class ConfigError(SpeedrunError):
    """A value, key or combination in a recipe, track, override or option that cannot be used."""

    exit_code = 2


class DataError(SpeedrunError):
    """A corpus, tokenizer, shard or dataset that cannot be read or does not fit the run."""


class RunError(SpeedrunError):
    """A run folder, checkpoint or training state that cannot be used."""
