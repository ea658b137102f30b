"""The small program of a run: what it does to rows is what the run did to its data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from bayou.data.encoders import Category, Number
from bayou.data.preprocess import ImagePreprocessor, TablePreprocessor
from bayou.runs.small import _AsInFile


class Sees(nn.Module):
    """Gives back what it is given."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"outputs": x, "mean": x[:, :1], "std": x[:, 1:2].abs()}


def test_columns_are_encoded_and_numbers_are_in_their_units() -> None:
    columns = (
        Number("size", 3.0, 2.0, 2.5, indicator=True), Category("kind", ("a", "b")), Number("age", 40.0, 10.0, 38.0),
    )  # fmt: skip
    preprocessor = TablePreprocessor(columns, "price", "regression", y_mean=100.0, y_scale=20.0)
    nan = float("nan")
    rows = torch.tensor([[1.0, 0.0, 50.0], [nan, 1.0, nan], [1e30, -1.0, 20.0]], dtype=torch.float64)
    table = {"size": ["1", "", "1e30"], "kind": ["a", "b", "other"], "age": ["50", "", "20"]}
    found = _AsInFile(preprocessor, Sees(), torch.float32)(rows)
    torch.testing.assert_close(found["outputs"], preprocessor.transform(table))
    torch.testing.assert_close(found["mean"], 100 + 20 * found["outputs"][:, :1])
    torch.testing.assert_close(found["std"], 20 * found["outputs"][:, 1:2].abs())


def test_pixels_are_encoded() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 2, 3, 3)).astype(np.uint8)
    preprocessor = ImagePreprocessor.fit(images, ("cat", "dog"))
    found = _AsInFile(preprocessor, Sees(), torch.float32)(torch.from_numpy(images).float())
    torch.testing.assert_close(found["outputs"], torch.from_numpy(preprocessor.encode(images)), rtol=1e-5, atol=1e-5)
