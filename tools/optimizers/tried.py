"""Which optimizers of which packages work, and why the others do not: the table in the docs.

    python -m tools.optimizers.tried                      all packages that are installed
    python -m tools.optimizers.tried schedulefree         this one

Every class is given the matrices of nano and tried out as before a run (speedrun/optim/foreign/
probe.py), each package in a process of its own. It is tried with its defaults first; where the
refusal says what to set, that is set. What was found is kept in docs/optimizers-tried.json, and
docs/own-optimizer.md is written anew from it.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from speedrun.config.code import package_version
from speedrun.optim.errors import OptimError
from speedrun.optim.foreign import Foreign, Use
from speedrun.optim.foreign.probe import probe

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE, RESULTS = DOCS / "own-optimizer.md", DOCS / "optimizers-tried.json"
TORCH = torch.__version__.partition("+")[0]
BEGIN, END = "<!-- tried -->\n", "<!-- /tried -->\n"
MODULES = (
    "torch.optim", "schedulefree", "pytorch_optimizer", "torch_optimizer", "heavyball", "muon",
    "optimi", "prodigyopt", "prodigyplus", "dadaptation", "parameterfree", "dog", "lion_pytorch",
    "adan_pytorch", "came_pytorch", "adabelief_pytorch", "adamp", "madgrad", "grokadamw",
    "kron_torch", "adam_mini", "galore_torch", "apollo_torch", "fira", "lomo_optim", "rose_opt",
    "tadam", "ranger_adabelief", "bitsandbytes.optim", "torchao.optim", "adabound", "adamod",
    "dowg", "fairscale.optim", "geoopt.optim", "ivon", "muon_fsdp2", "pytorch_ranger",
    "q_galore_torch", "qhoptim.pyt", "sophia_opt", "adv_optm", "adam_atan2_pytorch",
    "grokfast_pytorch", "adas",
)  # fmt: skip
SHAPES = {"mlp.up": (768, 192), "mlp.down": (192, 768), "attention.out": (192, 192)}
SECONDS = 300  # for one class: some compile
# What a refusal asks for, and what answers it.
ANSWERS: tuple[tuple[str, str, Any], ...] = (
    ("random = true", "random", True),
    ("scheduled = false", "scheduled", False),
    ("use_muon", "args.use_muon", True),
    ("required positional argument: 'lr'", "args.lr", 0.001),
    ("required optimization parameter lr", "args.lr", 0.001),
    ("'NoneType' and 'float'", "args.lr", 0.001),
    ("without momentum", "args.momentum", 0.9),
)

# Arguments that a class has no defaults for and asks for in no way that could be read.
GIVEN: dict[str, dict[str, Any]] = {
    "qhoptim.pyt:QHM": {"args.lr": 0.001, "args.nu": 0.7, "args.momentum": 0.9},
    "ivon:IVON": {"args.lr": 0.001, "args.ess": 1e6},
}


def classes(module: str) -> Iterator[tuple[str, type]]:
    for name, found in sorted(vars(import_module(module)).items()):
        is_class = inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)
        if is_class and found is not torch.optim.Optimizer and not name.startswith("_"):
            yield name, found


def tried(use: str, make: type) -> dict[str, Any]:
    """What came of one class: what had to be set, and why it was refused, if it was."""
    members = {"hidden": [(n, Parameter(torch.zeros(s))) for n, s in SHAPES.items()]}
    needs = dict(GIVEN.get(use, {}))
    while True:
        args = {k.removeprefix("args."): v for k, v in needs.items() if k.startswith("args.")}
        flags = {k: v for k, v in needs.items() if "." not in k}
        try:
            signal.alarm(SECONDS)
            probe(Use(make, use, args=args, **flags), members)
            step(Use(make, use, args=args, **flags))
        except OptimError as error:
            sentence = str(error)
            answer = next((a for a in ANSWERS if a[0] in sentence and a[1] not in needs), None)
            if answer is not None:
                needs[answer[1]] = answer[2]
                continue
            return {"use": use, "needs": needs, "refused": shortened(sentence)}
        except LateError:
            return {"use": use, "needs": needs, "refused": f"takes more than {SECONDS} s to try"}
        finally:
            signal.alarm(0)
        return {"use": use, "needs": needs, "refused": ""}


class LateError(BaseException):
    """The time is over; no code of an optimizer's own catches it."""


def ring(*_: Any) -> None:
    raise LateError


def step(use: Use) -> None:
    """As in a run: what compiles itself does so here, and what begins late has time to."""
    for count, smaller in ((2, 1), (60, 4)):
        shapes = {name: [side // smaller for side in shape] for name, shape in SHAPES.items()}
        members = [(name, Parameter(torch.ones(shape))) for name, shape in shapes.items()]
        one = Foreign(use, {"hidden": members})
        draws = torch.Generator().manual_seed(0)
        for _ in range(count):
            for _, param in members:
                param.grad = torch.randn(param.shape, generator=draws)
            one.step()


def shortened(sentence: str) -> str:
    """The reason without the name before it, the place in the code and the advice after it."""
    reason = sentence.partition(" (for hidden) ")[2]
    if reason.startswith("needs "):
        return re.split("[:,(]", reason)[0].strip()
    reason = re.sub(r" \(line \d+ of [\w.]+\)", "", reason.partition("; it takes")[0])
    return reason if len(reason) < 160 else f"{reason[:157]}..."


def child(module: str) -> None:
    """In a process of its own: a line of JSON for each class."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, ring)
    for name, make in classes(module):
        print(json.dumps(tried(f"{module}:{name}", make)), flush=True)


def results(module: str) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", "tools.optimizers.tried", "--child", module]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"use"')]
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
        found.append({"use": module, "needs": {}, "refused": f"ended early: {last}"})
    return found


def version_of(module: str) -> str:
    return package_version(module.partition(".")[0]).rpartition(" ")[2].partition("+")[0]


def setting(needs: dict[str, Any]) -> str:
    return ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in needs.items())


def row(module: str, found: dict[str, Any]) -> str:
    """What works of a package, those together that need the same."""
    works = [one for one in found["classes"] if not one["refused"]]
    by_needs: dict[str, list[str]] = {}
    for one in works:
        by_needs.setdefault(setting(one["needs"]), []).append(one["use"].partition(":")[2])
    parts = [
        f"with {needs}: {', '.join(names)}" if needs else ", ".join(names)
        for needs, names in sorted(by_needs.items())
    ]
    number = f"{len(works)} of {len(found['classes'])}"
    return f"| `{module}` | {found['version']} | {number} | {'; '.join(parts) or 'none'} |"


def section(told: dict[str, Any]) -> str:
    tried = [one for found in told.values() for one in found["classes"]]
    refused = [one for one in tried if one["refused"]]
    versions = " and ".join(sorted({found["torch"] for found in told.values()}))
    return "\n".join(
        [
            f"{len(tried) - len(refused)} of {len(tried)} classes of {len(told)} packages work, "
            f"with torch {versions} on a CPU.",
            "",
            "| package | version | work | which, and what they need |",
            "|---|---|---|---|",
            *(row(module, found) for module, found in told.items()),
            "",
            "| refused | because it |",
            "|---|---|",
            *(f"| `{one['use']}` | {one['refused'].replace('|', '/')} |" for one in refused),
            "",
        ]
    )


def with_section(page: str, told: dict[str, Any]) -> str:
    """The page with its section written anew from what was found."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{section(told)}\n{END}{after}"


def main() -> None:
    names = sys.argv[1:]
    if names[:1] == ["--child"]:
        child(names[1])
        return
    told: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for module in names or MODULES:
        if find_spec(module.partition(".")[0]) is None:
            print(f"{module} is not installed: what was found of it stays")
            continue
        told[module] = {"version": version_of(module), "torch": TORCH, "classes": results(module)}
        told = {name: told[name] for name in (*MODULES, *sorted(told)) if name in told}
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")
        PAGE.write_text(with_section(PAGE.read_text(), told))
        print(row(module, told[module]), flush=True)


if __name__ == "__main__":
    main()
