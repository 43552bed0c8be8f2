"""`speedrun report`: write the page, or serve it while a run is going."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speedrun.errors import ConfigError
from speedrun.files import write_atomically
from speedrun.report.page import build_page, read_inputs
from speedrun.report.page.watch import Server, Source
from speedrun.terminal.console import size_text


def report_command(
    *, paths: Sequence[Path], out: Path | None, watch: bool, port: int = 8765
) -> None:
    """Paths are run folders, folders of runs, results of races and so on, in the order to show."""
    if not paths:
        raise ConfigError(
            "report needs a run folder, a race, an ablation or a tuning; `speedrun runs` lists runs"
        )
    inputs = read_inputs(paths)
    if watch:
        if out is not None:
            raise ConfigError("--watch serves the page and writes no file: leave out --out")
        with Server(Source(paths), port) as server:
            watched = ", ".join(map(str, paths))
            print(f"watching {watched} at {server.address} (Ctrl-C ends it)", flush=True)
            server.serve_forever()
        return
    out = out or Path("report.html")
    page = build_page(inputs.runs, inputs.race, inputs.ablation, inputs.tuning)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written: {error.strerror}; name another file"
        ) from None
    write_atomically(out, page.encode(), ConfigError)
    runs = f"{len(inputs.runs)} run" + ("" if len(inputs.runs) == 1 else "s")
    print(f"{out}: {runs}, {size_text(len(page.encode()))}")
