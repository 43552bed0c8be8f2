"""`speedrun sample` and `speedrun doctor` by their own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from speedrun.commands.doctor import doctor_command
from speedrun.commands.sample import sample_command
from speedrun.commands.train import train_command
from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.train.request import Request
from tests.conftest import TINY


def test_the_prompt_comes_first_and_a_seed_repeats_the_text(
    tiny: Callable[..., Config], tiny_dataset: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = [*TINY, f"data.dir={tiny_dataset}"]
    train_command(
        Request(recipe="modern", overrides=words, folder=tmp_path / "run", sample_tokens=0)
    )
    capsys.readouterr()
    texts = []
    for seed in (1, 1, 2):
        sample_command(
            tmp_path / "run", prompt="1 + ", tokens=12, temperature=1.0, top_k=0, seed=seed
        )
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("1 + ") for text in texts)
    assert texts[0] == texts[1] != texts[2]


def test_a_folder_without_a_checkpoint_is_one_sentence(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        sample_command(tmp_path, prompt="", tokens=1, temperature=1.0, top_k=0, seed=0)


def test_doctor_says_what_would_be_used_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_command()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    found = {row[0]: row[1:] for row in rows}
    assert found["device"][0] == "cpu"
    assert found["attention"][0] == "blocks"
    assert found["precision"][0] == "float32"
    assert "GFLOP/s" in found["fp32"]
