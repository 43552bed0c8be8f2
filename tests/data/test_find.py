"""The dataset a config asks for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speedrun.config.resolve import resolve
from speedrun.data.corpus import Corpus
from speedrun.data.dataset import Dataset
from speedrun.data.find import find_dataset, load_tokenizer_if_any, open_dataset
from speedrun.data.known import stamp_of
from speedrun.errors import DataError
from tests.data.test_build import write_stories
from tests.data.test_shards import public_file
from tests.waiting import PATIENCE


def found(source: Path, tokenizer: str, *overrides: str) -> Path:
    words = [f"data.sources=['{source}']", f"data.tokenizer={tokenizer}", *overrides]
    return find_dataset(resolve(overrides=words).config)


def test_a_corpus_is_built_once_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    path = write_stories(tmp_path / "my stories.jsonl", 400)
    code = (
        "import sys; from pathlib import Path; from tests.data.test_find import found;"
        "print(found(Path(sys.argv[1]), 'bpe:300'))"
    )
    command = [sys.executable, "-c", code, str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=PATIENCE)[0] for process in running}
    assert len(answers) == 1
    folder = Path(answers.pop().strip())
    assert list((tmp_path / "home/datasets").iterdir()) == [folder]
    assert folder.name.startswith("my-stories.jsonl-bpe-300-")
    before = folder.stat().st_mtime_ns
    os.utime(path)
    assert found(path, "bpe:300") == folder
    assert folder.stat().st_mtime_ns == before
    write_stories(path, 401)
    assert found(path, "bpe:300") != folder


def test_a_corpus_that_was_found_once_is_not_read_again_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"{number} is a number\n" * 20)
    first = found(folder, "byte")
    read: list[Corpus] = []

    def content_hash(corpus: Corpus) -> str:
        read.append(corpus)
        return "changed"

    monkeypatch.setattr(Corpus, "content_hash", content_hash)
    assert found(folder, "byte") == first
    assert read == []
    assert stamp_of([str(folder)], "one") != stamp_of([str(folder)], "another")
    assert stamp_of(["hf:somebody/something"], "") is None
    text, times = folder / "3.txt", (folder / "3.txt").stat()
    text.write_text("4 is a number\n" * 20)  # of the same size
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns))  # and as old
    assert found(folder, "byte") != first
    assert len(read) == 1


def test_a_dataset_that_was_removed_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    path = write_stories(tmp_path / "a.jsonl", 50)
    first = found(path, "byte", "data.val_fraction=0.2")
    shutil.rmtree(first)
    assert found(path, "byte", "data.val_fraction=0.2") == first
    assert Dataset.open(first).vocab_size == 257


def test_names_of_built_datasets_never_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A changed name would build every user's dataset again.
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number} is a number\n" * 20)
    folder = found(tmp_path / "*.txt", "byte", "data.val_fraction=0.3")
    assert folder == tmp_path / "home/datasets/txt-byte-328ac8799908"


def test_a_config_names_a_folder_or_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_dataset(resolve(overrides=["data.dir=~/mine"]).config) == tmp_path / "mine"
    path = write_stories(tmp_path / "a.jsonl", 50)
    stages: list[str] = []
    words = [f"data.sources=['{path}']", "data.tokenizer=byte", "data.val_fraction=0.2"]
    folder = find_dataset(resolve(overrides=words).config, lambda stage, *_: stages.append(stage))
    assert folder == found(path, "byte", "data.val_fraction=0.2")
    assert Dataset.open(folder).tokenizer_spec == "byte"
    assert stages[0] == "scan"


def test_a_small_dataset_is_hashed_before_it_is_used(folder: Path) -> None:
    assert open_dataset(folder).vocab_size == 257
    path = folder / "speedrun_val_000000.bin"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"speedrun_val_000000\.bin is damaged between bytes"):
        open_dataset(folder)


def test_public_shards_need_no_tokenizer(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, notes = load_tokenizer_if_any(open_dataset(folder))
    assert tokenizer is not None
    assert (tokenizer.spec, notes) == ("byte", [])
    (folder / "tokenizer/spec.json").unlink()
    with pytest.raises(DataError, match="not a stored tokenizer"):
        load_tokenizer_if_any(Dataset.open(folder))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    (tmp_path / "public").mkdir()
    public_file(tmp_path / "public/fineweb_train_000001.bin", [50256, 1, 2])
    tokenizer, notes = load_tokenizer_if_any(open_dataset(tmp_path / "public"))
    assert tokenizer is None
    assert notes[0].startswith("GPT-2's vocab.bpe is not in tiktoken's cache")
