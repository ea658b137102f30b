"""Detectors of unusual inputs: several scores, each with a p-value, and their combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from bayou.core.files import FileError, StrPath, making, read_file, write_file
from bayou.core.params import under
from bayou.operations.ood.columns import (
    FEATURE_SCORES,
    FunctionScores,
    feature_columns,
    output_columns,
)
from bayou.operations.ood.ranks import ConformalRanks, Rule
from bayou.posteriors import Posterior
from bayou.training.inputs import digest

DEFAULT_RULE: Rule = "fisher"
KIND = "ood detector"  # of files


@final
@dataclass(frozen=True, eq=False)
class UnusualRows:
    """How unusual some rows are: the scores of a detector and their p-values.

    Args:
        scores: each score by name, (B,); higher is more unusual.
        p_values: of each score by name, (B,): the fraction of held-out rows that are at least as
            unusual. Small is unusual.
        p_value: the p-value of the combination, (B,).
        ranks: the scores of the held-out rows.
    """

    scores: dict[str, Tensor]
    p_values: dict[str, Tensor]
    p_value: Tensor
    ranks: ConformalRanks

    def combine(self, names: Sequence[str], rule: Rule = DEFAULT_RULE) -> Tensor:
        """Return the p-value of a combination of some scores, (B,).

        Args:
            names: of the scores.
            rule: "fisher", "stouffer" or "minimum", as ``ConformalRanks.combine`` defines them.
        """
        stacked = torch.stack([self.scores[name] for name in self.ranks.names], 1)
        return self.ranks.combine(stacked, names, rule)

    def is_unusual(self, level: float = 0.05) -> Tensor:
        """Return which rows have a combined p-value of at most a level, (B,).

        Of rows like the held-out ones this is a fraction of ``level`` at most.

        Args:
            level: the fraction.

        Raises:
            ValueError: for a level that no p-value can reach, or that is not below 1.
        """
        smallest = 1 / (self.ranks.rows + 1)
        if not smallest <= level < 1:
            raise ValueError(
                f"level must lie between {smallest:.2g}, the smallest p-value with "
                f"{self.ranks.rows} held-out rows, and 1, got {level!r}"
            )
        return self.p_value <= level


@final
@dataclass(frozen=True, eq=False)
class Detector:
    """Scores of a posterior with p-values against held-out rows: the result of ``ood.fit``.

    Args:
        posterior: whose predictions and features are scored.
        ranks: the scores of the held-out rows.
        feature_scores: the fitted scores of each function, by name.
        rule: of the combination.
        layer: whose inputs are the features; None for the last one.
        samples: draws of a prediction; None for as many as ``predict`` takes.
        seed: of all draws.
        is_exact: whether the held-out rows are no training rows of the posterior, so that p-values
            of new rows of the same distribution are uniform.
    """

    posterior: Posterior
    ranks: ConformalRanks
    feature_scores: tuple[FunctionScores, ...]
    rule: Rule
    layer: str | None
    samples: int | None
    seed: int
    is_exact: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scores."""
        return self.ranks.names

    def score(self, x: object) -> UnusualRows:
        """Score new rows.

        Args:
            x: inputs of the network (B, ...), as ``posterior.predict`` takes them.

        Returns:
            Every score with its p-value, and the p-value of their combination.

        Raises:
            ValueError: for no rows, or a score that is NaN.
        """
        inputs = self.posterior.place(x)
        if not len(inputs[0]):
            raise ValueError("x has no rows; a detector scores one row or more")
        columns = output_columns(self.posterior, inputs, self.names, self.samples, self.seed)
        columns |= feature_columns(
            self.posterior, inputs, self.feature_scores, self.layer, self.seed
        )
        scores = {name: columns[name] for name in self.names}
        stacked = torch.stack([*scores.values()], 1).to(self.ranks.scores.device)
        p_values = dict(zip(self.names, self.ranks.p_values(stacked).unbind(1), strict=True))
        p_value = self.ranks.combine(stacked, self.names, self.rule)
        return UnusualRows(scores, p_values, p_value, self.ranks)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and JSON from which ``restore`` makes the detector again."""
        tensors = {"ranks": self.ranks.scores}
        for number, scores in enumerate(self.feature_scores):
            for name, score in scores.items():
                for key, value in score.state().items():
                    tensors[f"feature.{number}.{name}.{key}"] = value
        config = {
            "kind": KIND,
            "names": list(self.names),
            "feature_scores": [list(scores) for scores in self.feature_scores],
            "rule": self.rule,
            "layer": self.layer,
            "samples": self.samples,
            "seed": self.seed,
            "is_exact": self.is_exact,
            "posterior": _fingerprint(self.posterior),
        }
        return tensors, config

    @staticmethod
    def restore(
        tensors: Mapping[str, Tensor], config: Mapping[str, Any], posterior: Posterior
    ) -> Detector:
        """Return the detector with a ``state``.

        Args:
            tensors: of the state.
            config: of the state.
            posterior: for which the detector was fitted.

        Raises:
            FileError: for another posterior.
        """
        if config["posterior"] != _fingerprint(posterior):
            raise FileError(
                "the detector was fitted for another posterior, or for this one with another "
                "temperature; fit it again: bayou.ood.fit(posterior, data)"
            )
        device = next(iter(posterior.template().values())).device
        placed = {name: value.to(device) for name, value in tensors.items()}
        feature_scores = tuple(
            {
                name: FEATURE_SCORES[name].restore(under(f"feature.{number}.{name}.", placed))
                for name in names
            }
            for number, names in enumerate(config["feature_scores"])
        )
        return Detector(
            posterior,
            ConformalRanks(tuple(config["names"]), placed["ranks"]),
            feature_scores,
            config["rule"],
            config["layer"],
            config["samples"],
            config["seed"],
            config["is_exact"],
        )

    def save(self, path: StrPath) -> None:
        """Write the detector to a file that ``bayou.ood.load`` reads.

        The file has tensors and settings, without the posterior, which has a file of its own. It
        contains features of training rows, if there is a score of neighbors.

        Args:
            path: of the file, such as "detector.bayou".
        """
        write_file(path, *self.state())

    def __repr__(self) -> str:
        return (
            f"Detector({', '.join(self.names)}; {self.ranks.rows:,} held-out rows, "
            f"{len(self.feature_scores)} functions)"
        )


def load(path: StrPath, posterior: Posterior) -> Detector:
    """Read the detector in a file that ``Detector.save`` wrote.

    Args:
        path: of the file.
        posterior: for which it was fitted.

    Returns:
        The detector, which gives the same scores as before.

    Raises:
        FileError: for a file that is missing, damaged or foreign, or of another posterior.
    """
    tensors, config = read_file(path, KIND)
    with making("detector", path):
        return Detector.restore(tensors, config, posterior)


def _fingerprint(posterior: Posterior) -> str:
    """Return a digest of the tensors and the temperature of a posterior."""
    tensors, _ = posterior.state()
    values = [tensors[name] for name in sorted(tensors)]
    return digest((values, torch.tensor(posterior.temperature, dtype=torch.float64)))
