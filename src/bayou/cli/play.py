"""The page of ``bayou play``: posteriors in a browser, as one HTML file without requests."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from bayou import __version__


def page() -> str:
    """The page with the posteriors that ``docs/make_play.py`` fitted."""
    folder = files("bayou.cli")
    text = (folder / "play.html").read_text("utf-8").replace("__VERSION__", __version__)
    return text.replace("__DATA__", (folder / "play.json").read_text("utf-8"))


def server(host: str, port: int) -> ThreadingHTTPServer:
    """A server of this page alone, at a free port for ``port=0``."""
    content = page().encode()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    return ThreadingHTTPServer((host, port), Page)
