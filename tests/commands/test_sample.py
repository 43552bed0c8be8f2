"""`speedrun sample` and `speedrun doctor` by their own code."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speedrun.commands.doctor import doctor_command
from speedrun.commands.sample import sample_command
from speedrun.commands.train import train_command
from speedrun.data.tokenizer import train_bpe
from speedrun.errors import ConfigError, DataError, RunError
from speedrun.serve.load import LoadedRun
from speedrun.serve.sampling import Sampling
from speedrun.serve.writing import Writer
from speedrun.train.request import Request
from tests.conftest import TINY

HOT = Sampling(temperature=1.0, top_k=0)
Heard = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampled") / "run"
    words = [*TINY, f"data.dir={tiny_dataset}"]
    train_command(Request(recipe="modern", overrides=words, folder=folder, sample_tokens=0))
    return folder


def sampled(run: Path, capsys: Heard, seed: int = 1, prompt: str = "1 + ", **more: Any) -> str:
    """What is printed."""
    capsys.readouterr()
    sample_command(run, prompt=prompt, tokens=12, sampling=replace(HOT, seed=seed), **more)
    return capsys.readouterr().out


def test_the_prompt_comes_first_and_a_seed_repeats_the_text(trained: Path, capsys: Heard) -> None:
    texts = [sampled(trained, capsys, seed) for seed in (1, 1, 2)]
    assert all(text.startswith("1 + ") for text in texts)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("prompt", ["1 + ", "1 + 2 = " * 6, "1 + 2 = " * 12])
def test_room_is_made_for_the_text_alone(
    trained: Path, capsys: Heard, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    """The model has 64 tokens; the text is the same as with room for all of them."""
    rooms: list[int] = []

    class Watched(Writer):
        def __init__(self, loaded: LoadedRun, slots: int, room: int) -> None:
            super().__init__(loaded, slots, 0 if whole else room)
            rooms.append(self.slots.room)

    monkeypatch.setattr("speedrun.serve.writing.Writer", Watched)
    whole = False
    small = sampled(trained, capsys, prompt=prompt)
    whole = True
    assert sampled(trained, capsys, prompt=prompt) == small
    assert rooms == [min(1 + len(prompt) + 12, 64), 64], "a mark comes before the prompt"


def test_several_samples_are_those_of_the_seeds_that_follow(trained: Path, capsys: Heard) -> None:
    alone = [sampled(trained, capsys, seed) for seed in range(5, 25)]
    together = sampled(trained, capsys, 5, samples=20)
    expected = [f"--- sample {n + 1}, seed {n + 5}\n{text}" for n, text in enumerate(alone)]
    assert together == "".join(expected)


def test_a_prompt_from_standard_input_and_a_stop(
    trained: Path, capsys: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sampled(trained, capsys, prompt="1\n2")
    for said in (b"1\n2", b"1\n2\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said)))
        assert sampled(trained, capsys, prompt="-") == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(DataError, match="not UTF-8 at byte 0"):
        sampled(trained, capsys, prompt="-")
    cut = expected[5]
    assert sampled(trained, capsys, prompt="1\n2", stop=[cut]) == (
        expected[: expected.index(cut, 3)] + "\n"
    )


def talked(
    run: Path, capsys: Heard, monkeypatch: pytest.MonkeyPatch, *lines: str, **more: Any
) -> str:
    coming = iter(lines)

    def typed(_: str = "") -> str:
        try:
            return next(coming)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    return sampled(run, capsys, interactive=True, **more)


def test_a_conversation(trained: Path, capsys: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts go on with what is typed, an empty line goes on with the text, commands change how."""
    first = sampled(trained, capsys)
    on = sampled(trained, capsys, prompt=first.removesuffix("\n"))
    lines = sampled(trained, capsys, prompt="1\n+")
    said = talked(trained, capsys, monkeypatch, "1 + ", "", "1\\", "+", prompt="")
    assert said == first + on + lines + "\n"
    second = sampled(trained, capsys, seed=2)
    said = talked(trained, capsys, monkeypatch, ":again", ":seed 1", "1 + ", ":quit", "1")
    assert said == first + second + first


def test_what_cannot_be_said_in_a_conversation(
    trained: Path, capsys: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (":what", ":top-p 2", ":top-k x", ":temperature nan", ":help", ":show", ":stop 7")
    said = talked(trained, capsys, monkeypatch, *lines, ":show", prompt="")
    for part in (
        ":what is not known", "top-p is a share", ":top-k takes a number", "a temperature is 0",
        ":repetition-penalty", "stop=none", "stop='7'",
    ):  # fmt: skip
        assert part in said, part
    with pytest.raises(ConfigError, match="leave out --samples"):
        sampled(trained, capsys, interactive=True, samples=2)


def test_ctrl_c_ends_a_text_and_not_the_conversation(
    trained: Path, capsys: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(self: Writer) -> None:
        monkeypatch.setattr(Writer, "step", step)
        raise KeyboardInterrupt

    step = Writer.step
    monkeypatch.setattr(Writer, "step", pressed)
    said = talked(trained, capsys, monkeypatch, "1 + ", "1 + ", prompt="")
    assert said == "1 +  (stopped)\n" + sampled(trained, capsys) + "\n"


def test_a_folder_without_a_checkpoint_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        sample_command(tmp_path, prompt="", tokens=1, sampling=HOT)
    with pytest.raises(RunError, match="nope does not exist; `speedrun runs` lists"):
        sample_command(tmp_path / "nope", prompt="", tokens=1, sampling=HOT)
    copied = tmp_path / "copied"
    shutil.copytree(trained, copied)
    newest = max((copied / "checkpoints").glob("step-*"))
    older = newest.with_name("step-000001")
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(RunError, match="has no whole checkpoint; train it first"):
        sample_command(copied, prompt="", tokens=1, sampling=HOT)
    shutil.copytree(trained / "checkpoints" / newest.name, older)
    (older / "model.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"model.safetensors has 0 bytes"):
        sample_command(copied, prompt="", tokens=1, sampling=HOT)


def test_that_an_older_checkpoint_is_taken_is_said(
    trained: Path, tmp_path: Path, capsys: Heard
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(trained, copied)
    newest = max((copied / "checkpoints").glob("step-*"))
    broken = newest.with_name("step-000999")
    shutil.copytree(newest, broken)
    (broken / "model.safetensors").write_bytes(b"")
    sample_command(copied, prompt="", tokens=1, sampling=HOT)
    assert "step-000999 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"), [("layers = 2", "layers = 4"), ("width = 32", "width = 1048576")]
)
def test_a_config_of_another_model_is_one_sentence(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """Also where another version made the weights, and of a model that memory does not hold."""
    monkeypatch.setattr("speedrun.train.trained.code_hash", lambda: "another")
    copied = tmp_path / "copied"
    shutil.copytree(trained, copied)
    text = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(text.replace(old, new))
    with pytest.raises(RunError, match="do not fit its records"):
        sample_command(copied, prompt="", tokens=1, sampling=HOT)


def test_doctor_says_what_would_be_used_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_command()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    found = {row[0]: row[1:] for row in rows}
    assert found["device"][0] == "cpu"
    assert found["attention"][0] == "blocks"
    assert found["precision"][0] == "float32"
    assert "GFLOP/s" in found["fp32"]


def test_records_that_are_not_those_of_the_weights_are_refused(
    trained: Path, tmp_path: Path
) -> None:
    """Either gave another text than the model's, and said nothing."""
    edited = Path(shutil.copytree(trained, tmp_path / "edited")) / "config.toml"
    edited.write_text(edited.read_text().replace("softcap = 0.0", "softcap = 0.5"))
    with pytest.raises(RunError, match=r"config\.toml was edited: the weights of step 8 were"):
        sample_command(edited.parent, prompt="", tokens=1, sampling=HOT)
    swapped = Path(shutil.copytree(trained, tmp_path / "swapped"))
    train_bpe(["a b c"], 257).save(swapped / "tokenizer")  # of as many ids, in another order
    with pytest.raises(RunError, match=r"is not the tokenizer that .* was trained with"):
        sample_command(swapped, prompt="", tokens=1, sampling=HOT)
