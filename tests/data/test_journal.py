"""An unfinished build: what is done is kept, what is damaged or of another build is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from speedrun.data.build import build_dataset
from speedrun.data.tokenizer import BpeTokenizer, TokenIds
from speedrun.errors import SpeedrunError
from tests.data.test_build import BUILD, contents, write_stories
from tests.room import room_for


def stop_at(path: Path, out: Path, tokenizer: str, shards: int) -> None:
    """Build until `shards` shards are journaled, then die as if killed."""
    code = BUILD.replace(
        "build_dataset(sources",
        "import os, speedrun.data.journal as journal\n"
        "save = journal.Journal.save\n"
        "def dying(self, folder):\n"
        "    save(self, folder)\n"
        "    done = sum(len(state.shards) for state in self.splits.values())\n"
        f"    if done == {shards}: os._exit(9)\n"
        "journal.Journal.save = dying\n"
        "build_dataset(sources",
    )
    job = json.dumps([[str(path)], str(out), tokenizer, {"shard_tokens": 15_000}])
    assert subprocess.run([sys.executable, "-c", code, job]).returncode == 9


def test_finished_work_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_stories(tmp_path / "a.jsonl", 800)
    build_dataset([str(path)], tmp_path / "whole", "bpe:300", shard_tokens=15_000)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    stop_at(path, out, "bpe:300", shards=6)
    shard = partial / "speedrun_train_000003.bin"
    written = shard.stat().st_mtime_ns
    stages: set[str] = set()
    encoded: list[str] = []
    encode = BpeTokenizer.encode_batch

    def watched(self: BpeTokenizer, texts: list[str]) -> list[TokenIds]:
        encoded.extend(texts)
        return encode(self, texts)

    def note(stage: str, *_: int) -> None:
        stages.add(stage)

    monkeypatch.setattr(BpeTokenizer, "encode_batch", watched)
    build_dataset([str(path)], out, "bpe:300", shard_tokens=15_000, progress=note)
    assert stages == {"encode"}, "scanned or trained again"
    assert (out / shard.name).stat().st_mtime_ns == written, "wrote a finished shard again"
    assert 0 < len(encoded) < 800, "encoded finished documents again"
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "name", ["speedrun_train_000001.bin", "journal.json", "tokenizer/spec.json"]
)
def test_damage_to_an_unfinished_build_is_repaired(tmp_path: Path, name: str) -> None:
    path = write_stories(tmp_path / "a.jsonl", 800)
    build_dataset([str(path)], tmp_path / "whole", "bpe:300", shard_tokens=15_000)
    stop_at(path, tmp_path / "out", "bpe:300", shards=6)
    damaged = tmp_path / "out.partial" / name
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2 :] = b"?" * 10
    damaged.write_bytes(data)
    build_dataset([str(path)], tmp_path / "out", "bpe:300", shard_tokens=15_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_build_that_ran_out_of_room_goes_on(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "a.jsonl", 800)
    build_dataset([str(path)], tmp_path / "whole", "byte", shard_tokens=100_000)
    val = next((tmp_path / "whole").glob("*_val_*"))
    assert val.stat().st_size < 150_000, "the shard of validation would not fit either"
    with (
        pytest.raises(SpeedrunError, match=r"cannot write .*\.bin: .*free some space"),
        room_for(150_000),
    ):
        build_dataset([str(path)], tmp_path / "out", "byte", shard_tokens=100_000)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    build_dataset([str(path)], tmp_path / "out", "byte", shard_tokens=100_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_unfinished_build_of_something_else_is_not_used(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "a.jsonl", 800)
    stop_at(path, tmp_path / "out", "bpe:300", shards=6)
    write_stories(path, 700)
    build_dataset([str(path)], tmp_path / "whole", "byte", shard_tokens=50_000)
    build_dataset([str(path)], tmp_path / "out", "byte", shard_tokens=50_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
