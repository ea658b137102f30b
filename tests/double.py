"""What tests make is float64, unless they say otherwise: ``from tests.double import double``."""

import pytest
import torch


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
