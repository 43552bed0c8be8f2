"""`speedrun eval` by its own code: what it prints, what it refuses, and its one JSON object."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speedrun.commands import evaluate as command
from speedrun.commands.evaluate import evaluate_command
from speedrun.config.resolve import resolve
from speedrun.data.build import build_dataset
from speedrun.errors import SpeedrunError
from speedrun.serve.load import load_run
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.serve.loaded import slow_nats
from tests.train.heard import train
from tests.waiting import PATIENCE

FIVE = ("nats_per_token", "bits_per_byte", "perplexity", "documents", "stderr")


class Runs:
    """Three small trained runs: two on the same bytes, one with another tokenizer."""

    def __init__(self, root: Path, dataset: Path) -> None:
        self.root, self.dataset = root, dataset
        self.first, self.second, self.bpe = (root / name for name in ("first", "second", "bpe"))
        for number in range(30):
            text = "".join(f"{number} + {n} = {number + n}\n" for n in range(40))
            (root / f"{number}.txt").write_text(text)
        pairs = root / "pairs"
        build_dataset([str(root / "*.txt")], pairs, "bpe:270", val_fraction=0.2, test_fraction=0.1)
        for recipe, data, folder, words in (
            ("modern", dataset, self.first, ()),
            ("baseline", dataset, self.second, ("train.steps=2",)),
            ("modern", pairs, self.bpe, ("batch.length=32",)),
        ):
            sets = [*TINY, f"data.dir={data}", *words]
            train(resolve(recipe, "nano", sets).config, folder)
        self.pairs = pairs


@pytest.fixture(scope="module")
def runs(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tiny_dataset)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("1 + 2 = 3\n" * 20)
    Path("b.jsonl").write_text("".join(json.dumps({"text": f"{n} + 1 = {n + 1}\n"}) + "\n"
                                       for n in range(9)))  # fmt: skip
    items = [
        {"context": f"{n} + 1 =", "choices": [f" {n + 1}", " x", " x y"], "answer": 0}
        for n in range(6)
    ]
    Path("t.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return tmp_path


def say(*words: str | Path, tasks: str = "", **options: Any) -> None:
    given: dict[str, Any] = {
        "context": 0, "stride": 0, "split": "", "text_field": "text", "as_json": False,
        "tasks": Path(tasks) if tasks else None, **options,
    }  # fmt: skip
    evaluate_command([str(word) for word in words], **given)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    def as_object(*words: str | Path, **options: Any) -> dict[str, Any]:
        say(*words, as_json=True, **options)
        captured = capsys.readouterr()
        assert not captured.err
        found: dict[str, Any] = json.loads(captured.out, parse_constant=pytest.fail)
        return found

    return as_object


def test_one_object_that_can_be_computed_again(runs: Runs, texts: Path, told: Any) -> None:
    found = told(runs.first, "a.txt", "b.jsonl", context=20, stride=7)
    assert found.keys() >= set(FIVE)
    run = load_run(runs.first)
    documents = ["1 + 2 = 3\n" * 20, *(f"{n} + 1 = {n + 1}\n" for n in range(9))]
    nats, sizes = [], []
    for text in documents:
        ids = run.tokenizer.encode("\n" + text)  # a place for end-of-text
        ids[0] = run.tokenizer.eot
        nats.append(math.fsum(slow_nats(run, ids, 20, 7)))
        sizes.append(len(ids) - 1)
    r, n = sum(nats) / sum(sizes), len(nats)
    squares = sum((x - r * w) ** 2 for x, w in zip(nats, sizes, strict=True))
    assert found["nats_per_token"] == pytest.approx(r, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(r / math.log(2), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(r), rel=1e-4)
    assert found["stderr"] == pytest.approx(math.sqrt(n / (n - 1) * squares) / sum(sizes), rel=1e-3)
    assert (found["documents"], found["tokens"], found["bytes"]) == (10, sum(sizes), sum(sizes))
    assert (found["context"], found["stride"], found["trained_context"]) == (20, 7, 64)
    assert found["run"] == str(runs.first)
    assert found["step"] == 8
    assert [(one["file"], one["documents"], one["stderr"] is None) for one in found["files"]] == [
        ("a.txt", 1, True),
        ("b.jsonl", 9, False),
    ]


def test_the_loss_on_its_own_dataset_is_near_its_validation(runs: Runs, told: Any) -> None:
    """Not the same: there rows run over the borders of documents."""
    found = told(runs.first, runs.dataset)
    assert found["files"][0]["file"] == "dataset/val"
    summary = RunFolder(runs.first).read_summary()
    assert summary is not None
    assert found["nats_per_token"] == pytest.approx(summary.val_loss, rel=0.1)
    assert found["documents"] == 3
    assert found["stderr"] > 0


def test_two_runs_are_compared_document_by_document(runs: Runs, texts: Path, told: Any) -> None:
    found = told(runs.first, runs.second, "a.txt", "b.jsonl", tasks="t.jsonl")
    first, second = found["runs"]
    assert {key: found[key] for key in FIVE} == {key: first[key] for key in FIVE}
    difference = found["difference"]
    assert difference["of"] == "nats_per_token"
    assert difference["difference"] == pytest.approx(
        second["nats_per_token"] - first["nats_per_token"]
    )
    low, high = difference["interval"]
    assert low < difference["difference"] < high
    assert difference["p"] < 0.05
    assert difference["better"] == str(runs.first)
    tasks = found["tasks_difference"]["accuracy"]
    assert tasks["difference"] == pytest.approx(
        second["tasks"]["accuracy"] - first["tasks"]["accuracy"]
    )
    same = told(runs.first, runs.first, "b.jsonl")["difference"]
    assert (same["difference"], same["p"], same["better"]) == (0, 1, None)
    alone = told(runs.first, runs.second, "a.txt")["difference"]
    assert alone["stderr"] is alone["interval"] is alone["p"] is alone["better"] is None


def test_runs_with_other_tokenizers_are_compared_in_bytes(
    runs: Runs, texts: Path, told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(runs.first, runs.bpe, "a.txt", "b.jsonl")
    assert found["difference"]["of"] == "bits_per_byte"
    assert {one["context"] for one in found["runs"]} == {32}  # what both were trained on
    assert found["runs"][0]["tokens"] > found["runs"][1]["tokens"]
    assert found["runs"][0]["bytes"] == found["runs"][1]["bytes"]
    say(runs.first, runs.bpe, "b.jsonl")
    text = capsys.readouterr().out
    assert "bits per byte (their tokenizers differ" in text
    # A dataset is decoded for the run whose tokens it does not hold.
    assert told(runs.first, runs.pairs)["bytes"] == told(runs.bpe, runs.pairs)["bytes"]


def test_tasks_alone(runs: Runs, texts: Path, told: Any) -> None:
    found = told(runs.first, tasks="t.jsonl")
    assert {key: found[key] for key in FIVE} == {**dict.fromkeys(FIVE), "documents": 0}
    tasks = found["tasks"]
    assert (tasks["items"], tasks["choices"]) == (6, 18)
    assert tasks["chance"] == pytest.approx(1 / 3)
    for key in ("accuracy", "accuracy_normalized", "accuracy_per_token"):
        low, high = tasks[f"{key}_interval"]
        assert 0 <= low <= tasks[key] <= high <= 1
    assert "files" not in found


def test_what_people_read(runs: Runs, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(runs.first, runs.second, "a.txt", "b.jsonl", tasks="t.jsonl")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("first, step 8, tokenizer byte, context 64")
    words = [line.split() for line in lines]
    assert words[1][:5] == ["file", "documents", "tokens", "bytes", "nats/token"]
    assert [line[0] for line in words[2:5]] == ["a.txt", "b.jsonl", "total"]
    assert words[2][5] == "-"
    assert any("95% interval" in line and "over 10 documents" in line for line in lines)
    assert any(line.startswith("t.jsonl: 6 items") and "chance 33.3%" in line for line in lines)
    assert any(line.endswith("first is better") for line in lines)
    say(runs.first, "a.txt")
    assert "one document gives no standard error" in capsys.readouterr().out


def test_many_files_are_cut_short_and_in_json_all(
    runs: Runs, texts: Path, told: Any, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "MOST_FILES", 2)
    for number in range(5):
        Path(f"{number}.md").write_text("1 + 1")
    say(runs.first, "*.md")
    assert "and 3 more files" in capsys.readouterr().out
    assert len(told(runs.first, "*.md")["files"]) == 5


def test_misuse_is_one_sentence(runs: Runs, texts: Path) -> None:
    (texts / "bare").mkdir()
    for name in ("config.toml", "tokenizer"):
        (texts / "bare" / name).symlink_to(runs.first / name)
    one, two = runs.first, runs.second
    cases: list[tuple[list[str | Path], dict[str, Any], str]] = [
        ([one], {}, "nothing to judge it on"),
        (["a.txt"], {}, "a.txt is not a run folder"),
        ([one, "a.txt", two], {}, "name the runs first"),
        ([one, two, runs.bpe, "a.txt"], {}, "one run or two, and 3"),
        (["bare", "a.txt"], {}, "has no whole checkpoint"),
        ([one, "a.txt"], {"stride": 65}, "a stride of at most 64"),
        ([one, "a.txt"], {"context": 4, "stride": 5}, "a stride of at most 4"),
        ([one, "a.txt"], {"context": 1 << 21}, "at most 1,048,576 tokens"),
        ([two, "a.txt"], {"context": 65}, "learned positions for 64 tokens"),
        ([one, "a.txt"], {"split": "train"}, "--split train is for datasets"),
        ([one], {"tasks": "t.jsonl", "stride": 2}, "--stride is for texts"),
        ([one], {"tasks": "none.jsonl"}, "cannot be read"),
        ([one, runs.dataset], {"split": "test"}, "no split test|alone"),
        ([runs.bpe, runs.pairs], {"split": "test"}, "speedrun verify .*bpe` alone"),
    ]
    for words, options, sentence in cases:
        with pytest.raises(SpeedrunError, match=sentence) as error:
            say(*words, **options)
        assert "\n" not in str(error.value)
    assert not RunFolder(runs.bpe).test.exists()
    say(one, runs.pairs, split="test")  # of another dataset than its own


def test_progress_is_shown_on_a_terminal_alone(
    runs: Runs, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[str, int, int]] = []

    class Bar:
        def __enter__(self) -> Any:
            return lambda *what: shown.append(what)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(command, "stage_progress", Bar)
    say(runs.first, "a.txt")
    assert not shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say(runs.first, "a.txt", tasks="t.jsonl")
    capsys.readouterr()
    assert shown[-1] == (f"{runs.first}: tasks", 18, 18)
    assert (str(runs.first), 200, 200) in shown


def test_the_verb(runs: Runs, texts: Path) -> None:
    words = [sys.executable, "-m", "speedrun", "eval", str(runs.first), "b.jsonl", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["documents"] == 9
    words[5] = "missing.txt"
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
