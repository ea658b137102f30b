"""The built site in a browser: no errors, no requests to the outside, tables that sort, a tree for
the keyboard.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote_plus, unquote, urlsplit

import pytest
from filelock import FileLock

from docs import release
from tests.test_site import DOCS, RESOURCE

pytestmark = pytest.mark.peers  # Sphinx, Playwright and a browser
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """``BAYOU_SITE``, or built once, whichever processes of pytest-xdist run the tests of it."""
    if given := os.environ.get("BAYOU_SITE"):
        return Path(given)
    pytest.importorskip("furo", reason="needs the docs extra")
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with FileLock(f"{out}.lock"):
        if not (out / "index.html").exists():
            command = [
                sys.executable,
                "-m",
                "sphinx",
                "-W",
                "--keep-going",
                "-q",
                "-b",
                "html",
                str(DOCS),
                str(out),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
    return out


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(site):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as play:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        running = play.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield running
        running.close()


@pytest.fixture
def page(browser, address):
    """A page that fails the test for errors in the console and for requests to anywhere else."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    opened, wrong = context.new_page(), list[str]()
    opened.on(
        "console", lambda message: wrong.append(message.text) if message.type == "error" else None
    )
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on(
        "request",
        lambda sent: (
            None if sent.url.startswith((address, "data:", "blob:")) else wrong.append(sent.url)
        ),
    )
    yield opened
    context.close()
    assert not wrong


def built(site):
    """Every page but the source listings, which are those of the code."""
    found = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return [name for name in found if not name.startswith(("_modules/", "_static/"))]


IDENTIFIER = re.compile(r'<[^>]*\s(?:id|name)="([^"]+)"')
LINK = re.compile(r'<[^>]*\s(?:href|src)="([^"]*)"')


def test_every_link_within_the_site_has_its_target(site):
    """Pages, source listings and downloads, with the place on the page that a link names."""
    texts = {path.resolve(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert any("_modules" in path.parts for path in texts)
    identifiers = {
        path: set(map(unescape, IDENTIFIER.findall(text))) for path, text in texts.items()
    }
    broken = []
    for path, text in texts.items():
        for link in map(unescape, LINK.findall(text)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path:
                target = Path(os.path.normpath(path.parent / unquote(parts.path)))
            place = unquote(parts.fragment)
            if not target.exists() or (place and place not in identifiers.get(target, {place})):
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    assert not broken


def test_no_built_file_names_an_external_resource(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        if "_modules" not in path.parts:
            assert not RESOURCE.findall(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(page, address, site, scheme):
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=scheme)
    names = built(site)
    assert len(names) > 90
    for name in (
        names
        if scheme == "light"
        else ["index.html", "which.html", "benchmarks.html", "methods/mnf.html"]
    ):
        page.goto(f"{address}/{name}", wait_until="load")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name


@pytest.mark.parametrize("paper", ["A4", "Letter"])
def test_the_poster_is_printed_on_one_page(page, address, paper):
    page.goto(f"{address}/poster.html", wait_until="networkidle")
    pdf = page.pdf(format=paper, print_background=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1


def test_the_switch_of_versions_leads_to_the_same_page_of_another_version(browser, tmp_path):
    """Two small sites as `python -m docs.release site` puts them beside each other."""
    for version in ("1.0.0", "1.1.0"):
        built = tmp_path / "built"
        (built / "guide").mkdir(parents=True, exist_ok=True)
        shutil.copytree(DOCS / "static", built / "_static", dirs_exist_ok=True)
        template = (DOCS / "templates/sidebar/versions.html").read_text(encoding="utf-8")
        for name, root in (("index", "./"), ("guide/tables", "../"), ("404", "./")):
            switch = template.replace("{{ content_root }}", root).replace("{{ pagename }}", name)
            (built / f"{name}.html").write_text(
                f'<title>{name}</title><script src="{root}_static/site.js"></script>'
                + switch.replace("{{ release }}", version),
                encoding="utf-8",
            )
        code = tmp_path / "src/bayou/__init__.py"
        code.parent.mkdir(parents=True, exist_ok=True)
        code.write_text(f'__version__ = "{version}"\n', encoding="utf-8")
        release.add_site(built, tmp_path / "pages", tmp_path)
    handler = partial(Quiet, directory=str(tmp_path / "pages"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{serving.server_port}"
        opened = browser.new_page()
        opened.goto(f"{home}/")
        opened.wait_for_url(f"{home}/latest/index.html")
        opened.goto(f"{home}/latest/guide/tables.html")
        switch = opened.get_by_label("Version")
        assert switch.input_value() == "1.1.0"
        opened.wait_for_function("document.getElementById('version').options.length == 2")
        switch.select_option("1.0.0")
        opened.wait_for_url(f"{home}/1.0.0/guide/tables.html")
        assert opened.get_by_label("Version").input_value() == "1.0.0"
        opened.close()
        serving.shutdown()


def test_tables_sort_and_filter(page, address):
    page.goto(f"{address}/methods/mnf.html")
    table = page.locator("table:has(th:has-text('RMSE'))").first
    head = table.locator("th:has-text('RMSE')")
    column = head.evaluate("cell => cell.cellIndex") + 1

    def values():
        texts = table.locator(f"tbody td:nth-child({column})").all_inner_texts()
        return [float(text.split()[0]) for text in texts if text]

    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert values() == sorted(values())
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert values() == sorted(values(), reverse=True)

    page.get_by_label("filter rows").fill("uci yacht")
    left = page.locator("#measured tbody tr:visible")
    assert 1 <= left.count() < 10
    assert all("yacht" in text for text in left.all_inner_texts())
    page.get_by_label("filter rows").fill("")
    assert left.count() > 100


def test_the_tree_works_by_keyboard(page, address):
    page.goto(f"{address}/which.html")
    first = page.locator(".tree > details > summary").first
    first.focus()
    link = page.locator(".tree a[href='methods/laplace.html']").first
    assert not link.is_visible()
    for _ in range(3):  # what, cost, data
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
    assert link.is_visible()
    assert page.evaluate("document.activeElement.getAttribute('href')") == "methods/laplace.html"
    page.keyboard.press("Enter")
    page.wait_for_url("**/methods/laplace.html")
    assert page.locator("h1").inner_text().startswith("Laplace approximation")


@pytest.mark.parametrize(
    ("card", "answer"),
    [
        ("I have a table", "conformal_upper"),
        ("I have a network", "p.prediction_set(0.9)"),
        ("I have a density", "flow.log_prob(data)"),
    ],
)
def test_a_card_of_the_start_page_leads_to_the_answer(page, address, card, answer):
    page.goto(f"{address}/index.html")
    page.locator(".card", has_text=card).click()
    page.wait_for_load_state()
    assert answer in page.locator("article").inner_text()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("horseshoe", "methods/horseshoe"),
        ("time series", "guide/sequences"),
        ("NaN", "guide/missing_values"),
    ],
)
def test_search_finds_a_page(page, address, query, found):
    page.goto(f"{address}/search.html?q={quote_plus(query)}")
    page.locator(f"#search-results a[href^='{found}']").first.wait_for()
