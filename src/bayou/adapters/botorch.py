"""A posterior as a BoTorch model, for Bayesian optimization: pip install 'bayou[botorch]'.

posterior = bayou.fit(net, (x, y), method=bayou.Ensemble(5), likelihood=bayou.Gaussian(0.05))
model = PosteriorModel(posterior, x)
acquisition = qLogExpectedImprovement(model, best_f=y.max())
candidates, _ = optimize_acqf(acquisition, bounds=bounds, q=2, num_restarts=8, raw_samples=256)
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.extras import extra
from bayou.core.params import size
from bayou.network import VmapOrLoop
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import NOISE

with extra("botorch", "PosteriorModel"):
    from botorch.models.ensemble import EnsembleModel
    from botorch.models.transforms.input import InputTransform
    from botorch.models.transforms.outcome import OutcomeTransform

EXAMPLE_ERROR = "BoTorch supports points (d,) only, so that example_x must be rows (B, d), got "


@final
class PosteriorModel(EnsembleModel):  # type: ignore[misc]
    """A BoTorch model of S functions E[y | f_s], drawn once from a posterior.

    They are the same functions at all points and in all batches. X (*batch, q, d) gives values
    (*batch, S, q, m), differentiable in X; ``model.posterior(X).rsample`` selects among the
    functions, so that its draws at q points are joint. They are those of
    ``posterior.predict(x, samples, seed=seed)``, without the noise of y. New observations need a
    new fit.

    Args:
        posterior: what predicts y.
        example_x: some rows (B, d).
        samples: S, by default 128, or all draws if there are fewer.
        seed: of the draws.
        outcome_transform: of BoTorch, if y was transformed before the fit; it is inverted.
        input_transform: of BoTorch, if x was transformed before the fit; it is applied.

    Raises:
        ValueError: if ``example_x`` are not rows (B, d).
    """

    def __init__(
        self,
        posterior: Posterior,
        example_x: Tensor,
        samples: int = 128,
        *,
        seed: int = 0,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: InputTransform | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(example_x, Tensor):
            raise ValueError(EXAMPLE_ERROR + type(example_x).__name__)
        if example_x.ndim != 2:
            raise ValueError(EXAMPLE_ERROR + str(tuple(example_x.shape)))
        self.fitted = posterior
        stack = posterior.sample(min(samples, posterior.draws or samples), rng.integer(seed))
        self.weights = {name: value for name, value in stack.items() if not name.startswith(NOISE)}
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        # Under the name input_transform BoTorch would require the training inputs.
        self.to_network = input_transform
        self._num_outputs = self.eval().forward(example_x[:1]).shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of one model."""
        return torch.Size()

    def forward(self, X: Tensor) -> Tensor:
        """Return E[y | f_s] of every function.

        Args:
            X: points (*batch, q, d).

        Returns:
            Values (*batch, S, q, m).
        """
        x = X if self.to_network is None else self.to_network(X)
        dtype = next(iter(self.fitted.template().values())).dtype
        (x,) = self.fitted.place(x.reshape(-1, x.shape[-1]).to(dtype))
        call = VmapOrLoop(self.fitted.call, (0, None), loop=not self.fitted.mappable)
        f = call(self.weights, x)  # (S, N, *out)
        means = self.fitted.apply_temperature(self.fitted.target.likelihood, f).means
        return means.reshape(size(self.weights), *X.shape[:-1], -1).movedim(0, -3).to(X)
