"""Sequential tests of a stream of rows: conformal test martingales, which may be read any time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.files import StrPath, making, read_file, write_file
from bayou.diagnostics.findings import Verdict
from bayou.diagnostics.reference import ReferenceRows, check_rows
from bayou.diagnostics.row_comparison import MIN_HELD_OUT_ROWS, PredictsRows
from bayou.diagnostics.target_scores import target_scores

SLOPES = (-1.0, 0.0, 1.0)  # of the bets 1 + slope·(p − 1/2)
JUMP = 0.01  # fraction of the capital that is spread over the slopes again in each step
MAX_LOG_CAPITAL = 700.0  # its exponential is finite
KIND = "martingale"  # of a file
BLOCK_SCORES = 512  # new scores that are compared with each other at a time
MAX_PROBE_DIFFERENCE = 1e-4  # between predictions of one posterior on different machines
MAX_INPUTS = 40  # of a row, each with a martingale of its own
TARGET_SCORES = ("location", "spread")


@final
@dataclass(frozen=True)
class Bets:
    """The capital of the simple jumper, a martingale of p-values (Vovk et al. 2021).

    Each step multiplies the capital of a slope ε by 1 + ε·(p − 1/2), after a fraction of all
    capital was spread evenly over the slopes. If the p-values are independent and uniform, the
    total is a martingale with mean 1, and exceeds 1/α at any time with a probability of at most α
    (Ville 1939).

    Args:
        log_capital: logarithm of the total.
        shares: of the capital at each of the three slopes; their sum is 1.
        log_peak: the largest ``log_capital`` so far.
    """

    log_capital: float = 0.0
    shares: tuple[float, ...] = (1 / 3, 1 / 3, 1 / 3)
    log_peak: float = 0.0

    def bet(self, *p_values: float) -> Bets:
        """Return the capital after p-values.

        Args:
            p_values: each between 0 and 1, in their order.
        """
        shares = self.shares
        log_capital = self.log_capital
        log_peak = self.log_peak
        for p in p_values:
            paid = [
                ((1 - JUMP) * share + JUMP / len(SLOPES)) * (1 + slope * (p - 0.5))
                for share, slope in zip(shares, SLOPES, strict=True)
            ]
            total = sum(paid)
            log_capital += math.log(total)
            log_peak = max(log_peak, log_capital)
            shares = tuple([amount / total for amount in paid])
        return Bets(log_capital, shares, log_peak)


@final
@dataclass(frozen=True, eq=False)
class ConformalBets:
    """Bets on the rank of each new score among all earlier ones.

    p = (#{earlier > new} + τ·(#{earlier = new} + 1))/(earlier + 1), τ uniform: independent and
    uniform if old and new scores are exchangeable (Vovk, Nouretdinov & Gammerman, Testing
    exchangeability on-line, ICML 2003).

    Args:
        scores: all earlier scores, sorted, (n,) in float64.
        bets: the capital.
        count: how many new scores there were.
    """

    scores: Tensor
    bets: Bets = field(default_factory=Bets)
    count: int = 0

    def update(self, values: Tensor, ties: Tensor) -> ConformalBets:
        """Return the bets after new scores, in their order.

        Args:
            values: the scores, (N,) in float64.
            ties: τ of each, between 0 and 1, (N,).
        """
        scores = self.scores
        bets = self.bets
        for block, tau in zip(values.split(BLOCK_SCORES), ties.split(BLOCK_SCORES), strict=True):
            below = torch.searchsorted(scores, block)
            up_to = torch.searchsorted(scores, block, right=True)
            # Row i: the scores of this block before the i-th one.
            is_greater = (block[None, :] > block[:, None]).tril(-1)
            is_equal = (block[None, :] == block[:, None]).tril(-1)
            greater_count = len(scores) - up_to + is_greater.sum(1)
            equal_count = up_to - below + is_equal.sum(1)
            earlier_count = len(scores) + torch.arange(len(block))
            p_values = (greater_count + tau * (equal_count + 1)) / (earlier_count + 1)
            bets = bets.bet(*p_values.tolist())
            scores = torch.cat((scores, block)).sort().values
        return ConformalBets(scores, bets, self.count + len(values))


@final
@dataclass(frozen=True, eq=False)
class ShiftMartingale:
    """A sequential test of a stream of rows, which keeps its rate of false alarms for ever.

    ``start`` begins with held-out rows, and ``update`` returns the state after new rows. There are
    K martingales: of the inputs their distance from the center of the training rows, the entropy
    of predictions (unless some inputs are left out), and each of the first 40 numbers of a row of a
    table; of the targets location and spread under the predictive. One of them is significant when
    its capital was ever K/alpha. If old and new rows are exchangeable, the verdict is ever other
    than "as expected" with a probability of at most alpha, however often it is read. Targets of
    tables are counted only where the inputs lie in the range of the training rows. Unlike
    ``watch``, the test does not compare rows of similar inputs: a shift of the inputs within that
    range can appear as a changed relation where the posterior is not calibrated in every region.

    Args:
        streams: the bets by the name of their score.
        inputs: indices of the inputs that have a martingale of their own, by its name.
        center: of the training rows, (D,).
        scale: of the training rows, (D,).
        low: the least input of the training rows, (D,).
        high: the largest input, (D,).
        compared: indices of the inputs that are compared; None for all.
        alpha: the largest probability of a false alarm.
        rows: how many new rows there were.
        samples: draws of the weights in a prediction.
        seed: of draws and random ranks.
        probe: what the posterior of ``start`` predicts for one row, by which another one is
            recognized; None in files that were written without it.
    """

    streams: dict[str, ConformalBets]
    inputs: dict[str, int]
    center: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    compared: tuple[int, ...] | None = None
    alpha: float = 0.01
    rows: int = 0
    samples: int | None = None
    seed: int = 0
    probe: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def start(
        cls,
        posterior: PredictsRows,
        reference: ReferenceRows,
        *,
        alpha: float = 0.01,
        samples: int | None = None,
        seed: int = 0,
    ) -> ShiftMartingale:
        """Begin with the held-out rows of a reference.

        Args:
            posterior: what predicts y.
            reference: training rows and held-out rows.
            alpha: the largest probability of a false alarm. Default: 0.01.
            samples: draws of the weights in a prediction; None: as many as ``predict`` takes.
            seed: of draws and random ranks.

        Raises:
            ValueError: for fewer than 50 held-out rows.
        """
        if isinstance(alpha, bool) or not 0 < alpha < 1:
            raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha!r}")
        held_x = reference.held_x
        held_y = reference.held_y
        if held_x is None or held_y is None or len(held_x) < MIN_HELD_OUT_ROWS:
            count = 0 if held_x is None else len(held_x)
            raise ValueError(
                f"a sequential test needs {MIN_HELD_OUT_ROWS} held-out rows or more, got {count}: "
                "ReferenceRows.of(x, (x_held, y_held))"
            )
        train = reference.x.reshape(len(reference.x), -1).double()
        scale = train.std(0, correction=0)
        names = reference.names or tuple(f"x{j + 1}" for j in range(train.shape[1]))
        indices = reference.compared
        if indices is None:
            indices = tuple(range(train.shape[1]))
        inputs = [(names[j], j) for j in indices[:MAX_INPUTS]] if reference.x.ndim == 2 else []
        test = cls(
            {},
            {f"input {name}": j for name, j in inputs},
            train.mean(0),
            torch.where(scale > 0, scale, torch.ones_like(scale)),
            train.amin(0),
            train.amax(0),
            reference.compared,
            alpha,
            0,
            samples,
            seed,
        )
        scores = test._scores(posterior, held_x, held_y, rng.fold(seed, "held-out rows"))
        streams = {name: ConformalBets(values.sort().values) for name, values in scores.items()}
        probe = test._probe(posterior, held_x)
        return replace(test, streams=streams, probe=probe)

    @torch.no_grad()
    def update(
        self, posterior: PredictsRows, x: Tensor, y: Tensor | None = None
    ) -> ShiftMartingale:
        """Return the test after new rows, in their order.

        Args:
            posterior: the one that the test was started with.
            x: inputs, (N, *shape).
            y: their targets; None without any.

        Raises:
            ValueError: for rows of another shape, or another posterior.
        """
        check_rows(x, "x", y)
        if x[0].numel() != len(self.center):
            raise ValueError(
                f"x has {x[0].numel()} numbers in a row, the reference has {len(self.center)}"
            )
        if self.probe is not None:
            probe = self._probe(posterior, x)
            if probe.shape != self.probe.shape or not torch.allclose(
                probe, self.probe, rtol=MAX_PROBE_DIFFERENCE, atol=MAX_PROBE_DIFFERENCE
            ):
                raise ValueError(
                    "the state belongs to another posterior: scores of two posteriors cannot be "
                    "compared; start another one, or use the posterior that it was started with"
                )
        seed = rng.fold(self.seed, "rows", self.rows)
        streams = dict(self.streams)
        for name, values in self._scores(posterior, x, y, seed).items():
            like = torch.empty(0, dtype=torch.float64)
            ties = rng.uniform(len(values), (), like, rng.fold(seed, "ties", name))
            streams[name] = streams[name].update(values, ties)
        return replace(self, streams=streams, rows=self.rows + len(x))

    def _probe(self, posterior: PredictsRows, x: Tensor) -> Tensor:
        """Return the probabilities, or mean and entropy, that a posterior predicts for one row.

        The row is one standard deviation above the center of the training rows.

        Args:
            posterior: the posterior.
            x: rows, for their shape and type.
        """
        row = torch.minimum(self.center + self.scale, self.high).reshape(x[:1].shape).to(x)
        predictive = posterior.predict(row, self.samples, seed=self.seed)
        if predictive.likelihood.support == "classes":
            values = predictive.probabilities
        else:
            values = torch.cat((predictive.mean.flatten(), predictive.entropy.flatten()))
        return values.detach().double().cpu().flatten().nan_to_num()

    def _scores(
        self, posterior: PredictsRows, x: Tensor, y: Tensor | None, seed: rng.Seed
    ) -> dict[str, Tensor]:
        """Return the scores of rows by name."""
        inputs = x.detach().reshape(len(x), -1).double().cpu()
        predictive = posterior.predict(x, self.samples, seed=self.seed)
        standardized = (inputs - self.center) / self.scale
        is_inside = (self.low <= inputs) & (inputs <= self.high)
        if self.compared is not None:
            standardized = standardized[:, list(self.compared)]
            is_inside = is_inside[:, list(self.compared)]
        scores: dict[str, Tensor] = {}
        if standardized.shape[1]:
            scores["distance"] = standardized.square().mean(1)
        if standardized.shape[1] == inputs.shape[1]:  # else it depends on inputs that are left out
            scores["uncertainty"] = predictive.entropy.detach().double().cpu()
        for name, j in self.inputs.items():
            scores[name] = inputs[:, j].contiguous()
        if y is None:
            return scores
        # Some pixel of nearly every image is outside the range.
        is_counted = torch.ones(len(x), dtype=torch.bool) if x.ndim > 2 else is_inside.all(1)
        target = target_scores(predictive, y, rng.fold(seed, "targets"), has_log_score=False)
        spread = target.spread if target.pit is not None else target.location.abs()
        scores["location"] = target.location.mean(1)[is_counted]
        scores["spread"] = spread.mean(1)[is_counted]
        return scores

    def evidence(self, name: str) -> float:
        """Return the largest capital of a martingale so far: 1 at the start, large for a shift.

        Args:
            name: "distance" or "uncertainty" of inputs, "location" or "spread" of targets, or one
                of ``inputs``.
        """
        return math.exp(min(self.streams[name].bets.log_peak, MAX_LOG_CAPITAL))

    @property
    def threshold(self) -> float:
        """The capital from which a martingale is significant: their number, divided by alpha."""
        return len(self.streams) / self.alpha

    @property
    def verdict(self) -> Verdict:
        """The conclusion from the rows so far, at the level alpha."""
        significant = self.significant
        if any(name in TARGET_SCORES for name in significant):
            return "the relation has changed"
        return "inputs have shifted" if significant else "as expected"

    @property
    def significant(self) -> tuple[str, ...]:
        """The names of the martingales that are significant."""
        return tuple(name for name in self.streams if self.evidence(name) >= self.threshold)

    def save(self, path: StrPath) -> None:
        """Write the state to a file, atomically.

        Args:
            path: the file.
        """
        tensors = {
            "center": self.center,
            "scale": self.scale,
            "low": self.low,
            "high": self.high,
        }
        streams = {}
        for name, stream in self.streams.items():
            tensors[f"scores.{name}"] = stream.scores
            bets = stream.bets
            streams[name] = {
                "count": stream.count,
                "log_capital": bets.log_capital,
                "log_peak": bets.log_peak,
                "shares": list(bets.shares),
            }
        config = {
            "kind": KIND,
            "streams": streams,
            "inputs": self.inputs,
            "compared": self.compared,
            "alpha": self.alpha,
            "rows": self.rows,
            "samples": self.samples,
            "seed": self.seed,
        }
        if self.probe is not None:
            tensors["probe"] = self.probe
        write_file(path, tensors, config)

    @classmethod
    def load(cls, path: StrPath) -> ShiftMartingale:
        """Read a state that ``save`` wrote.

        Args:
            path: the file.

        Raises:
            FileError: if the file is damaged or of another type.
        """
        tensors, config = read_file(path, KIND)
        with making("martingale", path):
            streams = {}
            for name, record in config["streams"].items():
                shares = tuple(map(float, record["shares"]))
                bets = Bets(float(record["log_capital"]), shares, float(record["log_peak"]))
                scores = tensors[f"scores.{name}"]
                streams[name] = ConformalBets(scores, bets, int(record["count"]))
            compared = config["compared"]
            return cls(
                streams,
                {str(name): int(j) for name, j in config["inputs"].items()},
                tensors["center"],
                tensors["scale"],
                tensors["low"],
                tensors["high"],
                None if compared is None else tuple(map(int, compared)),
                float(config["alpha"]),
                int(config["rows"]),
                config["samples"],
                int(config["seed"]),
                tensors.get("probe"),
            )
