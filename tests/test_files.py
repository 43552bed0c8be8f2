"""Files appear whole or not at all, and JSON has no NaN."""

import hashlib
import json
import math
import os
import pwd
from pathlib import Path

import pytest

from speedrun.data.find import built_datasets
from speedrun.errors import ConfigError, SpeedrunError
from speedrun.files import (
    cache_home,
    finite,
    has_sha256,
    parse_json,
    sha256_of,
    write_atomically,
    write_json,
)
from tests.room import protect, room_for, small_disk


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for data in (b"x" * 100_000, bytearray(b"short")):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")
    with (
        pytest.raises(SpeedrunError, match=r"cannot write .*a\.bin: .*; free some space") as caught,
        room_for(50_000),
    ):
        write_atomically(path, b"x" * 100_000)
    assert type(caught.value) is SpeedrunError
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_is_too_long_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpeedrunError, match="File name too long"):
        write_atomically(tmp_path / ("x" * 300), b"")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff", b""])
def test_whatever_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|digits|decode|Expecting value"):
        parse_json(text)


def test_a_disk_that_is_only_read_is_told_in_a_sentence(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        protect(disk)
        with pytest.raises(SpeedrunError, match=r"cannot write .*: Read-only .* another folder"):
            write_atomically(disk / "a", b"x")


def test_in_the_cache_another_place_is_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    with pytest.raises(SpeedrunError, match="set SPEEDRUN_HOME to a folder"):
        write_atomically(tmp_path / "home/none/a", b"x")
    with pytest.raises(SpeedrunError, match="choose another folder"):
        write_atomically(tmp_path / "none/a", b"x")


def test_no_home_at_all_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user whom the system does not know, as in a container with a uid of its own."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "SPEEDRUN_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SpeedrunError, match="set SPEEDRUN_HOME"):
        cache_home()
    assert built_datasets() == []  # nobody has built any
    with pytest.raises(SpeedrunError, match="choose another folder"):
        write_atomically(tmp_path / "none/a", b"x")


def test_the_caller_says_whose_mistake_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        write_atomically(tmp_path / "none/a.bin", b"", ConfigError)


def test_what_is_not_finite_is_null_at_any_depth(tmp_path: Path) -> None:
    value = {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": (2, "x", None, True)}
    plain = {"a": None, "b": [1.5, None, {"c": None}], "d": [2, "x", None, True]}
    assert finite(value) == plain
    write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text()) == plain
    assert (tmp_path / "a.json").read_text().endswith("}\n")


def test_hashes_are_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"tokens")
    digest = hashlib.sha256(b"tokens").hexdigest()
    assert sha256_of(tmp_path / "a") == digest
    assert has_sha256(tmp_path / "a", digest)
    assert not has_sha256(tmp_path / "a", "0" * 64)
    assert not has_sha256(tmp_path / "none", digest)
    with pytest.raises(FileNotFoundError):
        sha256_of(tmp_path / "none")


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.setenv("SPEEDRUN_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache/speedrun"


def test_json_with_half_a_character_is_refused() -> None:
    """It could not be written again: a page of it ended in a UnicodeEncodeError."""
    for data in ('{"a": "\\ud800"}', b'["\\udc00\\ud800"]', '{"\\udfff": 1}'):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            parse_json(data)
    with pytest.raises(ValueError, match="can't decode byte 0xed"):
        parse_json(b'["\xed\xa0\x80"]')
    assert parse_json(r'["\ud83c\udfc1", "\u00e9", "\\ud800"]') == ["\U0001f3c1", "\xe9", r"\ud800"]


def test_a_device_or_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"words")
        assert os.read(reader, 100) == b"words"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
