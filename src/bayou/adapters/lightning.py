"""Variational inference as a LightningModule, for training with a Lightning Trainer.

    module = BayesianModule(net, bayou.MNF(), bayou.Categorical(), n=len(train_set))
    Trainer(max_epochs=10).fit(module, train_loader, validation_loader)
    p = module.posterior().predict(x)

A run of ``bayou.fit`` can be killed and resumed bit for bit. Lightning's checkpoints have no random state, so that
runs resumed from them use other random numbers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from bayou import rng
from bayou.extras import extra
from bayou.guides import Bayesian
from bayou.guides.bayesian import Rules
from bayou.likelihoods import Likelihood
from bayou.methods.vi import VI, EvidenceBound, parameter_groups
from bayou.metrics import accuracy
from bayou.posteriors import Guided
from bayou.predictive import Predictive
from bayou.target import PriorRules, Target
from bayou.training.data import pair

with extra("lightning", "BayesianModule"):
    from lightning.pytorch import LightningModule

if TYPE_CHECKING:
    from torch import nn


@final
class BayesianModule(LightningModule):  # type: ignore[misc]
    """The loss of a batch of M out of N examples: −(1/M)·Σ_m log p(y_m | x_m, w) + (β/N)·KL(q ‖ p), w ~ q.

    ``n``: the number N of training examples. ``guide``: a family such as MNF(), or patterns → families. ``lr`` for
    everything but scales, ``scale_lr`` (10·lr) for log-stds. ``samples``: draws per step. Batches are pairs (x, y),
    several inputs in a tuple, or mappings with "labels". ``optimizer``: a function of parameter groups (Adam).

    Logs "loss", "elbo", "log_likelihood" and "kl" (nats for all data), and for validation data "val_nll", the negative
    log of predictions averaged over ``validation_samples`` draws, with "val_accuracy" for classes.
    """

    def __init__(
        self,
        net: nn.Module,
        guide: Rules,
        likelihood: Likelihood,
        n: int,
        *,
        prior: PriorRules | None = None,
        example: Any = None,
        lr: float = 1e-3,
        scale_lr: float | None = None,
        beta: float = 1.0,
        samples: int = 1,
        validation_samples: int = 8,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.target = Target.build(net, likelihood, prior, n)
        self.likelihood = self.target.likelihood
        self.bayesian = Bayesian(net, guide, self.target.prior, example)
        bound = EvidenceBound(VI(guide, samples=samples), self.target, self.bayesian)
        self.baseline = bound.baseline
        self._bound = (bound,)  # a tuple, so that shared tensors are not saved twice
        self.lr, self.scale_lr, self.beta = lr, scale_lr or 10 * lr, beta
        self.validation_samples, self.optimizer = validation_samples, optimizer
        self.history: list[dict[str, float]] = []
        self._started = time.monotonic()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two groups: scales with their own learning rate, and everything else."""
        groups = parameter_groups(self, self.lr, self.scale_lr)
        return torch.optim.Adam(groups) if self.optimizer is None else self.optimizer(groups)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """−ELBO/N of one batch."""
        x, y = pair(batch)
        bound = self._bound[0]
        bound.beta = torch.full_like(self.baseline.total, self.beta)
        loss, report = bound.loss(x, y)
        bound.after_step(report)
        self.log_dict({"loss": loss.detach(), **report}, on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """−log 1/S Σ_s p(y | x, w_s), the mean over the batch, with the same draws for every batch and epoch."""
        x, y = pair(batch)
        p = self._predictive(x)
        numbers = {"val_nll": -p.log_prob(y).mean()}
        if self.likelihood.support == "classes":
            numbers["val_accuracy"] = p.outputs.new_tensor(accuracy(p, y))
        self.log_dict(numbers, batch_size=len(y), prog_bar=True, sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Predictive:
        """The prediction for a batch of x, or of (x, y) pairs without using y."""
        return self._predictive(batch[0] if isinstance(batch, list | tuple) else batch)

    def _predictive(self, x: Any) -> Predictive:
        posterior = Guided(self.target, self.bayesian)
        return posterior.predict(x, self.validation_samples, seed=rng.fold(0, "validation"))

    def on_train_epoch_end(self) -> None:
        """One record of the history, with the means of the epoch."""
        seen = self.trainer.callback_metrics
        names = {"elbo": "elbo", "log_likelihood": "log_likelihood", "kl": "kl", "val_nll": "validation"}
        record = {ours: float(seen[theirs]) for theirs, ours in names.items() if theirs in seen}
        seconds = time.monotonic() - self._started
        self.history.append({"step": float(self.trainer.global_step - 1), **record, "seconds": seconds})

    def posterior(self) -> Guided:
        """A copy of the current posterior, on the device of the module."""
        found = Guided(self.target.copy(), copy.deepcopy(self.bayesian).eval(), list(self.history))
        found.stopped = "finished"
        return found
