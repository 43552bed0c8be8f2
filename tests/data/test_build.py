"""Builds: the right tokens, the same bytes after any kill, bounded memory, nothing half-made."""

import errno
import fcntl
import gzip
import hashlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from speedrun.data.build import build_dataset, build_notes
from speedrun.data.corpus import open_corpus
from speedrun.data.dataset import Dataset
from speedrun.data.shards import read_tokens
from speedrun.data.splits import SPLITS, SplitRule
from speedrun.data.staging import locked_folder
from speedrun.data.tokenizer import train_bpe
from speedrun.errors import ConfigError, DataError
from tests.waiting import PATIENCE, wait_for

WORDS = Path(json.__file__).with_name("decoder.py").read_text().split()
BUILD = """
import json, sys
from pathlib import Path
from speedrun.data.build import build_dataset
sources, out, tokenizer, options = json.loads(sys.argv[1])
build_dataset(sources, Path(out), tokenizer, **options)
"""


def story(number: int, words: int = 60) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=words)) + f" é{number}\n"


def write_stories(path: Path, count: int, words: int = 60) -> Path:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"text": story(number, words)}) + "\n")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def child(sources: list[Path], out: Path, tokenizer: str, **options: object) -> list[str]:
    job = json.dumps([[str(source) for source in sources], str(out), tokenizer, options])
    return [sys.executable, "-c", BUILD, job]


def decoded(folder: Path, split: str) -> list[str]:
    dataset = Dataset.open(folder)
    tokens = np.concatenate([read_tokens(path) for path in dataset.split(split).paths])
    assert tokens[0] == dataset.eot
    tokenizer = dataset.tokenizer()
    return [
        tokenizer.decode(part) for part in np.split(tokens, np.where(tokens == dataset.eot)[0])
    ][1:]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_a_dataset_holds_every_document_once(tmp_path: Path, tokenizer: str) -> None:
    stories = [story(number) for number in range(300)]
    (tmp_path / "a.jsonl.zst").write_bytes(
        zstandard.compress(
            "".join(json.dumps({"text": text}) + "\n" for text in stories[:100]).encode()
        )
    )
    pq.write_table(pa.table({"text": stories[100:299]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text(stories[299])
    sources = [str(tmp_path / name) for name in ("a.jsonl.zst", "b.parquet", "c.txt")]
    stages: list[str] = []
    manifest = build_dataset(
        sources,
        tmp_path / "out",
        tokenizer,
        val_fraction=0.2,
        test_fraction=0.15,
        shard_tokens=5000,
        progress=lambda stage, done, total: stages.append(stage) if done == total else None,
    )
    hashes = [hashlib.sha256(text.encode()).digest() for text in stories]
    rule = SplitRule(0.2, 0.15)
    for split in SPLITS:
        expected = [
            text
            for text, text_hash in zip(stories, hashes, strict=True)
            if rule.by_hash(text_hash) == split
        ]
        assert decoded(tmp_path / "out", split) == expected
        info = manifest.splits[split]
        assert info.documents == len(expected) > 30
        assert info.bytes == sum(len(text.encode()) for text in expected)
        assert [shard.tokens for shard in info.shards[:-1]] == [5000] * (len(info.shards) - 1)
    assert len(manifest.splits["train"].shards) > 2
    assert manifest.sources == ("a.jsonl.zst", "b.parquet", "c.txt")
    assert manifest.source_fingerprint == hashlib.sha256(b"".join(hashes)).hexdigest()
    assert (manifest.tokenizer, manifest.eot) == (tokenizer, manifest.vocab_size - 1)
    assert manifest.tokenizer_fingerprint == Dataset.open(tmp_path / "out").tokenizer().fingerprint
    assert [*dict.fromkeys(stages)] == (
        ["scan", "encode"] if tokenizer == "byte" else ["scan", "tokenizer", "encode"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a.jsonl.zst", "b.parquet", "c.txt", "out"]
    )


def test_progress_counts_the_text_of_packed_files(tmp_path: Path) -> None:
    """And not the bytes of the file on the disk, a tenth of it."""
    text = "".join(f"line {number} of a long text\n" for number in range(9_000))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    told: list[tuple[int, int]] = []
    build_dataset([str(tmp_path / "a.txt.gz")], tmp_path / "out", "byte",
                  progress=lambda _, done, total: told.append((done, total)))  # fmt: skip
    assert told[0] == (0, 0)  # nobody knows yet
    assert told[-1] == (len(text), len(text))


@pytest.mark.parametrize("size", [300, 3_000, 30_000])
def test_one_small_file_has_something_for_every_split(size: int, tmp_path: Path) -> None:
    """With what `speedrun data build` asks for: shares, limit and vocabulary by the text."""
    lines = "".join(f"in {n}, {n} and {7 * n} were {n % 9}\n" for n in range(1_900, 4_000))
    (tmp_path / "a.txt").write_text(lines[:size])
    manifest = build_dataset([str(tmp_path / "a.txt")], tmp_path / "out", "bpe:..4096",
                             val_fraction=None, test_fraction=None)  # fmt: skip
    shares = {name: split.bytes / size for name, split in manifest.splits.items()}
    assert sum(shares.values()) == 1
    assert shares["train"] > 0.5
    assert 0.05 <= shares["val"] < 0.3
    assert 0.03 < shares["test"] < 0.2
    assert 257 < manifest.vocab_size < 257 + size / 16 + 1
    assert manifest.tokenizer == f"bpe:{manifest.vocab_size}"
    assert str(tmp_path) not in str(contents(tmp_path / "out"))


def test_the_bpe_learns_from_training_documents_alone(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "a.jsonl", 200)
    first = build_dataset([str(path)], tmp_path / "one", "bpe:300")
    rule = SplitRule(0.05, 0.05)
    texts = [document.text for document in open_corpus([str(path)]).documents()]
    hashes = [hashlib.sha256(text.encode()).digest() for text in texts]
    train = [
        text for text, each in zip(texts, hashes, strict=True) if rule.by_hash(each) == "train"
    ]
    held_out = first.splits["val"].documents + first.splits["test"].documents
    assert held_out == 200 - len(train) > 0
    everything = train_bpe(texts, 300)
    assert first.tokenizer_fingerprint != everything.fingerprint
    assert first.tokenizer_fingerprint == train_bpe(train, 300).fingerprint


def test_a_large_corpus_gives_the_bpe_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_stories(tmp_path / "a.jsonl", 4000)
    whole = build_dataset([str(path)], tmp_path / "whole", "bpe:300")
    monkeypatch.setattr("speedrun.data.build.BPE_SAMPLE_BYTES", 1 << 20)
    sample = build_dataset([str(path)], tmp_path / "sample", "bpe:300")
    again = build_dataset([str(path)], tmp_path / "again", "bpe:300")
    assert sample.tokenizer_fingerprint == again.tokenizer_fingerprint
    assert sample.tokenizer_fingerprint != whole.tokenizer_fingerprint
    assert build_notes(tmp_path / "whole") == []
    assert "to learn the BPE" in build_notes(tmp_path / "sample")[0]


def test_building_again_returns_the_same_dataset_and_refuses_another(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "a.jsonl", 50)
    out = tmp_path / "out"
    first = build_dataset([str(path)], out, "byte")
    before = contents(out)
    os.utime(path)
    inode = out.stat().st_ino
    assert build_dataset([str(path)], out, "byte") == first
    assert out.stat().st_ino == inode, "built again although nothing changed"
    with pytest.raises(DataError, match=r"dataset made with val_fraction 0\.05: use --force"):
        build_dataset([str(path)], out, "byte", val_fraction=0.1)
    write_stories(path, 60)
    with pytest.raises(DataError, match="dataset of other text: use --force"):
        build_dataset([str(path)], out, "byte")
    with pytest.raises(DataError, match="dataset of other text, or made with val_fraction"):
        build_dataset([str(path)], out, "byte", val_fraction=None)
    assert contents(out) == before
    assert build_dataset([str(path)], out, "byte", force=True) != first
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_force_never_deletes_what_is_not_a_dataset(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "a.jsonl", 50)
    (tmp_path / "out").mkdir()
    build_dataset([str(path)], tmp_path / "out", "byte")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/thesis.txt").write_text("years of work")
    for target in ("papers", "a.jsonl"):
        with pytest.raises(DataError, match="is not a dataset: choose another folder"):
            build_dataset([str(path)], tmp_path / target, "byte", force=True)
    assert (tmp_path / "papers/thesis.txt").read_text() == "years of work"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("name", "data", "tokenizer", "message"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"no": 1}\n', "byte", "line 3 has no field"),
        ("bad.txt", b"abc\xff", "byte", "not UTF-8 at byte 3"),
        ("one.txt", b"only one document\n", "byte", "one single document"),
        ("few.jsonl", b'{"text": "aa"}\n{"text": "bb"}\n', "bpe:4096", "needs more text"),
    ],
)
def test_a_bad_input_leaves_nothing_behind(
    tmp_path: Path, name: str, data: bytes, tokenizer: str, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        build_dataset([str(tmp_path / name)], tmp_path / "out", tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_bad_options_are_refused(tmp_path: Path) -> None:
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="not between 0 and 1"):
            build_dataset(["stdlib"], tmp_path / "out", "byte", val_fraction=fraction)
    with pytest.raises(ConfigError, match="use at least 1"):
        build_dataset(["stdlib"], tmp_path / "out", "byte", shard_tokens=0)
    with pytest.raises(ConfigError, match="cannot become a dataset"):
        build_dataset(["stdlib"], Path("/"), "byte")
    assert not list(tmp_path.iterdir())


def test_sources_that_change_under_way_are_noticed(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "a.jsonl", 50)

    def meddle(stage: str, done: int, total: int) -> None:
        if stage == "encode" and done == 0:
            write_stories(path, 49)

    with pytest.raises(DataError, match="changed while they were being read"):
        build_dataset([str(path)], tmp_path / "out", "byte", shard_tokens=1000, progress=meddle)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]
    assert build_dataset([str(path)], tmp_path / "out", "byte").splits["train"].tokens


def waits_for_a_lock(pid: int) -> bool:
    """The kernel marks those who wait: `3: -> FLOCK ADVISORY WRITE <pid> ...`."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(words[1] == "->" and words[5] == str(pid) for words in lines)


def test_two_builds_at_once(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "a.jsonl", 50)
    with locked_folder(tmp_path / "out.partial", wait=False):
        with pytest.raises(DataError, match="in use by another process"):
            build_dataset([str(path)], tmp_path / "out", "byte")
        waiting = subprocess.Popen(child([path], tmp_path / "out", "byte", wait=True))
        wait_for(lambda: waits_for_a_lock(waiting.pid), "a wait for the lock")
        assert waiting.poll() is None
        assert not (tmp_path / "out").exists()
    assert waiting.wait(timeout=PATIENCE) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "out"]


def killed_builds(command: list[str], out: Path, whole: dict[str, bytes], when: list[int]) -> int:
    """Kill a build once it has each number of files of `when`, then let it end; kills that hit."""
    partial = out.with_name(out.name + ".partial")
    killed = 0
    for files in when:
        process = subprocess.Popen(command)
        while process.poll() is None and len(list(partial.glob("*"))) < files:
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        if out.exists():
            assert contents(out) == whole, "a half-made dataset has the real name"
            return killed
        if partial.exists() and not (partial / "manifest.json").exists():
            with pytest.raises(DataError):
                Dataset.open(partial)
    subprocess.run(command, check=True)
    assert contents(out) == whole
    return killed


def test_a_killed_build_goes_on_and_ends_in_the_same_bytes(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "a.jsonl", 3000)
    subprocess.run(child([path], tmp_path / "whole", "bpe:600", shard_tokens=40_000), check=True)
    whole = contents(tmp_path / "whole")
    assert len(whole) > 12
    draw = random.Random(0)
    killed = 0
    for attempt in range(2):
        out = tmp_path / f"out{attempt}"
        command = child([path], out, "bpe:600", shard_tokens=40_000)
        killed += killed_builds(command, out, whole, [1, *draw.sample(range(2, len(whole)), 2)])
    assert killed, "no kill hit a running build"
    assert not list(tmp_path.glob("*.partial"))


MEASURE = """
from speedrun.hardware import peak_memory_bytes
build_dataset([sources[0]], Path(out + "-small"), tokenizer, **options)
before = peak_memory_bytes()
build_dataset(sources, Path(out), tokenizer, **options)
print(peak_memory_bytes() - before >> 20)
"""


def grown_megabytes(tmp_path: Path, megabytes: int, tokenizer: str) -> int:
    """Growth of peak memory from a 4 MB build to one of `megabytes`, in one process."""
    if not Path("/proc/self/status").exists():
        pytest.skip("NOT TESTED: peak memory is read in /proc")
    small = write_stories(tmp_path / "small.jsonl", 2500, words=200)
    text = small.read_bytes()
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        while file.tell() < megabytes << 20:
            file.write(text)
    code = BUILD.replace("build_dataset(sources, Path(out), tokenizer, **options)\n", MEASURE)
    job = json.dumps([[str(small), str(large)], str(tmp_path / "out"), tokenizer, {}])
    # Threads and their arenas go with the cores of a machine, not with the corpus.
    few = {**os.environ, "RAYON_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "2"}
    words = [sys.executable, "-c", code, job]
    run = subprocess.run(words, env=few, capture_output=True, text=True, check=True)
    return int(run.stdout)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    assert grown_megabytes(tmp_path, 80, "byte") < 50


@pytest.mark.slow
def test_memory_does_not_grow_with_a_large_corpus(tmp_path: Path) -> None:
    assert grown_megabytes(tmp_path, 70, "bpe:512") < 50


def test_a_disk_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a home over NFS may be, which takes no lock on a folder in any case."""

    def flock(handle: int, _: int) -> None:
        kind = errno.EBADF if stat.S_ISDIR(os.fstat(handle).st_mode) else errno.ENOLCK
        raise OSError(kind, os.strerror(kind))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("speedrun.locks.SETTLE", 0.01)
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    (tmp_path / "b.txt").write_text("other text\n" * 50)
    build_dataset([str(tmp_path / "*.txt")], tmp_path / "out", "byte", val_fraction=0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "out"]
    with locked_folder(tmp_path / "out.partial", wait=False):
        monkeypatch.setattr("speedrun.locks.PATIENCE", 0.2)
        owner = (tmp_path / "out.partial.lock").read_text().split()
        assert owner[1] == str(os.getpid())
