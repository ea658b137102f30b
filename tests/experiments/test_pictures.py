"""The pictures of the docs are drawn, at tiny settings."""

from pathlib import Path

import pytest
import torch

from bayou.runs.folder import Run
from docs import make_pictures as pictures, report_picture
from experiments import plots

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_pictures_draw_every_panel(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    answers = {}
    try:
        for target, family in [("rings", "spline"), ("u1", "planar"), ("u1", "RealNVP")]:
            answers[target, family] = pictures.work(pictures.Job(target, family, steps=1))
    finally:
        torch.set_num_threads(threads)
    for name in pictures.SAMPLERS:
        answers[name, "spline"] = answers["rings", "spline"]
    for name in pictures.POTENTIALS:
        for family in ("planar", "RealNVP"):
            answers[name, family] = answers["u1", family]
    for path in (
        pictures.draw_densities(answers, tmp_path / "densities.png"),
        pictures.draw_potentials(answers, tmp_path / "potentials.png"),
    ):
        assert path.read_bytes().startswith(SIGNATURE)
        assert path.stat().st_size < 400_000


def test_the_picture_of_a_report_is_drawn_from_its_run(digits: Run, tmp_path: Path) -> None:
    path = report_picture.draw(digits.folder, tmp_path / "report.png")
    assert path.read_bytes().startswith(SIGNATURE)
    assert path.stat().st_size < 400_000


def test_grid_has_y_along_the_first_axis() -> None:
    grid = plots.on_grid(lambda x: x[..., 1], reach=1.0, points=4)
    assert torch.allclose(
        grid.log(), torch.tensor([-0.75, -0.25, 0.25, 0.75])[:, None].expand(4, 4), atol=1e-6
    )
