"""A factorized Gaussian over all weights of a network, by variational inference."""

import torch
from torch import nn

STEPS = 2000
torch.manual_seed(0)
x = torch.linspace(-1, 1, 100).unsqueeze(1)
y = x + 0.1 * torch.randn_like(x)
x_new = torch.tensor([[-0.5], [0.0], [0.5]])
net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))


def other_library():
    # start other
    from copy import deepcopy

    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    model = deepcopy(net)  # it is changed in place
    settings = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -4.0,
        "type": "Reparameterization",
        "moped_enable": False,
    }
    dnn_to_bnn(model, settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nll = 0.5 * ((model(x) - y) / 0.1).square().mean()
        (nll + get_kl_loss(model) / len(x)).backward()
        optimizer.step()
    with torch.no_grad():
        draws = torch.stack([model(x_new) for _ in range(200)])
    mean, epistemic_std = draws.mean(0), draws.std(0)
    # end other
    return mean, epistemic_std


def with_bayou():
    # start bayou
    import bayou

    posterior = bayou.fit(
        net,
        (x, y),
        bayou.VI(bayou.MeanField(), steps=STEPS, lr=1e-2),
        likelihood=bayou.Gaussian(0.1),
        prior=bayou.Normal(1.0),
        progress=False,
    )
    p = posterior.predict(x_new, samples=200)
    mean, epistemic_std = p.mean, p.epistemic_std
    # end bayou
    return mean, epistemic_std
