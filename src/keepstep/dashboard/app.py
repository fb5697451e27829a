"""The dashboard's HTTP server. All paths except ``/healthz`` need the viewer's token. All requests are read-only."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepstep.dashboard import wire
from keepstep.dashboard.live import Live
from keepstep.dashboard.metrics import RunCollector
from keepstep.dashboard.report import STATIC, html_report, security_policy
from keepstep.programs import leave
from keepstep.trace.timeline.run import Run, opened

MAX_CHANGES = 200_000
"""Phase changes in one answer; 4 MB of JSON."""
SEND_DEADLINE_S = 15.0
"""The server disconnects a page that reads nothing for this long."""
OWN_ONLY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class Dashboard:
    """Serves the run in one folder."""

    def __init__(self, folder: Path) -> None:
        self._registry = CollectorRegistry()
        self._collector: RunCollector | None = None
        self._counted: Run | None = None
        self.live = Live(folder, self._count)
        self._busy = asyncio.Semaphore(1)
        """Admits one request for a report at a time. It runs in a thread, on its own copy of the run."""

    def _count(self, run: Run, news: Any) -> None:
        if run is not self._counted:
            if self._collector is not None:
                self._registry.unregister(self._collector)
            self._counted, self._collector = run, RunCollector(run)
            self._registry.register(self._collector)
        assert self._collector is not None
        self._collector.observe(news)

    def app(self, token: str, cookie: str) -> ASGIApp:
        """Returns the ASGI application.

        Args:
            token: the viewer's token; requests without it are refused.
            cookie: name of the cookie with the token.
        """

        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            following = asyncio.create_task(self.live.follow())
            following.add_done_callback(_end_without)
            try:
                yield
            finally:
                following.cancel()

        routes = [
            Route("/healthz", self._healthz),
            Route("/", self._index),
            Route("/api/stream", EventStream(self.live)),
            Route("/api/phases", self._phases),
            Route("/api/overview", self._overview),
            Route("/metrics", self._metrics),
            Route("/report", self._report),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        return Guard(Starlette(routes=routes, lifespan=lifespan), token, cookie)

    async def _healthz(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _index(self, _request: Request) -> Response:
        page = (STATIC / "index.html").read_bytes()
        return Response(page, media_type="text/html", headers={"content-security-policy": OWN_ONLY})

    async def _phases(self, request: Request) -> Response:
        run = self._run()
        begin, end = _number(request, "begin"), _number(request, "end")
        if end < begin:
            raise HTTPException(400, f"begin={begin} is after end={end}")
        started_ns = run.info.started_ns
        changes = run.history.records(started_ns + begin * 1000, started_ns + end * 1000)
        phases = wire.describe_phases(run, changes[-MAX_CHANGES:])
        return _json({"begin": begin, "end": end, "truncated": len(changes) > MAX_CHANGES, "phases": phases})

    async def _overview(self, _request: Request) -> Response:
        return _json(wire.describe_overview(self._run()))

    async def _metrics(self, _request: Request) -> Response:
        self.live.poll()
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _report(self, _request: Request) -> Response:
        folder = self._run().folder

        def read_and_make() -> str:
            with opened(folder) as copy:
                return html_report(copy)

        async with self._busy:
            report = await asyncio.to_thread(read_and_make)
        return Response(report, media_type="text/html", headers={"content-security-policy": security_policy()})

    def _run(self) -> Run:
        if self.live.run is None:
            raise HTTPException(404, "no run has begun yet")
        return self.live.run


def _end_without(following: asyncio.Task[None]) -> None:
    """Ends the process if the task that follows the run has failed, because pages would show old data as current."""
    if not following.cancelled() and (error := following.exception()) is not None:
        traceback.print_exception(error)
        leave(1)


class EventStream:
    """Sends the updates of `Live` to a page as server-sent events, until the page disconnects."""

    def __init__(self, live: Live) -> None:
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one page."""
        page = self._live.open_page()
        gone = asyncio.create_task(_until_gone(receive))
        gone.add_done_callback(lambda _: page.put_nowait(None))
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (told := await page.get()) is not None:
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await send({"type": "http.response.body", "body": told, "more_body": True})
        except TimeoutError:
            pass  # the page does not read; the server closes the connection after this returns
        finally:
            self._live.close_page(page)
            gone.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Guard:
    """Refuses requests without the token, and all methods except GET and HEAD."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request, or the application's lifespan events."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a websocket; the page does not use any
        request = Request(scope, receive)
        refusal = self._refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return _plain(405, "this page is read-only: it answers only GET and HEAD")
        if request.url.path == "/healthz":
            return None
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/" and self._is_right(given):
            response: Response = RedirectResponse("/", status_code=303, headers=HEADERS)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
            return response
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_right(bearer.strip()):
            return None
        if self._is_right(request.cookies.get(self._cookie, "")):
            return None
        return _plain(
            401,
            "The token of this run's viewer is missing, or is another run's. Open the link that keepstep printed when "
            "it started the dashboard; the token also lies in the file viewer.token in the run's folder.",
        )

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name for name, _ in message.get("headers", [])}
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in there]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return sending


def _plain(status: int, text: str) -> Response:
    return PlainTextResponse(text + "\n", status, HEADERS)


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    try:
        number = int(text)
    except ValueError:
        raise HTTPException(400, f"{name}={text!r}: a whole number of microseconds is needed") from None
    if abs(number) >= 1 << 52:
        raise HTTPException(400, f"{name}={text}: that is longer than any run")
    return number
