"""What image flows cost: a step and draws beside normflows, and memory on a CPU
(``experiments.measure.images --speed``).

Two sizes: a small Glow, and that of survae's CIFAR-10 runs (experiments/image of its repository,
``--num_steps 12 --num_scales 2``: no act norm, an affine coupling by a dense network of 64
channels, depth 10, growth 64, with a gate, batches of 32). survae itself is no package that can be
installed; between its scales it keeps a quarter of the channels, here half go on.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou import flows
from bayou.core import rng
from bayou.flows.models.image_nets import zero_init
from bayou.flows.models.images import rotation

SHAPE = (3, 32, 32)
Contender = tuple[
    nn.Module, Callable[..., Any], Callable[..., Any]
]  # module, loss of a batch, draws


class Dense(nn.Module):
    """h ← [h, relu(3×3 relu(1×1 h))] ``depth`` times, a + b·sigmoid(c) of it added to the first h;
    0 at first.
    """

    def __init__(
        self, inputs: int, outputs: int, width: int = 64, depth: int = 10, growth: int = 64
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 1)
        sizes = [width + i * growth for i in range(depth + 1)]
        self.mixes = nn.ModuleList(nn.Conv2d(size, size, 1) for size in sizes[:-1])
        self.grows = nn.ModuleList(nn.Conv2d(size, growth, 3, padding=1) for size in sizes[:-1])
        self.gate = nn.Conv2d(sizes[-1], 3 * width, 1)
        self.last = zero_init(nn.Conv2d(width, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = start = self.first(x)
        for mix, grow in zip(self.mixes, self.grows, strict=True):
            h = torch.cat([h, F.relu(grow(F.relu(mix(h))))], 1)
        a, b, c = self.gate(h).chunk(3, 1)
        out: Tensor = self.last(start + a + b * c.sigmoid())
        return out


@dataclass(frozen=True)
class Size:
    """A model, and how it is timed."""

    says: str
    levels: int
    steps: int
    hidden: int | None  # None: dense networks, and no act norm
    batch: dict[str, int]
    rounds: int

    def net(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return Dense(shape[0], outputs)


SIZES = (
    Size("Glow of 3 levels of 4 steps, 64 hidden channels", 3, 4, 64, {"cpu": 64, "cuda": 64}, 7),
    Size(
        "survae's size: 2 levels of 12 steps, dense networks",
        2,
        12,
        None,
        {"cpu": 2, "cuda": 32},
        3,
    ),
)


def ours(size: Size, device: str, half: bool = False) -> Contender:
    torch.manual_seed(0)
    if size.hidden is not None:
        chain = flows.glow_image(SHAPE, size.levels, size.steps, size.hidden, half=half)
    else:
        parts: list[flows.Map] = [flows.Sigmoid(SHAPE, 1e-3)]  # from data to base
        event: Any = SHAPE
        for level in range(size.levels):
            if level:
                parts.append(flows.split_channels(event))
                event = (event[0] // 2, *event[1:])
            squeeze = flows.Squeeze(event)
            parts.append(flows.Inverse(squeeze))
            event = squeeze.event_out
            for _ in range(size.steps):
                coupling = flows.ImageCoupling(event, flows.Affine(2.0), net=size.net)
                parts += [flows.Inverse(rotation(event[0])), coupling]
        chain = flows.Chain(*reversed(parts))
    flow = flows.Flow(flows.StandardNormal(chain.event_in), chain).to(device)  # type: ignore[arg-type]
    flow.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return flow, lambda y: -flow.log_prob(y).mean(), flow.sample


def theirs(size: Size, device: str) -> Contender:
    """The Glow of normflows' own example, of the same size; or its couplings with the same dense
    networks.
    """
    import normflows as nf

    def block(channels: int) -> Any:
        if size.hidden is not None:
            return nf.flows.GlowBlock(channels, size.hidden, split_mode="channel", scale=True)
        coupling = nf.flows.AffineCouplingBlock(
            Dense(channels // 2, channels), True, "exp", "channel"
        )
        return nf.flows.Composite([coupling, nf.flows.Invertible1x1Conv(channels, True)])

    torch.manual_seed(0)
    levels, (c, h, w) = size.levels, SHAPE
    bases, blocks, merges = [], [], []
    for i in range(levels):
        here = [block(c * 2 ** (levels + 1 - i)) for _ in range(size.steps)]
        blocks.append([*here, nf.flows.Squeeze()])
        if i:
            merges.append(nf.flows.Merge())
        part = c * 2 ** (levels - i) if i else c * 2 ** (levels + 1)
        bases.append(
            nf.distributions.DiagGaussian((part, h // 2 ** (levels - i), w // 2 ** (levels - i)))
        )
    model = nf.MultiscaleFlow(bases, blocks, merges).to(device)
    return model, model.forward_kld, lambda n: model.sample(n)[0]


def speed(device: str) -> str:
    """A table for each size."""
    torch.set_num_threads(1)
    return "".join(timed(size, device) for size in SIZES)


def timed(size: Size, device: str) -> str:
    """Milliseconds of a training step and of drawing a batch, the best of some rounds in turn; on a
    CPU of its time.
    """
    clock, batch = time.perf_counter if device == "cuda" else time.process_time, size.batch[device]
    y = rng.uniform(batch, SHAPE, torch.zeros(()), 0).mul(0.98).add(0.01).to(device)
    models = {"bayou": ours(size, device)}
    if size.hidden is not None:
        models["bayou, bfloat16 networks"] = ours(size, device, half=True)
    with suppress(ImportError):
        models["normflows"] = theirs(size, device)
    best: dict[str, list[float]] = {name: [math.inf, math.inf] for name in models}
    steps = {name: torch.optim.Adam(net.parameters(), 1e-4) for name, (net, _, _) in models.items()}
    for _ in range(size.rounds):
        for name, (_, loss, sample) in models.items():
            for i, act in enumerate(
                (partial(_descend, loss, steps[name], y), partial(sample, batch))
            ):
                begun = clock()
                act()
                if device == "cuda":
                    torch.cuda.synchronize()
                best[name][i] = min(best[name][i], 1000 * (clock() - begun))
    said = f"{size.says}, on {SHAPE}, batch {batch}, {torch.get_num_threads()} thread(s):\n\n"
    said += "| | parameters | step, ms | sample, ms |\n|---|---:|---:|---:|\n"
    for name, (net, _, _) in models.items():
        step, sample_ = best[name]
        said += f"| {name} | {sum(p.numel() for p in net.parameters()):,} | {step:.1f} | {sample_:.1f} |\n"
    if "normflows" not in models:
        said += "\nnormflows is not installed here: no line of it.\n"
    return said + "\n"


def _descend(loss: Callable[..., Tensor], adam: torch.optim.Optimizer, y: Tensor) -> None:
    adam.zero_grad()
    loss(y).backward()
    adam.step()


PEAK = """
import resource, torch
from bayou.flows import glow_image, image_flow
torch.set_num_threads(1)
flow = image_flow(glow_image((3, 32, 32), levels=3, steps={steps}, hidden={hidden}))
adam = torch.optim.Adam(flow.parameters(), 1e-4)
y = torch.randint(0, 256, ({batch}, 3, 32, 32)).float()
for _ in range(2):
    adam.zero_grad()
    (-flow.log_prob(y).mean()).backward()
    adam.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def memory(batches: tuple[int, int] = (4, 12)) -> str:
    """Peak of a process that takes two steps, at two batch sizes, and the line through them at
    128.
    """
    said = (
        "| Glow, 3×32×32, 3 levels | GiB at a batch of "
        + " | ".join(map(str, batches))
        + " | 128, by the line |\n"
    )
    said += "|---|---:|---:|---:|\n"
    for steps, hidden in ((8, 128), (32, 512)):
        peaks = []
        for batch in batches:
            code = PEAK.format(steps=steps, hidden=hidden, batch=batch)
            peaks.append(
                float(
                    subprocess.run(
                        [sys.executable, "-c", code], capture_output=True, text=True, check=True
                    ).stdout
                )
            )
        slope = (peaks[1] - peaks[0]) / (batches[1] - batches[0])
        at = peaks[0] + slope * (128 - batches[0])
        said += f"| {steps} steps, hidden {hidden} | {peaks[0]:.2f} | {peaks[1]:.2f} | {at:.1f} |\n"
    return said + "\n"
