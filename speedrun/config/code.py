"""Code that a recipe names: a class or function in a file beside it, or in an installed package.

    use = "mine.py:SignMomentum"       a file, from the folder of the recipe that says so
    use = "pytorch_optimizer:SOAP"     an import path, module and name
    args = { lr = 0.002, beta = 0.9 }  what it is called with

Reading a recipe imports nothing. It notes where the code lies (`place`) and a hash of it (`code`),
which belongs to the experiment: other code is another experiment, wherever it lies. `load` imports
what was named, and only if it still has that hash.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from speedrun.config.fields import Section, Text
from speedrun.errors import ConfigError, quoted
from speedrun.files import write_atomically

FORM = 'write "file.py:Name" for a file, or "package.module:Name" for something installed'
MADE = "speedrun_used_"  # begins the names of modules that are made of files
MOST_BYTES = 2**22  # of a file that somebody wrote
# Thousands of files, in which nothing changes between two releases.
BY_VERSION = ("torch", "torchvision", "transformers")
WORKED_OUT = ("code", "place")
OF_CODE = ("use", "args", *WORKED_OUT, "scheduled", "random")  # what a table says of code alone
EXTRA = {"pytorch_optimizer": "optimizers", "schedulefree": "optimizers"}


class Named(NamedTuple):
    """What `use` says: a file or a module, and a name in it."""

    where: str
    name: str

    @property
    def is_file(self) -> bool:
        return self.where.endswith(".py")

    @property
    def package(self) -> str:
        return self.where.partition(".")[0]


def parse_use(use: str) -> Named:
    """The parts of `use`, or a ConfigError that says how it is written."""
    where, _, name = use.rpartition(":")
    named = Named(where, name)
    modules = where.split(".")
    good = named.is_file or all(part.isidentifier() for part in modules)
    if not name.isidentifier() or not good or "\0" in use:
        raise ConfigError(f"{quoted(use)} names no code: {FORM}")
    return named


def _checked_use(use: str) -> str:
    if use:
        try:
            parse_use(use)
        except ConfigError as error:
            raise PydanticCustomError("use", "{why}", {"why": str(error)}) from None
    return use


def _checked_args(args: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name in args:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise PydanticCustomError(
                "args", "{name} is no name that an argument can have", {"name": repr(name)}
            )
    return args


Use = Annotated[Text, AfterValidator(_checked_use)]
Arguments = Annotated[dict[str, JsonValue], AfterValidator(_checked_args)]
Hash = Annotated[Text, Field(pattern=r"^([0-9a-f]{64})?$")]


class UsedCode(Section):
    """Code of a user's own, by `use` and `args`; the rest follows from the code itself."""

    use: Use = Field("", description=f"code in place of ours; {FORM}")
    args: Arguments = Field(
        {}, description="what that code is called with, by the names of its arguments"
    )
    code: Hash = Field("", description="SHA-256 of that code; worked out, not set")
    place: Text = Field("", description="folder of that file; worked out, not set")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.args and not self.use:
            raise PydanticCustomError("args", "args are those of the code that `use` names: set it")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Where no code is named nothing is said of it, in files and hashes of configs alike."""
        found: dict[str, Any] = dump(self)
        if self.use:
            return found
        return {key: value for key, value in found.items() if key not in OF_CODE}

    @property
    def named(self) -> Named:
        return parse_use(self.use)

    @property
    def text(self) -> str:
        """What it is, in a few words: for a person, and for the log."""
        return f"{self.use} ({self.code[:12]})" if self.code else self.use


class CustomConfig(Section):
    """Code of a user's own in place of parts of ours; docs/own-technique.md has the signatures."""

    block: UsedCode = Field(UsedCode(), description="a transformer block")
    attention: UsedCode = Field(UsedCode(), description="attention, with its projections")
    mlp: UsedCode = Field(UsedCode(), description="the MLP")
    loss: UsedCode = Field(UsedCode(), description="what training minimises; not what is reported")
    schedule: UsedCode = Field(UsedCode(), description="multiplier of the learning rates by step")

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {part: value for part, value in dump(self).items() if value}


def found(use: str, folder: Path) -> dict[str, str]:
    """`use`, `code` and `place` of what a file in `folder` calls `use`; imports nothing.

    A file is called by its name alone, for the folder is no part of the experiment. A package that
    is not installed has no hash; only `load` refuses that, for a recipe can be read without it.
    """
    if not use:
        return {"use": "", "code": "", "place": ""}
    named = parse_use(use)
    if not named.is_file:
        code = package_hash(named.package)
        if code is None and (folder / f"{named.where}.py").is_file():
            raise ConfigError(
                f"{quoted(use)} names an installed package, and there is none of that name; the "
                f"file beside the recipe is {quoted(f'{named.where}.py:{named.name}')}"
            )
        return {"use": use, "code": code or "", "place": ""}
    path = Path(named.where).expanduser()
    path = path if path.is_absolute() else folder / path
    content = _read(path, use)
    code = hashlib.sha256(content).hexdigest()
    return {"use": f"{path.name}:{named.name}", "code": code, "place": str(path.parent.resolve())}


def _read(path: Path, use: str) -> bytes:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{quoted(use)} names {path.name}, which is no source of a program")
        return path.read_bytes()
    except OSError as error:
        others = (one.name for one in path.parent.glob("*.py") if one.is_file())
        near = get_close_matches(path.name, [*others], n=1)
        hint = f"; nearest: {quoted(near[0])}" if near else ""
        raise ConfigError(
            f"{quoted(use)} names a file that cannot be read, {quoted(str(path))}: "
            f"{error.strerror}{hint}; its path starts at the folder of the recipe"
        ) from None


@cache
def package_hash(package: str) -> str | None:
    """Of an installed package's version and source files; None: it is not installed.

    What is compiled in it is known by the version alone, and so are packages of many files.
    """
    try:
        spec = importlib.util.find_spec(package)  # a top-level name: found, and not imported
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    digest = hashlib.sha256(package.encode())
    digest.update(f"\0{package_version(package)}".encode())
    if package not in BY_VERSION:
        for name, path in _sources(spec):
            digest.update(f"\0{name}\0".encode())
            try:
                digest.update(path.read_bytes())
            except OSError as error:
                raise ConfigError(
                    f"package {package} cannot be read: {path.name}: {error.strerror}; mend it"
                ) from None
    return digest.hexdigest()


def package_version(package: str) -> str:
    """What it was installed as, with the version; the package's name for what never was."""
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    for name in packages_distributions().get(package, ()):  # which reads what all of them hold
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return package


def _sources(spec: importlib.machinery.ModuleSpec) -> Iterator[tuple[str, Path]]:
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if path.is_file():  # an editor's lock is a link to nowhere
                yield path.relative_to(folder).as_posix(), path
    if not folders and spec.origin and Path(spec.origin).is_file():
        yield Path(spec.origin).name, Path(spec.origin)


def hash_here(used: UsedCode) -> str:
    """The hash of the code as it lies here now; empty where it is gone."""
    try:
        return found(str(Path(used.place) / used.use) if used.place else used.use, Path())["code"]
    except ConfigError:
        return ""


def copy_of(used: UsedCode, copies: Path) -> Path:
    """Where a run keeps its own copy of a file."""
    return copies / used.code[:16] / used.named.where


def keep(used: UsedCode, copies: Path) -> None:
    """Copy a named file into a run's folder, so that the run can be used without the original."""
    if used.named.is_file and not copy_of(used, copies).exists():
        content = _checked_content(used, Path(used.place) / used.named.where)
        copy_of(used, copies).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy_of(used, copies), content, ConfigError)


def load(used: UsedCode) -> Any:
    """The class or function that `use` names."""
    named = used.named
    from speedrun.settings import untouched  # which imports torch, as whatever is named will

    with untouched():
        module = _file_module(used) if named.is_file else _package_module(used)
    try:
        return getattr(module, named.name)
    except AttributeError:
        near = _nearest(named.name, module)
        hint = f"; nearest: {quoted(near)}" if near else ""
        raise ConfigError(
            f"{quoted(used.use)} cannot be used: {named.where} has no {named.name}{hint}"
        ) from None


def _nearest(name: str, module: Any) -> str | None:
    """What may have been meant: of what a module defines, else of what it has imported."""
    public: dict[str, Any] = {
        one: value for one, value in vars(module).items() if not one.startswith("_")
    }
    own = [one for one, value in public.items()
           if getattr(value, "__module__", None) == module.__name__]  # fmt: skip
    for names in (own, [*public]):
        by_lower = {one.lower(): one for one in names}
        if near := get_close_matches(name.lower(), by_lower, n=1):
            return by_lower[near[0]]
    return own[0] if len(own) == 1 else None


def _checked_content(used: UsedCode, path: Path) -> bytes:
    content = _read(path, used.use)
    if used.code and hashlib.sha256(content).hexdigest() != used.code:
        raise ConfigError(
            f"{path} was changed since this config was made (its hash is not {used.code[:12]}), "
            "which makes it another experiment: begin a new run, or put the old file back"
        )
    return content


def _file_module(used: UsedCode) -> ModuleType:
    path = Path(used.place) / used.named.where
    content = _checked_content(used, path)
    name = f"{MADE}{hashlib.sha256(content).hexdigest()[:16]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # where dataclasses look for it
    try:
        # The very bytes that were hashed, and no bytecode beside them.
        exec(compile(content, str(path), "exec"), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[name]
        raise ConfigError(
            f"{quoted(used.use)} cannot be used: {path.name} raises {_told(error, path)}; mend it"
        ) from None
    return module


def _package_module(used: UsedCode) -> ModuleType:
    named = used.named
    here = package_hash(named.package)
    if here is None:
        extra = EXTRA.get(named.package)
        how = f"pip install 'speedrun[{extra}]'" if extra else f"pip install {named.package}"
        raise ConfigError(
            f"{quoted(used.use)} cannot be used: there is no package {named.package} here; "
            f"install it, for example by {how}, or name a file: {FORM}"
        )
    if used.code and here != used.code:
        raise ConfigError(
            f"{quoted(used.use)} cannot be used: the {named.package} installed here is other code "
            f"({here[:12]}) than this config was made with ({used.code[:12]}); install that one"
        )
    try:
        return importlib.import_module(named.where)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(
            f"{quoted(used.use)} cannot be used: importing {named.where} raises {_told(error)}"
        ) from None


def _told(error: BaseException, path: Path | None = None) -> str:
    """An error in one line, with the line of the user's file it came from."""
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None and line is None:
        if path is not None and trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    text = re.sub(r"\s+", " ", str(getattr(error, "msg", None) or error))[:200]
    where = f" in line {line}" if line else ""
    return f"{type(error).__name__}{where}: {text}".removesuffix(": ")


def name_in_file(name: str) -> str:
    """What a file calls something, for people: its module has a name of ours."""
    return re.sub(f"{MADE}[0-9a-f]{{16}}_", "", name)


def code_tables(model: type[Section], prefix: str = "") -> Iterator[str]:
    """The tables of a schema that can name code, as dotted keys."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            if {"use", "args", *WORKED_OUT} <= set(kind.model_fields):
                yield f"{prefix}{name}"
            else:
                yield from code_tables(kind, f"{prefix}{name}.")
