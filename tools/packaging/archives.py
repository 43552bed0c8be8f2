"""Archives whose bytes follow from their contents and one date."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import re
import tarfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

FILE = 0o100644  # of plain files, as zip stores it in the upper half of 32 bits


def rewrite_sdist(source: Path, target: Path, epoch: int) -> Path:
    """The same files, in order, of nobody, with one date."""
    with (
        tarfile.open(source) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch
            entry.mode = 0o755 if member.isdir() else 0o644
            new.addfile(entry, old.extractfile(member) if member.isfile() else None)
    return target


def rewrite_wheel(source: Path, target: Path, epoch: int) -> Path:
    return write_wheel(contents(source), target, epoch)


def add_to_wheel(
    pure: Path, out: Path, files: Mapping[str, bytes], platform: str, epoch: int
) -> Path:
    """A wheel with these files besides, for one platform and any Python."""
    name, version, _ = pure.name.split("-", 2)
    told = f"{name}-{version}.dist-info/WHEEL"
    have = contents(pure)
    text = have[told].decode()
    text = re.sub(r"^Root-Is-Purelib: true$", "Root-Is-Purelib: false", text, flags=re.M)
    text = re.sub(r"^Tag: .*$", f"Tag: py3-none-{platform}", text, flags=re.M)
    assert f"py3-none-{platform}" in text
    assert "false" in text
    target = out / f"{name}-{version}-py3-none-{platform}.whl"
    return write_wheel({**have, **files, told: text.encode()}, target, epoch)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


def write_wheel(files: Mapping[str, bytes], target: Path, epoch: int) -> Path:
    """The files with a record of their hashes, which stands last, as its rules ask."""
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    rest = {name: files[name] for name in sorted(files, key=_place) if name != record}
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    for name, data in rest.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        table.writerow((name, f"sha256={digest}", len(data)))
    table.writerow((record, "", ""))
    date = time.gmtime(max(epoch, 315532800))[:6]  # zip knows no date before 1980
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**rest, record: lines.getvalue().encode()}.items():
            entry = zipfile.ZipInfo(name, date)
            entry.external_attr, entry.compress_type = FILE << 16, zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, whose rights these are
            archive.writestr(entry, data)
    return target


def _place(name: str) -> tuple[bool, str]:
    return ".dist-info/" in name, name
