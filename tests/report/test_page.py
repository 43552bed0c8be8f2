"""The page's data and text: what is read from run folders, compared, thinned and embedded."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speedrun.cli import app
from speedrun.config.resolve import resolve
from speedrun.config.schedule import settings_at
from speedrun.errors import ConfigError, RunError
from speedrun.model.mask import dense_mask
from speedrun.report.page import build_page, page_data, read_inputs
from speedrun.report.page.mask import _made_up_documents
from speedrun.report.page.run import repeat_command, schedules
from speedrun.train.run import RunFolder
from tests.report.made import begun_run, made_config, made_run

LIMIT = 5 << 20


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Path) -> Path:
    """A run trained by the command itself."""
    folder = tmp_path_factory.mktemp("real") / "run"
    words = f"train modern --track nano --run {folder} --seed 3 --steps 8 --sample-tokens 8"
    sizes = (
        "model.layers=2 model.width=32 model.heads=2 batch.length=256 batch.tokens=512 "
        "validation.tokens=1024 validation.every=4 train.target=5.0 machine.threads=1 "
        "attention.documents=true"
    )
    result = CliRunner().invoke(app, [*words.split(), *sizes.split(), f"data.dir={tiny_dataset}"])
    assert result.exit_code == 0, result.output
    return folder


def test_a_trained_run_becomes_a_page(real_run: Path) -> None:
    data = page_data([RunFolder(real_run)])
    run = data["runs"][0]
    assert run["status"] == "finished"
    assert run["val"]["step"] == [0, 1, 2, 4, 8]  # two early ones, since there is a target
    assert run["train"]["step"] == list(range(1, 9))
    assert run["samples"][0]["text"].startswith(run["samples"][0]["prompt"])
    assert set(run["samples"][0]) == {"prompt", "text"}
    assert {event["kind"] for event in run["events"]} >= {"start", "checkpoint"}
    assert run["environment"]
    assert data["masks"][0]["real"]  # documents of the dataset it was trained on
    assert data["groups"][0]["schedules"]["lr"][-1] == [8, 0.0]


def test_the_page_is_one_file_without_a_network(real_run: Path) -> None:
    page = build_page([RunFolder(real_run)])
    assert len(page.encode()) < LIMIT
    addresses = set(re.findall(r"https?://[^\"'\s)]+", page)) - {"http://www.w3.org/2000/svg"}
    assert not addresses
    assert "default-src 'none'" in page
    assert "connect-src 'none'" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:|#)", page)
    assert "{{" not in page.partition('id="data">')[0]


def embedded(page: str) -> Any:
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def test_nothing_in_the_data_can_leave_its_element(tmp_path: Path) -> None:
    page = build_page([made_run(tmp_path / "a", made_config(recipe="{{script}}<!--"))])
    assert page.count("</script>") == 2
    assert embedded(page)["runs"][0]["samples"][0]["text"].endswith("<script>boom()</script>")
    assert "<title>{{script}}&lt;!-- on nano" in page


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", made_config())
    with run.metrics.open("a") as file:
        file.write('{"kind": "val", "step": 41, "tokens": 1, "seconds": 1, "wall_seconds": 1, '
                   '"loss": NaN}\n{"kind": "val", "st')  # fmt: skip
    val = embedded(build_page([run]))["runs"][0]["val"]
    assert val["loss"][-1] is None
    assert val["step"][-1] == 41


@pytest.mark.parametrize("recipe", ["modern-cosine", "mine-from-elsewhere"])
def test_the_command_repeats_the_config(recipe: str) -> None:
    config = made_config(
        "model.softcap=15.0", 'data.sources=["a b.txt"]', "optimizer.hidden.betas=[0.8,0.95]",
        "train.seed=7", recipe=recipe,
    )  # fmt: skip
    words = shlex.split(repeat_command(config))
    assert words[:2] == ["speedrun", "train"]
    assert words[3::2][:2] == ["--track", "--seed"]
    again = resolve(words[2], words[4], words[7:], {"train.seed": int(words[6])}).config
    assert again.model_copy(update={"recipe": recipe}) == config


def test_long_curves_are_averaged_and_many_runs_stay_small(tmp_path: Path) -> None:
    config = made_config("train.steps=1500")
    runs = [
        made_run(tmp_path / f"{seed}", config.model_copy(
            update={"train": config.train.model_copy(update={"seed": seed})}), slope=0.002)
        for seed in range(12)
    ]  # fmt: skip
    page = build_page(runs)
    assert len(page.encode()) < LIMIT / 4
    train = embedded(page)["runs"][0]["train"]
    assert len(train["step"]) == 375
    assert train["stretch"] == [4]
    assert train["step"][0] == 4  # placed at the end of its stretch
    assert train["loss"][0] == pytest.approx(7.0 - 0.002 * 2.5)
    assert train["tokens_per_second"][0] == pytest.approx(config.batch.tokens / 0.5)


def test_events_have_the_clock_before_them_and_a_rewind_counts_once(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "a", made_config())
    rows = [("train", 1, 10.0), ("train", 2, 11.0), ("resume", 2, None), ("train", 3, 15.0),
            ("rewind", 2, None), ("train", 3, 16.0)]  # fmt: skip
    for kind, step, wall in rows:
        clocks = {} if wall is None else {"tokens": step, "seconds": step, "wall_seconds": wall}
        run.log(kind, step=step, **clocks, **({"loss": 5.0, "ms": 1.0} if wall else {}))
    shown = page_data([run])["runs"][0]
    assert shown["train"]["step"] == [1, 2, 3]
    assert shown["train"]["wall_seconds"] == [10.0, 11.0, 16.0]
    assert [event["wall_seconds"] for event in shown["events"]] == [11.0, 15.0]
    assert shown["status"] == "unfinished"


def test_waiting_is_summed_over_the_processes_of_a_run(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "a", made_config())
    assert page_data([run])["runs"][0]["wait_share"] is None
    # The second process waits less at first, the third more at once than the second ever did.
    waits = {"start": [0.5, 2.0], "resume": [0.25, 1.0], "again": [3.0, 4.0]}
    seconds = 0.0
    for kind, process in waits.items():
        run.log("resume" if kind == "again" else kind, step=int(seconds))
        for wait in process:
            seconds += 10.0
            run.log("train", step=int(seconds), tokens=1, seconds=seconds, wall_seconds=seconds,
                    loss=5.0, ms=1.0, wait_seconds=wait)  # fmt: skip
    assert page_data([run])["runs"][0]["wait_share"] == pytest.approx((2.0 + 1.0 + 4.0) / 60)


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention.documents=true"],
        ["attention.documents=true", "attention.window=blocks", "attention.window_start=128",
         "attention.window_end=384"],
        ["attention.window=tokens", "attention.window_start=64", "attention.window_end=300"],
    ],
)  # fmt: skip
def test_mask_frames_are_the_mask(tmp_path: Path, overrides: list[str]) -> None:
    config = made_config("batch.length=1024", *overrides)
    mask = page_data([made_run(tmp_path / "a", config)])["masks"][0]
    documents = _made_up_documents(1024) * int(config.attention.documents)
    for frame in mask["frames"]:
        window = None if frame["window"] is None else torch.tensor(frame["window"])
        dense = dense_mask(documents, window, config.attention.window)[0]
        tiles = dense.view(8, 128, 8, 128).transpose(1, 2)
        seen, full = tiles.any(-1).any(-1), tiles.all(-1).all(-1)
        assert frame["full"] == full.sum(1).tolist()
        assert frame["partial"] == (seen & ~full).sum(1).tolist()
        assert frame["visible"] == pytest.approx(dense.sum().item() / (1024 * 1025 / 2))
        first = []
        for (query, key, slope), (end, _, _) in zip(
            frame["edge"], [*frame["edge"][1:], [1024, 0, 0]], strict=True
        ):
            first += [key + slope * i for i in range(end - query)]
        assert first == dense.int().argmax(1).tolist()


def test_recipes_without_a_window_share_a_picture_whatever_their_length(tmp_path: Path) -> None:
    window = ("attention.window=blocks", "attention.window_start=128", "attention.window_end=512")
    configs = [made_config(f"train.steps={40 + n}", recipe=f"old-{n}") for n in range(6)]
    configs += [made_config(*window, f"train.steps={40 + n}", recipe=f"new-{n}") for n in range(2)]
    runs = [made_run(tmp_path / config.recipe, config) for config in configs]
    masks = page_data(runs)["masks"]
    assert [mask["groups"] for mask in masks] == [[0, 1, 2, 3, 4, 5], [6], [7]]


def test_pictures_of_documents_are_those_of_the_own_dataset(tmp_path: Path) -> None:
    def pictures(*overrides: str) -> int:
        runs = [
            made_run(tmp_path / f"{overrides}{name}", made_config(*overrides), dataset=name)
            for name in ("one", "two")
        ]
        return len(page_data(runs)["masks"])

    assert pictures("attention.documents=true") == 2
    assert pictures("attention.documents=false") == 1


def test_the_published_curve_lies_under_its_record(tmp_path: Path) -> None:
    config = resolve("record-16", "small", ["train.steps=250", "train.seed=3"]).config
    data = page_data([made_run(tmp_path / "a", config, slope=0.01, every=125)])
    shown = data["published"][0]
    assert shown["changed"] == []
    assert (shown["record"], shown["steps"], shown["points"][-1]["step"]) == (16, 1480, 1480)
    rows = {row["step"]: row for row in shown["runs"][0]["rows"]}
    assert set(rows) == {0, 125, 250}
    assert rows[125]["deviations"] == pytest.approx((5.75 - 4.4164) / 0.0116, rel=0.01)
    elsewhere = config.model_copy(update={"track": "nano"})
    assert page_data([made_run(tmp_path / "b", elsewhere)])["published"] == []
    impostor = made_config("model.softcap=15.0", recipe="record-16", track="small")
    changed = page_data([made_run(tmp_path / "c", impostor)])["published"][0]["changed"]
    assert {"batch.tokens", "model.layers", "data.dir"} < set(changed)


def test_inputs_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "worse.json").write_text('{"effects": [{"switch": "x"}]}')
    (tmp_path / "broken.json").write_text("{")
    for name, sentence in [
        ("empty", "neither a run"), ("nowhere", "is not there"), ("bad.json", "no list of entries"),
        ("worse.json", "has no 'effect'"), ("broken.json", "cannot be read as JSON"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=sentence):
            read_inputs([tmp_path / name])


def test_a_folder_of_runs_is_its_runs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        made_run(tmp_path / name, made_config())
    inputs = read_inputs([tmp_path / "b", tmp_path])
    assert [run.path.name for run in inputs.runs] == ["b", "a"]


def test_a_race_under_way_is_its_runs_so_far(tmp_path: Path) -> None:
    race = tmp_path / "races" / "race"
    for name in ("b-s0", "a-s0"):
        made_run(race / "runs" / name, made_config(recipe=name[0]))
    assert [run.path.name for run in read_inputs([race]).runs] == ["a-s0", "b-s0"]
    entry = {"recipe": "b", "seed": 0, "run": "runs/b-s0"}
    (race / "race.json").write_text(json.dumps({"target": 4.0, "entries": [entry]}))
    assert [run.path.name for run in read_inputs([race]).runs] == ["b-s0"]  # its own word then
    nowhere = {"recipe": "b", "seed": 1, "run": "x" * 5000}  # longer than any file's name
    (race / "race.json").write_text(json.dumps({"target": 4.0, "entries": [entry, nowhere]}))
    assert [run.path.name for run in read_inputs([race]).runs] == ["b-s0"]


def test_damaged_files_of_a_run_are_one_sentence(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", made_config())
    for text, sentence in [
        ("{", "cannot be read as JSON"), ("[]", "no JSON object"), ("{}", "has no 'recipe'"),
    ]:  # fmt: skip
        run.summary.write_text(text)
        with pytest.raises(RunError, match=rf"summary.json .*{sentence}.*; delete it"):
            page_data([run])
    run.summary.unlink()
    run.environment.write_text('{"git_commit": 5}')
    with pytest.raises(RunError, match=r"environment.json .* git_commit is 5, but"):
        page_data([run])


def test_rows_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", made_config())
    whole = page_data([run])["runs"][0]
    with run.metrics.open("a") as file:
        file.write('5\n[]\n"val"\n{"step": 3}\n{"kind": "val"}\n{"kind": "train", "loss": 1.0}\n')
    assert page_data([run])["runs"][0] == whole


@pytest.mark.parametrize(("rule", "unit"), [("blocks", 128), ("tokens", 64)])
def test_schedules_are_those_of_the_trainer(rule: str, unit: int) -> None:
    config = made_config("optimizer.kind=muon", "schedule.momentum_warmup=400",
        "optimizer.muon.momentum_start=0.5", f"attention.window={rule}",
        "attention.window_start=128", "attention.window_end=512")  # fmt: skip
    found = schedules(config)
    for step, value in found["lr"]:
        assert value == round(settings_at(config, step).learning_rate_multiplier, 5)
    assert found["momentum"][0] == (0, 0.5)
    assert len({value for _, value in found["momentum"]}) > 3
    widths = [width for _, width in found["window"]]
    assert (widths[0], widths[-1]) == (128, 512)  # in tokens, however it is counted
    assert {after - before for before, after in pairwise(widths)} <= {0, unit}
    assert schedules(made_config()) | {"lr": []} == {"lr": [], "momentum": [], "window": []}


@pytest.mark.parametrize("window", ["none", "tokens", "blocks"])
def test_windows_are_found_without_a_look_at_every_step(window: str) -> None:
    """Of a run of a thousand million steps a page took hours."""
    words = [f"attention.window={window}", "batch.length=512"]
    if window != "none":
        words += ["attention.window_start=64", "attention.window_end=500"]
    config = made_config(*words, "train.steps=70")
    each = [settings_at(config, step).window for step in range(71)]
    widths = [(step, width * config.window_unit) for step, width in enumerate(each) if width]
    slow = [one for i, one in enumerate(widths) if not i or one[1] != widths[i - 1][1] or i == 70]
    assert schedules(config)["window"] == slow
    long = schedules(made_config(*words, "train.steps=1000000000"))["window"]
    assert [width for _, width in long][:-1] == [width for _, width in slow][:-1]
