"""The page of a run in a real browser: no errors, no requests, nothing cut off, and enough contrast
for everyone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bayou.app.report.page import RunReport
from bayou.app.runs.folder import Run

pytestmark = pytest.mark.peers  # Playwright and a browser
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = {"phone": 390, "desk": 1200}
CONTRAST = """() => {
  const linear = (x) => x <= 10 ? x / 255 / 12.92 : ((x / 255 + .055) / 1.055) ** 2.4;
  const lum = (c) => { const v = c.map(linear); return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
  const numbers = (s) => s.match(/[\\d.]+/g).map(Number);
  const back = (e) => { for (; e; e = e.parentElement) {
    const c = numbers(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const words = "h1, h2, h3, p, li, dt, dd, small, th, td, span, figcaption, summary, pre, svg text";
  return [...document.querySelectorAll(words)].filter((e) => e.textContent.trim()).map((e) => {
    const color = e.closest("svg") ? getComputedStyle(e).fill : getComputedStyle(e).color;
    const a = lum(numbers(color).slice(0, 3)), b = lum(back(e).slice(0, 3));
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.outerHTML.slice(0, 80)]; });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as play:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        running = play.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield running
        running.close()


def regression() -> RunReport:
    """Six methods on numbers, with long names: all kinds of tables and more curves than there are
    dashes.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, generator=generator).double()
    grid = [k / 10 for k in range(30)]
    mixing = {
        "draws": 300,
        "chains": 2,
        "r_hat": 1.012,
        "r_hat_median": 1.0,
        "ess": 210.0,
        "ess_median": 400.0,
    }
    trials = [{"scale": 1.0, "nll": 0.5}, {"scale": 2.0, "nll": 0.4}]
    results = [
        {
            "label": f"Method number {k}", "seed": 0, "task": "regression", "seconds": 3.0, "seconds_to_evaluate": 0.5,
            "metrics": {"rmse": 1.0 + k, "nll": float((rows + k).mean()), "crps": 0.5, "coverage": 0.9, "width": 3.0},
            "errors": {"rmse": 0.1, "nll": 0.2, "coverage": 0.03}, "rows": (rows + k).tolist(),
            "losses": (rows + k).abs().tolist(), "mixing": mixing | {"mixed": k != 1},
            "checks": [{"name": "mixing", "status": "failed" if k == 1 else "ok", "text": "chains have not mixed"}],
            "selection": [{"stage": "prior scale", "seconds": 1.0, "trials": trials}],
            "reliability": {"confidence": grid, "accuracy": [g / (1 + k) for g in grid], "count": [40] * 30},
            "error_rejection": {"rejected": [g / 3 for g in grid], "error": [1 + k - g / 9 for g in grid]},
            "curve": {"x": grid, "mean": grid, "low": [g - 1 for g in grid], "high": [g + 1 for g in grid],
                      "epistemic_low": [g - 0.1 for g in grid], "epistemic_high": [g + 0.1 for g in grid],
                      "points": {"x": grid, "y": grid, "of": 90}},
        }
        for k in range(6)
    ]  # fmt: skip
    return RunReport(
        results,
        {"data": "houses.csv", "command": "bayou compare " + "a" * 200, "facts": {"train": 90}},
    )


@pytest.fixture(scope="module", params=["classes", "numbers"])
def file(
    request: pytest.FixtureRequest, digits: Run, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(
        (digits.report() if request.param == "classes" else regression()).html(), encoding="utf-8"
    )
    return path


@pytest.fixture(params=["phone", "desk"])
def opened(request: pytest.FixtureRequest, browser: Any, file: Path) -> Iterator[Any]:
    """The page; any request or message of the console is an error."""
    context = browser.new_context(viewport={"width": WIDTHS[request.param], "height": 844})
    tab, problems = context.new_page(), list[str]()
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on(
        "request",
        lambda request: problems.append(request.url) if request.url.startswith("http") else None,
    )
    tab.goto(file.as_uri())
    yield tab
    assert problems == []
    context.close()


def test_the_conclusion_comes_first_and_nothing_is_cut_off(opened: Any) -> None:
    assert opened.locator("main h2").first.inner_text() == "Conclusion"
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "the page scrolls sideways"
    )
    tables = opened.locator(".scroll")
    for k in range(tables.count()):
        table = tables.nth(k)
        wide = table.evaluate("e => e.scrollWidth > e.clientWidth")
        assert (
            not wide or opened.viewport_size["width"] == WIDTHS["phone"]
        )  # on a desk every column is visible
        if wide:
            assert table.evaluate("e => e.nextElementSibling.checkVisibility()"), (
                "nothing says that the table scrolls"
            )
            table.focus()
            for _ in range(60):
                opened.keyboard.press("ArrowRight")
            opened.wait_for_timeout(300)
        last, box = table.locator("thead th").last.bounding_box(), table.bounding_box()
        assert last["x"] + last["width"] <= box["x"] + box["width"] + 1, (
            "the last column cannot be reached"
        )


def test_everything_has_a_label_and_enough_contrast(opened: Any) -> None:
    unnamed = opened.evaluate(
        """() => [...document.querySelectorAll("svg.chart, img, [tabindex]")].filter((e) =>
            !(e.getAttribute("aria-label") || e.getAttribute("alt"))).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    assert opened.locator("th:not([scope])").count() == 0
    ids = opened.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    for scheme in ("light", "dark"):
        opened.emulate_media(color_scheme=scheme)
        for ratio, where in opened.evaluate(CONTRAST):
            assert ratio >= 4.5, (scheme, where)


def test_curves_differ_without_color(opened: Any) -> None:
    """Every method has its own pair of dashes and shape of points, filled or not."""
    marks = opened.evaluate(
        """() => [...document.querySelectorAll(".legend")].map((l) => [...l.querySelectorAll(".key")].map((key) => {
            const [line, dot] = key.querySelectorAll("path"), c = getComputedStyle(dot);
            const filled = c.fill === getComputedStyle(line).stroke;
            return getComputedStyle(line).strokeDasharray + dot.getAttribute("d") + filled; }))"""
    )
    assert marks
    for keys in marks:
        assert len(keys) == len(set(keys))


def test_it_is_printed_in_light_without_scrolling(opened: Any) -> None:
    opened.set_viewport_size({"width": 703, "height": 1000})  # A4 less its margins
    opened.emulate_media(media="print", color_scheme="dark")
    assert (
        opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    cut = opened.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    )
    assert cut == []
    assert opened.pdf(format="A4").startswith(b"%PDF")
