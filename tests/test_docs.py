"""Every command and every Python example in README and docs is run, as it stands.

The commands of one fence are run in order, in a folder of their own: a fence must not need what
another one made. Only what would run for minutes or run this very test is shortened, and only in
the ways below.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub import serve_hub
from tests.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = ("model.width=64", "model.heads=2", "batch.tokens=1024", "validation.tokens=1024")
TINY = "".join(f" --set {word}" for word in (*SMALL, "train.steps=2"))
RACE = "speedrun race baseline record-03 record-18 best --track nano --seeds 3"
ABLATE = (
    "speedrun ablate record-18 --track nano --seeds 4 "
    "--switch model.softcap=30.0 --switch model.softcap=0.0"
)
FINISH = "speedrun race baseline record-03 best --track nano --track prose --finish"
UNTIL = "speedrun ablate record-18 --track pico --until decided --until 1h"
TUNE = (
    "speedrun tune record-02 --track pico --over optimizer.hidden.lr=0.0005..0.02:log --budget 12"
)
SHORTENED = {
    TUNE: TUNE.replace("--budget 12", "--budget 2") + TINY,
    FINISH: FINISH.replace(" --track prose", "")
    + " --seeds 1 --budget 5"
    + "".join(f" --set {word}" for word in SMALL),
    UNTIL: UNTIL + " --until 2 --switch model.softcap=30.0" + TINY,
    RACE: RACE.replace("--seeds 3", "--seeds 1") + TINY,
    ABLATE: ABLATE.replace("--seeds 4", "--seeds 2") + TINY,
    # With the environment that runs this test: it is not for a test to install anything.
    "make run": "make run -o .venv/ready BIN={bin} "
    'ARGS="--steps 2 --sample-tokens 4 --run {scratch}/run"',
    "make test": "make -n test",
    "make lint": "make -n lint",
    "make bench": "make -n bench",
}


def shortened(command: str) -> str:
    if "train record-18 --track nano --steps" in command and "data.dir" not in command:
        return " ".join((command, *SMALL))
    return SHORTENED.get(command, command)


def examples(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(fence: str) -> list[str]:
    bare = [re.sub(r"\s+#\s.*$", "", line).strip() for line in fence.splitlines()]
    return [line for line in bare if line and not line.startswith("#")]


FENCES = [
    pytest.param(commands(fence), id=f"{page.name}-{number}")
    for page in PAGES
    for number, fence in enumerate(examples(page, "sh"), start=1)
]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder like a fresh clone: the documents are there, results of commands are not."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lines", FENCES)
def test_commands_run(lines: list[str], scratch: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with serve_hub(scratch) as hub:
        home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(scratch / "hf")}
        for command in lines:
            line = shortened(command).format(scratch=scratch, bin=Path(sys.executable).parent)
            done = subprocess.run(
                line, shell=True, cwd=ROOT if line.startswith("make") else scratch,
                env={**os.environ, "PATH": path, **home}, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, scratch: Path) -> None:
    """The examples of a page are one program: a later one may use what an earlier one made."""
    code = "\n".join(examples(page, "python"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # As torchrun would start the only rank there is.
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=scratch, env={**os.environ, **rank},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
