"""`speedrun export` by its own code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from speedrun.commands.export import export_command
from tests.serve.exporting import make_run, small


@pytest.mark.parametrize(("recipe", "trust"), [("best", True), ("baseline", False)])
def test_it_says_what_was_written_and_how_to_load_it(
    recipe: str, trust: bool, tiny_dataset: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = make_run(small(recipe, tiny_dataset), tmp_path / "run")
    out = tmp_path / "out"
    export_command(run.path, out, to="hf", force=False)
    said = capsys.readouterr()
    first, *rest = said.out.splitlines()
    assert first.startswith(f"{out}  ")
    assert "iB" in first
    assert ("our own modelling file" if trust else "GPT-2") in first
    code = "\n".join(line.strip() for line in rest[1:])
    compile(code, "what it prints", "exec")
    assert (f"from_pretrained('{out}', trust_remote_code=True)" in code) == trust
    assert "validation rows" in said.err
    export_command(run.path, out, to="weights", force=True)
    assert "load_file(" in capsys.readouterr().out


def test_the_verb_needs_no_transformers(tiny_dataset: Path, tmp_path: Path) -> None:
    run = make_run(small("best", tiny_dataset), tmp_path / "run")
    words = ["export", str(run.path), "--to", "hf", str(tmp_path / "out")]
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        f"from speedrun.cli import main; sys.argv = ['speedrun', *{words!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/modeling_speedrun.py").exists()
