"""Which tensors are random: the committed table is that of its numbers, and the patterns name
tensors.
"""

import json

import pytest

from bayou.core.params import match
from experiments.hmc_cifar.network import resnet
from experiments.measure import partial


def test_the_table_is_that_of_its_numbers():
    rows = json.loads(partial.NUMBERS.read_text(encoding="utf-8"))["rows"]
    assert partial.render(rows) == partial.TABLE.read_text(encoding="utf-8")


@pytest.mark.parametrize("data", partial.CHOICES)
def test_the_counts_are_those_of_the_patterns(data):
    outputs = {"digits": (64, 7), "concrete": (8, 1)}
    net = resnet(8, 1) if data == "cifar10" else partial.mlp(*outputs[data])
    sizes = {name: value.numel() for name, value in net.named_parameters()}
    rows = json.loads(partial.NUMBERS.read_text(encoding="utf-8"))["rows"]
    for one in (row for row in rows if row["data"] == data and row["weights"]):
        random = match(
            sizes, dict.fromkeys(partial.CHOICES[data][one["choice"]], True), default=False
        )
        assert sum(sizes[name] for name, wanted in random.items() if wanted) == one["weights"], one[
            "choice"
        ]
