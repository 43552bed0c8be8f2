"""What is written must outlast a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
