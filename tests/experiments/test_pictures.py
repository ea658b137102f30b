"""The pictures of the docs are drawn, at tiny settings."""

import torch

from docs import report_picture
from experiments import plots

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_the_picture_of_a_report_is_drawn_from_its_run(digits, tmp_path):
    path = report_picture.draw(digits.folder, tmp_path / "report.png")
    assert path.read_bytes().startswith(SIGNATURE)
    assert path.stat().st_size < 400_000


def test_grid_has_y_along_the_first_axis():
    grid = plots.on_grid(lambda x: x[..., 1], reach=1.0, points=4)
    assert torch.allclose(
        grid.log(), torch.tensor([-0.75, -0.25, 0.25, 0.75])[:, None].expand(4, 4), atol=1e-6
    )
