"""The package has one direction: a stage imports only what stands before it, never in circles.

Every import counts, those inside of functions and under TYPE_CHECKING too: a reader has to follow
them all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "speedrun"
# Folders and files of the package in the order in which they may know each other.
ORDER = (
    "__init__", "errors", "files", "locks", "limits", "processes", "hardware", "streams",
    "settings", "traces", "config", "data", "model", "optim", "train", "science", "plan", "report",
    "serve", "bench", "terminal", "commands", "cli", "__main__",
)  # fmt: skip

Graph = Mapping[str, set[str]]  # from each module to those it imports, as dotted names


def module_name(root: Path, path: Path) -> str:
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def import_graph(root: Path) -> Graph:
    paths = {module_name(root, path): path for path in sorted(root.rglob("*.py"))}
    return {name: set(imported(path, root.name, paths)) for name, path in paths.items()}


def imported(path: Path, package: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of `package` that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relative to itself; write the whole name"
            module = node.module or ""
            # `from package.a import b` means the file package/a/b.py if there is one.
            names = [f"{module}.{a.name}" if f"{module}.{a.name}" in known else module
                     for a in node.names]  # fmt: skip
        for name in names:
            if name == package or name.startswith(f"{package}."):
                name = f"{package}.__init__" if name == package else name
                assert name in known, f"{path} imports {name}, which is not in the package"
                yield name


def stage(module: str) -> str:
    return module.split(".")[1]


def against_the_order(graph: Graph) -> list[str]:
    """Imports of what stands later in ORDER."""
    unplaced = {stage(module) for module in graph} - set(ORDER)
    assert not unplaced, f"give {unplaced} a place in ORDER"
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if ORDER.index(stage(other)) > ORDER.index(stage(module))
    ]


def cycle(graph: Graph) -> list[str]:
    """Some modules that import each other in a circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def packages(graph: Graph) -> Graph:
    """The same between folders of the package."""
    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        found.setdefault(stage(module), set()).update(
            stage(other) for other in others if stage(other) != stage(module)
        )
    return found


def test_every_stage_imports_only_what_stands_before_it() -> None:
    assert against_the_order(import_graph(ROOT)) == []


def test_no_files_and_no_folders_import_each_other_in_circles() -> None:
    graph = import_graph(ROOT)
    assert len(graph) > 80
    assert cycle(graph) == []
    assert cycle(packages(graph)) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "speedrun"
    files = {
        "__init__.py": "",
        "errors.py": "",
        "config/__init__.py": "",
        "config/schema.py": "from speedrun.errors import ConfigError\n",
        "data/__init__.py": "from speedrun.data.shards import Dataset\n",
        "data/shards.py": "import speedrun.config.schema\n",
        "train/loop.py": "from speedrun.data import Dataset, shards\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_package_in_order_is_left_in_peace(package: Path) -> None:
    graph = import_graph(package)
    assert graph["speedrun.train.loop"] == {"speedrun.data", "speedrun.data.shards"}
    assert against_the_order(graph) == cycle(graph) == cycle(packages(graph)) == []


@pytest.mark.parametrize(
    "late",
    [
        "from speedrun.train.loop import train\n",
        "def f():\n    from speedrun.train import loop\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import speedrun.train.loop\n",
    ],
)
def test_an_import_against_the_order_is_seen(package: Path, late: str) -> None:
    with (package / "data/shards.py").open("a") as file:
        file.write(late)
    graph = import_graph(package)
    assert against_the_order(graph) == ["speedrun.data.shards imports speedrun.train.loop"]
    assert set(cycle(graph)) >= {"speedrun.data.shards", "speedrun.train.loop"}
    assert set(cycle(packages(graph))) == {"data", "train"}


def test_a_circle_inside_of_a_stage_is_seen(package: Path) -> None:
    (package / "data/tokenizer.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from speedrun.data.shards import Dataset\n"
    )
    with (package / "data/shards.py").open("a") as file:
        file.write("def f():\n    from speedrun.data.tokenizer import load\n")
    graph = import_graph(package)
    assert against_the_order(graph) == []
    assert set(cycle(graph)) == {"speedrun.data.shards", "speedrun.data.tokenizer"}


def test_a_new_folder_must_be_given_a_place(package: Path) -> None:
    (package / "extras").mkdir()
    (package / "extras/one.py").write_text("")
    with pytest.raises(AssertionError, match=r"give \{'extras'\} a place"):
        against_the_order(import_graph(package))
