"""`speedrun report`: the file it writes, what it says, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from speedrun.commands.report import report_command
from speedrun.errors import ConfigError, RunError
from tests.report.made import made_config, made_run


def test_report_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "a", made_config())
    out = tmp_path / "new" / "page.html"
    report_command(paths=[run.path], out=out, watch=False)
    assert capsys.readouterr().out.startswith(f"{out}: 1 run, ")
    assert out.read_text().startswith("<!doctype html>")
    assert list(out.parent.iterdir()) == [out]


def test_mistakes_are_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", made_config())
    with pytest.raises(ConfigError, match="needs a run folder"):
        report_command(paths=[], out=None, watch=False)
    with pytest.raises(ConfigError, match="leave out --out"):
        report_command(paths=[run.path], out=tmp_path / "x.html", watch=True)
    with pytest.raises(ConfigError, match=r"--out .* cannot be written"):
        report_command(paths=[run.path], out=run.summary / "x.html", watch=False)
    run.summary.write_text("{")
    with pytest.raises(RunError, match="cannot be read as JSON"):
        report_command(paths=[run.path], out=tmp_path / "x.html", watch=False)
    assert not (tmp_path / "x.html").exists()
