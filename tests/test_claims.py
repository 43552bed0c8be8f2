"""docs/CLAIMS.md shows results as the commands printed them; here they are printed again.

After new results in docs/results:  python -m tests.test_claims
"""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from speedrun.bench.command import print_figures
from speedrun.science.race import statistics
from speedrun.science.tables import print_ablation, print_race

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "CLAIMS.md"
RESULTS = sorted((DOCS / "results").glob("*.json"))
PRINTERS = {"race": print_race, "ablation": print_ablation}


def printed(path: Path) -> str:
    result = json.loads(path.read_text())
    with redirect_stdout(io.StringIO()) as out:
        PRINTERS.get(result.get("kind", ""), print_figures)(result)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def block_of(path: Path) -> re.Pattern[str]:
    before = rf"<!-- results/{re.escape(path.name)} -->\n```\n"
    return re.compile(rf"(?<={before}).*?(?=\n```)", re.DOTALL)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_page_shows_the_results(path: Path) -> None:
    shown = block_of(path).search(PAGE.read_text())
    assert shown is not None, f"CLAIMS.md has no block for {path.name}"
    assert shown.group() == printed(path)


def test_race_statistics_follow_from_the_entries() -> None:
    result: dict[str, Any] = json.loads((DOCS / "results/race.json").read_text())
    found, stored = (flat(x) for x in (
        statistics(result["recipes"], result["entries"]), result["statistics"]
    ))  # fmt: skip
    assert found.keys() == stored.keys()
    for key, value in stored.items():  # other CPUs, other last digits
        assert found[key] == (value if value is None else pytest.approx(value, rel=1e-9)), key


def flat(x: object, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(x, dict):
        return {at: x}
    return {path: y for key, value in x.items() for path, y in flat(value, (*at, key)).items()}


if __name__ == "__main__":
    text = PAGE.read_text()
    for one in RESULTS:
        shown = printed(one)
        text = block_of(one).sub(lambda _, shown=shown: shown, text)  # type: ignore[misc]
    PAGE.write_text(text)
