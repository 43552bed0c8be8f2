"""Every Python example in README and docs is run, as it stands, and every link leads somewhere.

Their commands take minutes: `tests/integration/test_documented_commands.py` runs them.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import PAGES, copied, examples
from tests.waiting import PATIENCE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, tmp_path: Path) -> None:
    """The examples of a page are one program: a later one may use what an earlier one made."""
    code = "\n".join(examples(page, "python"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # As torchrun would start the only rank there is.
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copied(tmp_path), env={**os.environ, **rank},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
