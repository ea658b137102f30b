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

from bayou.core import rng
from bayou.core.extras import extra
from bayou.core.files import writing
from bayou.core.params import Params, shared
from bayou.likelihoods import BoundLikelihood
from bayou.network import Keywords, evaluating
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import NOISE, check_count
from bayou.predictive import Predictive

CHEAP = ("outputs", "mean", "std")
MOMENTS = (*CHEAP, "epistemic_std", "aleatoric_std")  # of every likelihood


@torch.no_grad()
def export(
    posterior: Posterior,
    example_x: Any,
    samples: int = 20,
    *,
    seed: int = 0,
    answers: Sequence[str] | None = None,
) -> ExportedProgram:
    """A program x ↦ predictions of ``samples`` draws, those of
    ``posterior.predict(x, samples, seed=seed)``.

    If a posterior has fewer draws (a point, an ensemble), the program has each of them once.
    x: a tensor (B, ...) or a tuple of them, as ``example_x``; B is free. The tensors of a dict are
    arguments in its order. The program gives a dict of ``answers``, as ``Predictive`` has them:
    "outputs" (S, B, *out) of the draws f_s, "mean" E[y] (class probabilities for classes), "std"
    √Var[y], "epistemic_std", "aleatoric_std", "entropy" H[y] and "mutual_information" (B,) in nats.
    By default the cheap ones: outputs, mean, std, and for classes entropy and mutual information.
    For numbers these two need an integral.

    The draws are stored as one stack, and the graph maps over it; if a network cannot be mapped for
    every B (a convolution), it is repeated S times. Dropout masks are stored, too. Networks that
    need Python code for every x are rejected.
    """
    check_count(samples, "samples", 1)
    samples = min(samples, posterior.draws or samples)
    likelihood = posterior.target.likelihood
    if answers is None:
        answers = (*CHEAP, *(likelihood.traceable if likelihood.support == "classes" else ()))
    _check_answers(answers, likelihood)
    inputs = tuple(  # a batch of one row would be specialized to a constant
        torch.cat([item, item]) if isinstance(item, Tensor) and len(item) == 1 else item
        for item in posterior.place(example_x)
    )
    with evaluating(posterior.net):
        program = _Program(posterior, samples, rng.integer(seed), inputs, answers).eval()
        if isinstance(
            inputs[-1], Keywords
        ):  # not an input of the graph, which has them by position
            inputs = inputs[:-1]
        sizes = (tuple({0: Dim.DYNAMIC} if isinstance(item, Tensor) else None for item in inputs),)
        if program.mappable:
            try:
                return _savable(torch.export.export(program, inputs, dynamic_shapes=sizes))
            except (
                Exception
            ):  # an operation without a batching rule, or with one that needs to know B
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
) -> Path:
    """Write the program of ``export`` as an ONNX file, with named inputs and outputs.

    Inputs: "x", or "x0", "x1", .. of a network with several. Outputs: ``answers``; by default all
    that the task
    allows: mean, std, epistemic_std, entropy, mutual_information. One file, whose weights stay
    below 2 GB. Needs onnx and onnxscript (``pip install 'bayou[onnx]'``); running the file needs
    neither.
    """
    with extra("onnx", "export_onnx"):
        import onnxscript  # noqa: F401  the exporter of torch is made with it
    if answers is None:
        answers = ("mean", "std", "epistemic_std", *posterior.target.likelihood.traceable)
    program = export(posterior, example_x, samples, seed=seed, answers=answers)
    count = len(program.graph_signature.user_inputs)
    names = ["x"] if count == 1 else [f"x{number}" for number in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and onnxscript
        made = torch.onnx.export(program, (), dynamo=True, input_names=names, verbose=False)
    assert made is not None
    graph = made.model.graph
    own = {id(value): name for value, name in zip(graph.outputs, answers, strict=True)}
    for value in (value for node in graph for value in node.outputs):
        # The exporter names outputs without checking intermediate values, some of which have the
        # same names.
        value.name = own.get(id(value), f"{value.name}_")
    with writing(path) as stream:
        stream.write(made.model_proto.SerializeToString())
    return Path(path)


def _check_answers(answers: Sequence[str], likelihood: BoundLikelihood) -> None:
    """A ValueError for answers that a graph cannot compute."""
    known = (*MOMENTS, *likelihood.traceable)
    unknown = [name for name in answers if name not in known]
    if unknown or not answers:
        raise ValueError(
            f"a program of {type(likelihood).__name__} supports {', '.join(known)}, not "
            f"{', '.join(unknown) or 'nothing'}; for others use posterior.predict(x)"
        )


def _savable(program: ExportedProgram) -> ExportedProgram:
    """Trace again: torch 2.9 leaves functorch calls in the graph, which cannot be saved."""
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    kept = any(
        getattr(target, "__module__", "").startswith("torch._functorch") for target in targets
    )
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
    ) -> None:
        super().__init__()
        self.answers = tuple(answers)
        self.likelihood = copy.deepcopy(posterior.target.likelihood).requires_grad_(False)
        self.temperature = posterior.temperature
        self.names = inputs[-1:] if isinstance(inputs[-1], Keywords) else ()
        self.nets = posterior.net  # its buffers are part of the program
        stack = posterior.sample(samples, seed)
        pairs = [
            posterior.traceable({n: v[s] for n, v in stack.items()}, inputs) for s in range(samples)
        ]
        self.callers = [caller for caller, _ in pairs]
        self.single = {name for name, value in stack.items() if shared(value)}
        self.places = {name: f"draws{number}" for number, name in enumerate(pairs[0][1])}
        for name, place in self.places.items():
            values = [draw[name] for _, draw in pairs]
            self.register_buffer(
                place, values[0].clone() if name in self.single else torch.stack(values)
            )
        self.mappable = samples > 1 and posterior.mappable

    def _draw(self, s: int) -> Params:
        found = {name: getattr(self, place) for name, place in self.places.items()}
        return {name: value if name in self.single else value[s] for name, value in found.items()}

    def _one(self, s: int, inputs: tuple[Any, ...]) -> Tensor:
        weights = {
            name: value for name, value in self._draw(s).items() if not name.startswith(NOISE)
        }
        return self.callers[s].call(weights, *inputs)

    def _mapped(self, inputs: tuple[Any, ...]) -> Tensor:
        weights = {
            n: getattr(self, place) for n, place in self.places.items() if not n.startswith(NOISE)
        }
        axes = {name: None if name in self.single else 0 for name in weights}
        return vmap(lambda weights: self.callers[0].call(weights, *inputs), (axes,))(weights)

    def forward(self, *inputs: Any) -> dict[str, Tensor]:
        """The answers, as by ``Predictive``."""
        count, inputs = len(self.callers), (*inputs, *self.names)
        f = (
            self._mapped(inputs)
            if self.mappable
            else torch.stack([self._one(s, inputs) for s in range(count)])
        )
        likelihood = self.likelihood
        noise = [name for name in self.places if name.startswith(NOISE)]
        if noise:
            drawn = {
                n.removeprefix(NOISE): torch.stack([self._draw(s)[n] for s in range(count)])
                for n in noise
            }
            likelihood, f = likelihood.per_sample(f, drawn)
        if self.temperature != 1.0:
            likelihood, f = likelihood.temper(f, self.temperature)
        p = Predictive(likelihood, f)
        return {name: getattr(p, name) for name in self.answers}
