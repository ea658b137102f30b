"""The page of ``bayou play``: posteriors in a browser, as one HTML file without requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from tempfile import TemporaryDirectory

from bayou import __version__
from bayou.core.files import write_text


def page() -> str:
    """Return the page with the posteriors that ``docs/make_play.py`` fitted."""
    folder = files("bayou.app.cli")
    text = (folder / "play.html").read_text("utf-8")
    data = (folder / "play.json").read_text("utf-8")
    return text.replace("__VERSION__", __version__).replace("__DATA__", data)


@contextmanager
def server(port: int) -> Iterator[ThreadingHTTPServer]:
    """Make a server of this page alone on this machine.

    Args:
        port: 0 for any free port.
    """
    with TemporaryDirectory() as folder:
        write_text(f"{folder}/index.html", page())
        handler = partial(SimpleHTTPRequestHandler, directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", port), handler) as http_server:
            yield http_server
