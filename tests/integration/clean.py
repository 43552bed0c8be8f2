"""The Python of an environment that has packages of others and nothing of ours."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIABLE = "SPEEDRUN_CLEAN_PYTHON"


def clean_python(*packages: str) -> str:
    """Its path: `clean` has transformers alone, `peers` has more; skips where one is missing."""
    name = "clean" if packages == ("transformers",) else "peers"
    found = Path(os.environ.get(VARIABLE) or ROOT / ".venv" / name / "bin/python")
    if not found.exists():
        pytest.skip(f"NOT TESTED: {' and '.join(packages)}: `make integration` makes .venv/{name}")
    code = f"import importlib.util as u; print([n for n in {packages!r} if not u.find_spec(n)])"
    missing = run_clean(str(found), "-c", code).strip()
    if missing != "[]":
        pytest.skip(f"NOT TESTED: {found} lacks {missing}")
    return str(found)


def run_clean(python: str, *words: str, home: Path | None = None) -> str:
    """Its standard output, without our package in reach and without a network."""
    kept = ("PATH", "LANG", "TMPDIR", "OMP_NUM_THREADS")
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    variables |= {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(home or ROOT / ".venv/clean-home"),
        "HOME": str(home or ROOT / ".venv/clean-home"),
    }  # fmt: skip
    done = subprocess.run(
        [python, "-I", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=variables, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout
