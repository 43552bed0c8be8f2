"""What a message echoes is short, and it ends with what to do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import speedrun
from speedrun.errors import LONGEST_ECHO, quoted, shortened
from tests.cli.calling import Call

LONG = "x" * 5000
# Those that say it in a value, which other lines of theirs word.
WORDED_ELSEWHERE = (
    "attention backend  .", "line  of metrics.jsonl ", " has no whole checkpoint",
)  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["train", LONG],
        ["train", "best", LONG],
        ["train", "best", f"{LONG}=1"],
        ["train", "best", f"model.layers={LONG}"],
        ["train", "best", f"model.norm={LONG}"],
        ["train", "best", f"model.attention_free={[99] * 2000}"],
        ["train", "best", f"data.tokenizer={LONG}", "--dry-run"],
        ["train", "best", "--track", LONG],
        ["train", "best", "--time-limit", LONG],
        ["train", "best", "--log", LONG],
        ["train", f"{LONG}=1"],
        ["race", "best", "--until", LONG],
        ["ablate", "best", "--switch", LONG],
        ["tune", "best", "--over", LONG, "--budget", "2"],
        ["tune", "best", "--budget", LONG],
        ["recipes", "show", LONG],
        ["tracks", "diff", "nano", LONG],
        ["bench", LONG],
        ["data", "build", LONG, "--out", "x"],
        ["data", "build", "README.md", "--out", "x", "--tokenizer", LONG],
        ["data", "download", LONG],
        ["runs", "--sort", LONG],
        ["runs", LONG],
        ["compare", LONG, LONG],
        [LONG],
        ["train", f"--{LONG}"],
        ["sample", "x", "--top-k", LONG],
    ],
)
def test_a_long_value_is_not_echoed_whole(
    call: Call, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = call(*words)
    assert said.code in (1, 2)
    assert len(said.err.splitlines()) == 1
    assert said.err.count("x" * (LONGEST_ECHO + 1)) == 0, said.err[:300]
    assert len(said.err) < 900


def test_what_is_short_is_whole() -> None:
    assert quoted("a'b") == '"a\'b"'
    assert shortened("x" * LONGEST_ECHO) == "x" * LONGEST_ECHO
    assert shortened(LONG).endswith("... (5,000 characters)")
    assert len(shortened(LONG)) <= LONGEST_ECHO
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert quoted(deep) == "a deeply nested list"


def test_no_message_is_a_bare_complaint() -> None:
    """Each goes on, after a colon or a semicolon, with what is allowed or what to do."""
    bare = []
    for path in sorted(Path(speedrun.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            raised = isinstance(node, ast.Raise) and node.exc
            if not isinstance(raised, ast.Call) or not isinstance(raised.func, ast.Name):
                continue
            if raised.func.id not in ("ConfigError", "DataError", "RunError", "SpeedrunError"):
                continue
            text = _literal(raised.args[0])
            said = text is None or text in WORDED_ELSEWHERE
            if not said and not any(mark in str(text) for mark in ":;,`"):
                bare.append(f"{path.name}: {text}")
    assert bare == []


def _literal(node: ast.expr) -> str | None:
    """The words of a message, without the values in it; None for what is not written there."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    return None
