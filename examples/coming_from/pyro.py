"""The posterior of a small model by the No-U-Turn sampler."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.linspace(-1, 1, 30).unsqueeze(1)
y = 2 * x + 0.5 + 0.3 * torch.randn_like(x)
x_new = torch.tensor([[-1.0], [0.0], [3.0]])


def other_library():
    # start other
    import pyro
    from pyro import distributions as dist

    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0))
        bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
        mean = weight * x + bias
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean.squeeze(-1), 0.3), obs=y)
        return mean

    pyro.set_rng_seed(0)
    kernel = pyro.infer.NUTS(model)
    mcmc = pyro.infer.MCMC(kernel, num_samples=250, warmup_steps=100, disable_progbar=True)
    mcmc.run(x, y.squeeze(-1))
    draws = mcmc.get_samples()
    outputs = draws["weight"] * x_new + draws["bias"]
    mean, epistemic_std = outputs.mean(-1, keepdim=True), outputs.std(-1, keepdim=True)
    # end other
    return mean, epistemic_std


def with_bayou():
    # start bayou
    import bayou

    posterior = bayou.fit(
        nn.Linear(1, 1),
        (x, y),
        bayou.NUTS(chains=2, draws=250, warmup=100),
        likelihood=bayou.Gaussian(0.3),
        prior=bayou.Normal(1.0),
        progress=False,
    )
    p = posterior.predict(x_new)
    mean, epistemic_std = p.mean, p.epistemic_std
    # end bayou
    return mean, epistemic_std
