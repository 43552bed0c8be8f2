"""`speedrun train` by its own code: what is printed, what is refused, what is left behind."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speedrun.cli import app
from speedrun.commands.runs import runs_command
from speedrun.commands.train import print_result, train_command
from speedrun.config.files import names
from speedrun.config.fixed import of_track
from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError, DataError, RunError
from speedrun.terminal.program import command, override
from speedrun.train.request import Request
from speedrun.train.run import RunFolder
from speedrun.train.summary import Summary
from tests.conftest import TINY
from tests.train.heard import losses, same_bits, tensors

FLAT = ("schedule.cooldown=0", "schedule.warmup=0", "schedule.momentum_warmup=0")


@pytest.fixture
def words(tiny_dataset: Path) -> tuple[str, ...]:
    return (*TINY, f"data.dir={tiny_dataset}")


def request(**changes: Any) -> Request:
    words: dict[str, Any] = {"recipe": "modern", "sample_tokens": 0} | changes
    return Request(**words)


def test_a_run_says_what_it_is_and_what_came_of_it(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train_command(request(overrides=[*words, "train.target=5.0"], folder=folder, sample_tokens=4))
    said = capsys.readouterr().out
    name = words[-1].removeprefix("data.dir=")
    size = "8 steps of 256 tokens"
    assert f"modern on {name}, sized as nano: {size}, run folder {folder}" in said
    for start in ("device cpu", "precision float32", "attention blocks", "torch.compile: none"):
        assert any(line.startswith(start) for line in said.splitlines()), start
    for part in ("text: ", "parameters:", "steps, tokens:  8, 2,048", "peak memory:",
                 "validation:", "target:", "what it writes:", f"run folder: {folder}"):  # fmt: skip
        assert part in said


def test_a_finished_run_is_not_resumed_and_a_longer_one_is(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_command(request(overrides=[*words, *FLAT], folder=tmp_path / "run"))
    again = Request(resume=True, folder=tmp_path / "run", sample_tokens=0)
    train_command(again)
    assert "is complete after 8 steps: nothing to resume" in capsys.readouterr().out
    train_command(Request(**{**vars(again), "steps": 10}))
    assert "train.steps goes from 8 to 10" in capsys.readouterr().out
    summary = RunFolder(tmp_path / "run").read_summary()
    assert summary is not None
    assert summary.steps == 10


def test_a_run_is_resumed_from_another_folder(
    tiny_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its dataset was named from where it was begun."""
    home, other = tmp_path / "my home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    (home / "da ta").symlink_to(tiny_dataset)
    monkeypatch.chdir(home)
    folder = home / "runs/a"
    train_command(request(overrides=[*TINY, "data.dir=da ta"], folder=folder, stop_after=2))
    monkeypatch.chdir(other)
    again = Request(resume=True, folder=folder, sample_tokens=0, stop_after=3)
    (home / "da ta").rename(home / "away")
    listing: dict[str, Any] = {
        "sort": "date",
        "track": "",
        "recipe": "",
        "state": "",
        "as_json": False,
    }
    with pytest.raises(DataError, match=f"was begun in, {home}; cd '{home}' first, or add data.d"):
        train_command(again)
    capsys.readouterr()
    runs_command([home], **listing)
    go_on = command("train", "--resume", "--run", str(folder))
    assert f"cd '{home}' && {go_on}" in capsys.readouterr().out
    (home / "away").rename(home / "da ta")
    runs_command([home], **listing)
    assert f"go on:    {go_on}" in capsys.readouterr().out
    record = folder / "dataset.json"
    record.write_text(record.read_text().replace("begun_in", "of an older version"))
    with pytest.raises(DataError, match=r"was begun in; cd there first, or add data\.dir=/"):
        train_command(again)
    record.write_text(record.read_text().replace("of an older version", "begun_in"))
    train_command(again)
    assert RunFolder(folder).load_config().data.dir == str(home / "da ta")


def test_another_machine_is_said_and_not_refused(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_command(request(overrides=[*words, *FLAT], folder=tmp_path / "run"))
    train_command(Request(resume=True, folder=tmp_path / "run", steps=9, sample_tokens=0,
                          overrides=["machine.microbatch=2"]))  # fmt: skip
    assert "machine.microbatch is 2 and was 0: numbers may be" in capsys.readouterr().out


def go_on(said: str) -> list[str]:
    """The words after the program's name of the line that says how to go on."""
    (line,) = [line for line in said.splitlines() if "train.stop" in line or "--resume" in line]
    program, *words = shlex.split(line.split(": ")[-1])
    assert program == "speedrun"
    return words


@pytest.mark.parametrize("stop", ["steps", "target"])
def test_a_run_that_stopped_sooner_goes_on_by_the_line_it_printed(
    words: tuple[str, ...],
    tmp_path: Path,
    stop: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["speedrun"])  # whichever way the tests were called
    whole, folder = tmp_path / "whole", tmp_path / "a run"
    train_command(request(overrides=words, folder=whole))
    capsys.readouterr()
    if stop == "steps":
        train_command(request(overrides=words, folder=folder, stop_after=5))
        assert "sized as nano: 5 of 8 steps of 256" in (said := capsys.readouterr().out)
    else:
        target = f"train.target={losses(whole, 'val')[1]}"
        whole = tmp_path / "whole with a target"  # which is looked for between validations too
        train_command(request(overrides=[*words, target], folder=whole))
        capsys.readouterr()
        train_command(request(overrides=[*words, target, "train.stop=target"], folder=folder))
        said = capsys.readouterr().out
        line = go_on(said)
        train_command(Request(resume=True, folder=folder, sample_tokens=0))
        refused = capsys.readouterr().out
        assert "reached its target in 4 of 8 steps: nothing to resume; for the others" in refused
        assert go_on(refused) == line
    done = CliRunner().invoke(app, [*go_on(said), "--sample-tokens", "0"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "go on:" not in done.output
    assert losses(folder) == losses(whole)
    assert losses(folder, "val") == losses(whole, "val")
    assert same_bits(tensors(folder), tensors(whole))


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_equal_bits_are_promised_on_a_cpu_alone(
    tiny_dataset: Path, tmp_path: Path, on_a_gpu: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("speedrun.commands.train._on_a_gpu", lambda _: on_a_gpu)
    words = [*TINY, f"data.dir={tiny_dataset}"]
    train_command(request(overrides=words, folder=tmp_path / "run", stop_after=5))
    promise = "as if it had not stopped" if on_a_gpu else "bit for bit as if it had not stopped"
    assert f"from step 5 to 8, {promise}" in capsys.readouterr().out


def test_lines_to_type_name_the_program_as_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new user's environment is not on the path."""
    program = tmp_path / ".venv/bin/speedrun"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", [".venv/bin/speedrun", "train"])
    assert command("sample", "a run") == ".venv/bin/speedrun sample 'a run'"
    monkeypatch.setenv("PATH", str(program.parent))
    assert command("sample", "a run") == "speedrun sample 'a run'"
    monkeypatch.setattr("sys.argv", [str(tmp_path / "speedrun/__main__.py"), "train"])
    assert command("doctor") == f"{sys.executable} -m speedrun doctor"


OLD_NAMES = {"machine.threads": ("train", "threads"), "machine.attention": ("attention", "backend")}


def test_a_run_folder_with_the_old_names_of_keys_goes_on(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was written before the machine had a section of its own."""
    train_command(request(overrides=[*words, *FLAT], folder=tmp_path / "run"))
    config = tmp_path / "run/config.toml"
    text, _, machine = config.read_text().partition("[machine]\n")
    values = dict(line.split(" = ") for line in machine.split("\n\n")[0].strip().splitlines())
    moved = {"batch": ("microbatch",), "train": ("device", "precision", "compile", "threads")}
    for section, keys in moved.items():
        lines = "".join(f"{key} = {values[key]}\n" for key in keys)
        text = text.replace(f"[{section}]\n", f"[{section}]\n{lines}")
    text = text.replace("[attention]\n", f"[attention]\nbackend = {values['attention']}\n")
    config.write_text(text)
    assert "machine" not in text
    train_command(Request(resume=True, folder=tmp_path / "run", steps=9, sample_tokens=0))
    summary = RunFolder(tmp_path / "run").read_summary()
    assert summary is not None
    assert summary.steps == 9


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recipe": ""}, "train needs a recipe"),
        ({"recipe": "model.layers=2"}, "recipe comes before the overrides"),
        ({"steps": 0}, "--steps 0 cannot be used"),
        ({"resume": True}, "give it --run DIR and no recipe"),
        ({"max_restarts": 1}, "--max-restarts cannot be used without --ranks"),
        ({"overrides": ["train.threads=1"]}, "'train.threads' .* is now called 'machine.threads'"),
        ({"overrides": ["train.target:=9.0"]}, "key:=value is what race, ablate, tune and ladder"),
        ({"overrides": ["machine.microbatch=5"]}, r"machine\.microbatch = 5 .* 16 sequences"),
        ({"overrides": ["machine.device=cuda"]}, r"machine\.device = 'cuda' cannot be used"),
    ],
)
def test_mistakes_are_refused_before_anything_is_made(
    changes: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        train_command(request(**changes))
    assert list(tmp_path.iterdir()) == []


def test_a_taken_folder_is_refused_and_left_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    train_command(request(overrides=words, folder=tmp_path / "run"))
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    for ranks in (0, 2):
        with pytest.raises(RunError, match="already holds a run, which is complete"):
            train_command(request(overrides=words, folder=tmp_path / "run", ranks=ranks))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    (tmp_path / "run/summary.json").unlink()
    (tmp_path / "run").rename(tmp_path / "first ü")
    with pytest.raises(RunError, match=r"--resume --run '.*/first ü'`"):
        train_command(request(overrides=words, folder=tmp_path / "first ü"))


def summary(**changes: Any) -> Summary:
    facts: dict[str, Any] = {
        "recipe": "modern", "track": "nano", "params": 1234, "steps": 8, "tokens": 2048,
        "train_seconds": 2.0, "wall_seconds": 3.0, "val_loss": 4.5, "val_bpb": 2.25,
        "val_tokens": 512, "target": 5.0, "tokens_to_target": 1024, "seconds_to_target": 1.0,
        "reached_target": True, "tokens_per_second": 1024.0, "peak_memory_bytes": 3 << 20,
        "dataset_fingerprint": "f" * 64, "seed": 0,
    }  # fmt: skip
    return Summary(**(facts | changes))


@pytest.mark.parametrize(
    ("changes", "shown", "hidden"),
    [
        ({}, ["5.0 reached after 1,024 tokens, 1.0 s", "4.5000 nats/token, 2.2500 bits/byte"], []),
        ({"tokens_to_target": None}, ["target:", "5.0 not reached"], ["reached after"]),
        ({"target": None}, ["validation:"], ["target:"]),
        ({"val_bpb": None}, ["4.5000 nats/token (512 tokens)"], ["bits/byte"]),
        ({"val_loss": None}, ["parameters:     1,234"], ["validation:"]),
        ({"peak_memory_bytes": None}, ["wall time:"], ["peak memory:"]),
    ],
)
def test_the_result_shows_what_there_is(
    changes: dict[str, Any], shown: list[str], hidden: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = RunFolder(tmp_path)
    rows = [{"kind": "train", "tokens": n, "loss": 5 - n} for n in range(3)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_result(resolve("modern", "nano").config, run, summary(**changes))
    said = capsys.readouterr().out
    assert all(words in said for words in shown)
    assert not any(words in said for words in hidden)


@pytest.mark.parametrize(("step", "words"), [(8, "nats/token ("), (4, "nats/token at step 4 (")])
def test_an_older_validation_is_not_taken_for_the_ends(
    step: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path)
    rows = [{"kind": "val", "step": at, "tokens": 256 * at, "loss": 4.5} for at in (0, step)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_result(resolve("modern", "nano").config, run, summary(val_bpb=None))
    assert words in capsys.readouterr().out


def test_the_result_stands_beside_the_race(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for recipe, raced in (("best", True), ("modern", False)):
        config = resolve(recipe, "nano").config
        reached = summary(target=config.train.target, reached_target=True)
        print_result(config, RunFolder(tmp_path), reached)
        found = re.search(r"^in the race: +on \w+ best takes [\d,]+ tokens .*: \d+\.\d times as",
                          capsys.readouterr().out, re.MULTILINE)  # fmt: skip
        assert bool(found) == raced


@pytest.mark.parametrize("track", names("track"))
def test_a_dry_run_needs_no_dataset(
    track: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    sizes = {"small": 50_257, "nano": 2_048, "prose": 2_048}
    recipe = "modern" if of_track(track) else "best"
    train_command(request(recipe=recipe, track=track, dry_run=True))
    said = capsys.readouterr().out
    assert f"vocabulary:            {sizes.get(track, 1_024):,}\n" in said
    assert ("data download fineweb10B --out data/fineweb10B" in said) == (track == "small")
    assert not [*tmp_path.iterdir()]  # nothing was built
    wrong = (ConfigError, "fixes data.dir") if of_track(track) else (DataError, "no dataset folder")
    with pytest.raises(wrong[0], match=wrong[1]):
        train_command(
            request(recipe=recipe, track=track, dry_run=True, overrides=["data.dir=mine"])
        )


def test_a_dry_run_shows_what_fits_a_dataset(
    tiny_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_command(request(dry_run=True, overrides=[f"data.dir={tiny_dataset}"]))
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("validation.tokens"))
    tokens, *origin = row.split()[1:]
    assert int(tokens) < 131_072
    assert origin[:3] == ["shrunk", "to", "fit"]
    assert f"shrunk to fit {tiny_dataset} (" in said
    train_command(request(dry_run=True, overrides=["data.sources=never/built.txt"]))
    assert "never/built.txt is not built yet: values that do not fit" in capsys.readouterr().out


def test_a_switch_that_does_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        train_command(request(recipe="record-18", dry_run=True, overrides=words))
        return capsys.readouterr().out

    told = "model.value_weights changes nothing here: nothing reads it with model.value_embeddings"
    assert told in said("model.value_embeddings=none")
    assert "changes nothing" not in said("model.value_weights=blend")
    assert "changes nothing" not in said("model.value_embeddings=none", "model.value_weights=blend",
                                         "model.value_tables=3")  # fmt: skip
    assert "train.stop changes nothing" in said("train.stop=target", "train.target=0.0")
    assert "schedule.momentum_cooldown changes nothing" in said(
        "schedule.momentum_cooldown=50", "optimizer.muon.momentum_start=0.95"
    )
    assert "optimizer.muon.cautious changes nothing" in said("optimizer.muon.cautious=true")


def test_windows_that_a_length_shortens_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        train_command(request(recipe="best", dry_run=True, overrides=words))
        return capsys.readouterr().out

    told = "shortened to batch.length: attention.window_end 464 -> 256\n"
    assert told in said("batch.length=256")
    for words in (["batch.length=256", "attention.window_end=192"], ["batch.length=512"]):
        assert "shortened to" not in said(*words)


def test_a_folder_is_named_so_that_it_is_read_as_one() -> None:
    for folder in ("mine", "my data", "1", "true", "2024-01-01", "[x]", 'say "x"', "a=b"):
        word = shlex.split(shlex.join([override("data.dir", folder)]))[0]
        assert resolve("best", "nano", [word]).config.data.dir == folder
    assert override("data.dir", "my data") == "data.dir=my data"
