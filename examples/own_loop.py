"""A training loop of one's own: ``bayou.bayesianize`` gives an ``nn.Module``, and a draw of it carries its KL.

    loss = −log-likelihood of the batch, per example + KL(q ‖ p)/N

Nothing else changes in the loop. ``draw`` is a network drawn from q with local reparameterization: each row of a batch
sees noise of its own, which is what makes the gradient quiet. The KL is counted in nats and never rescaled; the one
division by N is here, where the reader sees it. Afterwards the module and the data become a posterior like any other.

    python examples/own_loop.py --plot moons.png
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bayou
from bayou.data import load


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2))


def main(steps: int = 2000, plot: str | None = None) -> dict[str, float]:
    data = load("moons")
    x, y = data.train
    n, net = len(y), network()
    rules = {"0.weight": bayou.MeanField(), "*.weight": bayou.MNF(), "*": bayou.Delta()}  # the first match wins
    bnn = bayou.bayesianize(net, rules, prior=bayou.Normal(1.0), example=x[:2])

    scales = [
        p for name, p in bnn.named_parameters() if name.endswith("log_std")
    ]  # they start small and have far to go
    others = [p for name, p in bnn.named_parameters() if not name.endswith("log_std")]
    optimizer = torch.optim.Adam([{"params": others, "lr": 3e-3}, {"params": scales, "lr": 3e-2}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        batch = torch.randint(n, (128,))
        draw = bnn.draw()
        nll = F.cross_entropy(draw(x[batch]), y[batch])
        loss = nll + draw.kl / n
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(bnn.parameters(), 10.0)  # whatever else a loop does
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 5) == 0 or step + 1 == steps:
            print(f"step {step:5d}  loss {loss.item():7.4f} = nll {nll.item():6.4f} + KL {draw.kl.item():7.1f} / {n}")

    posterior = bnn.posterior(bayou.Categorical(), n)
    p = posterior.predict(data.test[0], seed=0)
    away = posterior.predict(data.ood, seed=0)
    found = {
        "accuracy": float((p.mean.argmax(-1) == data.test[1]).float().mean()),
        "elbo": bayou.elbo(posterior, (x, y), samples=20, seed=0).value,
        "entropy": float(p.entropy.mean()),
        "entropy_away": float(away.entropy.mean()),
    }
    print(f"\n{posterior!r}\naccuracy {found['accuracy']:.1%}, ELBO {found['elbo']:.1f} nats")
    print(f"mean entropy {found['entropy']:.3f} at test data, {found['entropy_away']:.3f} far away")
    with tempfile.TemporaryDirectory() as folder:  # it saves and loads like any posterior
        posterior.save(Path(folder) / "moons.bayou")
        again = bayou.load(Path(folder) / "moons.bayou", network()).predict(data.test[0], seed=0)
    print(f"loaded from its file it predicts the same: {torch.equal(again.outputs, p.outputs)}")
    if plot:
        from matplotlib.figure import Figure

        line = torch.linspace(-4, 4, 120)
        grid = torch.cartesian_prod(line, line)
        entropy = posterior.predict(grid, seed=0).entropy.reshape(120, 120)
        figure = Figure(figsize=(4.6, 4), layout="compressed")
        axis = figure.subplots()
        shown = axis.contourf(line, line, entropy.mT, levels=20, cmap="magma")
        axis.scatter(*x.T, c=["#7fb2e5" if label else "#f6a97a" for label in y], s=5, linewidths=0)
        figure.colorbar(shown, label="entropy in nats")
        figure.savefig(plot, dpi=130)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, plot=options.plot)
