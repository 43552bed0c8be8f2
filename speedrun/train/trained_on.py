"""What text a run was trained on, kept in its folder as `dataset.json`.

The config has the folder of a dataset, which may be gone or be another one by the time somebody
samples the run or looks at its page. This says what the text was called, how it begins, which
values of the track were made smaller to fit it, and in which folder the run was begun.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from speedrun.errors import RunError
from speedrun.files import write_json
from speedrun.train.summary import read_json, validated


class TrainedOn(BaseModel, frozen=True, strict=True):
    name: str
    sources: list[str] = []
    usual_text: bool = True  # the track's own
    shrunk: dict[str, list[int]] = {}  # by key: what the track has, and what fits the dataset
    prompt: str = ""  # how one of its texts begins
    begun_in: str = ""  # the folder from which relative paths in its config count

    @property
    def told(self) -> str:
        """With its sources, where the name does not say them."""
        others = [source for source in self.sources if source != self.name]
        return f"{self.name} ({', '.join(others)})" if others else self.name

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump())

    @staticmethod
    def read(path: Path) -> TrainedOn | None:
        """None: the run is of an older version."""
        if not path.exists():
            return None
        try:
            return validated(TrainedOn, read_json(path), path, "what a run was trained on")
        except RunError as error:
            raise RunError(f"{error}; delete it, for only headlines and hints need it") from None
