"""The page of ``bayou play``: posteriors in a browser, as one HTML file without requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from tempfile import TemporaryDirectory

from bayou import __version__
from bayou.files import write_text


def page() -> str:
    """The page with the posteriors that ``docs/make_play.py`` fitted."""
    text, data = (
        (files("bayou.cli") / name).read_text("utf-8") for name in ("play.html", "play.json")
    )
    return text.replace("__VERSION__", __version__).replace("__DATA__", data)


@contextmanager
def server(port: int) -> Iterator[ThreadingHTTPServer]:
    """A server of this page alone on this machine, at a free port for ``port=0``."""
    with TemporaryDirectory() as folder:
        write_text(f"{folder}/index.html", page())
        handler = partial(SimpleHTTPRequestHandler, directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", port), handler) as serving:
            yield serving
