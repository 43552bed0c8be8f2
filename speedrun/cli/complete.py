"""What a shell may put in place of a word that is half typed.

The protocol is typer's: `speedrun --install-completion` writes a few lines for the shell, which ask
this program how to go on. So nothing here may import torch. Whatever has no answer here is left to
the shell, which then completes names of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from speedrun.errors import ConfigError, quoted

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
# Instead of typer's own for these shells. Those put a space after `model.layers=`; in bash they
# take what follows the equals sign for a word of its own, in zsh they answer from the second time
# on and only to `speedrun` without a path. fish is asked as typer does.
BASH = r"""
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$' \t\n' words word answer at mark
    read -a words <<< "$line"  # a blank after a backslash ends no word
    [[ $line == *[[:space:]] && $line != *\\[[:space:]] ]] && words+=("")
    word=${words[-1]}
    IFS=$'\n'
    COMPREPLY=($(COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) \
        %(autocomplete_var)s=complete_bash "${1/#\~/$HOME}" 2> /dev/null))
    # bash keeps what stands before an equals sign, so it wants the rest alone.
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%%%%=*}="}")
    fi
    # Blanks and marks of the shell are escaped, unless the word began with a quote.
    if [[ ${line##*[[:space:]]} != [\"\']* ]]; then
        for at in "${!COMPREPLY[@]}"; do
            answer=${COMPREPLY[at]//\\/\\\\}
            for mark in ' ' \' '"' '(' ')' '&' ';' '<' '>' '|' '$' '`' '*' '?' '[' ']' '!' '#'; do
                answer=${answer//"$mark"/"\\$mark"}
            done
            COMPREPLY[at]=$answer
        done
    fi
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""
ZSH = r"""
#compdef %(prog_name)s

%(complete_func)s() {
    local -a answers open
    answers=(${(f)"$(_TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \
        _TYPER_COMPLETE_FISH_ACTION=get-args %(autocomplete_var)s=complete_fish \
        ${~words[1]} 2> /dev/null)"})
    answers=(${answers%%%%$'\t'*})
    (( $#answers )) || { _files; return }
    open=(${(M)answers:#*[=/]})
    (( $#open )) && compadd -S '' -a open
    answers=(${answers:#*[=/]})
    (( $#answers )) && compadd -a answers
    return 0
}

# Called by the completion system, this is the function; sourced, it makes the function known.
if [[ $funcstack[1] == _%(prog_name)s ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""


def use_own_scripts() -> None:
    """Have `--install-completion` and `--show-completion` write ours."""
    from typer import _completion_shared

    # A name that typer keeps to itself: once it is gone, tests fail here.
    _completion_shared._completion_scripts.update(bash=BASH.strip(), zsh=ZSH.strip())


def named_shell(context: typer.Context, words: Sequence[str]) -> None:
    """`--install-completion fish` is for fish, in whatever shell it is typed.

    typer's options take no shell: they ask which one they are in and pass over the word.
    """
    from typer.completion import install_callback, show_callback

    for option, act in {
        "--install-completion": install_callback, "--show-completion": show_callback,
    }.items():  # fmt: skip
        after = [after for word, after in pairwise(words) if word == option]
        after += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
        for shell in after:
            if shell not in SHELLS:
                raise ConfigError(
                    f"{option} {quoted(shell)} cannot be used: name one of {', '.join(SHELLS)}, or "
                    "none for the shell you are in"
                )
            act(context, context.command.params[0], shell)


def recipe_names(incomplete: str) -> list[str]:
    return _names("recipe", incomplete)


def track_names(incomplete: str) -> list[str]:
    return _names("track", incomplete)


def file_names(context: typer.Context, incomplete: str) -> list[str]:
    """Of the verb that is asked: `recipes show` or `tracks show`."""
    recipes = context.parent is not None and context.parent.info_name == "recipes"
    return _names("recipe" if recipes else "track", incomplete)


def _names(kind: Literal["recipe", "track"], incomplete: str) -> list[str]:
    from speedrun.config.files import built_in

    return [name for name in built_in(kind) if name.startswith(incomplete)]


def override(incomplete: str) -> list[str]:
    """`model.lay` goes on as `model.layers=`, and `model.norm=` as each of its values."""
    from speedrun.config.keys import schema_fields, settable

    key, equals, _ = incomplete.partition("=")
    fields = {name: field for name, field in schema_fields() if "." in name and settable(name)}
    if not equals:
        return [f"{name}=" for name in fields if name.startswith(incomplete)]
    if key not in fields:
        return []
    if key == "data.dir":
        return [f"{key}={name}" for name in _folders(incomplete.partition("=")[2])]
    values = [f"{key}={value}" for value in _values(fields[key].annotation)]
    return [text for text in values if text.startswith(incomplete)]


def _values(annotation: Any) -> list[str]:
    """Of a key that has few."""
    if annotation is bool:
        return ["true", "false"]
    return [*map(str, get_args(annotation))] if get_origin(annotation) is Literal else []


def run_folders(incomplete: str) -> list[str]:
    """Runs, and folders on the way to them."""
    return [*_folders(incomplete)]


def _folders(incomplete: str) -> Iterator[str]:
    """A run ends here; of any other folder, one may want what is inside."""
    head, slash, start = incomplete.rpartition("/")
    root = Path(f"{head}{slash}").expanduser()
    try:
        inside = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:
        return
    for path in inside:
        if path.name.startswith(start) and (start or not path.name.startswith(".")):
            whole = any((path / name).exists() for name in ("config.toml", "manifest.json"))
            yield f"{head}{slash}{path.name}" + ("" if whole else "/")


def switches(incomplete: str) -> list[str]:
    """A key, or the name of a technique."""
    from speedrun.config.fields import Technique
    from speedrun.config.keys import schema_fields

    marks = [mark for _, field in schema_fields() for mark in field.metadata]
    names = [mark.name for mark in marks if isinstance(mark, Technique)]
    return [*override(incomplete), *(name for name in names if name.startswith(incomplete))]


def bench_names(incomplete: str) -> list[str]:
    from speedrun.commands.bench import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def run_sorts(incomplete: str) -> list[str]:
    from speedrun.commands.runs import SORTS

    return [name for name in SORTS if name.startswith(incomplete)]


def run_states(incomplete: str) -> list[str]:
    from speedrun.train.state import STATES

    return [name for name in STATES if name.startswith(incomplete)]
