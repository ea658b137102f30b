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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.func import vmap

from bayou.core import rng
from bayou.core.params import Params, shared
from bayou.likelihoods import BoundLikelihood
from bayou.likelihoods.predictive import Predictive
from bayou.network import Keywords, evaluating
from bayou.operations.onnx_files import require_onnx, write_onnx
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import NOISE, check_count

MAIN_ANSWERS = ("outputs", "mean", "std")
MOMENT_ANSWERS = (*MAIN_ANSWERS, "epistemic_std", "aleatoric_std")  # of every likelihood


@torch.no_grad()
def export(
    posterior: Posterior,
    example_x: object,
    samples: int = 20,
    *,
    seed: int = 0,
    answers: Sequence[str] | None = None,
) -> ExportedProgram:
    """Export a posterior as a program x ↦ predictions, for use with torch alone.

    The predictions are those of ``posterior.predict(x, samples, seed=seed)``. The draws are stored
    as one stack, and the graph maps over it; if a network cannot be mapped for every B (a
    convolution), it is repeated S times. Dropout masks are stored, too. Networks that need Python
    code for every x are rejected.

    Args:
        posterior: what predicts y.
        example_x: x: a tensor (B, ...) or a tuple of them; B is free in the program. The tensors of
            a dict are arguments in its order.
        samples: S, the number of draws. A posterior that has fewer (a point, an ensemble) gives
            each of them once.
        seed: of the draws.
        answers: the predictions, as ``Predictive`` has them: "outputs" (S, B, *out) of the draws
            f_s, "mean" E[y] (class probabilities for classes), "std" √Var[y], "epistemic_std",
            "aleatoric_std", "entropy" H[y] and "mutual_information" (B,) in nats. By default
            outputs, mean, std, and for classes entropy and mutual information, which need an
            integral for numbers.

    Returns:
        A program that gives a dict of the answers.

    Raises:
        ValueError: if the likelihood has no such answers, or the network is not one graph for every
            batch size.

    Example:
        >>> program = export(posterior, x[:2], samples=20)
        >>> torch.export.save(program, "digits.pt2")
    """
    check_count(samples, "samples", 1)
    samples = min(samples, posterior.draws or samples)
    likelihood = posterior.target.likelihood
    if answers is None:
        class_answers = likelihood.traceable if likelihood.support == "classes" else ()
        answers = (*MAIN_ANSWERS, *class_answers)
    _check_answers(answers, likelihood)
    inputs = tuple(  # a batch of one row would be specialized to a constant
        torch.cat([item, item]) if isinstance(item, Tensor) and len(item) == 1 else item
        for item in posterior.place(example_x)
    )
    with evaluating(posterior.net):
        program = _PredictionModule(posterior, samples, rng.integer(seed), inputs, answers).eval()
        # Keywords are not an input of the graph, which has them by position.
        if isinstance(inputs[-1], Keywords):
            inputs = inputs[:-1]
        sizes = (tuple({0: Dim.DYNAMIC} if isinstance(item, Tensor) else None for item in inputs),)
        if program.mappable:
            try:
                return _trace_again_for_saving(
                    torch.export.export(program, inputs, dynamic_shapes=sizes)
                )
            except Exception:  # an operation has no batching rule, or one that needs to know B
                program.mappable = False
        try:
            return torch.export.export(program, inputs, dynamic_shapes=sizes)
        except Exception as error:
            net = type(posterior.target.net).__name__
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"torch.export cannot take {net} as one graph for every batch size: {reason}; "
                "branches on values and fixed batch sizes in its forward are the usual causes"
            ) from error


@torch.no_grad()
def export_onnx(
    posterior: Posterior,
    path: str | os.PathLike[str],
    example_x: object,
    samples: int = 20,
    *,
    seed: int = 0,
    answers: Sequence[str] | None = None,
) -> Path:
    """Write the program of ``export`` as an ONNX file, with named inputs and outputs.

    Inputs are "x", or "x0", "x1", .. of a network with several; outputs are the answers. It is one
    file, whose weights stay below 2 GB. Needs onnx and onnxscript (``pip install 'bayou[onnx]'``);
    running the file needs neither.

    Args:
        posterior: what predicts y.
        path: the file to write.
        example_x: as of ``export``.
        samples: the number of draws.
        seed: of the draws.
        answers: as of ``export``; by default all that the task allows: mean, std, epistemic_std,
            entropy, mutual_information.

    Returns:
        The path of the file.

    Raises:
        ImportError: if onnx or onnxscript is not installed.
        ValueError: as of ``export``.
    """
    require_onnx("export_onnx")
    if answers is None:
        answers = ("mean", "std", "epistemic_std", *posterior.target.likelihood.traceable)
    program = export(posterior, example_x, samples, seed=seed, answers=answers)
    count = len(program.graph_signature.user_inputs)
    input_names = ["x"] if count == 1 else [f"x{number}" for number in range(count)]
    return write_onnx(program, path, input_names, answers, "export_onnx")


def _check_answers(answers: Sequence[str], likelihood: BoundLikelihood) -> None:
    """Raise a ValueError for answers that a graph of this likelihood cannot compute."""
    supported = (*MOMENT_ANSWERS, *likelihood.traceable)
    unsupported = [name for name in answers if name not in supported]
    if unsupported or not answers:
        raise ValueError(
            f"a program of {type(likelihood).__name__} supports {', '.join(supported)}, not "
            f"{', '.join(unsupported) or 'nothing'}; for others use posterior.predict(x)"
        )


def _trace_again_for_saving(program: ExportedProgram) -> ExportedProgram:
    """Trace again if needed: torch 2.9 leaves calls of functorch, which cannot be saved."""
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    has_functorch_calls = any(
        getattr(target, "__module__", "").startswith("torch._functorch") for target in targets
    )
    return program.run_decompositions({}) if has_functorch_calls else program


@final
class _PredictionModule(nn.Module):
    """The draws of a posterior as buffers, and the computation of the answers."""

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
        self.calibration_map = posterior.calibration_map
        if self.calibration_map is not None and not self.calibration_map.is_traceable:
            raise ValueError(
                f"a program cannot apply {self.calibration_map!r}, which solves for quantiles; "
                "calibrate with map='temperature', or serve posterior.predict(x)"
            )
        self.names = inputs[-1:] if isinstance(inputs[-1], Keywords) else ()
        self.nets = posterior.net  # its buffers are part of the program
        stack = posterior.sample(samples, seed)
        pairs = [
            posterior.traceable({name: value[s] for name, value in stack.items()}, inputs)
            for s in range(samples)
        ]
        self.callers = [caller for caller, _ in pairs]
        self.single = {name for name, value in stack.items() if shared(value)}
        self.buffer_names = {name: f"draws{number}" for number, name in enumerate(pairs[0][1])}
        for name, buffer_name in self.buffer_names.items():
            values = [draw[name] for _, draw in pairs]
            buffer = values[0].clone() if name in self.single else torch.stack(values)
            self.register_buffer(buffer_name, buffer)
        self.mappable = samples > 1 and posterior.mappable

    def _draws(self, is_noise: bool) -> Params:
        """Return the draws of the tensors of the noise, or those of the weights."""
        return {
            name: getattr(self, buffer_name)
            for name, buffer_name in self.buffer_names.items()
            if name.startswith(NOISE) is is_noise
        }

    def _select_draw(self, draws: Params, s: int) -> Params:
        """Return draw s of each tensor; tensors that all draws have in common have only one."""
        return {name: value if name in self.single else value[s] for name, value in draws.items()}

    def _repeat_network(self, inputs: tuple[Any, ...]) -> Tensor:
        """Return the outputs of the draws, one after the other: (S, B, *out)."""
        weights = self._draws(is_noise=False)
        outputs = [
            caller.call(self._select_draw(weights, s), *inputs)
            for s, caller in enumerate(self.callers)
        ]
        return torch.stack(outputs)

    def _map_network(self, inputs: tuple[Any, ...]) -> Tensor:
        """Return the outputs of all draws at once: (S, B, *out)."""
        weights = self._draws(is_noise=False)
        axes = {name: None if name in self.single else 0 for name in weights}
        return vmap(lambda draw: self.callers[0].call(draw, *inputs), (axes,))(weights)

    def forward(self, *inputs: object) -> dict[str, Tensor]:
        """Return the answers, as ``Predictive`` gives them."""
        inputs = (*inputs, *self.names)
        f = self._map_network(inputs) if self.mappable else self._repeat_network(inputs)
        likelihood = self.likelihood
        noise = self._draws(is_noise=True)
        if noise:
            noise_draws = [self._select_draw(noise, s) for s in range(len(self.callers))]
            stack = {
                name.removeprefix(NOISE): torch.stack([draw[name] for draw in noise_draws])
                for name in noise
            }
            likelihood, f = likelihood.per_sample(f, stack)
        if self.temperature != 1.0:
            likelihood, f = likelihood.temper(f, self.temperature)
        if self.calibration_map is not None:
            likelihood, f = self.calibration_map.apply(likelihood, f)
        p = Predictive(likelihood, f)
        return {name: getattr(p, name) for name in self.answers}
