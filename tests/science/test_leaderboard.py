"""The leaderboard's rules on real runs, and attempts to bend each of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from speedrun.commands.verify import leaderboard_command
from speedrun.data.find import find_dataset
from speedrun.data.shards import PUBLIC_EOT
from speedrun.errors import ConfigError, DataError, RunError
from speedrun.science import leaderboard, records
from speedrun.science.leaderboard import OLDER, RULES, check, read, submit
from speedrun.science.track import NOT_HERE
from speedrun.train.run import RunFolder
from tests.science.board import (
    ALPHA,
    TRACK,
    Board,
    edit_config,
    edit_environment,
    edit_summary,
    refused,
    say_again,
)


def test_runs_that_keep_the_rules_make_one_entry(board: Board, tmp_path: Path) -> None:
    file = tmp_path / "board.json"
    entry = submit(board.honest, file, ALPHA)
    assert (entry.n, entry.steps, entry.seeds, entry.evaluated) == (3, 16, (0, 1, 2), True)
    summaries = [RunFolder(run).read_summary() for run in board.honest]
    assert entry.mean == pytest.approx(np.mean([one.loss for one in summaries if one]))
    tests = [json.loads((run / "test.json").read_text())["loss"] for run in board.honest]
    assert entry.test_mean == pytest.approx(np.mean(tests))
    assert entry.test_mean != entry.mean
    submit(board.honest, file, ALPHA)  # again: still one
    assert len(read(file)) == 1
    # Sizes, length and recipe are free, and another config is another entry.
    submit(board.three(tmp_path, "model.softcap=20.0", "train.steps=20"), file, ALPHA)
    assert len(read(file)) == 2
    with pytest.raises(RunError, match="is weaker"):
        submit(board.honest, file, 0.5)


@pytest.mark.parametrize(
    "override",
    [
        "data.test_fraction=0.2", "data.tokenizer=bpe:300", "data.order=sequential",
        "validation.tokens=256", "validation.rows=first", "train.target=5.2",
    ],
)  # fmt: skip
def test_what_a_track_decides_no_run_changes(board: Board, tmp_path: Path, override: str) -> None:
    refused([board.train(tmp_path / "run", override)], "the track's own", override.split("=")[0])


def test_another_text_is_refused_by_name(board: Board, tmp_path: Path) -> None:
    shutil.copytree(board.text, tmp_path / "text")
    (tmp_path / "text/more.txt").write_text("more\n")
    run = board.train(tmp_path / "run", f'data.sources=["{tmp_path / "text"}"]')
    refused([run], "the track's own", "data.sources is ")


def test_how_often_a_run_is_validated_is_its_own_matter(board: Board, tmp_path: Path) -> None:
    assert check(board.three(tmp_path, "validation.every=5", "batch.length=32"), ALPHA).n == 3


def test_a_set_is_of_one_kind(board: Board, tmp_path: Path) -> None:
    two, copies = board.honest[:2], board.copies(tmp_path / "copies")
    longer = board.train(tmp_path / "longer", "train.steps=20", seed=2)
    refused([*two, longer], "same stop", "16, 20")
    other = board.train(tmp_path / "other", "model.softcap=15.0", seed=2)
    refused([*two, other], "same recipe", "model.softcap is 15.0")
    again = board.train(tmp_path / "again", seed=1)
    refused([*two, again], "every seed once", "found 0, 1, 1")
    hard = board.train(tmp_path / "hard", seed=2, track="hard")
    refused([*two, hard], "one track", "hard, sums")
    for code, found in (("f" * 64, "ffffffffffff"), (None, "unknown")):
        edit_environment(copies[2], code_sha256=code)
        refused(copies, "same code", found)
    easy = board.dataset(tmp_path / "easy", *(f"{'a b ' * 800}{i}" for i in range(20)))
    elsewhere = board.train(tmp_path / "elsewhere", f"data.dir={easy}", seed=2)
    refused([*two, elsewhere], "same data")
    edit_summary(copies[1], recipe="mine")
    edit_config(copies[1], recipe="mine")
    refused(copies[:2], "same recipe", "found mine, modern")
    with pytest.raises(ConfigError, match="given twice"):
        check([*two, two[0]], ALPHA)


def test_a_mean_must_be_below_the_target_for_sure(board: Board, tmp_path: Path) -> None:
    refused(board.honest[:1], "significant", "n = 1")
    runs = board.three(tmp_path, track="hard")
    refused(runs, "significant", "p 1")
    # Which is decided before anything is evaluated: the test stays unseen.
    assert not any((run / "test.json").exists() for run in runs)


def test_a_copy_of_the_tracks_dataset_will_do(board: Board, tmp_path: Path) -> None:
    copy = shutil.copytree(find_dataset(board.config()), tmp_path / "copy")
    runs = [*board.honest[:2], board.train(tmp_path / "run", f"data.dir={copy}", seed=2)]
    assert check(runs, ALPHA).n == 3
    shard = next(copy.glob("*train*.bin"))
    data = bytearray(shard.read_bytes())
    data[5000:5002] = data[5002:5004]
    shard.write_bytes(data)
    refused(runs, "the track's text", "is damaged between bytes 0 and 65535")
    shutil.rmtree(copy)
    refused(runs, "the track's text", "there is no dataset folder")


def test_what_lies_in_the_cache_is_not_believed(board: Board, tmp_path: Path) -> None:
    """Easy text in the folder of the track's own, with the record of the right sources."""
    stored = find_dataset(board.config())
    sources = json.loads((stored / "manifest.json").read_text())["source_fingerprint"]
    easy = board.dataset(tmp_path / "easy", *(f"{'a b ' * 800}{i}" for i in range(20)))
    aside = stored.rename(tmp_path / "aside")
    try:
        shutil.copytree(easy, stored)
        manifest = json.loads((stored / "manifest.json").read_text())
        (stored / "manifest.json").write_text(
            json.dumps({**manifest, "source_fingerprint": sources})
        )
        refused(board.three(tmp_path), "the track's text", "and sums makes ")
    finally:
        shutil.rmtree(stored)
        aside.rename(stored)


def test_text_that_cannot_be_made_here_is_listed_as_unchecked(board: Board, tmp_path: Path) -> None:
    """Runs on easy text, which say that they are of the library of another Python."""
    easy = board.dataset(tmp_path / "easy", *(f"{'a b ' * 800}{i}" for i in range(20)))
    runs = board.three(tmp_path, f"data.dir={easy}")
    for run in runs:
        edit_config(run, 'data.dir=""')
        edit_environment(run, python="3.99.1")
    entry = submit(runs, tmp_path / "board.json", ALPHA)
    assert (entry.unchecked, entry.evaluated) == (NOT_HERE, False)
    assert read(tmp_path / "board.json") == (entry,)


def test_runs_of_older_versions_are_listed_as_unchecked(board: Board, tmp_path: Path) -> None:
    """They do not say whether they stayed the same; all else about them is checked."""
    runs = board.copies(tmp_path)
    say_again(runs[1], older=True)
    entry = check(runs, ALPHA)
    assert (entry.unchecked, entry.evaluated) == (OLDER, True)
    assert check(board.honest, ALPHA).unchecked == ""


def test_runs_of_another_python_are_listed_apart(board: Board, tmp_path: Path) -> None:
    """Its library is another text, which cannot be made here: nobody can say it is not."""
    file = tmp_path / "board.json"
    submit(board.honest, file, ALPHA)
    with (board.text / "00.txt").open("a") as text:
        text.write("a library of another version\n")
    try:
        refused(board.honest, "the track's text", "with Python 3.")
        runs = board.copies(tmp_path / "copies")
        for run in runs:
            (run / "test.json").unlink(missing_ok=True)
            edit_environment(run, python="3.99.1")
        entry = submit(runs, file, ALPHA)
        assert (entry.python, entry.evaluated, entry.test_mean) == ("3.99.1", False, None)
        assert entry.unchecked == NOT_HERE
        edit_config(runs[0], f'data.dir="{find_dataset(board.config())}"')
        refused(runs, "the track's text")  # a folder that was named has no such excuse
    finally:
        lines = [f"0 + {n} = {n}\n" for n in range(120)]
        (board.text / "00.txt").write_text("".join(lines))
    assert check([board.honest[0], *runs[1:]], ALPHA).evaluated  # the text is there again


def test_a_track_in_a_file_of_ones_own_is_known_by_name(board: Board, tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(TRACK.format(text=board.text, target=5.1))
    entry = check(board.three(tmp_path, "data.val_fraction=0.2", track=str(own)), ALPHA)
    assert (entry.track, entry.evaluated, entry.target) == ("mine", True, 5.1)
    assert entry.judged_on == "512 tokens in rows of 64, spread"
    words = ("train.target=5.9", "validation.tokens=64", "batch.tokens=64")
    easier = check(board.three(tmp_path / "easier", *words, track=str(own)), ALPHA)
    assert (easier.target, easier.judged_on) == (5.9, "64 tokens in rows of 64, spread")


def test_a_track_of_public_shards_takes_nothing_else(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = tmp_path / "public"
    public.mkdir()
    for split, tokens in (("train", 1_200_000), ("val", 2_000)):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, tokens
        ids = np.random.default_rng(0).integers(0, 50, tokens).astype(np.uint16)
        ids[::100] = PUBLIC_EOT
        (public / f"x_{split}_000001.bin").write_bytes(header.tobytes() + ids.tobytes())
    text = TRACK.format(text=board.text, target=10.82).replace("every", "rows = 'first'\nevery")
    (board.folder / "shards.toml").write_text(text.replace("[data]", f"[data]\ndir = '{public}'"))

    def out_of_reach(*_: object) -> NoReturn:
        raise DataError("there is no network in a test")

    monkeypatch.setattr("speedrun.data.dataset.load_gpt2", out_of_reach)
    try:
        built = find_dataset(board.config())
        words = [f"data.dir={built}"]
        runs = board.three(tmp_path / "built", *words, track="shards")
        refused(runs, "the track's text", "is not of public shards")
        words += ["validation.rows=spread"]
        run = board.train(tmp_path / "spread", *words, track="shards")
        refused([run], "the track's own", "validation.rows is 'spread', not 'first'")
        words = ["model.width=16", "model.heads=1", "train.steps=5"]  # the vocabulary is large
        runs = board.three(tmp_path, *words, track="shards")
        entry = check(runs, ALPHA)
        assert (entry.evaluated, entry.unchecked) == (True, "")
        assert entry.test_mean is not None  # rows that nobody validates on
        assert entry.judged_on == "the first 512 tokens"  # whatever the length of their rows
        # A fingerprint takes the ends of public shards alone, an entry their middle too.
        with (public / "x_train_000001.bin").open("r+b") as shard:
            shard.seek(1_200_000)
            shard.write(bytes(2))
        other = check(runs, ALPHA)
        assert other.dataset_fingerprint == entry.dataset_fingerprint
        assert None not in (entry.shards_sha256, other.shards_sha256)
        assert other.shards_sha256 != entry.shards_sha256
        assert other.identity != entry.identity
    finally:
        (board.folder / "shards.toml").unlink()


def test_a_file_that_is_no_leaderboard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a leaderboard"):
        read(tmp_path / "x.json")
    assert read(tmp_path / "none.json") == ()


def test_entries_of_older_versions_are_still_read(board: Board, tmp_path: Path) -> None:
    file = tmp_path / "board.json"
    entry = submit(board.honest, file, ALPHA).model_dump(mode="json")
    for key in ("test_mean", "python", "evaluated", "unchecked", "shards_sha256", "judged_on"):
        del entry[key]
    file.write_text(json.dumps({"entries": [entry]}))
    (old,) = read(file)
    assert (old.test_mean, old.python, old.evaluated) == (None, None, False)
    assert old.unchecked == "submitted by a version with fewer rules"


def test_every_rule_that_is_named_has_a_text() -> None:
    sources = [Path(module.__file__ or "").read_text() for module in (leaderboard, records)]
    for rule in RULES:
        assert any(f'"{rule}"' in source for source in sources)


def test_other_code_and_changed_recipes_are_shown(
    board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "board.json"
    assert submit(board.honest, file, ALPHA).changes == ()
    changed = board.three(tmp_path / "changed", "model.softcap=20.0", "optimizer.head.lr=0.01")
    entry = submit(changed, file, ALPHA)
    assert entry.changes is not None
    assert {"model.softcap=20.0", "optimizer.head.lr=0.01"} <= {*entry.changes}
    renamed = board.copies(tmp_path / "renamed")
    for name, said in (("baseline", "model.tied_head=false"), ("record-18", "another recipe")):
        for run in renamed:
            edit_summary(run, recipe=name)
            edit_config(run, recipe=name)
        changes = submit(renamed, file, ALPHA).changes
        assert changes is not None
        assert any(said in change for change in changes), "what it has of that is the name"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaderboard, "code_hash", lambda: "0" * 64)
        assert "made by other code" in submit(board.honest, file, ALPHA).unchecked
    leaderboard_command(file=file)
    said = capsys.readouterr().out
    assert "model.softcap=20.0" in said
    assert " more" in said
    assert "unchecked: made by other code" in said


def test_a_board_that_could_not_be_read_again_is_not_written(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "board.json"
    submit(board.honest, file, ALPHA)
    before = file.read_text()
    entry = read(file)[0].model_copy(update={"track": "other", "wall_seconds": float("nan")})
    monkeypatch.setattr(leaderboard, "check", lambda *_: entry)
    with pytest.raises(ConfigError, match="wall_seconds"):
        submit(board.honest, file, ALPHA)
    assert file.read_text() == before


def test_every_refusal_says_what_to_do(board: Board, tmp_path: Path) -> None:
    assert leaderboard.TO_DO.keys() == RULES.keys()
    with pytest.raises(RunError, match="; train the seeds from 0 on"):
        check(board.honest[1:], ALPHA)


def test_code_of_ones_own_is_marked(
    board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "from torch import nn\n\n\ndef same(inner, layer):\n    return inner\n"
    (tmp_path / "mine.py").write_text(source)
    use = f"custom.mlp.use={tmp_path}/mine.py:same"
    runs = board.three(tmp_path, use)
    entry = submit(runs, tmp_path / "board.json", ALPHA)
    code = RunFolder(runs[0]).load_config().custom.mlp.code
    assert entry.own_code == (f"custom.mlp mine.py:same ({code[:12]})",)
    leaderboard_command(file=tmp_path / "board.json")
    shown = capsys.readouterr().out
    assert "(own code)" in shown
    assert entry.own_code[0] in shown
    assert str(tmp_path) not in shown
    (tmp_path / "mine.py").write_text(f"{source}# another\n")
    other = board.train(tmp_path / "other", use, seed=2)
    refused([*runs[:2], other], "same recipe", "custom.mlp.code is")
    edit_summary(runs[1], own_code={})
    refused(runs, "adds up", "own_code is {} by summary.json")
