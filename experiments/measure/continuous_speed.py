"""What a training step costs: flows in continuous time beside torchdiffeq and zuko, residual flows
beside normflows.

Part of ``experiments.measure.continuous`` (``--speed``). All fields are the same network with the same
number of evaluations in equal steps of RK4 and an exact trace; contestants take turns, so that a
busy machine slows all of them alike. A library that is not installed is left out, and the table
says so; ``--compiled`` adds graphs of inductor.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from bayou import flows
from bayou.flows import Flow, Inverse, StandardNormal
from experiments.measure.parallel import made

DIM, HIDDEN, STEPS, LIPSCHITZ = 8, (64, 64), 4, 0.9
Step = Callable[[], object]


def descending(module: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """Loss, gradient and a step of Adam."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(x).backward()
        optimizer.step()

    return step


def ours(x: Tensor, compiled: bool) -> Step:
    """A fixed-step flow of bayou, eager or as one compiled graph."""
    flow = Flow(StandardNormal(DIM), flows.continuous(DIM, HIDDEN, steps=STEPS)).to(x)

    def loss(x: Tensor) -> Tensor:
        return -flow.log_prob(x).mean()

    return descending(flow, torch.compile(loss, fullgraph=True) if compiled else loss, x)


def torchdiffeq_step(x: Tensor, compiled: bool) -> Step:
    """The same field and trace, solved by torchdiffeq; compiled as far as it goes."""
    from torchdiffeq import odeint

    core = flows.continuous(DIM, HIDDEN, steps=STEPS).to(x)
    base = StandardNormal(DIM).to(x)
    change = core.derivative(None)

    def loss(x: Tensor) -> Tensor:
        t = torch.linspace(1, 0, STEPS + 1).to(x)
        state = (x, x.new_zeros(len(x)))
        z, ladj = odeint(
            lambda t, s: change(t.expand(len(x)), s),
            state,
            t,
            method="rk4",
            options={"perturb": False},
        )
        return -(base.log_prob(z[-1]) + ladj[-1]).mean()

    return descending(core, torch.compile(loss) if compiled else loss, x)


def zuko_step(x: Tensor, counted: list[int]) -> Step:
    """zuko's flow in continuous time; its solver adapts the steps, so its number of evaluations is
    its own.
    """
    import zuko

    flow = zuko.flows.CNF(DIM, hidden_features=HIDDEN).to(x)
    flow.transform.ode.register_forward_hook(lambda *_: counted.append(1))
    return descending(flow, lambda x: -flow().log_prob(x).mean(), x)


def residual_step(x: Tensor, determinant: str, rate: float | None = None) -> Step:
    """Four residual layers of bayou; with ``rate``, the terms of a geometric distribution with that
    one.
    """
    chain = flows.residual(DIM, 4, HIDDEN, LIPSCHITZ, determinant)  # type: ignore[arg-type]
    for layer in chain.transforms if rate is not None else ():
        layer.lipschitz = 1 - rate  # type: ignore[assignment, operator]
    flow = Flow(StandardNormal(DIM), Inverse(chain)).to(x)
    return descending(flow, lambda x: -flow.log_prob(x).mean(), x)


def normflows_step(x: Tensor) -> Step:
    """Four residual layers of normflows, which draws one number of terms for a whole batch."""
    import normflows as nf

    nets = [
        nf.nets.LipschitzMLP([DIM, *HIDDEN, DIM], init_zeros=True, lipschitz_const=LIPSCHITZ)
        for _ in range(4)
    ]
    layers = [nf.flows.Residual(net, reduce_memory=True) for net in nets]
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(DIM, trainable=False), layers).to(x)
    return descending(flow, flow.forward_kld, x)


def timed(step: Step, device: str) -> float:
    """Milliseconds of one step: of the processor on one thread, or of the clock on a GPU."""
    if device == "cpu":
        begun = time.process_time()
        step()
        return 1e3 * (time.process_time() - begun)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def speed(out: Path, device: str, small: bool, compiled: bool) -> None:
    """Print and keep the table; ``compiled``: also as one graph, which a compiler takes minutes
    for.
    """
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    x = torch.randn(64 if small else 512, DIM, device=device)
    counted: list[int] = []
    asked = f"{4 * STEPS} evaluations"
    makers: dict[str, tuple[str | None, Callable[[], Step]]] = {
        f"continuous, bayou, eager, {asked}": (None, lambda: ours(x, False)),
        f"continuous, bayou, compiled, {asked}": (None, lambda: ours(x, True)),
        f"continuous, torchdiffeq, eager, {asked}": (
            "torchdiffeq",
            lambda: torchdiffeq_step(x, False),
        ),
        f"continuous, torchdiffeq, compiled, {asked}": (
            "torchdiffeq",
            lambda: torchdiffeq_step(x, True),
        ),
        "continuous, zuko, eager": ("zuko", lambda: zuko_step(x, counted)),
        "residual, bayou, exact determinant": (None, lambda: residual_step(x, "exact")),
        "residual, bayou, roulette, 10 terms": (None, lambda: residual_step(x, "roulette")),
        "residual, bayou, roulette, 4 terms": (None, lambda: residual_step(x, "roulette", 0.25)),
        "residual, normflows, 4 terms": ("normflows", lambda: normflows_step(x)),
    }
    if not compiled:
        makers = {name: maker for name, maker in makers.items() if "compiled" not in name}
    steps: dict[str, Step] = {}
    missing = sorted(
        {need for need, _ in makers.values() if need and importlib.util.find_spec(need) is None}
    )
    first: dict[str, float] = {}
    for name, (need, make) in makers.items():
        if need not in missing:
            steps[name] = make()
            counted.clear()
            first[name] = timed(steps[name], device)  # compiles
            if counted:  # forward, and again backward in its adjoint
                own = f"{name}, {len(counted)} evaluations of its own"
                steps[own], first[own] = steps.pop(name), first.pop(name)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(3 if small else 10):
        for name, step in steps.items():
            times[name].append(timed(step, device))
    said = ["# A training step of flows in continuous time and of residual flows", ""]
    clock = "of the processor, one thread" if device == "cpu" else "of the clock"
    said += [
        f"Loss, gradient and Adam for {len(x)} rows of {DIM} numbers, networks {HIDDEN}, RK4 in {STEPS} equal steps, "
        f"exact trace (torchdiffeq solves with our field and trace); four residual layers, L = {LIPSCHITZ}. Medians of "
        f"milliseconds {clock}. Roulette at the rate 1 − L has {1 / (1 - LIPSCHITZ):.0f} terms in the mean, every row "
        "its own number: the largest of a batch, some sixty, is what is waited for. normflows draws one number for a "
        "whole batch at rate .5 after two terms, four in the mean, for which the variance is not finite at this L; the "
        "same mean number by our rule (rate ¼) is there to compare. Its norms come from power iteration, a step at a "
        "time, ours are bounds."
    ]
    said += ["", "| step | ms | first call, s |", "|---|---:|---:|"]
    said += [
        f"| {name} | {median(found):.1f} | {first[name] / 1e3:.1f} |"
        for name, found in times.items()
    ]
    if missing:
        said += ["", f"Not installed, and so not measured: {', '.join(missing)}."]
    print("\n".join(said))
    if not small:
        name = f"continuous-speed{'' if device == 'cpu' else '-' + device}.md"
        (out / name).write_text("\n".join(said) + f"\n\n{made(device)}\n")
