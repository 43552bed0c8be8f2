"""The public GPT-2 shards, fetched from the Hugging Face hub and checked before they are used.

The hub lists each file with its size and SHA-256. A file grows as `NAME.partial`, so a stopped
download goes on at the next byte, and is renamed only when its hash and its shard header are right.
"""

import difflib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from speedrun.data.shards import read_header
from speedrun.data.staging import locked_folder
from speedrun.data.stream import ProgressCallback
from speedrun.errors import ConfigError, DataError, quoted
from speedrun.files import flush, has_sha256, sha256_of

REPOSITORIES = {
    "fineweb10B": "kjj0/fineweb10B-gpt2",
    "fineweb100B": "kjj0/fineweb100B-gpt2",
    "finewebedu10B": "kjj0/finewebedu10B-gpt2",
}
TIMEOUT_SECONDS = 20.0
RETRIES, RETRY_SECONDS = 5, 1.0  # attempts that bring nothing before we give up
SHARD_NAME = re.compile(r"\w+_(train|val)_\d{6}\.bin")


class RemoteFile(NamedTuple):
    """One shard as the hub lists it."""

    name: str
    size: int
    sha256: str
    url: str


def download(
    name: str, out: Path, shards: int, progress: ProgressCallback = lambda *_: None
) -> Path:
    """Fetch the validation shard and the first `shards` training shards of a public dataset.

    Files that are there already and have the right hash are kept. $HF_ENDPOINT names another hub.
    """
    if name not in REPOSITORIES:
        close = difflib.get_close_matches(name, REPOSITORIES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"choose {', '.join(REPOSITORIES)}"
        raise ConfigError(f"no public dataset is called {quoted(name)}: {hint}")
    if shards < 1:
        raise ConfigError(f"{shards} shards cannot be fetched: ask for at least 1")
    files = _listed(REPOSITORIES[name], shards)
    total, before = sum(file.size for file in files), 0
    with locked_folder(out, wait=False):
        for file in files:

            def report(done: int, name: str = file.name, start: int = before) -> None:
                progress(name, start + done, total)

            report(0)
            if not has_sha256(out / file.name, file.sha256):
                _fetch(file, out, report)
            before += file.size
            report(file.size)
    return out


def _listed(repository: str, shards: int) -> list[RemoteFile]:
    """The wanted files with what the hub knows of them."""
    try:
        from huggingface_hub import HfApi, hf_hub_url
    except ModuleNotFoundError:
        raise ConfigError("downloads need the hub extra: pip install 'speedrun[hub]'") from None

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    api = HfApi(endpoint=endpoint, token=False)
    try:
        info = api.dataset_info(repository, files_metadata=True, timeout=TIMEOUT_SECONDS)
    except _network_errors() as error:
        raise DataError(
            f"the list of {repository} cannot be had from {endpoint} ({_reason(error)}): "
            "check the connection and run it again"
        ) from None
    found: dict[str, list[RemoteFile]] = {"val": [], "train": []}
    for entry in info.siblings or []:
        if match := SHARD_NAME.fullmatch(entry.rfilename):
            name, lfs = entry.rfilename, entry.lfs
            if lfs is None:
                raise DataError(
                    f"{endpoint} gives no SHA-256 for {name} of {repository}, so it cannot be "
                    "trusted; set another HF_ENDPOINT"
                )
            # The commit is named, so that all files are of one version of the repository.
            url = hf_hub_url(
                repository, name, repo_type="dataset", revision=info.sha, endpoint=endpoint
            )
            found[match[1]].append(RemoteFile(name, lfs.size, lfs.sha256, url))
    if len(found["train"]) < shards:
        raise ConfigError(
            f"{repository} has {len(found['train'])} training shards, not {shards}: ask for fewer"
        )
    return sorted(found["val"])[:1] + sorted(found["train"])[:shards]


def _fetch(file: RemoteFile, out: Path, report: Callable[[int], None]) -> None:
    partial = out / f"{file.name}.partial"
    if _size(partial) > file.size:
        partial.unlink()
    failures = 0  # in a row, without a byte between them
    while (start := _size(partial)) < file.size:
        try:
            _append(file.url, partial, report)
            if _size(partial) < file.size:
                raise OSError("the hub holds no more of it")
        except _network_errors() as error:
            failures = 1 if _size(partial) > start else failures + 1
            final = isinstance(error, OSError) or hasattr(error, "response")  # a disk, a refusal
            if final or failures > RETRIES:
                raise DataError(
                    f"{file.name} stopped at byte {_size(partial)} of {file.size} "
                    f"({_reason(error)}): run the download again to go on from there"
                ) from None
            time.sleep(RETRY_SECONDS)
    digest = sha256_of(partial)
    if digest != file.sha256:
        partial.unlink()
        raise DataError(
            f"{file.name} arrived damaged (SHA-256 {digest[:12]}, the hub says "
            f"{file.sha256[:12]}) and was removed: run the download again"
        )
    read_header(partial)
    flush(partial)
    partial.replace(out / file.name)
    flush(out)


def _append(url: str, partial: Path, report: Callable[[int], None]) -> None:
    """Ask for the bytes after those that are there, over the hub client's own connection.

    Its own file download (`hf_hub_download`) begins at the first byte again in a new process, so a
    killed download of a 200 MB shard would lose all it had.
    """
    from huggingface_hub import get_session

    headers = {"Accept-Encoding": "identity"}
    if start := _size(partial):
        headers["Range"] = f"bytes={start}-"
    request = get_session().stream(
        "GET", url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True
    )
    with request as response:
        response.raise_for_status()
        with partial.open("ab" if response.status_code == 206 else "wb") as target:
            for data in response.iter_bytes():
                target.write(data)
                report(target.tell())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _network_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises; its HTTP library has had two names, hence by way of the hub."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return (HTTPError, OSError)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0].rstrip(". :")
