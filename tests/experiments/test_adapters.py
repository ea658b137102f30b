"""Adapters: the base is kept, only adapters are fitted, every row can be made, and the page has
them.
"""

import pytest
import torch

import bayou
from experiments import adapters
from experiments.adapters import Sizes, Transformer, adapted

TINY = Sizes(
    width=16, layers=1, heads=2, rank=2, length=12, train=20, held=20, test=20, batch=10, base_steps=100, base_batch=16,
    steps=6, samples=4,
)  # fmt: skip


@pytest.mark.parametrize("text", [True, False])
def test_an_adapter_begins_at_the_base_and_a_character_sees_no_later_one(text):
    torch.manual_seed(0)
    net = Transformer(TINY, text)
    x = torch.randint(27, (3, 12)) if text else torch.randn(3, 3, 32, 32)
    before = net(x)
    adapted(net, 2)
    free = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-2] for name in free} == {
        "lora_A",
        "lora_B",
        *(() if text else ("head",)),
    }
    assert (before == net(x)).all() == text  # images have a new head
    if text:
        changed = x.clone()
        changed[:, 6] = (x[:, 6] + 1) % 27
        assert torch.equal(net(changed)[:, :6], before[:, :6])
        assert not torch.equal(net(changed)[:, 6:], before[:, 6:])


def test_characters_are_rows_of_their_own():
    y = torch.randint(27, (2, 5), generator=torch.Generator().manual_seed(0))
    outputs = torch.randn(3, 2, 5, 27, generator=torch.Generator().manual_seed(1))
    whole = bayou.likelihoods.predictive.Predictive(bayou.Categorical(shift=1).bind(), outputs)
    p, labels = adapters.by_token(whole, y)
    assert p.outputs.shape == (3, 8, 27)
    assert bayou.metrics.accuracy(p, labels) == bayou.metrics.accuracy(whole, y)
