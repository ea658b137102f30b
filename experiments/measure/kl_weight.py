"""The weight β of the KL on digits: the bound, the distance to HMC and the NLL, and which β is
selected on held-out rows.

    python -m experiments.measure.kl_weight        # some ten minutes on one core

The network, prior and rows of the reference ``hmc-digits``; mean field by Adam, 3,000 steps from
random weights. ``docs/methods/vi.md`` has its numbers.
"""

from __future__ import annotations

import torch
from torch import nn

import bayou
from bayou import truth
from bayou.data import load
from bayou.select.kl_weight import KL_WEIGHTS
from bayou.truth.board import fidelity
from experiments.truth_reference import PRIOR, PROBLEMS

SETTINGS = {"steps": 3000, "lr": 1e-2, "warmup": 0.3, "start": "network"}
SEED, SAMPLES = 0, 200


def main() -> None:
    """Print a line for each β, and what is selected."""
    data = load("digits")
    x, y = data.train
    reference = truth.reference("hmc-digits")
    of_hmc = truth.class_predictive(reference.log_probs)

    def fit(beta: float | str) -> bayou.Posterior:
        net: nn.Module = PROBLEMS["digits"].build(x, 10)
        method = bayou.VI(beta=beta, **SETTINGS)
        return bayou.fit(net, (x, y), method, prior=PRIOR, seed=SEED, progress=False)

    for beta in KL_WEIGHTS:
        posterior = fit(beta)
        bound = bayou.elbo(posterior, (x, y), SAMPLES, seed=SEED)
        p = posterior.predict(data.test[0], SAMPLES, seed=SEED).probabilities
        scores = fidelity(truth.class_predictive(p.log()), of_hmc, reference.y)
        numbers = {"elbo": bound.value, "log-likelihood": bound.log_likelihood, "kl": bound.kl}
        line = [f"{name}/N {value / len(x):.3f}" for name, value in numbers.items()]
        line += [f"{name} {value:.4f}" for name, value in scores.items()]
        print(f"{beta:g}: {', '.join(line)}", flush=True)
    posterior = fit("validation")
    print(posterior.choice)
    print(posterior.selection[0]["trials"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
