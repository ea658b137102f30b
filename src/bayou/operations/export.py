"""Export of a posterior predictive as one graph with S draws of the network, for use without bayou.

program = export(posterior, x[:2], samples=20)
torch.export.save(program, "digits.pt2")                     # later, with torch only:
answers = torch.export.load("digits.pt2").module()(x)        # {"outputs", "mean", "std", ...}

export_onnx(posterior, "digits.onnx", x[:2], samples=20)     # later, with onnxruntime only:
answers = InferenceSession("digits.onnx").run(["mean", "entropy"], {"x": x.numpy()})
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.func import vmap

from bayou import rng
from bayou.extras import extra
from bayou.files import writing
from bayou.likelihoods import BoundLikelihood
from bayou.params import Params
from bayou.posteriors import GaussianPosterior, Masked, Mixture, Posterior
from bayou.posteriors.empirical import shared
from bayou.posteriors.masked import SEED, Masks
from bayou.posteriors.mixture import MEMBER
from bayou.posteriors.posterior import NOISE, check_count, evaluating
from bayou.predictive import Predictive

CHEAP = ("outputs", "mean", "std")
MOMENTS = (*CHEAP, "epistemic_std", "aleatoric_std")  # of every likelihood
LEVELS = (0.05, 0.5, 0.95)
LINEARITY_FACTOR = 8.0  # enlargement of a draw in the test whether a network is linear in its weights


@torch.no_grad()
def export(
    posterior: Posterior,
    example_x: Any,
    samples: int = 20,
    *,
    seed: int = 0,
    answers: Sequence[str] | None = None,
    quantiles: Sequence[float] = LEVELS,
) -> ExportedProgram:
    """A program x ↦ predictions of ``samples`` draws, those of ``posterior.predict(x, samples, seed=seed)``.

    If a posterior has fewer draws (a point, an ensemble), the program has each of them once.
    x: a tensor (B, ...) or a tuple of them, as ``example_x``; B is free. The program gives a dict of ``answers``, as
    ``Predictive`` has them: "outputs" (S, B, *out) of the draws f_s, "mean" E[y] (class probabilities for classes),
    "std" √Var[y], "epistemic_std", "aleatoric_std", "entropy" H[y] and "mutual_information" (B,) in nats, "quantiles"
    (Q, B, *event) at these levels. By default the cheap ones: outputs, mean, std, and for classes entropy and mutual
    information. For numbers these two need an integral, and quantiles a root search, with a Gaussian y.

    The draws are stored as one stack, and the graph maps over it; if a network cannot be mapped for every B (a
    convolution), it is repeated S times. Dropout masks are stored, too. Networks that need Python code for every x are
    rejected.
    """
    check_count(samples)
    if samples < 1:
        raise ValueError("a program needs at least one sample, got samples=0")
    samples = min(samples, posterior.draws or samples)
    likelihood = posterior.target.likelihood
    if answers is None:
        answers = (*CHEAP, *(likelihood.traceable if likelihood.support == "classes" else ()))
    _check_answers(answers, quantiles, likelihood)
    inputs = tuple(  # a batch of one row would be specialized to a constant
        torch.cat([item, item]) if isinstance(item, Tensor) and len(item) == 1 else item
        for item in posterior._place(example_x)
    )
    with evaluating(posterior.net):
        program = _Program(posterior, samples, rng.integer(seed), inputs, answers, quantiles).eval()
        sizes = (tuple({0: Dim.DYNAMIC} if isinstance(item, Tensor) else None for item in inputs),)
        if program.mappable:
            try:
                return _savable(torch.export.export(program, inputs, dynamic_shapes=sizes))
            except Exception:  # an operation without a batching rule, or with one that needs to know B
                program.mappable = False
        try:
            return torch.export.export(program, inputs, dynamic_shapes=sizes)
        except Exception as error:
            net = type(posterior.target.net).__name__
            raise ValueError(
                f"torch.export cannot take {net} as one graph for every batch size: {str(error).splitlines()[0]}; "
                "branches on values and fixed batch sizes in its forward are the usual causes"
            ) from error


@torch.no_grad()
def export_onnx(
    posterior: Posterior,
    path: str | os.PathLike[str],
    example_x: Any,
    samples: int = 20,
    *,
    seed: int = 0,
    answers: Sequence[str] | None = None,
    quantiles: Sequence[float] = LEVELS,
) -> Path:
    """Write the program of ``export`` as an ONNX file, with named inputs and outputs.

    Inputs: "x", or "x0", "x1", .. of a network with several. Outputs: ``answers``; unless told, all that the task
    allows: mean, std, epistemic_std, entropy, mutual_information, and for Gaussian numbers quantiles. One file, whose
    weights stay below 2 GB. Needs onnx and onnxscript (``pip install 'bayou[onnx]'``); whoever runs it needs neither.
    """
    with extra("onnx", "export_onnx"):
        import onnxscript  # noqa: F401  the exporter of torch is made with it
    if answers is None:
        answers = ("mean", "std", "epistemic_std", *posterior.target.likelihood.traceable)
    program = export(posterior, example_x, samples, seed=seed, answers=answers, quantiles=quantiles)
    count = len(program.graph_signature.user_inputs)
    names = ["x"] if count == 1 else [f"x{number}" for number in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and onnxscript, about each other
        made = torch.onnx.export(program, (), dynamo=True, input_names=names, verbose=False)
    assert made is not None
    graph, own = (
        made.model.graph,
        {id(value): name for value, name in zip(made.model.graph.outputs, answers, strict=True)},
    )
    for value in (value for node in graph for value in node.outputs):
        # The exporter names outputs without checking intermediate values, some of which have the same names.
        value.name = own.get(id(value), f"{value.name}_")
    with writing(path) as stream:
        stream.write(made.model_proto.SerializeToString())
    return Path(path)


def _check_answers(answers: Sequence[str], quantiles: Sequence[float], likelihood: BoundLikelihood) -> None:
    """A ValueError for answers that a graph cannot compute."""
    known = (*MOMENTS, *likelihood.traceable)
    unknown = [name for name in answers if name not in known]
    if unknown or not answers:
        raise ValueError(
            f"a program of {type(likelihood).__name__} supports {', '.join(known)}, not "
            f"{', '.join(unknown) or 'nothing'}; for others use posterior.predict(x)"
        )
    if "quantiles" in answers and not all(0 < level < 1 for level in quantiles):
        raise ValueError(f"levels of quantiles lie strictly between 0 and 1, got {tuple(quantiles)}")


def _savable(program: ExportedProgram) -> ExportedProgram:
    """Trace again: torch 2.9 leaves functorch calls in the graph, which cannot be saved."""
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    kept = any(getattr(target, "__module__", "").startswith("torch._functorch") for target in targets)
    return program.run_decompositions({}) if kept else program


@final
class _Program(nn.Module):
    """The draws as buffers, and the computation of the answers."""

    def __init__(
        self,
        posterior: Posterior,
        samples: int,
        seed: int,
        inputs: tuple[Any, ...],
        answers: Sequence[str],
        quantiles: Sequence[float],
    ) -> None:
        super().__init__()
        self.answers, self.quantiles = tuple(answers), tuple(quantiles)
        self.likelihood = copy.deepcopy(posterior.target.likelihood).requires_grad_(False)
        self.temperature = posterior.temperature
        self.nets = posterior.net  # its buffers are part of the program
        stack = posterior.sample(samples, seed)
        members = stack.pop(MEMBER, torch.zeros(samples)).long().tolist()
        self.callers = [posterior.components[m] if isinstance(posterior, Mixture) else posterior for m in members]
        self.callers = [
            fixed(caller, {n: v[s] for n, v in stack.items()}, inputs) for s, caller in enumerate(self.callers)
        ]
        seeds = stack.pop(SEED, torch.zeros(samples)).long().tolist()
        self.single = {name for name, value in stack.items() if shared(value)}
        self.places = {name: f"draws{number}" for number, name in enumerate(stack)}
        for name, value in stack.items():
            self.register_buffer(self.places[name], (value[0] if name in self.single else value).clone())
        self.masks = [self._draw_masks(s, number, inputs) for s, number in enumerate(seeds)]
        self.mappable = samples > 1 and not isinstance(posterior, Mixture | Masked)

    def _draw_masks(self, s: int, seed: int, inputs: tuple[Any, ...]) -> list[str]:
        """The names of the buffers that hold the dropout masks of draw s."""
        caller = self.callers[s]
        if not isinstance(caller, Masked):
            return []
        mode = _Noted(seed, caller.p)
        with mode:
            caller.network.call(self._weights(s), *inputs)
        names = [f"mask{s}_{number}" for number in range(len(mode.masks))]
        for name, mask in zip(names, mode.masks, strict=True):
            self.register_buffer(name, mask)
        return names

    def _draw(self, s: int) -> Params:
        found = {name: getattr(self, place) for name, place in self.places.items()}
        return {name: value if name in self.single else value[s] for name, value in found.items()}

    def _weights(self, s: int) -> Params:
        return {name: value for name, value in self._draw(s).items() if not name.startswith(NOISE)}

    def _one(self, s: int, inputs: tuple[Any, ...]) -> Tensor:
        caller, weights = self.callers[s], self._weights(s)
        if not isinstance(caller, Masked):
            return caller.call(weights, *inputs)
        with _Stored(caller.p, [getattr(self, name) for name in self.masks[s]]):
            return caller.network.call(weights, *inputs)

    def _mapped(self, inputs: tuple[Any, ...]) -> Tensor:
        weights = {n: getattr(self, place) for n, place in self.places.items() if not n.startswith(NOISE)}
        axes = {name: None if name in self.single else 0 for name in weights}
        return vmap(lambda weights: self.callers[0].call(weights, *inputs), (axes,))(weights)

    def forward(self, *inputs: Any) -> dict[str, Tensor]:
        """The answers, as by ``Predictive``."""
        count = len(self.callers)
        f = self._mapped(inputs) if self.mappable else torch.stack([self._one(s, inputs) for s in range(count)])
        likelihood = self.likelihood
        noise = [name for name in self.places if name.startswith(NOISE)]
        if noise:
            drawn = {n.removeprefix(NOISE): torch.stack([self._draw(s)[n] for s in range(count)]) for n in noise}
            likelihood, f = likelihood.per_sample(f, drawn)
        if self.temperature != 1.0:
            likelihood, f = likelihood.tempered(f, self.temperature)
        p = Predictive(likelihood, f)
        return {name: p.quantile(self.quantiles) if name == "quantiles" else getattr(p, name) for name in self.answers}


class _Noted(Masks):
    """Masks, kept beside being applied."""

    def __init__(self, seed: int, p: float | None) -> None:
        super().__init__(seed, p)
        self.masks: list[Tensor] = []

    def _keep(self, x: Tensor, p: float, channels: bool) -> Tensor:
        self.masks.append(super()._keep(x, p, channels))
        return self.masks[-1]


class _Stored(Masks):
    """Masks that were drawn before, in the order of the calls."""

    def __init__(self, p: float | None, masks: list[Tensor]) -> None:
        super().__init__(0, p)
        self.masks = masks

    def _keep(self, x: Tensor, p: float, channels: bool) -> Tensor:
        self.shapes.append(x.shape)
        return self.masks[len(self.shapes) - 1]


def fixed(posterior: Posterior, draw: Params, inputs: tuple[Any, ...]) -> Posterior:
    """The posterior in a form that can be exported as one graph, or a ValueError if there is none.

    A linearized network needs derivatives, which torch.export does not support for every B. A network that is linear
    in its random tensors (a last layer) is its own linearization; a dry run with an enlarged draw tests this.
    """
    if isinstance(posterior, Mixture):
        raise ValueError("a mixture of mixtures cannot be exported; export its components one by one")
    if isinstance(posterior, Masked) and posterior.per_row:
        raise ValueError(
            "MC dropout with per_row=True draws masks for every row of x, which a graph cannot store; fit it with "
            "MCDropout(per_row=False), one mask for each draw"
        )
    if not isinstance(posterior, GaussianPosterior) or posterior.predictive == "sampled":
        return posterior
    if posterior.predictive == "probit":
        raise ValueError(
            "a probit prediction is no average over draws; export posterior.using('linearized') or .using('sampled')"
        )
    sampled = posterior.using("sampled")
    far = {name: value + LINEARITY_FACTOR * (draw[name] - value) for name, value in posterior.center.items()}
    linear, plain = posterior.call(far, *inputs), sampled.call(far, *inputs)
    if float((linear - plain).abs().max()) > 256 * torch.finfo(plain.dtype).eps * float(1 + plain.abs().max()):
        raise ValueError(
            "a network that is linearized in more than its last layer needs derivatives for every x, which "
            "torch.export cannot take; export posterior.using('sampled'), or fit with Laplace(where='last')"
        )
    return sampled
