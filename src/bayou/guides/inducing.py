"""A joint posterior over all layers, given pseudo-data propagated through the earlier layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from bayou.core import rng
from bayou.core.modules import Modules
from bayou.core.params import Params
from bayou.guides.gaussian import MeanField
from bayou.guides.guide import Draw, GuideSpec, JointGuide, Tensors
from bayou.guides.local import TensorCalls
from bayou.guides.regression import Regression, columns, patches
from bayou.network import Call, Network, Shell, VmapOrLoop, Watch
from bayou.priors import BoundNormal

LAYERS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
# Layers that pass their whole weight to one of these calls.
TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_PATCH_NUMBERS = 2**25  # in the patches of simultaneous draws


class PseudoOutputs(nn.Module):
    """The pseudo-outputs v of a layer, with one log-precision per example.

    Args:
        outputs: the initial v, in the shape of the outputs of the layer.
        precision: the initial precision.
    """

    def __init__(self, outputs: Tensor, precision: float) -> None:
        super().__init__()
        self.outputs: nn.Parameter = nn.Parameter(outputs.clone())
        self.log_precision: nn.Parameter = nn.Parameter(
            outputs.new_full(outputs.shape[:1], math.log(precision))
        )

    def rows(self, groups: int, is_linear: bool) -> tuple[Tensor, Tensor]:
        """Return v (G, R, out/G) and √precision (R, 1).

        Args:
            groups: the number G of groups of a convolution.
            is_linear: whether the outputs have their features on the last axis.
        """
        v = self.outputs if is_linear else self.outputs.movedim(1, -1)
        v = v.reshape(-1, groups, v.shape[-1] // groups).movedim(1, 0)
        root = (0.5 * self.log_precision).exp()
        return v, root.repeat_interleave(v.shape[1] // len(root)).unsqueeze(-1)


@dataclass(frozen=True)
class LayerPosterior:
    """q(W | earlier layers) of one layer with its bias: W = center + exp(log_scale) ⊙ Z.

    Args:
        z: the posterior of Z, (G, D, out/G), whose prior is N(0, I).
        center: the prior's mean, which broadcasts to W.
        log_scale: the prior's log-scale, which broadcasts to W.
    """

    z: Regression
    center: Tensor
    log_scale: Tensor

    def log_prob(self, w: Tensor) -> Tensor:
        """Compute log q(W): a scalar.

        Args:
            w: the weights, (G, D, out/G).
        """
        z = (w - self.center) * (-self.log_scale).exp()
        return self.z.log_prob(z) - self.log_scale.expand_as(w).sum()


class InducingGuide(JointGuide):
    """q(W) = Π_l q(W_l | W_1 .. W_{l−1}), by one run of the network on the inducing inputs U.

    At a layer whose inputs are φ, in the order of the calls, q(W_l | ..) = Π_o N(Σ·φᵀΛ·v_o, Σ) with
    Σ = (1/s² + φᵀΛφ)⁻¹, s the prior's scales, v and Λ = diag(precision) learned; φ has a column of
    ones for a bias. φ·W_l is the output.

    Args:
        tensors: the tensors with their priors, the network and rows of data.
        points: the maximum number of inducing inputs.
        precision: the initial precision of the pseudo-outputs.
    """

    scales: ClassVar[tuple[str, ...]] = ("log_precision",)
    priors: Modules[BoundNormal]  # type: ignore[assignment]

    def __init__(self, tensors: Tensors, points: int, precision: float) -> None:
        super().__init__(tensors, tensors.values)
        if tensors.network is None:
            raise TypeError("Inducing needs the network of its tensors")
        self.network: Network = tensors.network
        self.parents: tuple[str, ...] = tuple(
            name for name in self.network.names if name not in self.shapes
        )
        self.weights: tuple[str, ...] = tuple(
            name for name in self.names if len(self.shapes[name]) > 1
        )
        for name, prior in self.bound_priors().items():
            if not isinstance(prior, BoundNormal):
                family = type(prior).__name__.removeprefix("Bound")
                raise ValueError(
                    f"Inducing needs Normal priors, and that of {name!r} is a {family}; "
                    "use MeanField()"
                )
        # In eval mode, for torch.compile.
        self.shell: Shell = Shell(self.network.net, self.network.aliases)
        self.network_buffers: list[Any] = []
        for name in self.network.buffers():
            prefix, _, leaf = name.rpartition(".")
            self.network_buffers.append((name, self.network.net.get_submodule(prefix), leaf))
        self.loop: bool = False
        outputs = self._initialize(tensors, points)
        layers = [PseudoOutputs(outputs[name], precision) for name in self.weights]
        self.layers: Modules[PseudoOutputs] = nn.ModuleList(layers)  # type: ignore[assignment]

    def _initialize(self, tensors: Tensors, points: int) -> Params:
        """Set the inducing inputs, and return the initial pseudo-outputs of every weight."""
        if tensors.inputs is None:  # set when a file is loaded
            self._set_inputs(())
            reference = tensors.values[self.names[0]]
            return dict.fromkeys(self.weights, reference.new_empty(0))
        inputs = _take_rows(tensors.inputs, points)
        outputs = dry_run(self.network, tensors.values, tensors.start, inputs)
        missing = [name for name in self.names if name not in outputs]
        if missing:
            raise ValueError(
                f"Inducing cannot cover {', '.join(map(repr, missing))}: weights must be passed "
                "whole to linear or convolution calls, biases together with their weights, and "
                "neither to others; give it another family, such as MeanField() or Delta()"
            )
        if self.network.dry_run(lambda: tensors.start, inputs).random:
            raise ValueError(
                "Inducing needs a deterministic network, and this one draws random numbers"
            )
        self._set_inputs(inputs)
        return outputs

    def _set_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        """Register the inducing inputs U, constant if they are not real numbers (tokens)."""
        self.inputs: int = len(inputs)
        for i, value in enumerate(inputs):
            if value.is_floating_point():
                self.register_parameter(f"input{i}", nn.Parameter(value.clone()))
            else:
                self.register_buffer(f"input{i}", value.clone())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state, from which a guide without data takes its sizes."""
        if self.inputs == 0:
            reference = self.layers[0].outputs
            count = sum(key.startswith(f"{prefix}input") for key in state_dict)
            inputs = []
            for i in range(count):
                value = state_dict[f"{prefix}input{i}"]
                is_real = value.is_floating_point()
                inputs.append(value.to(reference) if is_real else value.to(reference.device))
            self._set_inputs(tuple(inputs))
            for i, layer in enumerate(self.layers):
                for leaf in ("outputs", "log_precision"):
                    size = state_dict[f"{prefix}layers.{i}.{leaf}"].shape
                    setattr(layer, leaf, nn.Parameter(reference.new_empty(size)))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # --- one run on U ---

    @property
    def _reference(self) -> Tensor:
        """Return a tensor with the dtype and device of the guide."""
        if self.inputs == 0:
            raise ValueError(
                "Inducing is initialized with rows of data and has none: "
                "pass example= some inputs to bayesianize"
            )
        return self.layers[0].outputs

    def _run(self, params: Params) -> None:
        """Run the network in eval mode on U."""
        inputs = [getattr(self, f"input{i}") for i in range(self.inputs)]
        for name, module, leaf in self.network_buffers:
            buffer = getattr(module, leaf)
            params[name] = (
                buffer.to(self._reference.dtype) if buffer.is_floating_point() else buffer
            )
        if torch.compiler.is_compiling():
            tied = {alias: params[name] for alias, name in self.network._tied.items()}
            functional_call(self.shell.net, params | tied, tuple(inputs), tie_weights=False)
        else:
            self.network.evaluate(params, *inputs)

    def _layer_posterior(
        self, call: Call, names: tuple[str, ...], bias: Tensor | None
    ) -> LayerPosterior:
        """Compute q of a weight, and of its bias if that is random; else ``bias`` is its value."""
        layer = self.layers[self.weights.index(names[0])]
        phi = patches(call)
        groups = len(phi)
        v, root = layer.rows(groups, call.func is F.linear)
        # Small and ill-conditioned.
        exact = torch.float64 if phi.device.type != "mps" else phi.dtype
        if bias is not None:
            v = v - columns(bias, groups)
        if len(names) > 1:
            phi = torch.cat([phi, torch.ones_like(phi[..., :1])], -1)
        prior_mean, prior_log_scale = self._prior(names, groups)
        center = prior_mean.to(exact)
        log_scale = prior_log_scale.to(exact)
        # One Σ for all outputs: the scales are approximated by a factor per input times one per
        # output.
        input_scale = log_scale.mean(-1, keepdim=True)  # (G, D, 1)
        output_scale = (log_scale - input_scale).mean(-2, keepdim=True)  # (G, 1, out/G or 1)
        phi = phi.to(exact)
        v = v.to(exact)
        root = root.to(exact)
        a = root * phi * input_scale.mT.exp()
        t = root * (v - phi @ center) * (-output_scale).exp()
        return LayerPosterior(Regression.fit(a, t), center, log_scale)

    def _prior(self, names: tuple[str, ...], groups: int) -> tuple[Tensor, Tensor]:
        """Return mean and log-scale of the prior: (G, D, out/G), or (G, D, 1) for scalars."""
        means: list[Tensor] = []
        log_scales: list[Tensor] = []
        for name in names:
            prior = self.priors[self.names.index(name)]
            shape = self.shapes[name]
            means.append(_expand_columns(prior.mean, shape, groups))
            log_scales.append(_expand_columns(prior.log_scale, shape, groups))
        return _join_columns(means), _join_columns(log_scales)

    def _propagate(
        self,
        placeholders: Params,
        parents: Params,
        draw_layer: Callable[[LayerPosterior, tuple[str, ...]], Params],
    ) -> Params:
        """Run the network on U, and compute each weight with its bias at its first use.

        Args:
            placeholders: the tensors in the network that stand for those of the guide.
            parents: the other tensors of the network.
            draw_layer: returns the tensors of a layer by their posterior and their names.

        Returns:
            The tensors that were computed.
        """
        values: Params = {}

        def compute(call: Call, weight: str | None, bias: str | None) -> Tensor:
            if bias in values:
                call.given["bias"] = values[bias]
            if weight is not None and weight not in values:
                names: tuple[str, ...] = (weight,)
                known_bias = call.bias
                if bias is not None and bias not in values:
                    names = (weight, bias)
                    known_bias = None
                q = self._layer_posterior(call, names, known_bias)
                values.update(draw_layer(q, names))
            if weight is not None:
                call.given["weight"] = values[weight]
            if bias is not None:
                call.given["bias"] = values[bias]
            output: Tensor = call.func(**call.given)
            return output

        with TensorCalls(placeholders, compute):
            self._run(parents | placeholders)
        return values

    def _draw(self, tree: dict[str, Params]) -> tuple[Params, Tensor]:
        """Return one draw with this noise ("eps") and these "parents", and its KL."""
        eps = tree["eps"]
        reference = self._reference
        kls: list[Tensor] = []

        def draw_layer(q: LayerPosterior, names: tuple[str, ...]) -> Params:
            noise = torch.cat([columns(eps[name], len(q.center)) for name in names], -2)
            w = q.center + q.log_scale.exp() * q.z.draw(noise.to(q.center.dtype))
            kls.append(q.z.kl().to(reference.dtype))
            sizes = [self.shapes[name].numel() // w.shape[0] // w.shape[2] for name in names]
            blocks = w.to(reference.dtype).split(sizes, -2)
            return {
                name: block.mT.reshape(self.shapes[name])
                for name, block in zip(names, blocks, strict=True)
            }

        nan = torch.full_like(reference.flatten()[0], math.nan)  # a use before the draw gives NaN
        placeholders = {name: nan.expand(shape) for name, shape in self.shapes.items()}
        values = self._propagate(placeholders, tree["parents"], draw_layer)
        return {name: values[name] for name in self.names}, torch.stack(kls).sum()

    def _log_prob_of_draw(self, params: Params) -> Tensor:
        """Compute log q of one set of tensors."""
        terms: list[Tensor] = []

        def score_layer(q: LayerPosterior, names: tuple[str, ...]) -> Params:
            w = torch.cat([columns(params[name], len(q.center)) for name in names], -2)
            terms.append(q.log_prob(w.to(q.center.dtype)))
            return {name: params[name] for name in names}

        self._propagate({name: params[name] for name in self.names}, params, score_layer)
        return torch.stack(terms).sum().to(params[self.names[0]].dtype)

    def _map(self, function: Callable[[Any], Any], tree: Any, n: int) -> Any:
        """Apply a function to every draw of a tree of tensors (n, ...), some at a time."""
        if n == 1:
            output = function(tree_map(lambda value: value[0], tree))
            return tree_map(lambda value: value.unsqueeze(0), output)
        mapped = VmapOrLoop(function, (0,), loop=self.loop or torch.compiler.is_compiling())
        size = max(1, MAX_PATCH_NUMBERS // self._patch_numbers)
        outputs = []
        for start in range(0, n, size):
            block = tree_map(lambda value, first=start: value[first : first + size], tree)
            outputs.append(mapped(block))
        self.loop = mapped.loop and not torch.compiler.is_compiling()
        return tree_map(lambda *values: torch.cat(values), *outputs)

    @property
    def _patch_numbers(self) -> int:
        """Return how many numbers the patches of one draw have."""
        return sum(
            layer.outputs.numel() * self.shapes[name][1:].numel() // self.shapes[name][0]
            for name, layer in zip(self.weights, self.layers, strict=True)
        )

    # --- the interface of a guide ---

    def draw(
        self,
        n: int,
        *,
        local: bool = False,
        seed: rng.Seed = None,
        start: int = 0,
        parents: Params | None = None,
    ) -> Draw:
        reference = self._reference
        if n == 0:
            empty = {name: reference.new_empty(0, *shape) for name, shape in self.shapes.items()}
            return Draw(dict(empty), reference.new_empty(0))
        noise = {
            name: rng.normal(n, shape, reference, rng.fold(seed, name), start)
            for name, shape in self.shapes.items()
        }
        tree = {"eps": noise, "parents": self._select_parents(parents)}
        params, kl = self._map(self._draw, tree, n)
        return Draw(params, kl)

    def log_prob(self, params: Params) -> Tensor:
        first = params[self.names[0]]
        batch = first.shape[: first.ndim - len(self.shapes[self.names[0]])]
        flat = {
            name: params[name].reshape(-1, *params[name].shape[len(batch) :])
            for name in self.network.names
        }
        log_q: Tensor = self._map(self._log_prob_of_draw, flat, batch.numel())
        return log_q.reshape(batch)

    def mean(self, parents: Params | None = None) -> Params:
        """Return the means of the layers one after another, each given the means before it.

        Args:
            parents: the values of tensors of other guides.
        """
        reference = self._reference
        noise = {name: reference.new_zeros(shape) for name, shape in self.shapes.items()}
        return self._draw({"eps": noise, "parents": self._select_parents(parents)})[0]

    def _select_parents(self, parents: Params | None) -> Params:
        """Return the values of the parents, or raise a ValueError if they are missing."""
        if parents is None and self.parents:
            raise ValueError(
                f"this guide is q({', '.join(self.names)} | {', '.join(self.parents)}): "
                "draw with parents= their values"
            )
        return {name: value for name, value in (parents or {}).items() if name in self.parents}


def _expand_columns(value: Tensor, shape: torch.Size, groups: int) -> Tensor:
    """Return a value that broadcasts to a tensor as (G, D, out/G), a scalar as (G, D, 1)."""
    if value.numel() == 1:
        return value.expand(groups, shape.numel() // shape[0], 1)
    return columns(value.expand(shape), groups)


def _join_columns(blocks: list[Tensor]) -> Tensor:
    """Join (G, D, out/G or 1) of a weight and of its bias, one after the other."""
    width = max(block.shape[-1] for block in blocks)
    return torch.cat([block.expand(-1, -1, width) for block in blocks], -2)


def _take_rows(inputs: tuple[Any, ...], points: int) -> tuple[Tensor, ...]:
    """Return the first rows of every input, or raise a ValueError if one has none."""
    if not all(isinstance(value, Tensor) and value.ndim > 0 for value in inputs):
        types = ", ".join(type(value).__name__ for value in inputs)
        raise ValueError(
            f"Inducing needs inputs that are tensors with a row for every example, got {types}"
        )
    return tuple(value[:points].detach() for value in inputs)


@torch.no_grad()
def dry_run(
    network: Network, names: Collection[str], start: Params, inputs: tuple[Any, ...]
) -> Params:
    """Run the network once and return the tensors that Inducing can cover.

    A tensor that is used by anything but linear or convolution calls cannot be covered.

    Args:
        network: the network.
        names: the tensors in question.
        start: the values of all tensors of the network.
        inputs: some rows of data.

    Returns:
        By name the outputs of the first call of a weight, and an empty tensor for a bias.
    """
    fresh = {name: value.detach().clone() for name, value in start.items()}
    watch = Watch(
        {name: fresh[name] for name in names}, lambda call: call.func in LAYERS, copies=True
    )
    with rng.isolated(0, inputs[0].device), watch:
        network.evaluate(fresh, *inputs)
    outputs: Params = {}
    for (call, weight, bias), (x, _) in zip(watch.calls, watch.copies, strict=True):
        if weight is None or weight in watch.other or weight in outputs or fresh[weight].ndim < 2:
            continue
        output = call.func(**(call.given | {"input": x}))
        example_axes = 1 if call.func is F.linear else fresh[weight].ndim - 1
        outputs[weight] = output.unsqueeze(0) if x.ndim == example_axes else output
        if bias is not None and bias not in watch.other:
            outputs.setdefault(bias, x.new_empty(0))
    return outputs


@dataclass(frozen=True)
class Inducing(GuideSpec):
    """Global inducing points: a joint Gaussian over all layers (Ober & Aitchison 2021).

    The weights of every layer have the exact posterior of a linear regression on M pseudo-data
    propagated through the earlier layers: q(W_l | W_1 .. W_{l−1}) = Π_o N(Σ·φᵀΛ·v_o, Σ),
    Σ = (1/s² + φᵀΛφ)⁻¹, for inputs φ of layer l at the pseudo-inputs, pseudo-outputs v,
    Λ = diag(precision) and the scale s of the Normal prior. The KL of a draw is the sum over layers
    of the closed KL(q(W_l | W_1 .. W_{l−1}) ‖ p(W_l)), which is unbiased for KL(q ‖ p).

    It covers linear and convolution layers, used once or several times; as the only family it
    leaves other tensors to MeanField, and parameters of normalization layers are points. A step
    costs an additional pass over M rows, and per layer O(min(R, D)²·max(R, D)) for D inputs and
    R = M rows or positions. With ``VI(compile=True)`` it needs torch 2.10 or newer
    (arXiv:2005.08140).

    Args:
        points: M (default 100). The pseudo-inputs are initialized with rows of the data (all of
            them, if there are fewer).
        precision: the initial precision of the pseudo-outputs, which start at the outputs of the
            network (default 0.05).

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.Inducing(points=50)))
    """

    points: int = 100
    precision: float = 0.05
    joint: ClassVar[bool] = True
    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_whole("points")
        self._check_positive("precision")

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Return the number of rows of data for the initial pseudo-inputs."""
        return self.points

    def reach(
        self, network: Network, values: Params, inputs: tuple[Any, ...] | None
    ) -> Collection[str]:
        covered: Collection[str]
        if inputs is not None:
            covered = dry_run(network, network.names, values, _take_rows(inputs, self.points))
        else:
            owners = {
                name: network.net.get_submodule(name.rpartition(".")[0]) for name in network.names
            }
            covered = {name for name, owner in owners.items() if type(owner) in TYPES}
        if not covered:
            raise ValueError(
                f"{type(network.net).__name__} has no linear or convolution layer for Inducing "
                "to cover"
            )
        return covered

    def build(self, tensors: Tensors) -> InducingGuide:
        return InducingGuide(tensors, self.points, self.precision)

    def for_vectors(self) -> GuideSpec:
        return MeanField()
