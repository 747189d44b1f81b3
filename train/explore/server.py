"""The local page of `polyad explore`: a server for this machine, for those who know its address.

Requests are rejected unless the path starts with a random token and the request names this server
as its host. A page of another site cannot achieve that: neither with a form or a script (it does
not know the token, and its `Origin` differs), nor with its own name that resolves to 127.0.0.1. The
page loads nothing from elsewhere, and inserts text into elements as text.
"""

import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor, nn

from polyad.train.errors import ConfigError, one_line
from polyad.train.experts.actions import HOWS, NEEDS_SELECTION
from polyad.train.experts.interventions import parse_intervention
from polyad.train.experts.probing import RoutedLayer, routed_layers
from polyad.train.explore.cards import Cards
from polyad.train.explore.view import TextView
from polyad.train.page.template import page

HOST = "127.0.0.1"
MOST_BYTES = 1 << 20
"""Maximum size of a request."""
MOST_INTERVENTIONS = 64
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address is the secret
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""


class Shows(Protocol):
    """A loaded model, as `polyad.load` returns it."""

    path: Path
    model: nn.Module

    def show(
        self,
        text: str,
        *,
        interventions: Sequence[Any] = (),
        top: int,
        means: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> TextView:
        """A view of a text."""


@dataclass(frozen=True, kw_only=True)
class Explored:
    """One of the models on the page."""

    run: Shows
    cards: Cards | None
    """None without held-out text."""

    def layers(self) -> dict[str, RoutedLayer]:
        """Its layers with experts, by name."""
        return {layer.name: layer for layer in routed_layers(self.run.model) if layer.in_block}


class Application:
    """Handlers of the page's requests.

    Args:
        models: one model, or two to compare.
        top: number of experts to show per token and level of a muMoE.
        lock: held while a model reads.
    """

    def __init__(self, models: Sequence[Explored], top: int, lock: threading.Lock) -> None:
        self._models, self._top, self._lock = models, top, lock

    def starlette(self, token: str, port: int) -> Starlette:
        """The application behind its guard.

        Args:
            token: the first part of a request's path.
            port: the server's port.
        """
        files = [("/", "page.html", "html"), ("/explore.css", "explore.css", "css")]
        files += [("/explore.js", "explore.js", "javascript")]
        routes = [
            Route(f"/{{token}}{path}", _file(name, kind), methods=["GET"])
            for path, name, kind in files
        ]
        routes += [
            Route("/{token}/about", self.about, methods=["GET"]),
            Route("/{token}/view", self.view, methods=["POST"]),
            Route("/{token}/card", self.card, methods=["GET"]),
        ]
        return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, port=port)])

    async def about(self, request: Request) -> Response:
        """Facts that the page needs before a text is entered."""
        shares = any(layer.shares for each in self._models for layer in each.layers().values())
        refused = NEEDS_SELECTION if shares else frozenset[str]()
        without_data = any(each.cards is None for each in self._models)
        hows = [how for how in HOWS if how not in refused and not (how == "mean" and without_data)]
        return JSONResponse({"models": [str(each.run.path) for each in self._models], "hows": hows})

    async def view(self, request: Request) -> Response:
        """Returns a text and its experts; the body is `{"text": ..., "interventions": [...]}`."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                return _refusal(f"text: more than {MOST_BYTES:,} bytes are not allowed", 413)
        return await run_in_threadpool(self._view, body)

    def _view(self, body: bytes) -> Response:
        try:
            asked = json.loads(body)
            text, interventions = asked["text"], asked["interventions"]
            assert isinstance(text, str)
            assert isinstance(interventions, list)
            assert all(isinstance(each, str) for each in interventions)
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            return _refusal('a JSON object {"text": TEXT, "interventions": [...]} is needed')
        if len(interventions) > MOST_INTERVENTIONS:
            return _refusal(f"interventions: at most {MOST_INTERVENTIONS} are allowed")
        try:
            changes = [parse_intervention(each) for each in interventions]
            with self._lock:
                views = [
                    each.run.show(
                        text,
                        interventions=changes,
                        top=self._top,
                        means=None if each.cards is None else each.cards.means,
                    )
                    for each in self._models
                ]
        except ValueError as error:
            return _refused(error)
        found = [view.to_json() for view in views]
        for view, value in zip(views[1:], found[1:], strict=True):
            value["moved"] = view.moved(views[0])
            value["same_tokens"] = view.token_ids == views[0].token_ids
        return JSONResponse({"views": found})

    async def card(self, request: Request) -> Response:
        """Returns an expert's card from held-out text."""
        return await run_in_threadpool(self._card, dict(request.query_params))

    def _card(self, asked: Mapping[str, str]) -> Response:
        try:
            explored = self._models[int(asked["model"])]
            layer, column = explored.layers()[asked["layer"]], int(asked["expert"])
            if not 0 <= column < layer.num_experts:
                raise IndexError
        except (KeyError, ValueError, IndexError):
            return _refusal("model, layer and expert of the page are needed")
        if explored.cards is None:
            state = "No held-out text: start polyad explore with --data DATA to see top contexts."
            return JSONResponse({"state": state, "is_reading": False})
        try:
            with self._lock:
                return JSONResponse(explored.cards.card(layer, column))
        except ValueError as error:
            return _refused(error)


def _refused(error: ValueError) -> Response:
    """The response to bad input; other errors are bugs of the program."""
    if getattr(error, "exit_status", None) != 2:
        raise error
    return _refusal(str(error))


def _refusal(line: str, status: int = 400) -> Response:
    return JSONResponse({"error": one_line(line)}, status_code=status)


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    media = f"text/{kind}"

    def give(request: Request) -> Response:
        return Response(page(f"train/explore/{name}"), media_type=media)

    return give


class Guard:
    """Rejects requests that do not come from the page.

    Args:
        app: the guarded application.
        token: the first part of the path.
        port: the server's port.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        suffix = "" if port == 80 else f":{port}"  # browsers omit port 80
        self._hosts = {f"{name}{suffix}" for name in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request, or responds with 403."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), each.encode()) for name, each in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        if scope["type"] != "http":  # web sockets are not served
            return
        allowed = self._is_allowed(Request(scope))
        app = self._app if allowed else PlainTextResponse("403: not allowed\n", status_code=403)
        await app(scope, receive, send_with_headers)

    def _is_allowed(self, request: Request) -> bool:
        hosts, origins = (request.headers.getlist(name) for name in ("host", "origin"))
        given = request.scope["path"].removeprefix("/").partition("/")[0].encode()
        return (
            secrets.compare_digest(given, self._token)
            and len(hosts) == 1
            and hosts[0].lower() in self._hosts
            and all(origin == f"http://{hosts[0].lower()}" for origin in origins)
        )


def serve(
    models: Sequence[Explored],
    *,
    port: int,
    top: int,
    lock: threading.Lock,
    say: Callable[[str], None],
) -> None:
    """Serves the page until Ctrl-C.

    Args:
        models: one model, or two to compare.
        port: 0: any free port.
        top: number of experts to show per token and level of a muMoE.
        lock: held while a model reads.
        say: called with the address, once the server responds.

    Raises:
        ConfigError: the port is taken.
    """
    token = secrets.token_urlsafe(32)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "0 to 65535"
            raise ConfigError(f"--port: {port} is not allowed: {why}") from None
        listening.listen()
        port = listening.getsockname()[1]
        application = Application(models, top, lock).starlette(token, port)
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,  # it would contain the token
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
        cards = [each.cards for each in models if each.cards is not None]
        for each in cards:
            each.start()
        say(f"http://{HOST}:{port}/{token}/")
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:  # after which the server has shut down properly
            pass
        finally:
            for each in cards:
                each.end()
