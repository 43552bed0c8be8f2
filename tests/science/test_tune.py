"""Tunings: the search, its budget and what goes wrong, mostly of made-up runs."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from speedrun.commands import tune as command
from speedrun.config.experiment import all_values, differences
from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError, RunError
from speedrun.report.page import page_data
from speedrun.science import children
from speedrun.science.results import Tuning, read_result
from speedrun.science.space import Budget, Range
from speedrun.science.tune import tune
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.report.made import HEAD
from tests.science.trials import BEST, MadeChild
from tests.train.children import QuickChild

HIDDEN = Range.parse("optimizer.hidden.lr=0.0001..0.01:log")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> type[MadeChild]:
    class Child(MadeChild):
        begun: ClassVar[list[list[str]]] = []

    monkeypatch.setattr(children, "Child", Child)
    monkeypatch.setattr(children, "PAUSE", 0.001)
    return Child


@pytest.fixture
def tiny_tune(tiny_dataset: Path, tmp_path: Path) -> Callable[..., Tuning]:
    words = [*TINY, f"data.dir={tiny_dataset}"]
    return partial(tune, recipe="modern", track="nano", out=tmp_path / "out", say=print,
                   overrides=words, jobs_at_once=2)  # fmt: skip


def values_of(found: Tuning) -> list[tuple[Any, ...]]:
    return [tuple(trial.values.values()) for trial in found.trials]


def test_a_search_closes_in_on_the_best_and_repeats_no_run(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    go = partial(tiny_tune, over=[HIDDEN, HEAD], budget=Budget(trials=21), seeds=2)
    found = go()
    assert len(made.begun) == 42
    first, *others = found.trials
    own = all_values(resolve("modern", "nano").config)
    assert first.values == {key: own[key] for key in ("optimizer.hidden.lr", "optimizer.head.lr")}
    assert [trial.box for trial in found.trials] == [None, *[1] * 12, *[1 / 3] * 5, *[1 / 6] * 3]
    best = found.ranked[0]
    assert found.best == best.number > 12  # closer in
    for key, value in BEST.items():
        assert abs(math.log(best.values[key] / value)) < 0.4  # of 4.6 that a range is long
    for trial in others:
        explored = [one for one in found.trials if one.number <= (12 if trial.number < 18 else 17)]
        centre = min(explored, key=lambda one: one.loss or 0).values
        for one in (HIDDEN, HEAD):
            assert one.low <= trial.values[one.key] <= one.high
            if trial.number > 12:
                away = abs(one.place(trial.values[one.key]) - one.place(centre[one.key]))
                assert away <= (trial.box or 0) / 2 + 1e-4
    for trial in found.trials:
        assert trial.loss == pytest.approx(sum(filter(None, trial.losses)) / 2)
    assert found.seeds == (1000, 1001)
    assert (found.rows, found.jobs, found.best in range(21)) == ("between", 2, True)
    assert read_result(tmp_path / "out/tune.json") == found
    made.begun.clear()
    assert go().trials == found.trials
    # A budget of more trials looks first where this one did; what is alike is found.
    longer = go(budget=Budget(trials=31))
    assert values_of(longer)[:13] == values_of(found)[:13]
    assert not any("trial_12-" in word for words in made.begun for word in words)
    made.begun.clear()
    assert go().trials == found.trials
    assert made.begun == []


def test_finalists_are_chosen_from_by_the_mean_of_further_seeds(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    go = partial(tiny_tune, over=[HIDDEN, HEAD], budget=Budget(trials=12))
    _, second, *_ = go(out=tmp_path / "plain").ranked
    key, lucky = HEAD.key, second.values[HEAD.key]
    # The second looks better than the lowest by the seed that all are run with, and by no other.
    made.luck = staticmethod(lambda values, seed: -2.0 * (seed == 1000 and values[key] == lucky))
    alone = go(out=tmp_path / "alone")
    assert alone.best_trial is not None
    assert alone.best_trial.number == second.number
    made.begun.clear()
    found = go(finalists=3, out=tmp_path / "alone")
    assert len(made.begun) == 3 * 2, "the trials are those of the search, whose runs are there"
    assert values_of(found) == values_of(alone)
    assert [len(one.losses) for one in found.ranked] == [3] * 3 + [1] * 9
    assert [one.box for one in found.trials] == [one.box for one in alone.trials]
    again = found.ranked[0]
    assert again.number == found.best == min(found.ranked[:3], key=lambda one: one.loss or 9).number
    assert again.loss == pytest.approx(sum(filter(None, again.losses)) / 3)
    text = (tmp_path / "alone" / found.file).read_text()
    assert "the best 3 with 2 further seeds" in " ".join(text.split())
    made.begun.clear()
    assert go(finalists=3, out=tmp_path / "alone").trials == found.trials
    assert made.begun == []


def test_a_finalist_that_diverges_is_not_chosen(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    go = partial(tiny_tune, over=[HIDDEN, HEAD], budget=Budget(trials=6))
    lowest = go().ranked[0]
    worst = lowest.values[HEAD.key]
    made.fails = staticmethod(
        lambda values: "gave_up"
        if values[HEAD.key] == worst and values["train.seed"] > 1000 else ""
    )  # fmt: skip
    found = go(finalists=2)
    assert found.best != lowest.number
    assert found.trials[lowest.number].diverged


def test_the_recipe_file_gives_back_the_values_found(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "modern"\n[model]\nsoftcap = 15.0\n')
    for recipe, track in (("modern", "nano"), (str(mine), "pico"), ("modern-cosine", "pico-prose")):
        found = tiny_tune(recipe=recipe, track=track, over=[HIDDEN, HEAD], budget=Budget(trials=4),
                          out=tmp_path / track)  # fmt: skip
        assert found.best
        best = found.trials[found.best]
        file = tmp_path / track / found.file
        assert found.file == f"{found.recipe}-tuned.toml"
        tuned = resolve(str(file), track, found.settings).config
        run = RunFolder(tmp_path / track / best.runs[0]).load_config()
        for key, value in best.values.items():
            assert all_values(tuned)[key] == pytest.approx(value, rel=1e-9)
        changed = {one.key for one in differences(tuned, run)}
        assert changed <= {"train.seed", "validation.rows", *best.values}
        assert file.read_text().count("\n[optimizer.hidden]\nlr = ") == 1
        assert "best of 4 trials" in file.read_text()


def test_an_element_of_a_list_is_searched_and_the_list_stated(
    made: type[MadeChild],
    tiny_tune: Callable[..., Tuning],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Range.parse("optimizer.hidden.betas[0]=0.5..0.99")
    monkeypatch.setattr(made, "best", {first.key: 0.7})
    found = tiny_tune(over=[first], budget=Budget(trials=9))
    assert found.best_trial
    best = found.best_trial.values[first.key]
    assert best == pytest.approx(0.7, abs=0.05)
    tuned = resolve(str(tmp_path / "out" / found.file), "nano", found.settings).config
    assert tuned.optimizer.hidden.betas == (best, 0.95)
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'extends = "modern"\n[optimizer.hidden]\nuse = "torch.optim:AdamW"\n'
        "args = { lr = 0.01, betas = [0.9, 0.99] }\n"
    )
    other = Range.parse("optimizer.hidden.args.betas[1]=0.5..0.999")
    monkeypatch.setattr(made, "best", {other.key: 0.7})
    found = tiny_tune(recipe=str(mine), over=[other], budget=Budget(trials=3))
    tuned = resolve(str(tmp_path / "out" / found.file), "nano", found.settings).config
    assert all_values(tuned)["optimizer.hidden.args.betas"][0] == 0.9
    assert tuned.optimizer.hidden.args["lr"] == 0.01
    with pytest.raises(ConfigError, match=r"betas\[7\].*the recipe does not state"):
        tiny_tune(over=[Range.parse("optimizer.hidden.betas[7]=0.5..0.9")], budget=Budget(trials=3))


def test_a_recipe_that_cannot_be_bettered_stays_as_it_is(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    own = all_values(resolve("modern", "nano").config)
    made.best = {"optimizer.head.lr": own["optimizer.head.lr"]}
    found = tiny_tune(over=[Range.parse("optimizer.head.lr=0.1..0.9:log")], budget=Budget(trials=5))
    assert found.best == 0  # outside of the range that was searched
    assert found.edges == ("optimizer.head.lr",)
    file = tmp_path / "out" / found.file
    assert "as it stands, which was the best of 5 trials" in file.read_text()
    words = found.settings
    assert resolve(str(file), "nano", words).config == resolve(
        "modern", "nano", words
    ).config.model_copy(update={"recipe": "modern-tuned"})
    said = command.sentences(found)
    assert said[0].startswith("no trial was better than modern as it stands, 3.0000, on seed 1000")
    assert said[1].startswith("the best value of optimizer.head.lr is at the edge of the range")


def test_a_trial_that_diverges_is_the_worst_and_ends_nothing(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    made.fails = staticmethod(
        lambda values: "gave_up" if values["optimizer.head.lr"] > 0.03 else ""
    )
    go = partial(tiny_tune, over=[HEAD], budget=Budget(trials=8))
    found = go()
    diverged = [trial for trial in found.trials if trial.diverged]
    assert 0 < len(diverged) < 7
    assert all(trial.values["optimizer.head.lr"] > 0.03 for trial in diverged)
    assert {(trial.loss, trial.losses) for trial in diverged} == {(None, (None,))}
    assert found.ranked[-1].diverged
    assert not found.trials[found.best or 0].diverged
    assert read_result(tmp_path / "out/tune.json") == found
    made.begun.clear()
    assert go().trials == found.trials
    assert made.begun == []  # not even those that gave up
    made.fails = staticmethod(lambda _: "gave_up")
    ruined = go(out=tmp_path / "ruined")
    assert ruined.best is None
    assert "all of 8 trials" in (tmp_path / "ruined" / ruined.file).read_text()
    assert command.sentences(ruined)[0].startswith("every trial diverged")


def test_a_run_that_fails_otherwise_is_an_error(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning]
) -> None:
    made.fails = staticmethod(lambda _: "out of memory")
    with pytest.raises(RunError, match=r"modern trial \d with seed 1000 failed .*no memory left"):
        tiny_tune(over=[HEAD], budget=Budget(trials=3))


def test_whole_numbers_are_tried_once_each(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning]
) -> None:
    said: list[str] = []
    over = [Range.parse("optimizer.muon.iterations=3..6")]
    found = tiny_tune(recipe="record-03", over=over, budget=Budget(trials=9), say=said.append)
    assert sorted(values_of(found)) == [(3,), (4,), (5,), (6,)]
    assert values_of(found)[0] == (5,)  # as the recipe has it
    assert said[-1] == "every value of these ranges that can be used has been tried"


def test_whole_numbers_that_cannot_be_used_are_left_out(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    said: list[str] = []
    over = [Range.parse("model.bigram_rows=0..3")]
    found = tiny_tune(over=over, budget=Budget(trials=9), say=said.append)
    assert sorted(values_of(found)) == [(0,), (2,), (3,)]
    assert (tmp_path / "out" / found.file).exists()
    left_out = [line for line in said if line.startswith("left out")]
    assert left_out == [
        "left out: model.bigram_rows = 1 cannot be used: one row is for tokens with none before: "
        "0, 2 or more"
    ]
    # Beside a rate each point has its own values, and the sentence is said once all the same.
    said.clear()
    found = tiny_tune(over=[*over, HEAD], budget=Budget(trials=12), say=said.append,
                      out=tmp_path / "two")  # fmt: skip
    assert len(found.trials) == 12
    assert {rows for rows, _ in values_of(found)} == {0, 2, 3}
    assert [line for line in said if line.startswith("left out")] == left_out


def test_a_role_that_some_trials_have_can_be_searched(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning]
) -> None:
    """modern has no table of token pairs, but with rows for it there is one."""
    over = [Range.parse("optimizer.bigram.lr=0.01..0.1"), Range.parse("model.bigram_rows=0..64")]
    assert len(tiny_tune(over=over, budget=Budget(trials=3)).trials) == 3


def test_a_key_without_effect_is_called_that(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning]
) -> None:
    over = [Range.parse("model.value_tables=1..3"), Range.parse("optimizer.hidden.eps=1e-9..1e-7")]
    found = tiny_tune(over=over, budget=Budget(trials=4))
    assert found.edges  # its best value is the recipe's own, at the end of the range
    said = command.sentences(found)
    assert said[0].startswith("no trial was better than modern as it stands")
    assert said[1:] == [
        "all 4 losses are the same: model.value_tables and optimizer.hidden.eps changed nothing "
        "here"
    ]
    assert page_data([], tuning=found)["tuning"]["edges"] == []
    one = found.trials[0].model_copy(update={"losses": (9.0,), "loss": 9.0})
    other = found.model_copy(update={"trials": (one, *found.trials[1:]), "best": 1})
    assert not any("changed nothing" in sentence for sentence in command.sentences(other))


def test_a_time_is_a_limit_for_all_attempts_together(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    made.seconds = 0.1
    go = partial(tiny_tune, over=[HIDDEN, HEAD], budget=Budget(seconds=1.0))

    def interrupt(text: str) -> None:
        if text.startswith("[1/2] modern trial 2, seed 1000: running"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        go(say=interrupt)
    broken_off = read_result(tmp_path / "out/tune.json")
    assert isinstance(broken_off, Tuning)
    assert [trial.number for trial in broken_off.trials] == [0, 1]
    assert 0.1 < (broken_off.seconds or 0) < 1.0
    begin = time.monotonic()
    found = go()
    assert time.monotonic() - begin < 60
    assert (found.seconds or 0) >= 1.0
    assert found.trials[:2] == broken_off.trials
    assert [trial.number for trial in found.trials] == list(range(len(found.trials)))
    boxes = [trial.box for trial in found.trials[1:]]
    assert boxes == sorted(boxes, key=lambda box: -(box or 0))
    made.begun.clear()
    again = go()
    assert (again.trials, again.seconds, again.stopped) == (
        found.trials, found.seconds, found.stopped,
    )  # fmt: skip
    assert made.begun == []


def test_runs_under_way_at_the_limit_are_stopped(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], tmp_path: Path
) -> None:
    made.seconds = 1e6
    with pytest.raises(RunError, match=r"no trial came to its end within 0.5 s"):
        tiny_tune(over=[HEAD], budget=Budget(seconds=0.5))
    assert len(made.begun) == 2
    assert not (tmp_path / "out/tune.json").exists()


def test_trials_that_had_to_stop_are_counted(
    made: type[MadeChild], tiny_tune: Callable[..., Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two end at once; of the next two none does."""

    class Child(made):  # type: ignore[misc, valid-type]
        def __init__(self, words: Sequence[str]) -> None:
            self.seconds = 0.0 if len(made.begun) < 2 else 1e6
            super().__init__(words)

    monkeypatch.setattr(children, "Child", Child)
    found = tiny_tune(over=[HEAD], budget=Budget(seconds=0.6))
    assert ([trial.number for trial in found.trials], found.stopped) == ([0, 1], 2)
    assert command.sentences(found)[-1].endswith("and stopped: 2")


@pytest.mark.slow
def test_a_real_run_that_diverges(
    tiny_tune: Callable[..., Tuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "Child", QuickChild)
    over = [Range.parse("optimizer.head.lr=1e25..1e30:log")]
    found = tiny_tune(over=over, budget=Budget(trials=2))
    assert [trial.diverged for trial in found.trials] == [False, True]
    assert found.best == 0


def test_mistakes_are_refused_before_any_run(
    made: type[MadeChild], tiny_dataset: Path, tmp_path: Path
) -> None:
    def refused(sentence: str, *over: str, recipe: str = "modern", **others: Any) -> None:
        words = [*TINY, f"data.dir={tiny_dataset}", *others.pop("words", ())]
        request: dict[str, Any] = {"track": "nano", "budget": Budget(trials=3), **others}
        with pytest.raises(ConfigError, match=sentence):
            tune(recipe=recipe, over=[Range.parse(one) for one in over], out=tmp_path, say=print,
                 overrides=words, **request)  # fmt: skip

    head = "optimizer.head.lr=0.001..0.1:log"
    refused("optimizer.head.lr is given twice", head, head)
    refused("0 keys cannot be searched")
    for key in ("train.seed", "train.steps", "validation.tokens", "data.val_fraction",
                "machine.threads", "batch.tokens", "schedule.steps"):  # fmt: skip
        ends = "0.1..0.2" if key.startswith("data") else "1..9"
        refused(f"{key} belongs to what all trials have in common", f"{key}={ends}")
    refused("model.layers is not for a recipe to decide: track nano sets it", "model.layers=2..4")
    refused("optimizer.head.lr is searched by --over", head, words=["optimizer.head.lr=0.1"])
    refused("by adamw, which does not read optimizer.muon.lr", "optimizer.muon.lr=0.01..0.1")
    refused("by muon, which does not read optimizer.hidden.lr", "optimizer.hidden.lr=0.01..0.1",
            recipe="record-03")  # fmt: skip
    for role in ("bigram", "value_embedding", "scalar"):
        refused(f"no parameter of modern has the role {role}", f"optimizer.{role}.lr=0.01..0.1")
    refused("no parameter of record-03 has the role embedding", "optimizer.embedding.eps=0.1..0.2",
            recipe="record-03")  # fmt: skip
    refused("optimizer.head.weight_decay = -1.0", "optimizer.head.weight_decay=-1..1")
    refused("schedule.cooldown", "schedule.cooldown=100..900", "schedule.warmup=0..300")
    recipe = tiny_dataset.parent / "mine.toml"
    recipe.with_name("mine.py").write_text(
        "def wrap(inner, layer, size=2, gain=1.0):\n    assert size > 1\n    return inner\n"
    )
    recipe.write_text(
        'extends = "modern"\n[custom.mlp]\nuse = "mine.py:wrap"\nargs = {size = 2}\n'
        '[optimizer.head]\nuse = "torch.optim:SGD"\nargs = {lr = 0.1}\n'
    )
    own: dict[str, Any] = {"recipe": str(recipe)}
    refused("does not state custom.mlp.args.gain", "custom.mlp.args.gain=1..2", **own)
    refused("size=1..4.*|wrap.* fails for layer 0, in line 2", "custom.mlp.args.size=1..4", **own)
    words = [f"custom.schedule.use={recipe.with_name('mine.py')}:wrap"]
    refused("custom.schedule.use names the schedule", "schedule.cooldown=1..9", words=words, **own)
    refused("optimizer.head.use names the code, which does not read optimizer.head.lr", head, **own)
    refused("--seeds 0", head, seeds=0)
    for word in ("train.seed=5", "train.stop=target", "machine.jobs=2"):
        refused("cannot be used here: the command sets", head, words=[word])
    refused("nearest: 'modern'", head, recipe="modrn")
    assert made.begun == []
    assert [path.name for path in tmp_path.iterdir()] == []
