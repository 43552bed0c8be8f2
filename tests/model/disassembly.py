"""Which loops of a library compute in vectors, read off its object code."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Arithmetic on fp32, packed (p) or scalar (s), as objdump writes it. Moves, conversions and
# comparisons of single floats are not arithmetic.
X86 = re.compile(r"v?(add|sub|mul|div|sqrt|max|min|fn?m(add|sub)\d*)(p|s)s$")
ARM = re.compile(r"f(n?m?add|n?m?sub|n?mul|mla|mls|div|sqrt|max|min|maxnm|minnm|abd)$")


@dataclass(frozen=True)
class Loop:
    """An innermost loop: the function it is in, and its fp32 arithmetic."""

    function: str
    packed: tuple[str, ...]  # each packed operation with its registers
    scalar: tuple[str, ...]  # each scalar operation
    calls: bool  # it calls a function


def innermost_loops(library: Path, objdump: str) -> list[Loop]:
    words = [objdump, "-d", "--no-show-raw-insn", "-C", str(library)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    loops = []
    for name, body in re.findall(r"^[0-9a-f]+ <(.+)>:\n((?:.+\n?)*)", text, re.MULTILINE):
        lines = re.findall(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$", body, re.MULTILINE)
        code = [(int(address, 16), word, operands) for address, word, operands in lines]
        spans = [
            (int(target.group(1), 16), address)
            for address, word, operands in code
            if re.match(r"j|b\b|b\.|cb|tb", word)
            and (target := re.search(r"\b([0-9a-f]+) <", operands))
            and code[0][0] <= int(target.group(1), 16) <= address
        ]
        for begin, end in spans:
            if any((b, e) != (begin, end) and begin <= b and e <= end for b, e in spans):
                continue
            inside = [
                (word, operands) for address, word, operands in code if begin <= address <= end
            ]
            calls = any(re.match(r"call|blr?$", word) for word, _ in inside)
            loops.append(Loop(name, *_arithmetic(inside), calls))
    return loops


def _arithmetic(code: list[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    packed: list[str] = []
    scalar: list[str] = []
    for word, operands in code:
        registers = operands.partition("<")[0]
        if found := X86.match(word):
            (packed if found.group(3) == "p" else scalar).append(f"{word} {registers}")
        elif ARM.match(word):
            single = re.match(r"s\d", registers)
            vector = ".4s" in registers
            if single or vector:
                (scalar if single else packed).append(f"{word} {registers}")
    return tuple(packed), tuple(scalar)
