"""A custom training loop, as in the README."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.core.files import FileError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm, self.fc = nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x):
        h = self.norm(self.conv1(x)).relu()
        return self.fc(F.max_pool2d(self.conv2(h).relu(), 2).flatten(1))


def test_the_snippet_trains():
    torch.manual_seed(0)
    n = 96
    x = torch.randn(n, 1, 8, 8)
    y = x.mean((1, 2, 3)).mul(8).round().clamp(-1, 1).long() + 1
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    bnn = bayou.bayesianize(
        net, {"conv*.weight": bayou.MNF(), "*.weight": bayou.MeanField(), "*": bayou.Delta()}
    )
    optimizer = torch.optim.Adam(bnn.parameters(), 1e-2)
    losses, likelihoods = [], []
    for _ in range(60):
        draw = bnn.draw()
        likelihood = F.cross_entropy(draw(x), y)
        loss = likelihood + draw.kl / n
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        likelihoods.append(likelihood.item())

    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert sum(likelihoods[-5:]) < 0.8 * sum(likelihoods[:5])
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} of the user's network has changed"
    assert not torch.equal(bnn.net.norm.running_mean, net.norm.running_mean)
    names = [name for name, _ in bnn.named_parameters()]
    assert names
    assert all(name.startswith("guides.") for name in names), "placeholders among the parameters"
    assert not any(name.endswith(("conv1.weight", "fc.bias")) for name in bnn.state_dict())
    weights = sum(p.numel() for p in net.parameters())
    assert sum(w[0].numel() for w in bnn.sample(2).values()) == weights


def test_reinforce_in_a_custom_loop():
    """E[f(mask)] has the gradient of its score: the rate that the data ask for is found."""
    torch.manual_seed(0)
    bnn = bayou.bayesianize(
        nn.Linear(4, 1, bias=False).double(),
        bayou.Dropout(0.3, rate="reinforce"),
        example=torch.ones(1, 4).double(),
    )
    guide = bnn.guides[0]
    x = torch.ones(1, 4, dtype=torch.float64)
    n = 20_000
    draw = bnn.draw(n)
    value = draw(x).reshape(n).square()
    surrogate = (value + (value - value.mean()).detach() * draw.score).mean()
    (got,) = torch.autograd.grad(surrogate, guide.logit_p)
    # E[(Σ_i M_i·m_i/(1−p))²] = (Σ M)² + Σ M²·p/(1−p), whose derivative in logit p is Σ M²·p/(1−p)
    want = guide.center.square().sum() * 0.3 / 0.7
    assert abs(float(got.detach() - want.detach())) < 0.15 * float(want.detach())


class Adapted(nn.Module):
    """A frozen base with running statistics, and an adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.base(x).tanh())


def trained_adapter(net):
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    y = torch.arange(20) % 2
    torch.manual_seed(0)
    bnn = bayou.bayesianize(net, bayou.MNF(), prior=bayou.Normal(0.5), example=x)
    optimizer = torch.optim.Adam(bnn.parameters(), 0.01)
    for _ in range(3):
        draw = bnn.draw()
        loss = nn.functional.cross_entropy(draw(x), y) + draw.kl / 20
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return bnn, x, y


def test_a_training_loop_ends_in_the_posterior_that_fit_returns(tmp_path):
    torch.manual_seed(0)
    net = Adapted()
    bnn, x, y = trained_adapter(net)
    posterior = bnn.posterior(bayou.Categorical(), 20)
    assert posterior.target.net.base[0].weight.data_ptr() == net.base[0].weight.data_ptr()
    p = posterior.predict(x, 5, seed=0)
    stack = bnn.sample(5, seed=0)
    for s in range(5):  # running statistics of the loop, in eval mode
        weights = {name: value[s] for name, value in stack.items()}
        assert_close(p.outputs[s], posterior.call(weights, x).detach())
    assert bool(bayou.elbo(posterior, (x, y), 4, seed=0).value < 0)
    posterior.save(tmp_path / "a.bayou")
    loaded = bayou.load(tmp_path / "a.bayou", net)
    assert torch.equal(loaded.predict(x, 5, seed=0).outputs, p.outputs)
    assert loaded.target.n == 20
    assert all(p.requires_grad for p in loaded.bayesian.train().parameters())
    same_prior = loaded.bayesian.draw(seed=0, local=False).kl
    assert_close(same_prior, bnn.draw(seed=0, local=False).kl)
    with pytest.raises(FileError, match="other values of 'base"):
        bayou.load(tmp_path / "a.bayou", Adapted())
    with pytest.raises(ValueError, match="likelihood must be"):
        bnn.posterior("classes", 20)


def test_a_copy_of_a_bayesian_network_shares_the_original():
    bnn, _, _ = trained_adapter(Adapted())
    assert copy.deepcopy(bnn)._original is bnn._original
