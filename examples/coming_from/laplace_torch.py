"""The last layer of a trained regression network as a Gaussian, and its predictions."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.linspace(-2, 2, 100).unsqueeze(1)
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
x_new = torch.tensor([[0.0], [4.0]])
net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(500):
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()


def other_library():
    # start other
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    la = Laplace(
        net,
        "regression",
        subset_of_weights="last_layer",
        hessian_structure="full",
        sigma_noise=0.1,
        prior_precision=1.0,
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=100))
    mean, variance = la(x_new)
    epistemic_std = variance.squeeze(-1).sqrt()
    # end other
    return mean.detach(), epistemic_std.detach()


def with_bayou():
    # start bayou
    import bayou

    posterior = bayou.fit(
        net,
        (x, y),
        bayou.Laplace("full", where="last", start=None),
        likelihood=bayou.Gaussian(0.1),
        prior=bayou.Normal(1.0),
        progress=False,
    )
    p = posterior.predict(x_new, samples=2000)
    mean, epistemic_std = p.mean, p.epistemic_std
    # end bayou
    return mean, epistemic_std
