"""What is spoilt: a dataset, runs, results and all else that is read, made once and honestly.

Everything comes from the command line itself, or is what the repository holds.
"""

from __future__ import annotations

import functools
import gc
import gzip
import importlib
import os
import pkgutil
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import typer.main

import speedrun
from speedrun.cli import app, main
from speedrun.config import files

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ITEMS = Path(__file__).parents[2] / "docs" / "items.jsonl"
SEEDS = (0, 1, 2)
TRACK = """
[data]
sources = ["{text}"]
tokenizer = "byte"
val_fraction = 0.1
test_fraction = 0.1
[model]
layers = 2
width = 16
heads = 2
[batch]
tokens = 128
length = 64
[train]
target = 5.52
steps = 12
[validation]
tokens = 256
every = 2
[machine]
threads = 1
"""
# But pyarrow, which starts a thread that no fork takes along.
LATER = ("torch._dynamo", "rich._emoji_codes", "pydantic.dataclasses")
TINY = (
    "model.layers=2", "model.width=16", "model.heads=2", "batch.length=64", "batch.tokens=128",
    "validation.tokens=256", "validation.every=2", "train.steps=2", "machine.threads=1",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    root: Path

    @property
    def text(self) -> Path:
        return self.root / "text"

    @property
    def data(self) -> Path:
        """A dataset of bytes, with a test."""
        return self.root / "data"

    @property
    def bpe(self) -> Path:
        """The same text in tokens of a trained BPE."""
        return self.root / "bpe"

    @property
    def runs(self) -> list[Path]:
        """Three runs on the track `sums`."""
        return [self.root / f"run{seed}" for seed in SEEDS]

    @property
    def leaderboard(self) -> Path:
        return self.root / "leaderboard.json"

    @property
    def packed(self) -> Path:
        """Texts in files of other kinds."""
        return self.root / "packed"

    def prepare(self) -> None:
        """Settings of the process that everything is forked from."""
        os.environ |= {
            "SPEEDRUN_HOME": str(self.root / "home"), "HF_HUB_OFFLINE": "1", "COLUMNS": "160",
            "NO_PROXY": "127.0.0.1,localhost", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            "TIKTOKEN_CACHE_DIR": str(self.root / "tiktoken"),
        }  # fmt: skip
        # Nothing here asks a network, whatever a spoilt file names.
        os.environ |= dict.fromkeys(
            ("HTTP_PROXY", "HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9"
        )
        # What any verb needs is imported once, and looked through for garbage no more.
        for module in pkgutil.walk_packages(speedrun.__path__, "speedrun."):
            name = module.name.rpartition(".")[2]
            with_triton = ".kernels." in module.name and name.endswith("_kernel")
            if not with_triton and name not in ("__main__", "modeling_speedrun"):
                importlib.import_module(module.name)
        for name in LATER:
            importlib.import_module(name)
        # Building the command line takes 30 ms, longer than most cases: it is built once.
        typer.main.get_command = functools.cache(typer.main.get_command)
        typer.main.get_command(app)
        gc.freeze()
        tracks = self.root / "tracks"
        shutil.copytree(files.FOLDERS["track"], tracks, dirs_exist_ok=True)
        (tracks / "sums.toml").write_text(TRACK.format(text=self.text))
        files.FOLDERS["track"] = tracks

    def make(self) -> None:
        """In a process of its own: those that are forked later begin without its threads."""
        if (self.root / "whole").exists():
            return
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(os.open(self.root / "making", os.O_CREAT | os.O_WRONLY), 1)
                self._make()
                (self.root / "whole").touch()
                code = 0
            except BaseException as error:
                sys.stderr.write(f"{error!r}\n")
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "what is to be spoilt could not be made"

    def _make(self) -> None:
        self.text.mkdir()
        for index in range(30):
            lines = [f"{index} + {n} = {index + n}\n" for n in range(60)]
            (self.text / f"{index:02d}.txt").write_text("".join(lines))
        split = ("--val-fraction", "0.1", "--test-fraction", "0.1")
        said("data", "build", self.text, "--out", self.data, "--tokenizer", "byte", *split)
        said("data", "build", self.text, "--out", self.bpe, "--tokenizer", "bpe:280", *split)
        for seed, run in zip(SEEDS, self.runs, strict=True):
            said("train", "modern", "--track", "sums", "--seed", seed, "--run", run,
                 "--checkpoint-every", "6", "--sample-tokens", "4")  # fmt: skip
        said("submit", *self.runs, "--file", self.leaderboard)
        said("verify", *self.runs)
        self._pack()

    def _pack(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        import zstandard

        self.packed.mkdir()
        texts = [path.read_text() for path in sorted(self.text.glob("*.txt"))[:8]]
        lines = "".join(f'{{"text": "{text[:80]!r}", "n": {n}}}\n' for n, text in enumerate(texts))
        lines = lines.replace("\\n", " ")
        (self.packed / "a.jsonl").write_text(lines)
        (self.packed / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        (self.packed / "a.txt.zst").write_bytes(zstandard.compress(texts[0].encode()))
        (self.packed / "a.txt").write_text(texts[1])
        pq.write_table(
            pa.table({"text": texts, "n": list(range(len(texts)))}), self.packed / "a.parquet"
        )


def said(*words: object) -> None:
    """A command that must give a result."""
    sys.argv = ["speedrun", *map(str, words)]
    code: object = None
    try:
        main()
    except SystemExit as end:
        code = end.code
    assert not code, (words, code)


def copied(folder: Path, to: Path, spoilt: str = "") -> Path:
    """A folder once more; large files that stay as they are only by another name."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_dir():
            (to / name).mkdir(parents=True, exist_ok=True)
            continue
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".safetensors", ".bin") and str(name) != spoilt:
            try:
                os.link(path, to / name)
            except OSError:  # on another disk
                shutil.copy2(path, to / name)
        else:
            shutil.copy2(path, to / name)
    return to
