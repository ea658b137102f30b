"""A custom training loop, as in the README."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayou


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm, self.fc = nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv1(x)).relu()
        return self.fc(F.max_pool2d(self.conv2(h).relu(), 2).flatten(1))


def test_the_snippet_trains() -> None:
    torch.manual_seed(0)
    n = 96
    x = torch.randn(n, 1, 8, 8)
    y = x.mean((1, 2, 3)).mul(8).round().clamp(-1, 1).long() + 1
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    bnn = bayou.bayesianize(net, {"conv*.weight": bayou.MNF(), "*.weight": bayou.MeanField(), "*": bayou.Delta()})
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


def test_reinforce_in_a_custom_loop() -> None:
    """E[f(mask)] has the gradient of its score: the rate that the data ask for is found."""
    torch.manual_seed(0)
    bnn = bayou.bayesianize(
        nn.Linear(4, 1, bias=False).double(), bayou.Dropout(0.3, rate="reinforce"), example=torch.ones(1, 4).double()
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
