"""Networks of other libraries: TabM by the recipe of its pages, and sklearn-contrib-bde."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.tables.peers import split_held_out
from experiments.tables.rows import Rows
from experiments.tables.scores import Floats, Forecast, gaussian

BINS = 48  # of a piecewise-linear embedding
EMBEDDING = 16  # numbers for a column
BATCH_ROWS = 256
PREDICTED_ROWS = 4096  # at a time
PATIENCE = 16  # epochs without improvement
MAX_EPOCHS = 1000
MAX_SECONDS = 240.0  # of training; the best epoch until then is kept
BDE_ROWS = 5000


@final
@dataclass(frozen=True)
class Inputs:
    """Columns as TabM takes them.

    Args:
        numbers: standardized, medians where one is missing (N, columns).
        codes: of categories, 0 for one that no training row has (N, categories).
    """

    numbers: Tensor
    codes: Tensor

    def to(self, device: torch.device) -> Inputs:
        """Return the same on a device.

        Args:
            device: of torch.
        """
        return Inputs(self.numbers.to(device), self.codes.to(device))

    def at(self, rows: Any) -> tuple[Tensor, Tensor | None]:
        """Return some rows, without codes if there are none.

        Args:
            rows: an index or a slice.
        """
        return self.numbers[rows], self.codes[rows] if self.codes.shape[1] else None


def tabm_inputs(rows: Rows) -> tuple[Inputs, Inputs, list[int]]:
    """Return training and test rows for TabM, and the number of codes of every category.

    Args:
        rows: of one split.
    """
    places = list(rows.categories)
    others = [i for i in range(rows.mixed.shape[1]) if i not in rows.categories]
    train, test = rows.mixed[:, others], rows.mixed_test[:, others]
    with np.errstate(all="ignore"):
        median = np.nan_to_num(np.nanmedian(train, axis=0))
    train, test = (np.where(np.isnan(part), median, part) for part in (train, test))
    mean, scale = train.mean(0), train.std(0)
    varies = scale > 0
    numbers = [((part - mean) / np.where(varies, scale, 1))[:, varies] for part in (train, test)]
    codes = [part[:, places].astype(np.int64) + 1 for part in (rows.mixed, rows.mixed_test)]
    sizes = [int(column.max()) + 1 for column in codes[0].T]
    inputs = [
        Inputs(torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(c))
        for x, c in zip(numbers, codes, strict=True)
    ]
    return inputs[0], inputs[1], sizes


def fit_tabm(rows: Rows, seed: int) -> Forecast:
    """Fit TabM: 32 members, piecewise-linear embeddings, AdamW, and early stopping.

    The noise of a regression is that of held-out residuals.

    Args:
        rows: of one split.
        seed: of the split and the network.
    """
    fitted, held = split_held_out(rows, seed)
    train, test, sizes = tabm_inputs(rows)
    shift, scale = (0.0, 1.0) if rows.classes else (rows.y.mean(), rows.y.std())
    dtype = torch.long if rows.classes else torch.float32
    y = torch.as_tensor((rows.y - shift) / scale, dtype=dtype)
    # The recipe is for a GPU; on one thread of a processor most tables end at MAX_SECONDS.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test, y = train.to(device), test.to(device), y.to(device)
    torch.manual_seed(seed)
    net = _tabm(train.numbers[fitted], sizes, rows.classes or 1).to(device)
    _train(net, train, y, (torch.as_tensor(fitted), torch.as_tensor(held)))
    outputs = _member_outputs(net, test).cpu()
    if rows.classes:
        return Forecast(probabilities=outputs.softmax(-1).mean(1).double().numpy())
    residuals = (y[held] - _member_outputs(net, train, held).mean((1, 2))).cpu()
    std = float(residuals.square().mean().sqrt())
    return gaussian(shift + scale * outputs.mean((1, 2)).double().numpy(), scale * std)


def _tabm(numbers: Tensor, sizes: list[int], outputs: int) -> nn.Module:
    """Return the network; embeddings need columns with more than one value."""
    import rtdl_num_embeddings
    from tabm import TabM

    embeddings = None
    columns = numbers.shape[1]
    if columns:
        bins = rtdl_num_embeddings.compute_bins(numbers.cpu(), n_bins=min(BINS, len(numbers) - 1))
        embeddings = rtdl_num_embeddings.PiecewiseLinearEmbeddings(
            bins, EMBEDDING, activation=False, version="B"
        )
    return TabM.make(
        n_num_features=columns,
        cat_cardinalities=sizes or None,
        d_out=outputs,
        num_embeddings=embeddings,
    )


def _loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean over members (B, K, D) of their cross entropy, or squared error."""
    targets = y[:, None].expand(outputs.shape[:2])
    if y.is_floating_point():
        return F.mse_loss(outputs[..., 0], targets)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _train(net: nn.Module, inputs: Inputs, y: Tensor, parts: tuple[Tensor, Tensor]) -> None:
    """Train to the epoch with the lowest loss of the held-out rows."""
    fitted, held = parts
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=3e-4)
    best_loss, best_epoch = float("inf"), 0
    best = {name: value.clone() for name, value in net.state_dict().items()}
    started = time.monotonic()
    for epoch in range(MAX_EPOCHS):
        net.train()
        for batch in fitted[torch.randperm(len(fitted))].split(BATCH_ROWS):
            optimizer.zero_grad()
            _loss(net(*inputs.at(batch)), y[batch]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        loss = _held_out_loss(_member_outputs(net, inputs, held), y[held])
        if loss < best_loss:
            best_loss, best_epoch = loss, epoch
            best = {name: value.clone() for name, value in net.state_dict().items()}
        if epoch - best_epoch >= PATIENCE or time.monotonic() - started > MAX_SECONDS:
            break
    net.load_state_dict(best)


def _held_out_loss(outputs: Tensor, y: Tensor) -> float:
    """Return the loss of the averaged prediction."""
    if y.is_floating_point():
        return float(F.mse_loss(outputs.mean((1, 2)), y))
    return float(F.nll_loss(outputs.softmax(-1).mean(1).clamp_min(1e-12).log(), y))


@torch.inference_mode()
def _member_outputs(net: nn.Module, inputs: Inputs, rows: Any = slice(None)) -> Tensor:
    """Return the outputs of all members, (N, K, D)."""
    net.eval()
    numbers, codes = inputs.numbers[rows], inputs.codes[rows]
    parts = [
        net(*Inputs(x, c).at(slice(None)))
        for x, c in zip(numbers.split(PREDICTED_ROWS), codes.split(PREDICTED_ROWS), strict=True)
    ]
    return torch.cat(parts)


def fit_bde(rows: Rows, seed: int) -> Forecast:
    """Fit sklearn-contrib-bde with the settings of its README: two layers of 16, eight members.

    Args:
        rows: of one split.
        seed: of the model.
    """
    import bde
    import jax

    options: dict[str, Any] = {
        "n_members": 8,
        "hidden_layers": [16, 16],
        "epochs": 200,
        "patience": 10,
        "validation_split": 0.15,
        "lr": 1e-3,
        "weight_decay": 1e-4,
        "warmup_steps": 5000,
        "n_samples": 2000,
        "n_thinning": 2,
        "seed": seed,
    }
    x, x_test = rows.x.astype(np.float32), rows.x_test.astype(np.float32)
    if rows.classes:
        classifier = bde.BdeClassifier(loss=bde.loss.CategoricalCrossEntropy(), **options)
        classifier.fit(x=x, y=rows.y)
        return Forecast(probabilities=np.asarray(classifier.predict_proba(x_test), np.float64))
    shift, scale = float(rows.y.mean()), float(rows.y.std())
    y = ((rows.y - shift) / scale).astype(np.float32)[:, None]
    model = bde.BdeRegressor(loss=bde.loss.GaussianNLL(), **options)
    model.fit(x=x, y=y)
    raw = np.asarray(model.predict(x_test, raw=True), np.float64).reshape(-1, len(x_test), 2)
    std: Floats = np.asarray(jax.nn.softplus(raw[..., 1]), np.float64) + 1e-6
    keep = thin(len(raw))
    return gaussian(shift + scale * raw[keep, :, 0], scale * std[keep])


def thin(draws: int, most: int = 1000) -> Any:
    """Return the indices of at most this many draws, equally spaced.

    Args:
        draws: how many there are.
        most: how many are kept.
    """
    return np.unique(np.linspace(0, draws - 1, min(draws, most)).round().astype(int))
