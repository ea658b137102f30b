"""Files of an earlier version: posteriors load, and runs that were stopped go on to where that version ended."""

import runpy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import bayou

REFERENCE = Path(__file__).parents[1] / "reference"
made = runpy.run_path(str(REFERENCE / "make_before.py"))
network, rows, methods = (made[name] for name in ("network", "rows", "methods"))


def started(name: str) -> bayou.Method:
    """The method with the arguments that the run was started with: MNF's defaults are others now."""
    method = methods()[name]
    was = bayou.MNF(std=0.01, z_std=0.1, mixing=0)
    return replace(method, guide=was) if isinstance(method, bayou.VI) and name == "mnf" else method


@pytest.mark.parametrize("name", methods())
def test_a_stopped_run_of_an_earlier_version_goes_on_to_the_posterior_it_saved(name: str, tmp_path: Path) -> None:
    net = network()
    saved = bayou.load(REFERENCE / "before" / f"{name}.bayou", net)
    with torch.no_grad():  # a run that began anew, from here, would end elsewhere
        for parameter in net.parameters():
            parameter.add_(1)
    files = list((REFERENCE / "before").glob(f"{name}.run*"))
    assert files
    for file in files:
        shutil.copy(file, tmp_path)
    posterior = bayou.fit(
        net, rows(), method=started(name), seed=3, progress=False, checkpoint=tmp_path / f"{name}.run"
    )
    # The last 15 to 20 steps are computed anew: another machine may round them in another way.
    close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    draws = saved.sample(3, seed=0)
    if name == "laplace":  # where draws follow the signs of eigenvectors, which every machine chooses for itself
        close(posterior.mean, saved.mean)
        close(posterior.log_prob(draws), saved.log_prob(draws))
    else:
        close(posterior.sample(3, seed=0), draws)
