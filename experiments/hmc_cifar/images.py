"""The images of CIFAR-10, others and corrupted ones, beside what HMC and people say of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from bayou.data import CATALOGUE
from bayou.data.images import cifar10, read_idx
from experiments.adapters import FOLDERS, path_of

MEAN, SCALE = (0.49, 0.48, 0.44), 0.2  # of the pixels
AWAY = ("fashion", "letters")  # what is out of distribution
CORRUPTED = 1500  # test images, a third for each kind, at every strength
CORRUPTIONS = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.1),  # its standard deviation, of pixels in [0, 1]
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # the standard deviation of its kernel, in pixels
    "contrast": (
        0.75,
        0.5,
        0.4,
        0.3,
        0.15,
    ),  # what remains of the distance from the mean of a channel
}  # about those of CIFAR-10-C (Hendrycks & Dietterich 2019)
STRENGTHS = len(CORRUPTIONS["noise"])


@final
@dataclass(frozen=True)
class Sizes:
    """All numbers of a run: of the network, of the rows and of a fit."""

    width: int = 16
    blocks: int = 3  # of each of the three stages
    train: int = 50_000
    test: int = 10_000
    away: int = 2000  # of each of AWAY
    batch: int = 250
    epochs: int = 100
    samples: int = 50


class Task(NamedTuple):
    """Images to train on, to test on and out of distribution; P(class) of HMC and of people at the
    test images.
    """

    train: tuple[Tensor, Tensor]
    inputs: dict[
        str, Tensor
    ]  # "test", AWAY, and "corrupted": the first test images at every strength
    y: Tensor
    hmc: Tensor
    people: Tensor


def corrupted(pixels: np.ndarray, kind: str, strength: int) -> np.ndarray:
    """Images (N, 3, H, W) of 8 bits with noise, blur or less contrast; noise is a function of the
    strength and N.
    """
    amount = CORRUPTIONS[kind][strength]
    x = torch.from_numpy(pixels).double() / 255
    if kind == "noise":
        x = x + amount * torch.from_numpy(np.random.default_rng(strength).normal(size=x.shape))
    elif kind == "blur":
        reach = math.ceil(4 * amount)
        kernel = torch.softmax(
            -torch.arange(-reach, reach + 1).double().square() / (2 * amount**2), 0
        )
        padded = nn.functional.pad(x, (reach,) * 4, mode="reflect").flatten(0, 1).unsqueeze(1)
        x = nn.functional.conv2d(padded, kernel.outer(kernel)[None, None]).view_as(x)
    else:
        mean = x.mean((-2, -1), keepdim=True)
        x = mean + amount * (x - mean)
    return (255 * x.clamp(0, 1)).round().to(torch.uint8).numpy()


@lru_cache(maxsize=1)
def read(sizes: Sizes, place: torch.device) -> Task:
    """The files of ``BAYOU_DATA``; gray images have a frame of two pixels."""
    (x, y), (x_test, y_test) = cifar10(CATALOGUE["cifar10"], None)
    gray = {name: read_idx(path_of(f"{FOLDERS[name]}/t10k-images-idx3-ubyte.gz")) for name in AWAY}
    frames = {
        name: np.pad(one, ((0, 0), (2, 2), (2, 2)))[:, None].repeat(3, 1)
        for name, one in gray.items()
    }
    mean = torch.tensor(MEAN, device=place).view(3, 1, 1)

    def images(pixels: Any) -> Tensor:
        return (torch.from_numpy(pixels).to(place).float() / 255 - mean) / SCALE

    def probabilities(name: str, key: str) -> Tensor:
        with np.load(path_of(f"cifar10/{name}.npz"), allow_pickle=False) as file:
            counts = torch.from_numpy(file[key][: sizes.test].astype(np.float64))
        return counts / counts.sum(1, keepdim=True)

    parts = list(
        zip(
            CORRUPTIONS,
            np.array_split(x_test[: min(CORRUPTED, sizes.test)], len(CORRUPTIONS)),
            strict=True,
        )
    )
    worse = np.concatenate(
        [corrupted(part, kind, strength) for strength in range(STRENGTHS) for kind, part in parts]
    )
    return Task(
        (images(x[: sizes.train]), torch.from_numpy(y[: sizes.train].astype(np.int64)).to(place)),
        {"test": images(x_test[: sizes.test]), "corrupted": images(worse)}
        | {name: images(one[: sizes.away]) for name, one in frames.items()},
        torch.from_numpy(y_test[: sizes.test].astype(np.int64)),
        probabilities("hmc_resnet20_frn_swish", "probs"),
        probabilities("human_labels", "cifar10h_test_counts"),
    )
