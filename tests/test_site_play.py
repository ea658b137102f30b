"""The page of the start page: it computes what the library computes, and a browser shows it without
errors.
"""

import base64
import json
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bayou
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors import Empirical
from tests.test_site_browser import browser

__all__ = ["browser"]

STATIC = Path(__file__).parents[1] / "docs" / "static"
peers = pytest.mark.peers  # Playwright and a browser
LETTERS = "LMPQW"  # those of the button, which its text names
THE_LETTER_A = [[[0.2, 0.85], [0.5, 0.12], [0.8, 0.85]], [[0.32, 0.6], [0.68, 0.6]]]
SEVEN = [[[0.2, 0.15], [0.8, 0.15], [0.45, 0.88]]]  # strokes


@lru_cache
def data():
    text = (STATIC / "play_data.js").read_text()
    return json.loads(text.removeprefix("const DATA = ").removesuffix(";\n"))


def array(packed):
    return torch.from_numpy(
        np.frombuffer(base64.b64decode(packed["f32"]), np.float32).copy().reshape(packed["shape"])
    )


def posterior(layers):
    """The networks of the page as a posterior of the library."""
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    stack = {
        f"{2 * i}.{part}": array(layer[part])
        for i, layer in enumerate(layers)
        for part in ("weight", "bias")
    }
    return Empirical(Target.build(net, bayou.Categorical(), None, 1), Network(net), stack)


@pytest.fixture
def opened(browser):
    """The page at phone width; any request or message of the console is an error."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    tab, problems = context.new_page(), list[str]()
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on(
        "request",
        lambda request: problems.append(request.url) if request.url.startswith("http") else None,
    )
    tab.goto((STATIC / "play.html").as_uri())
    tab.wait_for_function("window.bayou !== undefined")
    yield tab
    assert problems == []
    context.close()


def test_the_page_needs_no_network():
    assert "http" not in (STATIC / "play.html").read_text().replace("http-equiv", "")
    assert len(array(data()["digits"]["mean"])) == 10


@peers
def test_probabilities_are_those_of_predict(opened):
    many, plain = posterior(data()["digits"]["layers"]), posterior(data()["digits"]["plain"])
    opened.evaluate("strokes => { bayou.clear(); bayou.pad.strokes.push(...strokes); }", SEVEN)
    got = opened.evaluate(
        "() => { const p = bayou.judge(); return {...p, pixels: [...bayou.pad.pixels]}; }"
    )
    x = torch.tensor(got["pixels"])[None]
    p = many.predict(x, samples=None)
    assert x.sum() > 5
    assert torch.allclose(torch.tensor(got["mean"]), p.mean[0], atol=1e-3)
    assert got["entropy"] == pytest.approx(float(p.entropy), abs=1e-3)
    assert got["information"] == pytest.approx(float(p.mutual_information), abs=1e-3)
    assert torch.allclose(torch.tensor(got["plain"]), plain.predict(x).mean[0], atol=1e-3)
    assert int(p.mean.argmax()) == 7
    for k in range(10):
        mean = opened.evaluate("k => { bayou.example(k); return bayou.judge().mean; }", k)
        assert torch.allclose(torch.tensor(mean), array(data()["digits"]["mean"])[k], atol=1e-3)


def percentages(text):
    return [float(number) for number in re.findall(r"([\d.]+) %", text)]


@peers
def test_the_networks_disagree_about_letters_and_one_network_is_sure(opened):
    """The numbers that the page shows, for every letter of the button; an A is the exception that
    the text names.
    """
    intro = opened.locator("#h-digits + p").inner_text()
    assert f"letters {', '.join(LETTERS[:-1])} and {LETTERS[-1]}" in intro
    for _ in LETTERS:
        opened.locator("#letter").click()
        text = opened.locator("#digit-says").inner_text()
        many, one = percentages(text)
        assert many < 50, text
        assert one > 95, text
        (votes,) = re.findall(r"(\d+) of 50 votes", text)
        assert int(votes) < 30
    assert opened.evaluate("i => bayou.letter(i).votes.length", len(LETTERS) - 1) == 10
    assert "an A, and" in intro
    assert "are a 4 to most of the fifty networks" in intro
    opened.evaluate(
        "strokes => { bayou.clear(); bayou.pad.strokes.push(...strokes); bayou.judge(); }",
        THE_LETTER_A,
    )
    assert "Fifty networks: 4 with" in opened.locator("#digit-says").inner_text()


@peers
def test_one_network_is_sure_far_from_all_points_and_the_average_is_not(opened):
    """The sentence above the plane, on the grid of the page and by the number below it."""
    assert (
        "sure of itself in most places far from all points"
        in opened.locator("#h-plane + p").inner_text()
    )
    far = """() => {
      const { grid, points, probabilities } = bayou.plane, reach = 2.6, tops = [];
      for (let i = 0; i < grid * grid; i++) {
        const x = (((i % grid) + 0.5) / grid) * 2 * reach - reach;
        const y = reach - ((Math.floor(i / grid) + 0.5) / grid) * 2 * reach;
        const nearest = Math.min(...points.map((p) => Math.hypot(p.x - x, p.y - y)));
        if (nearest > 1) tops.push(Math.max(...probabilities.subarray(3 * i, 3 * i + 3)));
      }
      return tops;
    }"""
    shares = {}
    for method in ("plain", "many"):
        opened.locator("#plane-method").select_option(method)
        opened.wait_for_timeout(300)
        shares[method] = np.array(opened.evaluate(far))
        (corner,) = percentages(opened.locator("#plane-says").inner_text())
        if method == "plain":
            assert corner > 90
        else:
            assert corner < 50
    assert len(shares["many"]) > 500
    assert np.mean(shares["plain"] > 0.9) > 0.5
    assert shares["many"].max() < 0.75


@peers
def test_the_band_is_near_that_of_hmc_and_wider_than_a_point(opened):
    """Between the points and at them, before they move: first layers are draws of HMC, last layers
    are exact.
    """
    bands = opened.evaluate("bayou.curve.band.map((b) => [...b])")
    low, middle, high = (torch.tensor(b) for b in bands)
    hmc, grid = array(data()["curve"]["hmc"]), array(data()["curve"]["grid"])
    inside = grid.abs() < 2
    assert (middle - hmc[1])[inside].abs().mean() < 0.15
    ratio = ((high - low) / (hmc[2] - hmc[0]))[inside].mean()
    assert 0.7 < ratio < 1.3  # 24 first layers
    opened.locator("#curve-method").select_option("plain")
    low, _, high = (torch.tensor(b) for b in opened.evaluate("bayou.curve.band.map((b) => [...b])"))
    assert torch.equal(low, high)


@peers
def test_everything_has_a_label_and_enough_contrast(opened):
    unnamed = opened.evaluate(
        """() => [...document.querySelectorAll("canvas, button, select, input")].filter((e) =>
            !(e.getAttribute("aria-label") || e.textContent.trim() || e.closest("label"))).map((e) => e.id)"""
    )
    assert unnamed == []
    for scheme in ("light", "dark"):
        opened.emulate_media(color_scheme=scheme)
        ratios = opened.evaluate(
            """() => {
              const linear = (x) => x <= 10 ? x / 255 / 12.92 : ((x / 255 + .055) / 1.055) ** 2.4;
              const lum = (c) => { const v = c.map(linear);
                return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
              const numbers = (s) => s.match(/[\\d.]+/g).map(Number);
              const back = (e) => { for (; e; e = e.parentElement) {
                const c = numbers(getComputedStyle(e).backgroundColor);
                if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
              return [...document.querySelectorAll("h1, h2, p, button, select, label, output, code")].map((e) => {
                const a = lum(numbers(getComputedStyle(e).color).slice(0, 3)), b = lum(back(e).slice(0, 3));
                return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); });
            }"""
        )
        assert min(ratios) >= 4.5
    wide = opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert wide, "the page scrolls sideways on a phone"
