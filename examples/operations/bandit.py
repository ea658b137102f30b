# %% [markdown]
# # A bandit: explore with a posterior that learns after every round
#
# Each customer gets one of six offers, and only the answer to that offer is seen. Thompson sampling draws a function
# from the posterior for each customer and takes the offer that is best for it: offers that might be good are tried,
# those that are known to be worse are not. `posterior.update` learns the answers of a round in milliseconds. Beside it
# ε-greedy with the same posterior, and LinUCB, a linear model with a bonus for uncertainty (Li et al. 2010).

# %%
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import bayou
from bayou import rng

OFFERS, FEATURES, NOISE, SEEDS, ZERO = 6, 2, 0.3, range(3), torch.zeros(1).double()
START, ROUNDS, CUSTOMERS = 80, 40, 10  # random offers at first; then rounds of ten customers


def customers(n: int, seed: int) -> Tensor:
    return rng.uniform(n, (FEATURES,), ZERO, seed) * 2 - 1


def random_offers(n: int, seed: int) -> Tensor:
    return (rng.uniform(n, (), ZERO, rng.fold(seed, "offers")) * OFFERS).long()


def values(x: Tensor) -> Tensor:
    return 2 * torch.exp(-3 * torch.cdist(x, customers(OFFERS, seed=100)).square())


def answers(x: Tensor, offer: Tensor, seed: int) -> Tensor:
    return values(x).gather(1, offer[:, None]) + NOISE * rng.normal(len(x), (1,), x, seed)


def pairs(x: Tensor) -> Tensor:
    """Customers with each offer, the inputs of the network, (n, OFFERS, FEATURES + OFFERS)."""
    offers = torch.eye(OFFERS).double().expand(len(x), -1, -1)
    return torch.cat([x[:, None].expand(-1, OFFERS, -1), offers], -1)


# %% [markdown]
# Two posteriors are fitted once, to 80 random offers. The last layer keeps its features, which saw only these rows; the
# wide network has none to keep.


# %%
def fitted(name: str, data: tuple[Tensor, Tensor], seed: int) -> bayou.Posterior:
    torch.manual_seed(seed)
    body = [nn.Linear(FEATURES + OFFERS, 80), nn.Tanh(), nn.Linear(80, 80), nn.Tanh()]
    net = nn.Sequential(*body, nn.Linear(80, 1)).double()
    last = bayou.Laplace("full", where="last", start=bayou.MAP(steps=300), predictive="sampled")
    method = last if name == "last layer" else bayou.methods.Wide(draws=1, passes=30)
    return bayou.fit(net, data, method, likelihood=bayou.Gaussian(NOISE), seed=seed, progress=False)


# A rule gets the posterior and all rows so far, and returns the offers of a round.
def thompson(posterior, history, x: Tensor, seed: int) -> Tensor:
    functions = posterior.predict(pairs(x).flatten(0, 1), samples=len(x), seed=seed).outputs
    each = functions[..., 0].reshape(len(x), len(x), OFFERS)  # (function, customer, offer)
    return each.diagonal().mT.argmax(1)


def greedy(posterior, history, x: Tensor, seed: int) -> Tensor:
    best = posterior.predict(pairs(x).flatten(0, 1)).mean.reshape(len(x), OFFERS).argmax(1)
    explores = rng.uniform(len(x), (), x, rng.fold(seed, "explore")) < 0.1
    return torch.where(explores, random_offers(len(x), seed), best)


def lin_ucb(posterior, history, x: Tensor, seed: int) -> Tensor:
    known, offers, y = history
    scores = []
    for offer in range(OFFERS):
        a, at = (torch.nn.functional.pad(rows, (0, 1), value=1.0) for rows in (known, x))
        a = a[offers == offer]
        covariance = torch.linalg.inv(a.mT @ a + torch.eye(FEATURES + 1).double())
        weights = covariance @ a.mT @ y[offers == offer, 0]
        scores.append(at @ weights + (at @ covariance * at).sum(1).sqrt())
    return torch.stack(scores, 1).argmax(1)


def play(rule, name: str | None, seed: int) -> Tensor:
    x, offer = customers(START, rng.fold(seed, "start")), random_offers(START, seed)
    history = (x, offer, answers(x, offer, rng.fold(seed, "noise")))
    rows = pairs(x)[torch.arange(START), offer]
    posterior = None if name is None else fitted(name, (rows, history[2]), seed)
    regret = []
    for number in range(ROUNDS):
        of_round = rng.fold(seed, "round", number)
        x = customers(CUSTOMERS, of_round)
        offer = rule(posterior, history, x, rng.fold(of_round, "rule"))
        y = answers(x, offer, rng.fold(of_round, "noise"))
        regret.append(values(x).amax(1) - values(x).gather(1, offer[:, None])[:, 0])
        history = tuple(torch.cat(pair) for pair in zip(history, (x, offer, y), strict=True))
        if posterior is not None:
            posterior = posterior.update((pairs(x)[torch.arange(CUSTOMERS), offer], y))
    return torch.cat(regret).cumsum(0)


# %%
players = {
    "Thompson, last layer": (thompson, "last layer", "#3b5b92"),
    "Thompson, wide": (thompson, "wide", "#2a9d8f"),
    "ε-greedy, wide": (greedy, "wide", "#d9743c"),
    "LinUCB": (lin_ucb, None, "0.5"),
}
title = "Cumulative regret over 400 customers for four rules, with the range over seeds"
fig, axis = plt.subplots(figsize=(7, 3.4), layout="compressed", num=title)
for label, (rule, name, color) in players.items():
    curve = torch.stack([play(rule, name, seed) for seed in SEEDS])
    error = curve[:, -1].std() / len(SEEDS) ** 0.5
    print(f"{label:22s} regret {curve[:, -1].mean():6.1f} ± {error:4.1f}")
    steps = range(1, curve.shape[1] + 1)
    axis.plot(steps, curve.mean(0), color=color, label=label)
    axis.fill_between(steps, curve.amin(0), curve.amax(0), color=color, alpha=0.15, linewidth=0)
axis.set(xlabel="customers", ylabel="cumulative regret")
axis.legend(frameon=False)
plt.show()
