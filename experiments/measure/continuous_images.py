"""Images for ``experiments.measure.continuous``: residual flows and flows in continuous time, by likelihood
and by matching.
"""

from __future__ import annotations

import base64
import math
import time
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bayou import flows
from bayou.core import rng
from bayou.data import load
from bayou.flows import (
    Chain,
    Continuous,
    Dequantize,
    Flow,
    Inverse,
    Ladj,
    StandardNormal,
    Transform,
)
from bayou.flows.continuous_time.fields import time_features
from experiments.measure.time_unet import TimeUNet


@dataclass(frozen=True)
class Options:
    """Of a run."""

    device: str = "cpu"
    seconds: float = 60.0
    judge: float = 40.0
    small: bool = False


def packed(x: Tensor) -> dict[str, Any]:
    """Whole numbers 0 .. 255 as text."""
    raw = x.detach().cpu().round().to(torch.uint8).numpy().tobytes()
    return {"shape": list(x.shape), "zlib": base64.b64encode(zlib.compress(raw, 9)).decode()}


def unpacked(found: dict[str, Any]) -> Tensor:
    """The numbers again."""
    raw = zlib.decompress(base64.b64decode(found["zlib"]))
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(found["shape"]).float()


class Squash(Transform):
    """y = (sigmoid(x) − α)/(1 − 2α): what pixels in [0, 1] are, with a little room around them
    (Dinh et al. 2017).
    """

    def __init__(self, shape: tuple[int, ...], alpha: float = 1e-5) -> None:
        super().__init__()
        self.event_shape, self.alpha = shape, alpha
        self.codomain = (-alpha / (1 - 2 * alpha), (1 - alpha) / (1 - 2 * alpha))

    def _term(self, x: Tensor) -> Tensor:
        slopes = (
            nn.functional.logsigmoid(x)
            + nn.functional.logsigmoid(-x)
            - math.log(1 - 2 * self.alpha)
        )
        return slopes.flatten(-3).sum(-1)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return (x.sigmoid() - self.alpha) / (1 - 2 * self.alpha), self._term(x)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        x = (self.alpha + (1 - 2 * self.alpha) * y).logit()
        return x, -self._term(x)


class TimeConv(nn.Module):
    """v(t, z) of images by tanh convolutions of blocks of 2 × 2 pixels, shifted by waves of t; 0 at
    first.
    """

    def __init__(self, channels: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        widths = [4 * channels, *hidden]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.shifts = nn.ModuleList(nn.Linear(9, width) for width in hidden)
        self.last = nn.Conv2d(widths[-1], widths[0], 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        """t (N,), z (N, C, H, W) to (N, C, H, W)."""
        features = time_features(t.expand(z.shape[:-3]), 4)
        h = nn.functional.pixel_unshuffle(z, 2)
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            h = torch.tanh(layer(h) + shift(features)[..., None, None])
        return nn.functional.pixel_shuffle(self.last(h), 2)


def whole_pixels(name: str, small: bool) -> tuple[Tensor, Tensor]:
    """Images of whole numbers 0 .. 255, to learn from and to judge by."""
    data = load("mnist" if name == "mnist" else "cifar10", ood="none")
    pixels = data.preprocessor.pixels  # type: ignore[attr-defined]
    train, test = ((255 * pixels(x)).round().clamp(0, 255) for x, _ in (data.train, data.test))
    return (train[:1000], test[:64]) if small else (train, test)


def image_flow(name: str, model: str, train: Tensor, options: Options) -> tuple[Flow, Chain]:
    """The flow, and its part between the base and the numbers that the network sees: standardized
    logits of pixels.

    Photographs are scaled to [−1, 1] instead, as is usual for matching.
    """
    shape = tuple(train.shape[1:])
    affine = flows.DiagonalAffine(shape)
    outer = [Squash(shape)] if name == "mnist" else []
    with torch.no_grad():
        if name == "mnist":
            z = Chain(Squash(shape), Dequantize(shape, 256)).inverse(train[:10_000], seed=0)[0]
            affine.shift.copy_(z.mean(0))
            affine.log_scale.copy_(z.std(0).log())
        else:
            affine.shift.fill_(0.5)
            affine.log_scale.fill_(math.log(0.5))
    affine.requires_grad_(model == "residual")
    if model == "residual":
        cpu = (6, (32, 32))  # a step of what a GPU learns would take half a minute
        layers, hidden = (
            (2, (8, 8)) if options.small else (12, (128, 128)) if options.device == "cuda" else cpu
        )
        core: Transform = Inverse(flows.residual(shape, layers=layers, hidden=hidden))
    else:
        field: nn.Module
        if model == "continuous":  # every step asks it 16 times or more
            field = TimeConv(shape[0], (8, 8) if options.small else (128, 128, 128))
        else:
            channels = (
                (8, 16) if options.small else (96, 192, 192) if name == "cifar" else (64, 128, 128)
            )
            field = TimeUNet(
                shape, channels, blocks=2 if name == "cifar" and not options.small else 1
            )
        core = Continuous(shape, field, trace="hutchinson", steps=4)
    whole = Chain(core, affine, *outer, Dequantize(shape, 256))
    return Flow(StandardNormal(shape), whole).to(options.device), Chain(
        affine, *outer, Dequantize(shape, 256)
    )


def matching_loss(core: Continuous, z: Tensor, noise: torch.Generator) -> Tensor:
    """Mean of ‖v(t, (1 − t)·x₀ + t·x₁) − (x₁ − x₀)‖²/D over a batch."""
    start = rng.normal(len(z), z.shape[1:], z, noise)
    t = rng.uniform(len(z), (), z, noise)
    wide = t.reshape(-1, 1, 1, 1)
    with torch.autocast(z.device.type, torch.bfloat16, enabled=z.is_cuda):
        v = core.velocity(t, (1 - wide) * start + wide * z)
    return (v.float() - (z - start)).square().mean()


class Average:
    """A running mean of parameters, by which a noisy descent is judged."""

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        self.live = [p for p in module.parameters() if p.requires_grad]
        self.mean, self.decay, self.seen = [p.detach().clone() for p in self.live], decay, 0

    @torch.no_grad()
    def update(self) -> None:
        self.seen += 1
        torch._foreach_lerp_(
            self.mean, self.live, 1 - min(self.decay, self.seen / (self.seen + 10))
        )  # type: ignore[arg-type]

    @torch.no_grad()
    def load(self) -> None:
        torch._foreach_copy_(self.live, self.mean)  # type: ignore[arg-type]


def learned(
    name: str, model: str, flow: Flow, outer: Chain, train: Tensor, options: Options, seed: int
) -> int:
    """Adam until the clock says stop; the number of steps."""
    rows = {
        "residual": 256 if train.is_cuda else 64,
        "continuous": 256,
        "matching": 256 if name == "mnist" else 128,
    }
    batch = 16 if options.small else rows[model]
    params = [p for p in flow.parameters() if p.requires_grad]
    highest = {"residual": 2e-3, "continuous": 1e-3, "matching": 5e-4}[model]
    optimizer = torch.optim.Adam(params, lr=highest, betas=(0.9, 0.99), fused=train.is_cuda)
    average = Average(flow)
    if model == "matching" and train.is_cuda:
        flow.to(memory_format=torch.channels_last)
    noise = torch.Generator(train.device).manual_seed(
        seed
    )  # on a GPU one kernel a draw, where a seed takes one a row
    begun, step = time.monotonic(), 0
    flow.train()
    while (done := (time.monotonic() - begun) / options.seconds) < 1 and not (
        options.small and step >= 3
    ):
        for group in optimizer.param_groups:
            group["lr"] = (
                highest * min(1.0, step / 200 + 0.01) * 0.5 * (1 + math.cos(math.pi * done))
            )
        y = train[(rng.uniform(batch, (), train, noise) * len(train)).long()]
        if model == "matching":
            z = outer.inverse(y, seed=noise)[0]
            if name == "cifar":
                flip = rng.uniform(batch, (1, 1, 1), z, noise) < 0.5
                z = torch.where(flip, z.flip(-1), z)
            loss = matching_loss(flow.transform.transforms[0], z, noise)  # type: ignore[union-attr]
        else:
            if step % 50 == 0:  # by twice the steps of its solver it must be the same
                flows.refine(
                    flow,
                    lambda: -flow.log_prob(train[:64], seed=0).mean() / train[0].numel(),
                    0.005,
                )
            with flows.varied_steps(flow, rng.uniform(1, (64,), train, noise)[0]):
                loss = -flow.log_prob(y, seed=noise).mean() / y[0].numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        if bool(norm.isfinite()):
            optimizer.step()
        average.update()
        step += 1
    average.load()
    flow.eval()
    return step


def bits(flow: Flow, test: Tensor, options: Options) -> dict[str, Any]:
    """Bits a dimension of test rows, −E[log p]/(D·ln 2) one draw of the noise: an upper bound; as
    far as time goes.
    """
    scores: list[Tensor] = []
    begun, chunk = time.monotonic(), 16 if options.small else 250
    with torch.no_grad():
        for i, rows in enumerate(test.split(chunk)):
            scores.append(flow.log_prob(rows, seed=0, start=i * chunk))
            if time.monotonic() - begun > options.judge:
                break
    each = -torch.cat(scores) / (test[0].numel() * math.log(2))
    return {
        "bits": each.mean().item(),
        "error": (each.std() / math.sqrt(len(each))).item(),
        "rows": len(each),
    }


def many(flow: Flow, test: Tensor, options: Options, draws: int = 20) -> dict[str, Any]:
    """log-mean-exp of K draws of the dequantization, as it is published, and what of that is not
    true.

    The trace is an estimate, whose noise is inside the exponent too. The same with one draw of the
    dequantization and K of the trace has nothing to gain: what it gains all the same is subtracted
    from the claim, in ``honest``.
    """
    chain: Any = flow.transform
    if not any(t.ladj_kind is Ladj.estimate for t in chain.transforms):
        return {}
    begun, claimed, spurious, single = time.monotonic(), [], [], []
    dims = test[0].numel() * math.log(2)
    chunk = 8 if options.small else 50
    outer = Chain(*chain.transforms[1:])
    core = chain.transforms[0]
    with torch.no_grad():
        for i, rows in enumerate(test.split(chunk)):
            each: dict[bool, list[Tensor]] = {False: [], True: []}
            for k in range(2 if options.small else draws):
                for same in (False, True):
                    z, term = outer.inverse(
                        rows, seed=rng.fold(1, "same" if same else k), start=i * chunk
                    )
                    x, more = core.inverse(z, seed=rng.fold(2, k, int(same)), start=i * chunk)
                    each[same].append(flow.base.log_prob(x) + term + more)
            found, idle = (torch.stack(each[same]) for same in (False, True))
            claimed.append(found.logsumexp(0) - math.log(len(found)))
            spurious.append(idle.logsumexp(0) - math.log(len(idle)) - idle.mean(0))
            single.append(found.mean(0))
            if time.monotonic() - begun > options.judge:
                break
    told, false, one = (
        torch.cat(part).mean().item() / dims for part in (claimed, spurious, single)
    )
    return {"K": draws, "bits K": -told, "bits K honest": -told + false, "bits 1 same rows": -one,
            "rows K": sum(map(len, claimed))}  # fmt: skip


def image(name: str, model: str, seed: int, options: Options) -> dict[str, Any]:
    """Bits a dimension of one model."""
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = (
        model != "residual"
    )  # its number of rows changes from term to term
    train, test = (x.to(options.device) for x in whole_pixels(name, options.small))
    flow, outer = image_flow(name, model, train.cpu(), options)
    begun = time.monotonic()
    steps = learned(name, model, flow, outer, train, options, seed)
    found: dict[str, Any] = {"steps": steps, "learned": time.monotonic() - begun}
    found["parameters"] = sum(p.numel() for p in flow.parameters() if p.requires_grad)
    core: Any = flow.transform.transforms[0]  # type: ignore[union-attr]
    if isinstance(core, Continuous):
        found["learned with"] = 4 * core.steps
        core.steps = 2 if options.small else max(20, 2 * core.steps)
    found |= bits(flow, test, options)
    if isinstance(core, Continuous):  # the error of the solver, on a few rows with the same noise
        few = Options(options.device, options.seconds, 5.0, options.small)
        near = bits(flow, test[:250], few)["bits"]
        core.steps *= 2
        found |= {
            "evaluations": 2 * core.steps,
            "twice the steps": bits(flow, test[:250], few)["bits"] - near,
        }
        core.steps //= 2
        if model == "matching":
            found |= many(flow, test, options)
    with torch.no_grad():
        draws = flow.sample(8, seed=0).clamp(0, 255)
    found["draws"] = packed(draws)
    return found
