"""The page's ES modules as one classic script, because a page is one file and may load no other.

A page opened from disk cannot import modules, and its Content-Security-Policy allows inline scripts
alone. So each module becomes a function that takes what it imports and returns what it exports,
called after the modules it imports from; its other names are its own, as they are in the modules.
The syntax below is all that is known, each at the beginning of a line. Any other use of the two
words is refused, in strings and comments too, so that nothing is missed without a parser.

    import { a, b } from "./module.js";
    export function a                       or const, class, async function
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources.abc import Traversable

IMPORT = re.compile(r'^import \{\s*([\w$]+(?:,\s*[\w$]+)*),?\s*\} from "\./([a-z]+)\.js";$', re.M)
EXPORT = re.compile(r"^export (?=(?:const|class|function|async function) ([\w$]+))", re.M)
UNKNOWN = re.compile(r"^.*\b(?:import|export)\b.*$", re.M)
# What could end the script element, or make the HTML parser wait for another end.
MARKUP = re.compile(r"</?script|<!--", re.I)


class ScriptError(ValueError):
    """A script that cannot be bundled: a mistake in `static/`, not of whoever builds a page."""


@dataclass(frozen=True)
class Module:
    imports: dict[str, tuple[str, ...]]  # names by the module they come from
    exports: tuple[str, ...]
    code: str


def bundle(folder: Traversable, entry: str) -> str:
    """The module `entry` of a folder with all it imports, as the text of one script element."""
    modules: dict[str, Module] = {}
    _collect(folder, entry, (), modules)
    calls = []
    for name, module in modules.items():
        for source, names in module.imports.items():
            missing = sorted(set(names) - set(modules[source].exports))
            if missing:
                raise ScriptError(f"{source}.js exports no {missing[0]}, which {name}.js imports")
        taken = ", ".join(f"{{ {', '.join(names)} }}" for names in module.imports.values())
        given = ", ".join(f"${source}" for source in module.imports)
        result = f"return {{ {', '.join(module.exports)} }};"
        calls.append(f"const ${name} = (({taken}) => {{\n{module.code}\n{result}\n}})({given});\n")
    return '(() => {\n"use strict";\n' + "".join(calls) + "})();"


def _collect(
    folder: Traversable, name: str, importers: tuple[str, ...], modules: dict[str, Module]
) -> None:
    """Add a module to `modules`, after all it imports; `importers` is the way that led to it."""
    if name in importers:
        circle = " -> ".join((*importers[importers.index(name) :], name))
        raise ScriptError(f"modules import each other in a circle: {circle}")
    if name in modules:
        return
    file = folder / f"{name}.js"
    if not file.is_file():
        raise ScriptError(f"there is no {name}.js, which {['the page', *importers][-1]} needs")
    module = _read(name, file.read_text(encoding="utf-8"))
    for source in module.imports:
        _collect(folder, source, (*importers, name), modules)
    modules[name] = module


def _read(name: str, text: str) -> Module:
    imports: dict[str, tuple[str, ...]] = {}
    for names, source in IMPORT.findall(text):
        if source in imports:
            raise ScriptError(f"{name}.js imports from {source}.js twice")
        imports[source] = tuple(re.split(r",\s*", names))
    code = EXPORT.sub("", IMPORT.sub("", text)).strip()
    if unknown := UNKNOWN.search(code):
        raise ScriptError(f"{name}.js: the bundler does not know {unknown[0].strip()!r}")
    if markup := MARKUP.search(code):
        raise ScriptError(f"{name}.js holds {markup[0]!r}, which HTML would read as markup")
    return Module(imports, tuple(EXPORT.findall(text)), code)
