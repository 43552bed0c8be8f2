"""Ways to spoil an input: bytes, text, JSON and TOML, all drawn from one `Random`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import tomli_w

NUMBERS: Sequence[Any] = (
    0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**12,
    -(10**12), 10**30, 10**400, 0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 5e-324, 1e-9, 1e300, 1e308,
    -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS: Sequence[str] = (
    "", " ", "\0", "a\0b", "\x1b[31mred\x1b[0m", "a\nb", "\r\n", "\t", "\ud800", "\udcff", "é",
    "²", "١٢", "³.5", "１２", "\u202eevil", "\u2028", "\ufeff", "🏁", "../../x", "/dev/null", "/",
    "~", ".", "-", "--help", "nan", "NaN", "inf", "-Infinity", "1e999", "0x10", "1_000", "true",
    "null", "None", "{}", "[]", "%s%n{0}", "${HOME}", "[red]", "a" * 5000, "[" * 3000, "{" * 200,
    "../" * 50, "9" * 6000, "*", "[a-", "**/*", "step-000008", "model.layers", "train", "val",
    "test", "race", "modern", "nano",
)  # fmt: skip


def value(rng: Random, depth: int = 0) -> Any:
    """Anything that JSON holds, and the numbers that it holds only in Python."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind <= 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.randrange(-5, 5000) if rng.random() < 0.5 else rng.uniform(-10, 10)
    if kind in (3, 4):
        return text(rng)
    if kind == 5:
        return rng.choice((True, False, None))
    inside = [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return inside if kind == 6 else {text(rng)[:20]: item for item in inside}


def text(rng: Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    alphabet = rng.choice(
        ("abc=.\"'[]{}#\n,0123456789-_ ", "\0\x01\x1b\x7f\x9b\ud800\uffff", "é²١🏁")
    )
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40)))


def spoil_bytes(rng: Random, data: bytes) -> bytes:
    """One to three changes that know nothing of what the bytes mean."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_BYTE_CHANGES)(rng, data)
    return data


def _place(rng: Random, data: bytes) -> int:
    """Headers and ends decide more than what lies between them."""
    size = len(data)
    near = rng.choice((size, size, min(size, 64), min(size, 1100)))
    place = rng.randrange(near + 1)
    return size - place if rng.random() < 0.3 else place


def _flip(rng: Random, data: bytes) -> bytes:
    if not data:
        return b"\xff"
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8))):
        changed[min(_place(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: Random, data: bytes) -> bytes:
    return data[: _place(rng, data)]


def _delete(rng: Random, data: bytes) -> bytes:
    start = _place(rng, data)
    return data[:start] + data[start + rng.choice((1, 2, 7, 64, 1000)) :]


def _insert(rng: Random, data: bytes) -> bytes:
    start = _place(rng, data)
    known = (
        b"\0", b"\xff", b"\n", b"\r\n", b"\x1b[2J", b"{", b"]", b'"', b"\xef\xbb\xbf",
        b"\xed\xa0\x80", b"9" * 5000, b"[" * 5000,
    )  # fmt: skip
    piece = rng.choice((*known, rng.randbytes(16)))
    return data[:start] + piece + data[start:]


def _repeat(rng: Random, data: bytes) -> bytes:
    start = _place(rng, data)
    piece = data[start : start + rng.choice((1, 16, 300))]
    return data[:start] + piece * rng.choice((2, 3, 50)) + data[start:]


def _overwrite(rng: Random, data: bytes) -> bytes:
    start = _place(rng, data)
    piece = rng.choice((b"\0" * 8, b"\xff" * 8, b"\0" * 64, rng.randbytes(4), b"\x7f\xff\xff\xff"))
    return data[:start] + piece + data[start + len(piece) :]


def _replace(rng: Random, data: bytes) -> bytes:
    known = (
        b"", b"\0", b"\n", b"{}", b"[]", b"null", b"0", b'""', b"\xff\xfe", b"[" * 100_000,
        b"1" * 5000,
    )  # fmt: skip
    return rng.choice((*known, rng.randbytes(rng.randrange(1, 2000)), data * 2))


def _encode(rng: Random, data: bytes) -> bytes:
    readable = data.decode("latin-1")
    return readable.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7", "utf-8")))


def _digits(rng: Random, data: bytes) -> bytes:
    """A number of the text becomes another."""
    places = [i for i, byte in enumerate(data[:20_000]) if 48 <= byte <= 57]
    if not places:
        return _flip(rng, data)
    start = rng.choice(places)
    new = rng.choice(
        (
            b"-1",
            b"0",
            b"9" * 25,
            b"1e400",
            b"NaN",
            b"\xc2\xb2",
            b"\xd9\xa1",
            b"00",
            b"0x1",
            b"1.5",
            b'"1"',
        )
    )
    return data[:start] + new + data[start + 1 :]


Change = Callable[[Random, bytes], bytes]
_BYTE_CHANGES: Sequence[Change] = (
    _flip, _flip, _cut, _delete, _insert, _insert, _repeat, _overwrite, _replace, _encode, _digits,
    _digits,
)  # fmt: skip


def spoil_value(rng: Random, found: Any) -> Any:
    """The same with one place of it changed: gone, another type, an extreme, a copy, a new name."""
    if isinstance(found, dict) and found and rng.random() < 0.85:
        key = rng.choice(list(found))
        how, rest = rng.randrange(10), {k: v for k, v in found.items() if k != key}
        if how == 0:
            return rest
        if how == 1:
            return rest | {text(rng): found[key]}
        if how == 2:
            return found | {text(rng): value(rng)}
        if how == 3:
            return found | {key: found[rng.choice(list(found))]}
        return found | {key: spoil_value(rng, found[key])}
    if isinstance(found, list) and found and rng.random() < 0.8:
        place, how = rng.randrange(len(found)), rng.randrange(8)
        if how == 0:
            return found[:place] + found[place + 1 :]
        if how == 1:
            return [*found[:place], found[place], *found[place:]]
        if how == 2:
            return rng.sample(found, len(found))
        return [*found[:place], spoil_value(rng, found[place]), *found[place + 1 :]]
    if isinstance(found, (int, float)) and not isinstance(found, bool) and rng.random() < 0.4:
        return rng.choice((found + 1, -found, found * 1000, str(found), [found], 1.5))
    return value(rng)


def as_json(rng: Random, found: Any) -> bytes:
    written = json.dumps(found, ensure_ascii=rng.random() < 0.7, indent=rng.choice((None, 2)))
    return written.encode(errors="surrogatepass")


def spoil_json(rng: Random, data: bytes) -> bytes:
    """Mostly JSON still, of another shape."""
    if rng.random() < 0.25:
        return spoil_bytes(rng, data)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):  # spoilt already
        return spoil_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 2))):
        found = spoil_value(rng, found)
    return as_json(rng, found)


def spoil_lines(rng: Random, data: bytes) -> bytes:
    """JSON lines: one spoilt, gone, doubled or moved."""
    lines = data.splitlines()
    if not lines or rng.random() < 0.2:
        return spoil_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place, how = rng.randrange(len(lines)), rng.randrange(8)
        if how == 0:
            lines.insert(place, lines[rng.randrange(len(lines))])
        elif how == 1 and len(lines) > 1:
            lines.pop(place)
        elif how == 2:
            lines.insert(place, rng.choice((b"", b" ", b"null", b"[]", b"{}", b"0", b"{", b"\xff")))
        elif how == 3:
            rng.shuffle(lines)
        else:
            try:
                lines[place] = as_json(rng, spoil_value(rng, json.loads(lines[place])))
            except (ValueError, RecursionError):  # spoilt already
                lines[place] = spoil_bytes(rng, lines[place])
    return b"\n".join(lines) + rng.choice((b"\n", b"\n", b"", b"\r\n"))


def spoil_toml(rng: Random, data: bytes) -> bytes:
    """Mostly TOML still, with a value, a key or a table changed."""
    if rng.random() < 0.3:
        return spoil_bytes(rng, data)
    try:
        return as_toml(spoil_value(rng, tomllib.loads(data.decode()))).encode(errors="replace")
    except (TypeError, ValueError, RecursionError, AttributeError):  # spoilt already, or no tables
        return spoil_bytes(rng, data)


def as_toml(found: Any) -> str:
    """Tables as TOML; what TOML has no word for is left out."""
    return tomli_w.dumps(_without_none(found))


def _without_none(found: Any) -> Any:
    if isinstance(found, dict):
        return {str(k): _without_none(v) for k, v in found.items() if v is not None}
    if isinstance(found, list):
        return [_without_none(item) for item in found if item is not None]
    return found
