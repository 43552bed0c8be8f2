"""The command line as a user meets it: a real process, its output and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.waiting import PATIENCE, wait_for


def speedrun(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "speedrun", *map(str, words)],
        capture_output=True, text=True, cwd=cwd, timeout=PATIENCE,
    )  # fmt: skip


def assert_one_sentence(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr.strip().splitlines()
    assert len(message) == 1, done.stderr
    for word in words:
        assert word in message[0]


def test_help_does_not_load_torch_and_shows_examples() -> None:
    code = "import sys; sys.argv = ['speedrun', '--help']\nfrom speedrun.cli import app\n"
    code += "try: app()\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    for verb in ("train", "sample", "recipes", "tracks", "data", "doctor", "bench"):
        assert verb in done.stdout
    for words in (["train", "--help"], ["sample", "-h"], ["data", "build", "--help"]):
        assert "Example:" in speedrun(*words).stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "modern", "model.widht=3"], ["model.widht", "model.width"]),
        (["train", "modern", "model.heads=5"], ["model.heads", "5", "must divide"]),
        (["train", "modern", "machine.microbatch=5"], ["machine.microbatch", "5", "16 sequences"]),
        (["train", "modrn"], ["'modrn'", "'modern'"]),
        (["train", "modern", "--track", "nona"], ["'nona'", "'nano'"]),
        (["train", "modern", "--steps", "0"], ["--steps 0"]),
        (["train", "model.layers=2"], ["recipe comes before"]),
        (["train"], ["recipe", "speedrun train best", "`speedrun recipes` lists them"]),
        (["train", "modern", "--resume"], ["--resume", "--run"]),
        (["recipes", "show", "x"], ["'x'", "modern"]),
        (["tracks", "diff", "nano", "x"], ["'x'", "nano"]),
        (["bench", "loadr"], ["'loadr'", "'loader'"]),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(words: list[str], expected: list[str]) -> None:
    assert_one_sentence(speedrun(*words), 2, *expected)


def test_recipes_and_tracks_by_name_and_by_path(tmp_path: Path) -> None:
    assert "modern-cosine" in speedrun("recipes").stdout
    assert "nano" in speedrun("tracks").stdout
    shown = speedrun("recipes", "show", "modern-cosine").stdout
    assert "schedule.shape" in shown
    assert "recipe modern-cosine" in shown
    assert any(line.rstrip().endswith("recipe modern") for line in shown.splitlines())
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "modern"\nwhy = "mine"\n[model]\nsoftcap = 15.0\n')
    rows = speedrun("recipes", "diff", "modern", mine).stdout
    assert [line.split() for line in rows.splitlines()[1:]] == [["model.softcap", "0.0", "15.0"]]
    assert "same values" in speedrun("tracks", "diff", "nano", "nano").stdout


def test_dry_run_says_where_values_come_from_and_what_they_cost(tmp_path: Path) -> None:
    done = speedrun(
        "train", "modern", "--track", "nano", "--steps", "100", "--seed", "3", "model.layers=2",
        "--dry-run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert rows["model.layers"] == ["2", "override"]
    assert rows["train.steps"] == ["100", "option"]
    assert rows["batch.tokens"][1:] == ["track", "nano"]
    assert rows["schedule.cooldown"][1:] == ["recipe", "modern"]
    assert rows["optimizer.hidden.lr"][1:] == ["recipe", "modern", "x", "1.4", "(track", "nano)"]
    assert rows["model.bias"] == ["false", "default"]
    for words in ("hidden", "embedding", "FLOPs per token", "steps, tokens", "peak memory"):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []  # a dry run writes nothing


def test_train_and_sample(tiny_dataset: Path, tmp_path: Path) -> None:
    overrides = [*TINY, f"data.dir={tiny_dataset}", "train.target=5.0"]
    done = speedrun("train", "modern", "--run", tmp_path / "run", "--seed", "5", *overrides)
    assert done.returncode == 0, done.stderr
    for words in ("validation", "bits/byte", "target", "what it writes", str(tmp_path / "run")):
        assert words in done.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["seed"], summary["steps"]) == (5, 8)
    text = speedrun("sample", tmp_path / "run", "--prompt", "1 + ", "--tokens", "9", "--seed", "1")
    assert text.returncode == 0
    assert text.stdout.startswith("1 + ")
    again = speedrun("train", "modern", "--run", tmp_path / "run", *overrides)
    assert_one_sentence(again, 1, "already holds a run", "complete", "another --run")


def test_sets_have_the_same_order_in_every_process_of_a_run(tmp_path: Path) -> None:
    """Code of a user's own that goes by it does the same when a run is resumed."""
    (tmp_path / "mine.py").write_text(
        "def rate(step, total):\n    return 1.0\n\nprint('hashed', hash('momentum'))\n"
    )
    (tmp_path / "mine.toml").write_text(
        'extends = "modern"\ncustom.schedule = { use = "mine.py:rate" }\n'
    )
    words = ("train", "mine.toml", "--track", "pico", "--dry-run")
    said = [speedrun(*words, cwd=tmp_path).stdout for _ in range(2)]
    first, second = ([line for line in one.splitlines() if "hashed" in line] for one in said)
    assert len(first) == 1
    assert first == second


def test_a_dataset_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = speedrun("train", "modern", "--run", tmp_path / "run", f"data.dir={tmp_path}/none")
    assert_one_sentence(done, 1, "none")
    assert not (tmp_path / "run").exists()  # nothing half-made


def test_ctrl_c_ends_cleanly_and_the_run_continues(tiny_dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train", "modern", "--run", str(folder), *TINY, f"data.dir={tiny_dataset}"]
    child = subprocess.Popen(
        [sys.executable, "-m", "speedrun", *words, "train.steps=100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"kind": "train"' in metrics.read_text(), "a step")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert f"speedrun train --resume --run {folder}" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["stopped_early"]
    assert (folder / "checkpoints" / f"step-{summary['steps']:06d}").is_dir()


def test_doctor_names_the_machine_and_its_choices() -> None:
    """The tables are looked at in tests/commands/test_sample.py."""
    done = speedrun("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"torch", "cpu", "memory", "threads", "cache folder", "open files"} <= set(
        found["facts"]
    )
    assert "GFLOP/s" in found["facts"]["fp32 matmul"]["found"]
    assert found["facts"]["memory"]["bytes"] > 1 << 20
    assert found["choices"]["device"]["value"] == "cpu"
    assert found["choices"]["attention"]["value"] == "blocks"
    assert found["choices"]["attention"]["because"]


HEAVY = (
    "torch._dynamo", "torch._inductor", "torch.distributed.run", "tokenizers", "pyarrow", "scipy",
    "datasets", "huggingface_hub", "tensorboard", "wandb", "speedrun.report", "speedrun.science",
    *(("psutil",) if sys.platform == "linux" else ()),
)  # fmt: skip


def test_a_run_imports_nothing_heavy_that_it_does_not_use(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    """torch's compiler takes as long to import as torch itself; the rest is for other verbs."""
    words = [
        "train",
        "record-03",
        "--run",
        str(tmp_path / "run"),
        *TINY,
        f"data.dir={tiny_dataset}",
        "train.target=0.1",  # a run that reaches its target is put beside the race, with statistics
    ]
    code = (
        "import sys; from speedrun.cli import main; "
        f"sys.argv = ['speedrun', *{words!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print('heavy:', [x for x in {HEAVY!r} if x in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n"), done.stdout
