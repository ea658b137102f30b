"""A density of two dimensions, fitted to draws by maximum likelihood."""

import torch

STEPS = 400
torch.manual_seed(0)
first = torch.randn(2000, 1)
data = torch.cat((first, 0.5 * first.square() + 0.5 * torch.randn(2000, 1)), dim=1)
train, test = data[:1500], data[1500:]


def other_library():
    # start other
    from nflows import distributions, flows, transforms

    layers = []
    for _ in range(2):
        layers.append(transforms.ReversePermutation(2))
        layers.append(transforms.MaskedAffineAutoregressiveTransform(2, hidden_features=32))
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([2]))
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-flow.log_prob(train[torch.randint(1500, (256,))]).mean()).backward()
        optimizer.step()
    log_density = flow.log_prob(test)
    samples = flow.sample(1000)
    # end other
    return log_density.detach(), samples.detach()


def with_bayou():
    # start bayou
    from bayou import flows

    flow = flows.Flow(flows.StandardNormal(2), flows.maf(2, layers=2))
    flows.fit(flow, train, steps=STEPS, lr=5e-3, progress=False)
    log_density = flow.log_prob(test)
    samples = flow.sample(1000, seed=0)
    # end bayou
    return log_density.detach(), samples.detach()
