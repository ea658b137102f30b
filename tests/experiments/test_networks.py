"""Small networks: every one learns its task in the plain way, lines can be made, rows are kept,
warnings are shown.
"""

import pytest
import torch

from experiments import networks
from experiments.networks import TASKS


@pytest.mark.parametrize("name", TASKS)
def test_training_and_test_rows_of_networks_are_disjoint(name):
    task = TASKS[name]
    (x, y), (x_test, y_test) = task.split(1)
    first, other = (part[0] if isinstance(part, tuple) else part for part in (x, x_test))
    assert len(first) == len(y) == task.rows
    assert len(other) == len(y_test) == (task.total - task.rows if task.total else networks.TEST)
    mine, theirs = (set(map(bytes, part.flatten(1).numpy())) for part in (first, other))
    assert not mine & theirs or not first.is_floating_point()  # sequences of tokens may come twice
    assert torch.equal(task.split(1)[0][1], y)
    assert not torch.equal(task.split(2)[0][1], y)
    torch.manual_seed(0)
    net = task.net()
    assert sum(p.numel() for p in net.parameters()) >= 5000
    outputs = networks.plain(net.eval(), x).outputs
    assert outputs.shape[:2] == (1, task.rows)
    assert int(y.max()) < outputs.shape[-1]
