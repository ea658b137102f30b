"""The recipe of a network that predicts its own noise: for tables whose noise depends on x."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from torch import Tensor

from bayou.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from bayou.likelihoods.continuous import HeteroscedasticStudentT, StudentT
from bayou.network.target import Target
from bayou.networks import TableLayout, TableNetwork
from bayou.select.noise import least_noise
from bayou.select.plans import Plan
from bayou.select.recipes import Recipe
from bayou.select.replaced_network import (
    check_replaceable,
    count_outputs,
    table_of,
    with_table_network,
)
from bayou.select.search_run import SearchRun
from bayou.training.data import Data, as_data

NAME: Final = "tabm-noise"  # in messages
HIDDEN: Final = (128, 128)  # units of the hidden layers, where the given network is of another kind
# Least standard deviation of the noise, in standard deviations of y: without it the density of
# targets that repeat would grow without bounds.
MIN_STD: Final = 1e-3


@final
@dataclass(frozen=True)
class PredictedNoise(Recipe):
    """A method by name for a network of tables that predicts the noise of every row.

    The network has two outputs for each target, m and s, and the likelihood is N(y; m, σ²) with
    σ = log(1 + exp(s)) + 10⁻³ in standard deviations of y (``HeteroscedasticGaussian``), or that of
    ``HeteroscedasticStudentT`` in place of Student-t noise. For rounded targets the noise of their
    rounding is in place of 10⁻³, if it is larger. It takes the place of the given
    network: with the layout and the hidden layers of a ``TableNetwork``, else with a layout of the
    rows. The posterior contains its network: ``bayou.load`` takes any other in its place.

    Args:
        recipe: the method, of this network.
        hidden: units of the hidden layers, where the given network is no ``TableNetwork``.

    Paper: Nix & Weigend 1994, *Estimating the mean and variance of the target probability
    distribution*, https://doi.org/10.1109/ICNN.1994.374138.
    """

    recipe: Recipe
    hidden: tuple[int, ...] = HIDDEN

    @property
    def batch_size(self) -> int:
        """The batch size of the method."""
        return self.recipe.batch_size

    def check_target(self, target: Target, data: Data) -> None:
        """Raise a ValueError where there is no noise to learn, or the network cannot be replaced.

        Args:
            target: network, likelihood and prior.
            data: the training data.
        """
        _with_predicted_noise(target.likelihood_spec, MIN_STD)
        check_replaceable(target, NAME)
        table_of(data, NAME)

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Plan the fit of the network that predicts its noise."""
        rows = as_data(data, self.batch_size)
        self.check_target(target, rows)
        min_std = max(MIN_STD, least_noise(rows))
        noisy_target = self._replace_network(target, table_of(rows, NAME), run, min_std)
        plan = self.recipe.make_plan(noisy_target, rows, run)
        decision = "a network of tables that predicts its noise"
        narrowed = None if plan.narrowed is None else replace(self, recipe=plan.narrowed)
        return replace(plan, decisions=(decision, *plan.decisions), narrowed=narrowed)

    def _replace_network(self, target: Target, x: Tensor, run: SearchRun, min_std: float) -> Target:
        """Return the target of the network of tables, in the units of the given network."""
        likelihood = _with_predicted_noise(target.likelihood_spec, min_std)
        outputs = likelihood.outputs(count_outputs(target, x, NAME))

        def build() -> TableNetwork:
            if isinstance(target.net, TableNetwork):
                settings = target.net.settings | {"outputs": outputs}
                return TableNetwork(target.net.layout, **settings)
            return TableNetwork(TableLayout.fit(x), outputs, self.hidden)

        return with_table_network(target, build, NAME, run, likelihood)


def _with_predicted_noise(likelihood: Likelihood, min_std: float) -> Likelihood:
    """Return a likelihood of the same family whose noise the network predicts.

    Args:
        likelihood: with a noise to learn.
        min_std: the least standard deviation of Gaussian noise.

    Raises:
        ValueError: the noise is known, or of another kind.
    """
    if isinstance(likelihood, Gaussian) and likelihood.learn:
        return HeteroscedasticGaussian(min_std=min_std, transform="softplus")
    if isinstance(likelihood, StudentT) and likelihood.learn:
        return HeteroscedasticStudentT(likelihood.df)
    raise ValueError(
        f"{NAME} predicts a noise that is learned, of Gaussian(learn=True) or "
        f"StudentT(learn=True), got {likelihood!r}; use tabm"
    )
