"""Shells ask by the real protocol how a line goes on; the answer needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speedrun.config.files import names
from tests.cli.calling import Call
from tests.report.made import begun_run, made_config


def bash(call: Call, line: str) -> list[str]:
    """The lines that the script of bash gets for a line with the cursor at its end."""
    at = len(line.split()) - (not line.endswith(" "))
    found = call(COMP_WORDS=line, COMP_CWORD=str(at), _SPEEDRUN_COMPLETE="complete_bash")
    assert (found.code, found.err) == (0, "")
    return found.out.splitlines()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("speedrun tra", ["train", "tracks"]),
        ("speedrun train mod", ["modern", "modern-cosine"]),
        ("speedrun train best --track n", ["nano"]),
        ("speedrun train best model.lay", ["model.layers="]),
        ("speedrun train best model.layers=3 model.qk_n", ["model.qk_norm="]),
        ("speedrun train best model.norm=", ["model.norm=rms", "model.norm=layer"]),
        ("speedrun train best model.qk_norm=t", ["model.qk_norm=true"]),
        ("speedrun train best model.layers=", [""]),  # any number: nothing to offer
        ("speedrun race best record-1", [name for name in names("recipe") if "-1" in name]),
        ("speedrun race best --set machine.thr", ["machine.threads="]),
        ("speedrun ablate best --switch model.soft", ["model.softcap="]),
        ("speedrun ablate best --switch Mu", ["Muon", "Muon by heads"]),
        ("speedrun tune best --over optimizer.head.l", ["optimizer.head.lr="]),
        ("speedrun recipes sh", ["show"]),
        ("speedrun recipes show mode", ["modern", "modern-cosine"]),
        ("speedrun tracks show p", ["pico", "pico-prose", "prose"]),
        ("speedrun bench att", ["attention"]),
        ("speedrun runs --sort l", ["loss"]),
        ("speedrun runs --state f", ["finished", "failed", "foreign"]),
        ("speedrun train best --see", ["--seed"]),
        ("speedrun zzz x", [""]),
    ],
)
def test_bash_is_answered(call: Call, line: str, expected: list[str]) -> None:
    assert bash(call, line) == expected


def test_runs_and_the_way_to_them(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun_run(tmp_path / "runs/first", made_config())
    (tmp_path / "runs/group").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert bash(call, "speedrun sample ru") == ["runs/"]
    assert bash(call, "speedrun sample runs/") == ["runs/first", "runs/group/"]
    assert bash(call, "speedrun train --resume --run runs/f") == ["runs/first"]
    assert bash(call, "speedrun report runs/first runs/g") == ["runs/group/"]
    assert bash(call, "speedrun train best data.dir=ru") == ["data.dir=runs/"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_are_answered(call: Call, shell: str) -> None:
    asked = {
        "_SPEEDRUN_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": "speedrun train best model.lay",
    }  # fmt: skip
    assert "model.layers=" in call(**asked).out


def test_neither_answers_nor_lists_load_torch(tmp_path: Path) -> None:
    """A second of importing at every press of a key: so an import of torch is an error here."""
    code = (
        "import os, sys; sys.modules['torch'] = None\n"
        "from speedrun.cli import main\n"
        "def call(*words):\n"
        "    sys.argv = ['speedrun', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, words\n"
        "call(); call('--help'); call('runs', '--json'); call('recipes')\n"
        "os.environ |= {'_SPEEDRUN_COMPLETE': 'complete_bash', 'COMP_CWORD': '3'}\n"
        "for line in ('train best model.lay', 'runs --state fi', 'recipes show nothing'):\n"
        "    os.environ['COMP_WORDS'] = f'speedrun {line}'\n"
        "    call()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nmodel.layers=\nfinished\n\n")


def test_bash_gets_a_path_with_blanks_as_one_word(call: Call, tmp_path: Path) -> None:
    """The script itself, asked without a terminal: what it gives, bash puts into the line."""
    for name in ("erst ü", "zw(ei"):
        begun_run(tmp_path / "runs" / name, made_config())
    script = call("--show-completion", "bash").out
    program = Path(sys.executable).parent / "speedrun"
    for line, expected in {
        "speedrun sample runs/er": r"runs/erst\ ü",
        r"speedrun sample runs/erst\ ": r"runs/erst\ ü",
        "speedrun sample 'runs/er": "runs/erst ü",
        "speedrun sample runs/z": r"runs/zw\(ei",
        "speedrun train best model.norm=lay": "layer",
    }.items():
        ask = f'_speedrun_completion {program}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        asked = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line)),
                 "LC_ALL": "C.UTF-8"}  # fmt: skip
        done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], cwd=tmp_path, env=asked,
                              capture_output=True, text=True)  # fmt: skip
        assert done.stdout == f"{expected}\n", (line, done)


def test_a_shell_that_is_named_is_the_one(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call("--show-completion", "zsh").out.startswith("#compdef speedrun")
    assert "complete --command speedrun" in call("--show-completion=fish").out
    assert "fish completion installed" in call("--install-completion", "fish").out
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file == tmp_path / ".config/fish/completions/speedrun.fish"
    call("--install-completion", "csh").sentence(2, "'csh' cannot be used", "bash, zsh, fish")
