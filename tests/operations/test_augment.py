"""Copies of inputs: what each setting does to a row, and the same copies for the same seed."""

import pytest
import torch

from bayou.operations import Augment

X = torch.arange(5 * 2 * 4 * 4, dtype=torch.float64).reshape(5, 2, 4, 4)


def test_rows_come_first_and_copies_are_functions_of_the_seed():
    augment = Augment(copies=3, noise=0.1, shift=1, flip=True)
    first = augment.inputs(X, seed=1)
    assert first.shape == (20, 2, 4, 4)
    assert torch.equal(first[:5], X)
    assert torch.equal(augment.inputs(X, seed=1), first)
    assert not torch.equal(augment.inputs(X, seed=2), first)
    assert not torch.equal(first[5:10], first[10:15])


def test_mixed_rows_lie_between_two_rows():
    corners = torch.eye(64, dtype=torch.float64)
    mixed = Augment(copies=20).inputs(corners)[64:]
    torch.testing.assert_close(mixed.sum(1), torch.ones(1280, dtype=torch.float64))
    assert int((mixed > 0).sum(1).max()) == 2
    share = mixed.unflatten(0, (20, 64)).diagonal(dim1=1, dim2=2)  # of the row itself
    # U(0, 1), but for rows that are mixed with themselves: five standard errors of 1,280
    assert float(share.mean()) == pytest.approx(0.5, abs=5 * 0.29 / 1280**0.5 + 1 / 64)


def test_shifted_images_are_windows_of_the_image_with_repeated_edges():
    copies = Augment(copies=40, mixup=False, shift=1).inputs(X)[5:].unflatten(0, (40, 5))
    padded = torch.nn.functional.pad(X, (1, 1, 1, 1), mode="replicate")
    windows = {(i, j): padded[..., i : i + 4, j : j + 4] for i in range(3) for j in range(3)}
    for row in range(5):
        seen = {
            place
            for copy in copies[:, row]
            for place, window in windows.items()
            if torch.equal(copy, window[row])
        }
        matches = [
            any(torch.equal(copy, window[row]) for window in windows.values())
            for copy in copies[:, row]
        ]
        assert all(matches)
        assert len(seen) > 4


def test_flipped_images_are_mirrored():
    copies = Augment(copies=30, mixup=False, flip=True).inputs(X)[5:].unflatten(0, (30, 5))
    mirrored = (copies == X.flip(-1)).flatten(2).all(-1)
    same = (copies == X).flatten(2).all(-1)
    assert bool((mirrored ^ same).all())
    assert 0.3 < float(mirrored.double().mean()) < 0.7  # 150 coins


def test_noise_has_its_standard_deviation():
    noise = Augment(copies=100, noise=0.5, mixup=False).inputs(X)[5:] - X.repeat(100, 1, 1, 1)
    assert float(noise.std()) == pytest.approx(0.5, rel=0.03)  # 16,000 numbers


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Augment(copies=0), "at least one copy"),
        (lambda: Augment(noise=-1.0), "noise and a shift of at least 0"),
        (lambda: Augment(mixup=False), "would repeat all rows unchanged"),
        (lambda: Augment().inputs(torch.arange(3)), "floating-point inputs, got torch.int64"),
        (lambda: Augment().inputs((X, X)), "floating-point inputs, got tuple"),
        (lambda: Augment(shift=1).inputs(X[0, 0]), r"images \(B, C, H, W\), got inputs \(4, 4\)"),
    ],
)
def test_invalid_settings_and_inputs_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
