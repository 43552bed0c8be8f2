"""`speedrun report`: write the page, or serve it while a run is going."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speedrun.errors import ConfigError
from speedrun.report.text import size_text


def report_command(paths: Sequence[Path], out: Path | None, watch: bool, port: int = 8765) -> None:
    """Paths are run folders, folders of runs, race or ablation results, in the order to show."""
    from speedrun.report.page import build_page, read_inputs

    if not paths:
        raise ConfigError("report needs a run folder, a race or an ablation")
    inputs = read_inputs(paths)
    if watch:
        if out is not None:
            raise ConfigError("--watch serves the page and writes no file: leave out --out")
        _serve(paths, port)
        return
    out = out or Path("report.html")
    page = build_page(inputs.runs, inputs.race, inputs.ablation)
    temporary = out.with_name(out.name + ".partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
    runs = f"{len(inputs.runs)} run" + ("" if len(inputs.runs) == 1 else "s")
    print(f"{out}: {runs}, {size_text(len(page.encode()))}")


def _serve(paths: Sequence[Path], port: int) -> None:
    from speedrun.report.page.watch import Server, Source

    with Server(Source(paths), port) as server:
        print(
            f"watching {', '.join(map(str, paths))} at {server.address} (Ctrl-C ends it)",
            flush=True,
        )
        server.serve_forever()
