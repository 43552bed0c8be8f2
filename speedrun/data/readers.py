"""Documents out of one file: plain text, JSON lines or parquet, plain or compressed.

Every reader streams in bounded memory and yields `Document`s. Whatever is wrong with a file is a
DataError that names it and the byte, line or row. Gzip and zstd go through pyarrow, whose streams
raise when a file is cut short; zstandard's reader stops quietly there (half a file read as whole).
"""

import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from speedrun.errors import ConfigError, DataError, quoted

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = {
    "jsonl": r"\.(jsonl|ndjson)",
    "parquet": r"\.parquet",
    "text": r"\.(txt|text|tokens|raw|md|rst|tex|org|log|html?|xml|csv|tsv|toml|ya?ml|ini|cfg|sql|"
    r"sh|pyi?|c|h|cc|cpp|hpp|cu|rs|go|java|kt|swift|jsx?|tsx?|css|rb|php|pl|lua|jl|r|scala|hs|ml|"
    r"lean)",  # wikitext's own files end in .tokens and .raw
}
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20  # past this a "line" is a file of another kind, and memory has a bound
ROWS_AT_ONCE = 256


class Document(NamedTuple):
    """One text; `read` counts the bytes on disk up to its end."""

    text: str
    read: int
    first: bool = True  # of its file, or not cut from one
    side: str = ""  # the split that its source was named for; else its text decides


def format_of(path: Path) -> tuple[str, str | None] | None:
    """`text`, `jsonl` or `parquet` by file name, and its compression; None for other names."""
    stem, compression = path, COMPRESSIONS.get(path.suffix.lower())
    if compression:
        stem = path.with_suffix("")
    for kind, suffix in KINDS.items():
        if re.fullmatch(suffix, stem.suffix.lower()):
            return None if kind == "parquet" and compression else (kind, compression)
    return None


def read_text(path: Path, compression: str | None, limit: int) -> Iterator[Document]:
    """A text file as one document, or cut at line ends into several of at most `limit` bytes."""
    with _opened(path, compression) as (stream, disk):
        start, rest = 0, b""
        while block := rest + _read_up_to(stream, limit + 1 - len(rest)):
            cut = len(block) if len(block) <= limit else _last_line_end(block, limit)
            yield Document(_decode(block[:cut], path, start), disk.tell())
            start, rest = start + cut, block[cut:]


def read_jsonl(path: Path, compression: str | None, field: str) -> Iterator[Document]:
    """One document per line: the string under `field`. Lines of white space are passed over."""
    for record, where, read in read_records(path, compression, f'{{"{field}": "..."}}'):
        yield Document(text_of(record, field, where), read)


def read_records(
    path: Path, compression: str | None, example: str
) -> Iterator[tuple[dict[str, Any], str, int]]:
    """The objects of a file of JSON lines, each with its file and line, and the bytes read.

    `example` is what is shown to somebody whose line is no object.
    """
    with _opened(path, compression) as (stream, disk):
        lines = iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")
        start = 0
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{where} is longer than {MAX_LINE_BYTES >> 20} MiB: a .jsonl file holds one "
                    "JSON object per line"
                )
            text = _decode(line, path, start).removeprefix("\ufeff")
            start += len(line)
            if text and not text.isspace():
                yield _json_object(text, example, where), where, disk.tell()


def read_parquet(path: Path, field: str) -> Iterator[Document]:
    """One document per row of the string column `field`, a few hundred rows at a time."""
    pa = _arrow(path)
    import pyarrow.parquet as pq

    size = path.stat().st_size
    row = 0
    try:
        with pq.ParquetFile(
            path, buffer_size=BLOCK_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as file:
            _check_column(file.schema_arrow, field, path)
            rows = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[field], use_threads=False):
                for value in batch.column(0):
                    row += 1
                    text = text_of({field: value.as_py()}, field, f"{path}, row {row}")
                    yield Document(text, size * row // rows)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, row {row} is not UTF-8 (byte {error.start} of its {field}): "
            "write the file again from UTF-8 text"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is cut short or not a parquet file, found after row {row} "
            f"({first_line(error)}): copy or write it again"
        ) from None


def _arrow(path: Path) -> Any:
    """pyarrow, which plain text can do without."""
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise ConfigError(f"{path} needs the files extra: pip install 'speedrun[files]'") from None
    return pyarrow


def text_of(record: Mapping[str, Any], field: str, where: str) -> str:
    """The string under `field`, or a DataError that says what is there instead."""
    if field not in record:
        raise DataError(
            f"{where} has no field {quoted(field)}, only {_listed(record)}: choose one with "
            "--text-field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise DataError(
            f"{where} has {type(text).__name__} under {field!r} where text is needed: "
            "mend it or choose another field with --text-field"
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} has half of a surrogate pair at character {error.start} of {field!r}, "
                "which UTF-8 cannot hold: remove it"
            ) from None
    return text


@contextmanager
def _opened(path: Path, compression: str | None) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file's content as a stream, and the file itself, whose position is the progress."""
    try:
        with path.open("rb") as disk:
            if compression is None:
                yield disk, disk
                return
            pa = _arrow(path)
            unpacked = pa.CompressedInputStream(pa.PythonFile(disk, mode="r"), compression)
            with io.BufferedReader(unpacked, BLOCK_BYTES) as stream:
                try:
                    yield stream, disk
                except OSError as error:
                    raise DataError(
                        f"{path} is cut short or not {compression}, found by byte {disk.tell()} "
                        f"({first_line(error)}): copy or compress it again"
                    ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {first_line(error)}; leave it out, or mend it"
        ) from None


def _read_up_to(stream: BinaryIO, count: int) -> bytes:
    """`count` bytes unless the file ends first; a compressed stream may return fewer at a time."""
    blocks = []
    while count > 0 and (block := stream.read(min(count, BLOCK_BYTES))):
        blocks.append(block)
        count -= len(block)
    return b"".join(blocks)


def _last_line_end(block: bytes, limit: int) -> int:
    """Where to cut to keep at most `limit` bytes: after a line, else after a character."""
    cut = block.rfind(b"\n", 0, limit) + 1
    if cut:
        return cut
    cut = limit
    while cut > limit - 3 and block[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _decode(data: bytes, path: Path, start: int) -> str:
    binary = data.find(b"\0")
    if binary >= 0:
        raise DataError(
            f"{path} is binary: byte {start + binary} is zero, and text has none: "
            "leave the file out or convert it to UTF-8"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {start + error.start} (value "
            f"0x{data[error.start]:02x}): convert it to UTF-8"
        ) from None


def _json_object(line: str, example: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg} at column {error.colno}): "
            "mend the line or leave it out"
        ) from None
    except RecursionError:
        raise DataError(f"{where} is JSON nested too deeply: leave the line out") from None
    except ValueError:  # what is left of them: Python reads no whole number of 5,000 digits
        raise DataError(f"{where} has a number that is too long: leave the line out") from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where} is a JSON {type(record).__name__}: each line must be an object such as "
            f"{example}"
        )
    return record


def _check_column(schema: Any, field: str, path: Path) -> None:
    import pyarrow.types as types

    if field not in schema.names:
        raise DataError(
            f"{path} has no column {quoted(field)}, only {_listed(schema.names)}: "
            "choose one with --text-field"
        )
    kind = schema.field(field).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(
            f"{path} has {kind} in column {field!r} where text is needed: "
            "choose another with --text-field"
        )


def _listed(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in list(names)[:12]) or "none at all"


def first_line(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).strip().split("\n")[0].rstrip(".")
