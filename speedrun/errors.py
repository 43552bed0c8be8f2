"""What a user can do wrong, as exceptions whose text is the whole message.

The command line prints the text and exits with `exit_code`; a traceback means a bug of ours. What
a user gave is echoed by `quoted` or `shortened`, so that a message stays one that can be read.
"""

LONGEST_ECHO = 120  # characters of a user's value in a message


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


def shortened(value: object) -> str:
    """A value as the text of a message: cut where it is long, with its length instead."""
    text = str(value)
    if len(text) <= LONGEST_ECHO:
        return text
    return f"{text[: LONGEST_ECHO - 30]}... ({len(text):,} characters)"


def quoted(value: object) -> str:
    """`repr` of a value for a message, cut likewise."""
    try:
        return shortened(repr(value))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
