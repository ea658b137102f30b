"""The predictive distribution of y: a mixture over S samples of the network's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from bayou.core.rng import Seed
from bayou.likelihoods import BoundLikelihood, FiniteLikelihood, decisions
from bayou.likelihoods.decisions import Decision, Utility
from bayou.likelihoods.mixtures import average, chunks


@final
class Predictive:
    """p(y | x) = 1/S Σ_s p(y | f_s), with f_s = net(x; w_s), w_s ~ the posterior.

    y is (B, *event): the shape of one output, without the classes' axis for a categorical y and
    with half of the last axis for a heteroscedastic one. Moments, quantiles and entropies are the
    mixture's.

    Args:
        likelihood: p(y | f).
        outputs: f_s at B inputs, (S, B, *out).

    Raises:
        ValueError: if the outputs have no samples, or do not match the likelihood.

    Example:
        >>> predictive = posterior.predict(x)
        >>> predictive.mean, predictive.std
        >>> low, high = predictive.interval(0.9)
    """

    def __init__(self, likelihood: BoundLikelihood, outputs: Tensor) -> None:
        if outputs.ndim < 2 or outputs.shape[0] == 0:
            raise ValueError(
                "outputs must be (samples, batch, *out) with 1 sample or more, "
                f"got {tuple(outputs.shape)}"
            )
        if not outputs.is_floating_point():
            raise ValueError(f"outputs must be floating point, got {outputs.dtype}")
        likelihood.target_shape(outputs.shape[1:])  # raises if they do not match the likelihood
        self.likelihood: BoundLikelihood = likelihood.for_scores()
        self.outputs = outputs

    def __repr__(self) -> str:
        return f"Predictive({type(self.likelihood).__name__}, outputs={tuple(self.outputs.shape)})"

    @property
    def means(self) -> Tensor:
        """Compute E[y | f_s] for every sample: (S, B, *event).

        For a categorical y they are class probabilities, (S, B, *event, C).
        """
        return self.likelihood.mean(self.outputs)

    @property
    def mean(self) -> Tensor:
        """Compute E[y], (B, *event); class probabilities (B, *event, C) for a categorical y."""
        return self._average(self.likelihood.mean)

    @property
    def std(self) -> Tensor:
        """Compute √Var[y], in the shape of ``mean``.

        Var[y] = Var_s E[y | f_s] + E_s Var[y | f_s], of the class indicators for a categorical y.
        """
        return (self._epistemic_variance + self._average(self.likelihood.variance)).sqrt()

    @property
    def epistemic_std(self) -> Tensor:
        """Compute √Var_s E[y | f_s], the uncertainty that more data would reduce."""
        return self._epistemic_variance.sqrt()

    @property
    def aleatoric_std(self) -> Tensor:
        """Compute √E_s Var[y | f_s], the observation noise."""
        return self._average(self.likelihood.variance).sqrt()

    @property
    def entropy(self) -> Tensor:
        """Compute H[y] in nats, (B,), differential for a continuous y.

        It is exact for classes, and by quadrature for the other likelihoods of bayou. With several
        coordinates it is Σ_i H[y_i], an upper bound of the joint entropy: they share the samples. A
        sum over a sequence has its padding too; ``entropy_map`` has the terms.
        """
        return self._per_example(self.entropy_map)

    @property
    def entropy_map(self) -> Tensor:
        """Compute H[y_i] in nats of every coordinate, such as a token or a pixel: (B, *event)."""
        return self.likelihood.mixture_entropy(self.outputs)

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Compute E_s H[y | f_s] in nats, (B,).

        It is ``entropy`` minus ``mutual_information``, up to rounding.
        """
        return self._per_example(self._average(self.likelihood.entropy))

    @property
    def mutual_information(self) -> Tensor:
        """Compute I[y; w] = H[y] − E_s H[y | f_s] ≥ 0 in nats, (B,).

        It is the epistemic part of the entropy (Houlsby et al. 2011, arXiv:1112.5745).
        """
        return self._per_example(self.mutual_information_map)

    @property
    def mutual_information_map(self) -> Tensor:
        """Compute I[y_i; w] in nats of every coordinate: (B, *event)."""
        return self.likelihood.mixture_information(self.outputs)

    @property
    def probabilities(self) -> Tensor:
        """Compute P(y_i = k) of every class k, two for a binary y: (B, *event, K)."""
        if not isinstance(self.likelihood, FiniteLikelihood):
            raise ValueError(
                f"probabilities are for classes, not for {type(self.likelihood).__name__}; "
                "use log_prob"
            )
        return self.likelihood.mixture_pmf(self.outputs)

    def log_prob(self, y: Tensor) -> Tensor:
        """Compute log p(y) = logsumexp_s log p(y | f_s) − log S, over all coordinates: (B,).

        Args:
            y: targets, (B, *event).
        """
        self.likelihood.validate(self.outputs.shape[1:], y)
        blocks = (self.outputs,) if self.likelihood.needs_all_samples else chunks(self.outputs)
        terms = torch.cat([self.likelihood.log_prob(f, y) for f in blocks])
        return terms.logsumexp(0) - math.log(len(self.outputs))

    def cdf(self, y: Tensor) -> Tensor:
        """Compute P(Y_i ≤ y_i): (B, *event).

        Args:
            y: values, (B, *event).
        """
        return self._average(lambda f: self.likelihood.cdf(f, y))

    @torch.no_grad()
    def exceeds(self, threshold: float | Tensor) -> Tensor:
        """Compute P(Y_i > threshold), in the units of y: (B, *event).

        It is the average of 1 − P(Y_i ≤ threshold | f_s) over the functions, accurate in the upper
        tail of the likelihoods of bayou. Ordered classes have the threshold k, the number of a
        class: the probability of the classes above it. (A custom likelihood without a ``cdf`` is
        sampled.)

        Args:
            threshold: a number, or one for each row and coordinate, (B, *event).

        Raises:
            ValueError: for classes without an order, or a threshold that is nan or of another
                shape.

        Example:
            >>> posterior.predict(x).exceeds(250.0)  # how probable a price above 250 is
        """
        likelihood = self.likelihood
        if likelihood.support == "classes" and not likelihood.is_ordered:
            raise ValueError(
                "classes have no order, so none exceeds a threshold; probabilities has that of "
                "every class"
            )
        if isinstance(likelihood, FiniteLikelihood):
            shape = likelihood.log_pmf(self.outputs[:1]).shape[1:-1]
        else:
            shape = likelihood.mean(self.outputs[:1]).shape[1:]
        y = torch.as_tensor(threshold, dtype=self.outputs.dtype, device=self.outputs.device)
        if bool(y.isnan().any()) or y.shape not in (torch.Size(), shape):
            raise ValueError(
                f"threshold must be a number or a tensor {tuple(shape)}, got "
                f"{threshold if y.ndim == 0 else tuple(y.shape)}; nan is none"
            )
        y = y.expand(shape)
        if not likelihood.overrides("log_survival"):
            return 1 - self.cdf(y)
        return self._average(lambda f: likelihood.log_survival(f, y).exp())

    def decide(
        self,
        utilities: Tensor | Sequence[Sequence[float]] | Utility,
        actions: Tensor | Sequence[float] | None = None,
        *,
        abstain: float | None = None,
        names: Sequence[str] | None = None,
    ) -> Decision:
        """Choose the action with the highest expected utility for every row.

        Costs are negative utilities. For classes the expectations are exact. For counts they are
        sums over all counts up to the quantile 1 − 10⁻⁶ (over groups of them where there are more
        than 4,096). For real numbers y is divided into 512 cells between its quantiles, whose
        probabilities are exact for every function, and u is evaluated in the middle of each: the
        relative error of an expected loss is about 10⁻⁴, or 10⁻³ for heavy tails. The best action
        of ``Newsvendor`` is a quantile, exact to rounding.

        Args:
            utilities: for classes a matrix (actions, classes); for numbers a function u(action, y)
                of tensors that broadcast, which returns one number for each pair, such as
                ``bayou.likelihoods.Newsvendor``.
            actions: for numbers, the actions to choose from, in a list (A,), or a tensor
                (A, B, *event) with other ones in each row. None (the default) for a utility that
                has a formula of the best action, and for classes.
            abstain: the cost of leaving a row to somebody else (its utility is −abstain); None (the
                default) if that is no option.
            names: the names of the actions.

        Raises:
            ValueError: if the utilities do not match the classes or are not finite, or actions are
                missing.

        Example:
            >>> costs = torch.tensor([[0.0, 10.0], [1.0, 0.0]])  # ignore, flag; of good, bad
            >>> decision = predictive.decide(-costs, names=["ignore", "flag"], abstain=0.3)
            >>> decision.labels, decision.perfect_information
        """
        return decisions.decide(self, utilities, actions, abstain=abstain, names=names)

    @torch.no_grad()
    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Compute the smallest y_i with P(Y_i ≤ y_i) ≥ q.

        Solved on the mixture, not sampled: to rounding for a continuous y, exact for a discrete
        one. (A custom likelihood without a ``cdf`` is sampled.) The quantiles of a categorical y
        are class indices, which are meaningful only if the classes are ordered.

        Args:
            q: a level between 0 and 1, or a sequence of Q levels.

        Returns:
            Quantiles (B, *event), or (Q, B, *event) for a sequence.
        """
        for level in (q,) if isinstance(q, int | float) else q:
            check_level(level, "a quantile's")
        if isinstance(q, int | float):
            return self.likelihood.mixture_quantile(self.outputs, q)
        return torch.stack([self.likelihood.mixture_quantile(self.outputs, level) for level in q])

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Compute the central interval of y with (at least) this probability.

        Args:
            level: the probability (default 0.9).

        Returns:
            The quantiles (1 − level)/2 and (1 + level)/2, (B, *event) each.
        """
        check_level(level)
        if self.likelihood.support == "classes" and not self.likelihood.is_ordered:
            raise ValueError(
                f"classes have no order, so no interval({level}); prediction_set({level}) gives "
                "the smallest set of them with that probability, quantile(q) class indices if "
                "yours are ordered"
            )
        return self.quantile(0.5 - level / 2), self.quantile(0.5 + level / 2)

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Compute the smallest set of classes with (at least) this probability.

        Args:
            level: the probability (default 0.9).

        Returns:
            A mask of the classes, (B, *event, K).
        """
        check_level(level, "a set's")
        p, order = self.probabilities.sort(stable=True, dim=-1, descending=True)
        mass_before = p.cumsum(-1) - p  # the probability of the more probable classes
        mask = torch.zeros_like(mass_before, dtype=torch.bool)
        return mask.scatter(-1, order, mass_before < level)

    @torch.no_grad()
    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """Draw y n times, each from one sample of the network for the whole batch.

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.

        Returns:
            Draws (n, B, *event).
        """
        return self.likelihood.mixture_sample(self.outputs, n, seed)

    @property
    def _epistemic_variance(self) -> Tensor:
        """Compute Var_s E[y | f_s], in the shape of ``mean``."""
        mean = self.mean

        def squared_deviation(f: Tensor) -> Tensor:
            deviation = self.likelihood.mean(f) - mean
            return deviation.square() + self.likelihood.function_variance(f)

        return self._average(squared_deviation)

    def _average(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Average a function of the outputs over the samples."""
        if self.likelihood.needs_all_samples:
            return function(self.outputs).mean(0)
        return average(function, self.outputs)

    def _per_example(self, x: Tensor) -> Tensor:
        """Sum over the coordinates of every example: (B, *event) to (B,)."""
        return x.flatten(1).sum(1) if x.ndim > 1 else x


def check_level(level: float, owner: str = "an interval's") -> None:
    """Raise a ValueError unless this is a probability between 0 and 1.

    Args:
        level: the level.
        owner: what has the level, for the error message.
    """
    if not 0 < level < 1:
        raise ValueError(f"{owner} level must lie strictly between 0 and 1, got {level}")
