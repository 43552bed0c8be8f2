"""Going on with a run: exactly, or not at all without saying what is different."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.config.experiment import run_hash
from speedrun.config.resolve import change, from_toml, to_toml
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, RunError
from speedrun.train import checkpoint
from speedrun.train.environment import code_hash
from speedrun.train.request import Interval
from speedrun.train.run import RunFolder
from tests.train.heard import Heard, Make, losses, newest, same_bits, tensors, train, values


def run(config: Config, folder: Path, interrupt_at: int = -1, **how: Any) -> list[str]:
    """Train; gives what was said."""
    heard = Heard(interrupt_at)
    train(config, folder, heard, **how)
    return heard.lines


def assert_same_end(left: Path, right: Path) -> None:
    assert losses(left) == losses(right)
    assert losses(left, "val") == losses(right, "val")
    assert same_bits(tensors(left), tensors(right))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.muon.lr=0.5", "optimizer.muon.lr is 0.5 and was"),
        ("train.seed=7", "train.seed is 7 and was 0"),
        ("validation.every=2", "validation.every is 2 and was 4"),
        ("batch.tokens=512", "batch.tokens is 512 and was 256"),
    ],
)
def test_a_changed_config_is_named_and_refused(
    tiny: Make, tmp_path: Path, change: str, words: str
) -> None:
    run(tiny(), tmp_path / "run", 3)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"cannot be resumed as it was.*--force") as caught:
        run(tiny(change), tmp_path / "run", resume=True)
    assert words in str(caught.value)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    run(tiny(change), tmp_path / "run", resume=True, force=True)
    assert RunFolder(tmp_path / "run").load_config() == tiny(change)


def edit_config(folder: Path, *overrides: str) -> None:
    stored = change(from_toml(folder / "config.toml"), overrides, {}).config
    (folder / "config.toml").write_text(to_toml(stored))


def resume_as_stored(folder: Path, **how: Any) -> None:
    """As `speedrun train --resume` does, which takes the config from the folder."""
    run(RunFolder(folder).load_config(), folder, resume=True, **how)


def test_a_config_that_was_edited_in_between_is_refused(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "whole")
    run(tiny(), tmp_path / "run", 3)
    for edit in ("optimizer.head.lr=0.5", "train.seed=1"):
        edited = Path(shutil.copytree(tmp_path / "run", tmp_path / edit))
        edit_config(edited, edit)
        with pytest.raises(RunError, match=r"config\.toml was edited since: it is not that of"):
            resume_as_stored(edited)
        resume_as_stored(edited, force=True)
        (sentence,) = RunFolder(edited).read_forced()
        assert sentence.startswith("at step 4: config.toml was edited since")
    # What goes on with the values it had is the same run, whatever the file said in between.
    edit_config(tmp_path / "run", "optimizer.head.lr=0.5")
    run(tiny(), tmp_path / "run", resume=True)
    assert not RunFolder(tmp_path / "run").forced.exists()
    assert RunFolder(tmp_path / "run").load_config() == tiny()
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_length_that_was_edited_in_between_is_a_new_length(tiny: Make, tmp_path: Path) -> None:
    run(tiny(recipe="modern-cosine"), tmp_path / "run", 4)
    edit_config(tmp_path / "run", "train.steps=16")
    with pytest.raises(RunError, match=r"train\.steps is 16 and was 8, which gives step \d of the"):
        resume_as_stored(tmp_path / "run")


def test_every_start_and_checkpoint_says_of_what_it_is(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run", 3)
    run(tiny(), tmp_path / "run", resume=True)
    known = {"experiment_sha256": run_hash(tiny()), "train_steps": 8, "code_sha256": code_hash()}
    folder = RunFolder(tmp_path / "run")
    for said in (*folder.read_metrics("start"), *folder.read_metrics("resume")):
        assert said.items() >= known.items()
    assert newest(folder.checkpoints).meta.items() >= known.items()


def test_checkpoints_of_older_versions_resume_as_before(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run", 3)
    found = newest(tmp_path / "run/checkpoints")
    new = ("experiment_sha256", "train_steps", "code_sha256")
    meta = {key: value for key, value in found.meta.items() if key not in new}
    meta["meta_sha256"] = checkpoint._sha256_of_meta(meta)
    (found.folder / checkpoint.META).write_text(json.dumps(meta))
    with pytest.raises(RunError, match=r"optimizer\.head\.lr is 0\.5 and was"):
        run(tiny("optimizer.head.lr=0.5"), tmp_path / "run", resume=True)
    run(tiny(), tmp_path / "run", resume=True)
    assert not RunFolder(tmp_path / "run").forced.exists()


def test_forcing_a_model_of_another_size_is_one_sentence(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run", 3)
    with pytest.raises(RunError, match=r"does not fit this model: .*size mismatch") as caught:
        run(tiny("model.width=64"), tmp_path / "run", resume=True, force=True)
    assert "\n" not in str(caught.value)


def test_changed_code_is_named_and_refused(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = code_hash()
    run(tiny(), tmp_path / "run", 3)
    file = tmp_path / "run/environment.json"
    facts = json.loads(file.read_text())
    assert facts["code_sha256"] == code_hash()
    file.write_text(json.dumps(facts | {"code_sha256": "0" * 64}))
    with pytest.raises(RunError, match=f"the code has hash {code_hash()[:12]} and had 000000"):
        run(tiny(), tmp_path / "run", resume=True)
    monkeypatch.setattr("speedrun.train.environment.code_hash", lambda: "f" * 64)
    file.write_text(json.dumps(facts | {"code_sha256": "f" * 64}))  # an edit to hide the change
    with pytest.raises(RunError, match=f"the code has hash ffffffffffff and had {then[:12]}"):
        run(tiny(), tmp_path / "run", resume=True)
    monkeypatch.undo()
    file.unlink()
    with pytest.raises(RunError, match=r"environment\.json does not say with which code"):
        run(tiny(), tmp_path / "run", resume=True)
    run(tiny(), tmp_path / "run", resume=True, force=True)


def test_a_run_is_made_longer_where_its_schedule_permits(tiny: Make, tmp_path: Path) -> None:
    flat = ("schedule.cooldown=0", "schedule.warmup=0", "schedule.momentum_warmup=0")
    run(tiny(*flat, "train.steps=12"), tmp_path / "whole")
    run(tiny(*flat), tmp_path / "run")
    said = run(tiny(*flat, "train.steps=12"), tmp_path / "run", resume=True)
    assert any("train.steps goes from 8 to 12; the schedules" in line for line in said)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("last", [4, 5])  # with a validation, and between two
def test_a_run_stopped_after_some_steps_goes_on_as_if_it_had_not(
    tiny: Make, tmp_path: Path, last: int
) -> None:
    run(tiny(), tmp_path / "whole")
    said = run(tiny(), tmp_path / "run", stop_after=last)
    folder = RunFolder(tmp_path / "run")
    summary = folder.read_summary()
    assert summary is not None
    assert (summary.steps, summary.stopped_early, summary.exit_code) == (last, True, 0)
    assert any(line.startswith(f"step {last}/{last}  loss") for line in said)
    assert not folder.finished(tiny())
    with pytest.raises(ConfigError, match=f"--stop-after 4 cannot be used: {last} steps of 8 are"):
        run(tiny(), tmp_path / "run", resume=True, stop_after=4)
    run(tiny(), tmp_path / "run", resume=True)
    assert folder.finished(tiny())
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_stopped_at_its_target_goes_on_as_if_it_had_not(
    tiny: Make, tmp_path: Path
) -> None:
    run(tiny(), tmp_path / "first")
    target = f"train.target={losses(tmp_path / 'first', 'val')[1]}"  # of the first after step 0
    run(tiny(target), tmp_path / "whole")
    run(tiny(target, "train.stop=target"), tmp_path / "run")
    assert values(tmp_path / "run", "train") == [1, 2, 3, 4]
    run(tiny(target, "train.stop=steps"), tmp_path / "run", resume=True)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_an_extension_says_which_schedules_change(tiny: Make, tmp_path: Path) -> None:
    """Stopped before the decay begins: it moves to the new end."""
    late = ("schedule.cooldown=500", "schedule.warmup=0", "schedule.momentum_warmup=0")
    run(tiny(*late, "train.steps=12"), tmp_path / "whole")
    run(tiny(*late), tmp_path / "run", 2)
    said = run(tiny(*late, "train.steps=12"), tmp_path / "run", resume=True)
    (sentence,) = [line for line in said if "train.steps goes from 8 to 12" in line]
    assert "schedules differ from step 5 on: learning rate multiplier 1.0 instead of" in sentence
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_an_extension_that_rewrites_the_past_is_refused(tiny: Make, tmp_path: Path) -> None:
    config = tiny(recipe="modern-cosine")
    run(config, tmp_path / "run", 4)
    longer = tiny("train.steps=16", recipe="modern-cosine")
    with pytest.raises(RunError, match=r"train\.steps is 16 and was 8, which gives step \d of the"):
        run(longer, tmp_path / "run", resume=True)
    shorter = tiny("train.steps=3", recipe="modern-cosine")
    with pytest.raises(RunError, match=r"train\.steps is 3 and 4 steps are done"):
        run(shorter, tmp_path / "run", resume=True)


def test_a_run_stopped_before_its_first_checkpoint_starts_over(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "whole")
    run(tiny(), tmp_path / "run", 3)
    shutil.rmtree(tmp_path / "run/checkpoints")
    (tmp_path / "run/summary.json").unlink()
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    said = run(tiny(), tmp_path / "run", resume=True)
    assert any("no checkpoint yet: starting from step 0" in line for line in said)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run/earlier-1/metrics.jsonl").read_bytes() == before


def test_lost_checkpoints_never_empty_the_records_of_a_run(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run")
    records = {name: (tmp_path / "run" / name).read_bytes()
               for name in ("metrics.jsonl", "summary.json", "environment.json")}  # fmt: skip
    shutil.rmtree(tmp_path / "run/checkpoints")
    longer = tiny("train.steps=12")
    with pytest.raises(RunError, match=r"checkpoints of .* are gone.*its records stay as they are"):
        run(longer, tmp_path / "run", resume=True)
    for name, data in records.items():
        assert (tmp_path / "run" / name).read_bytes() == data
    for attempt in (1, 2):
        run(longer, tmp_path / "run", resume=True, force=True)
        assert values(tmp_path / "run", "train") == list(range(1, 13))
        shutil.rmtree(tmp_path / "run/checkpoints")
        assert (tmp_path / f"run/earlier-{attempt}/summary.json").exists()
    for name, data in records.items():
        assert (tmp_path / "run/earlier-1" / name).read_bytes() == data


def test_what_was_forced_stays_written(tiny: Make, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run(tiny(), folder.path, 3)
    changed = tiny("model.softcap=20.0")
    with pytest.raises(RunError, match=r"model.softcap is 20.0 and was .*stays written in the run"):
        run(changed, folder.path, resume=True)
    assert folder.read_forced() == []
    run(changed, folder.path, 5, resume=True, force=True)
    (sentence,) = folder.read_forced()
    assert sentence.startswith("at step 4: model.softcap is 20.0 and was ")
    # Going on without force, or with the file gone, forgets nothing.
    folder.forced.unlink()
    run(changed, folder.path, resume=True)
    summary = folder.read_summary()
    assert summary is not None
    assert summary.forced == folder.read_forced() == [sentence]


def test_a_force_that_changes_nothing_forces_nothing(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run", 3)
    run(tiny(), tmp_path / "run", resume=True, force=True)
    assert not RunFolder(tmp_path / "run").forced.exists()


def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(tiny: Make, tmp_path: Path) -> None:
    often = Interval(steps=2)
    run(tiny(), tmp_path / "whole")
    run(tiny(), tmp_path / "run", 5, checkpoint_every=often)
    newest = tmp_path / "run/checkpoints/step-000006/model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    said = run(tiny(), tmp_path / "run", resume=True, checkpoint_every=often, keep=1)
    (sentence,) = [line for line in said if line.startswith("passed over")]
    assert "step-000006 is damaged: model.safetensors has" in sentence
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_records_cut_short_by_a_crash_are_mended(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "whole")
    run(tiny(), tmp_path / "run", 3, checkpoint_every=Interval(steps=2))
    shutil.rmtree(tmp_path / "run/checkpoints/step-000004")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5, "lo')
    run(tiny(), tmp_path / "run", resume=True)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_run_without_records_can_go_on(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run", 3)
    (tmp_path / "run/metrics.jsonl").unlink()
    run(tiny(), tmp_path / "run", resume=True)
    assert values(tmp_path / "run", "train") == [5, 6, 7, 8]


def test_the_folder_says_where_and_with_what_it_was_run(tiny: Make, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run")
    facts = json.loads((tmp_path / "run/environment.json").read_text())
    assert facts.keys() >= {
        "speedrun", "code_sha256", "git_commit", "git_diff", "python", "libraries", "cpu", "cores",
        "threads", "memory_bytes", "gpu", "command", "variables",
    }  # fmt: skip
    assert torch.__version__.startswith(facts["libraries"]["torch"])  # which may add +cu130
    (start,) = RunFolder(tmp_path / "run").read_metrics("start")
    assert len(start["dataset_fingerprint"]) == len(start["tokenizer_fingerprint"]) == 64
