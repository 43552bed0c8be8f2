"""`speedrun serve`: a page and an HTTP interface for one run or several."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speedrun.errors import ConfigError

if TYPE_CHECKING:
    from speedrun.serve.server.app import Served

LONGEST_CONTEXT = 4096  # unless asked for: every slot has memory for as many tokens


def serve_command(
    runs: Sequence[Path],
    *,
    host: str,
    port: int,
    allow_hosts: Sequence[str],
    slots: int,
    queue: int,
    context: int,
) -> None:
    try:
        import uvicorn

        from speedrun.serve.server.app import hosts_of, serve_app
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette"):
            raise
        raise ConfigError("serve needs an extra: pip install 'speedrun[serve]'") from None
    import torch

    from speedrun.limits import threads

    with listen(host, port) as listening:
        torch.set_num_threads(threads())
        served = _named_apart([_load(path, context) for path in runs])
        app = serve_app(
            served, hosts_of(host, allow_hosts), slots=slots, queue=queue, workers=threads()
        )
        address = f"http://{_in_address(host)}:{listening.getsockname()[1]}"
        for run in served:
            step = run.loaded.trained.checkpoint.step
            print(
                f"{run.name}: {run.loaded.run.path}, step {step:,}, context {run.context:,} tokens"
            )
        print(f"page:    {address}/")
        print(f"clients: base_url {address}/v1, any api_key, model {served[0].name!r}")
        if not _is_loopback(host):
            print(f"{host} can be reached from other machines: whoever can, may use it")
        print("Ctrl-C ends it", flush=True)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=2,
            server_header=False,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, taken before a model is loaded for nothing.

    Its protocol is named: only then does asyncio send small packets at once, and an answer of two
    of them does not wait 40 ms for the client to acknowledge the first.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port (0: any)"
        ) from None
    return made


def _load(path: Path, context: int) -> Served:
    from speedrun.serve.load import load_run
    from speedrun.serve.server.app import Served

    loaded = load_run(path, length=context)
    return Served(loaded.name, loaded, context or min(loaded.model.length, LONGEST_CONTEXT))


def _named_apart(runs: Sequence[Served]) -> Sequence[Served]:
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            raise ConfigError(f"two runs are called {run.name!r}: copy or link one by another name")
    return runs


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
