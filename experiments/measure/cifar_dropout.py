"""The rate of dropout on CIFAR-10, by the NLL of 5,000 held-out training images after 50 epochs of
the other 45,000.

    python -m experiments.measure.cifar_dropout .1 .2 .3      # a line for each rate; some two minutes each
    on a GPU

The rate of the rows with dropout in ``experiments.reproduce hmc-cifar10``: 0.1 has .447 nats (accuracy
84.7 %), 0.2 .470 (83.7 %) and 0.3 .558 (81.0 %); one seed, an H200.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

import bayou
from bayou import metrics
from bayou.select import with_dropout
from experiments.hmc_cifar.images import Sizes, read
from experiments.hmc_cifar.network import resnet
from experiments.hmc_cifar.rows import PRIOR, methods

HELD, SEED = 5000, 100


def main() -> None:
    """Print the scores of each rate of the command line."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = replace(Sizes(), epochs=50)
    x, y = read(replace(sizes, epochs=0, samples=0), place).train
    for rate in map(float, sys.argv[1:]):
        torch.manual_seed(SEED)
        net, method = (
            with_dropout(resnet(), rate).to(place),
            methods(sizes, place.type == "cuda")["MC dropout"](),
        )
        posterior = bayou.fit(net, (x[:-HELD], y[:-HELD]), method, prior=PRIOR, seed=SEED)
        p = posterior.predict(x[-HELD:], sizes.samples, seed=SEED, chunk=1, batch_size=1000)
        print(
            f"{rate}: NLL {metrics.nll(p, y[-HELD:]):.4f}, accuracy {metrics.accuracy(p, y[-HELD:]):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
