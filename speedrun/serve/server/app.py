"""The HTTP side: a page, the list of runs, and the completions call.

A request is checked before anything else hears of it: who it calls this server by and from which
page it comes (so that no web site can reach a server on the machine of whoever reads it), how large
it is and how long it takes to arrive, and every value in it. What is wrong is answered in a
sentence, in the form that OpenAI's clients read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speedrun.config.architecture import BLOCK
from speedrun.model import native
from speedrun.model.steps import PackedWeights
from speedrun.serve.load import LoadedRun
from speedrun.serve.server.engine import BusyError, Engine, Stream, TextError, Worker
from speedrun.serve.server.protocol import Answer, Completion, RequestError, parse
from speedrun.serve.writing import Piece, Wanted, Writer

MOST_BYTES = 1 << 20  # of a request's body
QUICK = 2048  # characters of prompts that are encoded in less time than a thread takes to begin
GOODBYE_SECONDS = 1  # from a connection that is closed to the word of it
PATIENCE_SECONDS = 15.0  # for a body to arrive
OWN = (
    "page.js", "card.js", "column.js", "kept.js", "settings.js", "sight.js", "stream.js",
    "theme.js", "tokens.js", "walk.js", "words.js", "page.css", "icon.svg",
)  # fmt: skip
PAGE = {"": "serve/page/page.html"} | {name: f"serve/page/{name}" for name in OWN}
PAGE |= {name: f"report/page/static/{name}" for name in ("dom.js", "numbers.js")}
KINDS = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}
KNOWN = "GET /v1/models and POST /v1/completions"
HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Served:
    """A run that can be asked for by its name."""

    name: str
    loaded: LoadedRun
    context: int  # tokens that a text is remembered by

    def writers(self, slots: Sequence[int]) -> list[Writer]:
        """One for each number of slots, with the same weights in memory."""
        kernel = native.load()
        weights = None if isinstance(kernel, str) else PackedWeights(kernel)
        return [Writer(self.loaded, count, self.context, weights) for count in slots]

    def about(self) -> dict[str, Any]:
        """As in the protocol, and what the page shows of it."""
        config, summary = self.loaded.config, self.loaded.run.readable_summary()
        window = self.loaded.planner.window
        return {
            "id": self.name,
            "object": "model",
            "created": int(self.loaded.run.config.stat().st_mtime),
            "owned_by": "speedrun",
            "recipe": config.recipe,
            "track": config.track,
            "step": self.loaded.trained.checkpoint.step,
            "parameters": sum(x.numel() for x in self.loaded.model.parameters()),
            "vocabulary": self.loaded.tokenizer.vocab_size,
            "tokenizer": self.loaded.tokenizer.spec,
            "context": self.context,
            "window": None if window is None else int(window) * config.window_unit,
            "window_unit": config.attention.window,
            "block": BLOCK,
            "inside_documents": config.attention.documents,
            "validation_loss": summary.val_loss if summary else None,
        }


def hosts_of(host: str, more: Collection[str]) -> frozenset[str]:
    """The names a request may call this server by."""
    return frozenset(name.lower() for name in ("127.0.0.1", "localhost", "::1", host, *more))


class Doorkeeper:
    """Turns away requests that name another server, or come from another's page."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: dict[bytes, list[bytes]] = {}
            for name, value in scope["headers"]:
                headers.setdefault(name, []).append(value)
            wrong = self._wrong(headers.get(b"host", []), headers.get(b"origin", []))
            if wrong:
                return await _refusal(RequestError(403, wrong, "forbidden"))(scope, receive, send)
        return await self._app(scope, receive, _to_whoever_is_there(receive, send))

    def _wrong(self, hosts: Sequence[bytes], origins: Sequence[bytes]) -> str:
        names = [_host_of(b"//" + value) for value in hosts]
        if len(names) != 1 or names[0] not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            return (
                f"this server goes by {known}: call it so, or start it with --allow-host and the "
                "name you call it by"
            )
        if any(_host_of(origin) not in self._hosts for origin in origins):
            return "this server answers no requests from pages of other sites"
        return ""


def _to_whoever_is_there(receive: Receive, send: Send) -> Send:
    """What is sent to a client that has just gone is dropped.

    uvicorn does so once it knows; until then uvloop raises, and the terminal has a traceback of it.
    """

    async def sent(message: Message) -> None:
        try:
            await send(message)
        except RuntimeError as error:
            if "handler is closed" not in str(error) or not await _has_gone(receive):
                raise

    return sent


async def _has_gone(receive: Receive) -> bool:
    """Does the server hear, within a moment, that the client has disconnected?"""
    with suppress(TimeoutError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            while (await receive())["type"] != "http.disconnect":
                pass
            return True
    return False


def _host_of(address: bytes) -> str | None:
    try:
        return urlsplit(address.decode("ascii")).hostname
    except ValueError:
        return None


async def read_json(request: Request) -> Any:
    """The body of a request, which is bounded in size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            415, "the body must be JSON, with the header content-type: application/json"
        )
    body = bytearray()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BYTES:
                    raise RequestError(413, f"the body may have {MOST_BYTES:,} bytes at most")
    except TimeoutError:
        raise RequestError(
            408, f"the body took longer than {PATIENCE_SECONDS:g} s to arrive"
        ) from None

    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is not a number")

    try:
        return json.loads(body, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise RequestError(400, f"the body is not JSON: {reason}") from None


class Server:
    """The routes, and what they need to know."""

    def __init__(self, runs: Sequence[Served], engine: Engine, hosts: Collection[str]) -> None:
        self._runs, self._engine = {run.name: run for run in runs}, engine
        folder = files("speedrun")
        self._page = {path: (folder / name).read_bytes() for path, name in PAGE.items()}
        routes = [
            *(Route(f"/{path}", self.page) for path in PAGE),
            Route("/v1/models", self.models),
            Route("/v1/models/{name}", self.model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

        @asynccontextmanager
        async def living(_: Starlette) -> AsyncIterator[None]:
            engine.start()
            yield
            await run_in_threadpool(engine.stop)

        handlers: Mapping[Any, Any] = {
            RequestError: lambda _, error: _refusal(error),
            ClientDisconnect: lambda *_: Response(status_code=499),  # read by nobody
            HTTPException: lambda _, error: _refusal(
                RequestError(
                    error.status_code, f"{error.detail}: see /v1/models and /v1/completions"
                )
            ),
        }
        app = Starlette(routes=routes, lifespan=living, exception_handlers=handlers)
        self.app = Doorkeeper(app, hosts)

    async def page(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/")
        kind = KINDS[PAGE[path].rpartition(".")[2]]
        return Response(self._page[path], media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    async def models(self, _: Request) -> Response:
        runs = [run.about() for run in self._runs.values()]
        return JSONResponse({"object": "list", "data": runs})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._run(request.path_params["name"]).about())

    async def chat(self, _: Request) -> Response:
        raise RequestError(
            404, "these models go on with a text and know no chat: use /v1/completions"
        )

    async def complete(self, request: Request) -> Response:
        asked = parse(await read_json(request))
        run = self._run(asked.model)
        wanted = await self._texts(asked, run)
        if len(wanted) > self._engine.most:
            most = f"{self._engine.most} texts at most"
            raise RequestError(400, f"this server takes {most}: ask for fewer", param="n")
        try:
            streams = self._engine.ask(run.name, wanted, whole=not asked.stream)
        except BusyError:
            busy = RequestError(
                429, "busy: as many texts as may are waiting; try again in a moment"
            )
            return _refusal(busy, {"retry-after": "1"})
        answer = Answer(asked, run.loaded.tokenizer)
        if asked.stream:
            events = self._events(asked, answer, streams)
            return StreamingResponse(
                events, media_type="text/event-stream", headers={"cache-control": "no-store"}
            )
        return await self._whole(request, asked, answer, streams)

    async def _texts(self, asked: Completion, run: Served) -> list[Wanted]:
        """In another thread if prompts may take a while to encode: others are being served."""
        tokenizer, context = run.loaded.tokenizer, run.context
        if sum(map(len, asked.prompts())) <= QUICK:
            return asked.texts(tokenizer, context)
        return await run_in_threadpool(asked.texts, tokenizer, context)

    def _run(self, name: str) -> Served:
        if name not in self._runs:
            known = ", ".join(self._runs)
            raise RequestError(404, f"there is no model {name[:100]!r} here, only {known}",
                          "model_not_found", "model")  # fmt: skip
        return self._runs[name]

    async def _whole(
        self, request: Request, asked: Completion, answer: Answer, streams: Sequence[Stream]
    ) -> Response:
        async def written() -> list[list[Piece]]:
            return [await stream.pieces() for stream in streams]

        work = asyncio.ensure_future(written())
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            texts = await work
        except TextError as error:
            return _refusal(RequestError(500, str(error)))
        except ClientDisconnect:
            return Response(status_code=499)  # read by nobody
        finally:
            self._engine.close(streams)
            for task in (work, gone):
                task.cancel()
        choices = [
            answer.choice(
                i, pieces, echo_of(asked, i), self._context(asked, answer, stream, pieces)
            )
            for i, (stream, pieces) in enumerate(zip(streams, texts, strict=True))
        ]
        usage = answer.usage([stream.wanted for stream in streams], sum(map(len, texts)))
        return JSONResponse(answer.whole(choices, usage))

    async def _events(
        self, asked: Completion, answer: Answer, streams: Sequence[Stream]
    ) -> AsyncIterator[bytes]:
        """Every text's pieces as they come, each event of one text, and [DONE]."""
        written: dict[int, list[Piece]] = {i: [] for i in range(len(streams))}
        news: asyncio.Queue[tuple[int, list[Piece] | TextError]] = asyncio.Queue()

        async def follow(i: int, stream: Stream) -> None:
            try:
                finish = None
                while finish is None:
                    pieces = await stream.pieces()
                    news.put_nowait((i, pieces))
                    finish = pieces[-1].finish
            except TextError as error:
                news.put_nowait((i, error))

        tasks = [asyncio.ensure_future(follow(i, stream)) for i, stream in enumerate(streams)]
        try:
            for i in range(len(streams)) if asked.echo else ():
                yield event(answer.whole([answer.choice(i, [], echo_of(asked, i))]))
            left = len(streams)
            while left:
                i, pieces = await news.get()
                if isinstance(pieces, TextError):
                    yield event(RequestError(500, str(pieces)).body)
                    return
                written[i] += pieces
                ends = pieces[-1].finish is not None
                left -= ends
                context = self._context(asked, answer, streams[i], written[i]) if ends else None
                yield event(answer.whole([answer.choice(i, pieces, "", context)]))
            if asked.stream_options and asked.stream_options.include_usage:
                count = sum(map(len, written.values()))
                usage = answer.usage([stream.wanted for stream in streams], count)
                yield event(answer.whole([], usage))
            yield b"data: [DONE]\n\n"
        finally:
            self._engine.close(streams)
            for task in tasks:
                task.cancel()

    def _context(
        self, asked: Completion, answer: Answer, stream: Stream, pieces: Sequence[Piece]
    ) -> Any:
        if not asked.show_context or stream.sight is None:
            return None
        return answer.context([*stream.wanted.ids, *(p.token for p in pieces)], stream.sight)


def echo_of(asked: Completion, index: int) -> str:
    """The prompt of a text, if it is to be given back."""
    prompt = asked.prompts()[index // (asked.n or 1)] if asked.echo else ""
    return prompt if isinstance(prompt, str) else ""


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    """Until the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(error: RequestError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=headers)


def serve_app(
    runs: Sequence[Served], hosts: Collection[str], *, slots: int, queue: int, workers: int
) -> ASGIApp:
    """An application that serves these runs.

    Each of them has `slots` texts at work at a time, shared by the workers; `queue` more may wait.
    """
    workers = min(workers, slots)
    shares = [slots // workers + (i < slots % workers) for i in range(workers)]
    writers = {run.name: run.writers(shares) for run in runs}
    made = [Worker({name: some[i] for name, some in writers.items()}) for i in range(workers)]
    return Server(runs, Engine(made, len(runs) * slots + queue), hosts).app
