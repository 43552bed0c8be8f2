"""Child processes run the code of their parent, wherever they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import speedrun
from speedrun.processes import same_code


def test_a_package_of_the_same_name_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "speedrun").mkdir()
    (tmp_path / "speedrun" / "__init__.py").write_text("raise SystemExit('another checkout')")
    for words in (
        ["-c", "import speedrun; print(speedrun.__file__)"],
        ["-m", "speedrun", "--version"],
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env={**os.environ, **same_code()},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() in (speedrun.__file__, f"speedrun {speedrun.__version__}")
