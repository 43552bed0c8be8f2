"""A small text made up by a rule, and built into a dataset by the code that builds all others.

The pictures of the block mask and of a token's way show its tokens. Its words follow from a seed by
a rule that no version of Python changes, and a token is a byte, so the numbers are the same
everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from speedrun.data.build import build_dataset
from speedrun.data.dataset import Dataset

WORDS = (
    "a the one each no some token batch row window loss rate step block key query value weight "
    "model text file shard sees reads learns grows falls turns ends begins moves and or but then "
    "small large early late full empty fast slow"
)
DOCUMENTS = 60


def documents(seed: int = 9) -> Iterator[str]:
    """Sentences; most documents are short and a few are long, as on the web."""
    draw, vocabulary = random.Random(seed), WORDS.split()
    for _ in range(DOCUMENTS):
        length = 40 + 1500 * draw.random() ** 4
        text = ""
        while len(text) < length:
            words = [
                vocabulary[int(draw.random() * len(vocabulary))]
                for _ in range(4 + int(draw.random() * 8))
            ]
            text += " ".join(words).capitalize() + ". "
        yield text.strip()


@contextmanager
def dataset() -> Iterator[Dataset]:
    with TemporaryDirectory() as folder:
        source = Path(folder) / "text"
        source.mkdir()
        for number, text in enumerate(documents()):
            (source / f"{number:03d}.txt").write_text(text)
        build_dataset([str(source)], Path(folder) / "built", "byte")
        yield Dataset.open(Path(folder) / "built")
