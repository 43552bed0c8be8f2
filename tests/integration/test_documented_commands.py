"""Every command in README and docs is run, as it stands.

The commands of one fence are run in order, in a folder of their own: a fence must not need what
another one made. Files that a page shows with a title are there. Only what would run for minutes or
run this very test is shortened, and only in the ways below.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, copied, examples, files, write_files
from tests.hub import serve_hub

SMALL = ("model.width=64", "model.heads=2", "batch.tokens=1024", "validation.tokens=1024")
FEW = " --seeds 1 --budget 5" + "".join(f" --set {word}" for word in SMALL)
TINY = "".join(f" --set {word}" for word in (*SMALL, "train.steps=2"))
RACE = "speedrun race record-03 record-18 best --track nano --seeds 3"
ABLATE = (
    "speedrun ablate record-18 --track nano --seeds 4 "
    "--switch model.softcap=30.0 --switch model.softcap=0.0"
)
FINISH = "speedrun race record-02 record-03 --track pico --track pico-prose --finish"
TUNED = "speedrun race record-02 record-03 --track pico --tuned 12 --finish"
UNTIL = "speedrun ablate record-18 --track pico --until decided --until 1h"
BOTH = "speedrun ablate best --track pico --track nano --seeds 5 --switch Muon"
TUNE = (
    "speedrun tune record-02 --track pico --over optimizer.hidden.lr=0.0005..0.02:log --budget 12"
)
OWN = "speedrun race modern sign.toml --track pico --tuned 12 --finish"
AGAINST = "speedrun race best swiglu.toml --track pico --seeds 3"
OUT = (
    'speedrun ablate swiglu.toml --track pico --seeds 5 --switch "custom mlp SwiGLU" '
    "--switch custom.mlp.args.ratio=4.0"
)
RATIO = "speedrun tune swiglu.toml --track pico --over custom.mlp.args.ratio=1.0..4.0 --budget 12"
PAIR = "speedrun race record-03 record-18 --track pico --seeds 3"
OURS = "speedrun race modern record-18 --track ours.toml --seeds 3"
SERVE = "speedrun serve runs/short"
SHORTENED = {
    # It serves until Ctrl-C, which ends it with 130; by itself it would not end.
    SERVE: f"timeout --preserve-status -s INT 15 {SERVE} --port 0; test $? = 130",
    TUNE: TUNE.replace("--budget 12", "--budget 2") + TINY,
    OWN: OWN.replace("--tuned 12", "--tuned 2") + FEW,
    AGAINST: AGAINST.replace("--seeds 3", "--seeds 1") + TINY,
    OUT: OUT.replace("--seeds 5", "--seeds 2") + TINY,
    RATIO: RATIO.replace("--budget 12", "--budget 2") + TINY,
    OURS: OURS.replace("--seeds 3", "--seeds 1") + TINY,
    PAIR: PAIR.replace("--seeds 3", "--seeds 1") + TINY,
    FINISH: FINISH.replace(" --track pico-prose", "") + FEW,
    TUNED: TUNED.replace("--tuned 12", "--tuned 2") + FEW,
    UNTIL: UNTIL + " --until 2 --switch model.softcap=30.0" + TINY,
    BOTH: BOTH.replace("--seeds 5", "--seeds 2") + TINY,
    RACE: RACE.replace("--seeds 3", "--seeds 1") + TINY,
    ABLATE: ABLATE.replace("--seeds 4", "--seeds 2") + TINY,
    # With the environment that runs this test: it is not for a test to install anything.
    "make run": "make run -o .venv/ready BIN={bin} "
    'ARGS="--steps 2 --sample-tokens 4 --run {scratch}/run"',
    "make test": "make -n test",
}


def shortened(command: str) -> str:
    if "train record-18 --track nano --steps" in command and "data.dir" not in command:
        return " ".join((command, *SMALL))
    return SHORTENED.get(command, command)


def commands(fence: str) -> list[str]:
    bare = [re.sub(r"\s+#\s.*$", "", line).strip() for line in fence.splitlines()]
    return [line for line in bare if line and not line.startswith("#")]


# What two pages say alike is run once.
DIFFERENT = {
    (tuple(commands(fence)), tuple(files(page).items())): (page, f"{page.name}-{number}")
    for page in reversed(PAGES)
    for number, fence in enumerate(examples(page, "sh"), start=1)
}
FENCES = [pytest.param(page, lines, id=name) for (lines, _), (page, name) in DIFFERENT.items()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("page", "lines"), FENCES)
def test_commands_run(page: Path, lines: tuple[str, ...], tmp_path: Path) -> None:
    scratch = copied(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with serve_hub(scratch) as hub:
        home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(scratch / "hf")}
        write_files(page, scratch)
        for command in lines:
            line = shortened(command).format(scratch=scratch, bin=Path(sys.executable).parent)
            done = subprocess.run(
                line, shell=True, cwd=ROOT if line.startswith("make") else scratch,
                env={**os.environ, "PATH": path, **home}, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_every_shortened_command_is_documented() -> None:
    """A command that was reworded would be run whole, for hours."""
    fences = (fence for page in PAGES for fence in examples(page, "sh"))
    documented = {line for fence in fences for line in commands(fence)}
    assert [line for line in SHORTENED if line not in documented] == []
