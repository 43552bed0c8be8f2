"""`speedrun race` and `speedrun ablate`: what they print, and that they write a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speedrun.commands import race as command
from speedrun.errors import ConfigError
from speedrun.science.compare import Entry
from speedrun.science.results import Ablation, Effect, Race
from speedrun.science.space import Budget
from speedrun.train.trained_on import TrainedOn

Output = pytest.CaptureFixture[str]
RACE = Race(
    track="nano",
    target=4.3,
    seeds=2,
    entries=tuple(
        Entry(recipe=recipe, seed=seed, tokens_to_target=tokens, steps_to_target=tokens and 5,
              seconds_to_target=tokens and 1.5 * seed, wall_seconds_to_target=tokens and 9.0,
              val_loss=4.25, params=1_234_567, peak_memory_bytes=memory)
        for recipe, seed, tokens, memory in (
            ("slow", 0, 1000, 2 << 20), ("slow", 1, 1200, 2 << 20),
            ("fast", 0, 500, None), ("fast", 1, 700, None),
            ("unlucky", 0, 400, 1 << 30), ("unlucky", 1, None, 1 << 30),
        )
    ),
)  # fmt: skip
ABLATION = Ablation(
    recipe="modern",
    track="nano",
    seeds=3,
    effects=(
        Effect(switch="cap", n=3, of=3, effect=0.125, low=0.1, high=0.15, p=0.001, p_holm=0.002,
               decided=True, more_seeds=0),
        Effect(switch="norm", n=3, of=3, effect=-0.01, low=-0.5, high=0.48, p=0.9, p_holm=0.9,
               decided=False, more_seeds=17),
        Effect(switch="skip", n=3, of=3, effect=0.0, p=1.0, p_holm=1.0, decided=False),
        Effect(switch="cap", metric="tokens_to_target", n=1, of=3, effect=None, decided=False),
    ),
)  # fmt: skip


def rows_of(text: str) -> dict[str, list[str]]:
    """Printed lines by their first word, the tables one after the other."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        first, _, rest = line.partition(" ")
        rows.setdefault(first, []).append(" ".join(rest.split()))
    return rows


def test_the_table_of_a_race(capsys: Output) -> None:
    command.print_race(RACE)
    text = capsys.readouterr().out
    assert "to a validation loss of 4.3 on nano, 2 seeds" in text
    assert "ratios to slow" in text
    rows = rows_of(text)
    assert rows["slow"][0].startswith("1,100 +- 141 [-171, 2,371] 1.000 5.0 +- 0.0")
    assert rows["slow"][2].endswith("1,234,567 2.0 MiB")
    assert rows["fast"][0].startswith("600 +- 141")
    assert rows["fast"][2].endswith("1,234,567 -")  # its memory was not measured
    assert rows["unlucky"][0].startswith("reached by 1 of 2 - - reached by 1 of 2")
    assert rows["unlucky"][2].startswith("4.2500 +- 0.0000")
    assert rows["unlucky"][2].endswith("1.0 GiB")


def test_a_chain_of_recipes_shows_what_each_link_gave(capsys: Output) -> None:
    chain = {"one": (1000, 1200), "two": (500, 600), "three": (400, 480)}
    entries = tuple(
        Entry(recipe=recipe, seed=seed, tokens_to_target=count, steps_to_target=count)
        for recipe, tokens in chain.items()
        for seed, count in enumerate(tokens)
    )
    found = Race(track="nano", target=4.3, entries=entries)
    before = found.to_the_one_before()
    assert {name: row.ratio for name, row in before.items()} == pytest.approx(
        {"two": 0.5, "three": 0.8}
    )
    alone = Race(entries=entries[2:]).statistics()["three"]["tokens_to_target"]
    assert before["three"] == alone
    command.print_race(found)
    text = capsys.readouterr().out
    assert "to the one before" in text
    assert rows_of(text)["three"][0].startswith("440 +- 57 [-68, 948] 0.400 0.800 ")
    command.print_race(found.model_copy(update={"entries": entries[:4]}))
    assert "to the one before" not in capsys.readouterr().out


def test_a_shared_machine_has_no_seconds(tmp_path: Path, capsys: Output) -> None:
    shared = RACE.model_copy(update={"jobs": 2})
    command.print_race(shared)
    text = capsys.readouterr().out
    assert "2 runs at a time shared the machine" in text
    assert "training seconds" not in text
    assert rows_of(text)["slow"][0].endswith("reached by 0 of 2")  # by the public rule
    assert rows_of(text)["slow"][1].endswith("not tested 1,234,567 2.0 MiB")
    shared.write(tmp_path / "race.json")
    written = json.loads((tmp_path / "race.json").read_text())
    assert written["jobs"] == 2
    assert not any("seconds" in metric for metric in written["statistics"]["slow"])
    command.print_ablation(ABLATION.model_copy(update={"jobs": 2}))
    text = capsys.readouterr().out
    assert "2 runs at a time shared the machine" in text
    assert "seconds_to_target" not in text


def test_the_table_of_an_ablation(capsys: Output) -> None:
    command.print_ablation(ABLATION)
    rows = rows_of(capsys.readouterr().out)
    assert rows["cap"] == [
        "- tokens - - 1 of 3 pairs have it",
        "+0.1250 nats [+0.1000, +0.1500] 0.001 0.002 decided",
    ]
    assert rows["seconds_to_target:"] == ["no pair of runs has it"]
    assert rows["norm"] == ["-0.0100 nats [-0.5000, +0.4800] 0.9 0.9 undecided: about 20 new seeds"]
    assert rows["skip"] == ["+0.0000 nats 1 1 undecided"]


def test_titles_name_a_text_that_is_not_the_tracks(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    TrainedOn(name="my poem", usual_text=False).write(tmp_path / "runs/a/dataset.json")
    first = RACE.entries[0].model_copy(update={"run": "runs/a"})
    raced = RACE.model_copy(update={"entries": (first, *RACE.entries[1:])})
    command.print_race(raced, tmp_path)
    assert "of 4.3 on my poem, sized as nano, 2 seeds" in capsys.readouterr().out
    command.print_ablation(ABLATION.model_copy(update={"runs": ("runs/a",)}), tmp_path)
    assert "modern on my poem, sized as nano, 3 seeds" in capsys.readouterr().out


def test_requests_pass_through_and_a_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    asked: dict[str, dict[str, Any]] = {}

    def fake(result: Race | Ablation, file: str, **request: Any) -> Race | Ablation:
        request.pop("say")("a run")
        request["jobs"] = request.pop("jobs_at_once")
        asked[file] = request
        result.write(tmp_path / file)
        return result

    monkeypatch.setattr(command, "race", lambda **words: fake(RACE, "race.json", **words))
    monkeypatch.setattr(command, "ablate", lambda **words: fake(ABLATION, "ablation.json", **words))
    race_request: dict[str, Any] = {
        "recipes": ["modern", "best"], "seeds": 2, "budget": 9, "out": tmp_path,
        "overrides": ["train.seed=1"], "jobs": 2, "until": [], "margin": None,
    }  # fmt: skip
    command.race_command(**race_request, tracks=["nano"], finish=True, tuned="12")
    ablation_request: dict[str, Any] = {
        "recipe": "modern", "seeds": 3, "switches": ["b=2"], "out": tmp_path,
        "alpha": 0.1, "margin": 0.02, "overrides": [], "jobs": None, "until": [],
    }  # fmt: skip
    command.ablate_command(**ablation_request, tracks=["nano"])
    race_request |= {"track": "nano", "finished": True, "until": None,
                     "tuned": Budget(trials=12)}  # fmt: skip
    ablation_request |= {"track": "nano", "until": None}
    assert asked == {"race.json": race_request, "ablation.json": ablation_request}
    assert capsys.readouterr().out.startswith("a run\n")
    for name in ("race.html", "ablation.html"):
        assert (tmp_path / name).read_text().startswith("<!doctype html>")


def test_an_ablation_on_several_tracks_says_where_they_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    verdicts: dict[str, dict[str, Any]] = {
        "nano": {"cap": "helps", "norm": "helps", "skip": "equal", "mask": "equal", "one": "helps",
                  "late": "undecided"},
        "pico": {"cap": "helps", "norm": "hurts", "skip": "equal", "mask": "hurts",
                  "late": "helps"},
    }  # fmt: skip

    def fake(*, track: str, out: Path, **request: Any) -> Ablation:
        assert request["until"].seconds == 1800  # of an hour, half for each
        effects = (
            Effect(switch=switch, n=9, of=9, effect=-0.5 if verdict == "hurts" else 0.5,
                   verdict=verdict)
            for switch, verdict in verdicts[Path(track).stem].items()
        )  # fmt: skip
        found = Ablation(recipe="modern", track=track, until="1h", effects=tuple(effects))
        found.write(out / "ablation.json")
        return found

    monkeypatch.setattr(command, "ablate", fake)
    request: dict[str, Any] = {
        "recipe": "modern", "seeds": None, "switches": [], "out": tmp_path, "alpha": 0.05,
        "margin": 0.01, "overrides": [], "jobs": None, "until": ["1h"],
    }  # fmt: skip
    for track in ("nano", "pico"):
        (tmp_path / track).mkdir()
    command.ablate_command(**request, tracks=["nano", "pico"])
    text = capsys.readouterr().out.partition("side by side: modern on nano, modern on pico")[2]
    rows = {name: found[0] for name, found in rows_of(text).items()}
    assert rows["cap"] == "+0.5000 helps +0.5000 helps agree"
    assert rows["norm"] == "+0.5000 helps -0.5000 hurts opposite"
    assert rows["skip"] == "+0.5000 equal +0.5000 equal agree"
    assert rows["mask"] == "+0.5000 equal -0.5000 hurts differ"
    assert rows["one"] == "+0.5000 helps - open"
    assert rows["late"] == "+0.5000 undecided +0.5000 helps open"
    assert "decided on all: 4 of 6, of which 2 agree and 1 point the other way" in text
    assert "; 1 have an effect on one track and none on another" in text
    for track in ("nano", "pico"):
        assert (tmp_path / track / "ablation.html").exists()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "small.toml").write_text('extends = "nano"\n')
    twice = [str(tmp_path / folder / "small.toml") for folder in ("a", "b")]
    with pytest.raises(ConfigError, match="two files of one name"):
        command.ablate_command(**request, tracks=twice)
    asked: list[str] = []
    monkeypatch.setattr(command, "ablate", lambda **words: asked.append(words["track"]))
    with pytest.raises(ConfigError, match="track 'picco' is not known"):
        command.ablate_command(**request, tracks=["nano", "picco"])
    assert asked == [], "before the first has taken hours"


def test_code_that_no_run_could_be_made_with_is_refused_before_the_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def wrap(inner, layer):\n    return None\n")
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "modern"\ncustom.mlp = { use = "mine.py:wrap" }\n')
    with pytest.raises(ConfigError, match=r"mine.py:wrap\) gives None where a torch.nn.Module"):
        command.race_command(
            recipes=["modern", str(recipe)], tracks=["pico"], seeds=2, until=[], margin=None,
            finish=False, tuned="", budget=None, out=tmp_path / "out", overrides=[], jobs=None,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
