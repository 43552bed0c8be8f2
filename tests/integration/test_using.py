"""The examples of docs/using.md that need the packages of others, run where those are."""

from __future__ import annotations

from pathlib import Path

from speedrun.commands.export import export_command
from tests.documents import ROOT, examples
from tests.integration.clean import clean_python, run_clean
from tests.serve.served import serving
from tests.train.heard import Make, train


def test_examples_run(tiny: Make, tmp_path: Path) -> None:
    python = clean_python("openai", "transformers")
    train(tiny(recipe="record-02"), tmp_path / "short")
    export_command(tmp_path / "short", tmp_path / "exported", to="hf", force=False)
    client, loader = examples(ROOT / "docs/using.md", "py")
    with serving([tmp_path / "short"]) as server:
        code = client.replace("http://127.0.0.1:8000", server.address)
        assert code != client
        assert run_clean(python, "-c", code, home=tmp_path).strip()
    assert "def main" in run_clean(python, "-c", loader, home=tmp_path)
