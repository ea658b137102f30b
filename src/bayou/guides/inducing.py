"""A joint posterior over all layers: the weights of each given pseudo-data propagated through the
earlier layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from bayou import rng
from bayou.guides.gaussian import MeanField
from bayou.guides.guide import Draw, GuideSpec, JointGuide, Tensors
from bayou.guides.regression import Regression, columns, patches
from bayou.modules import Modules
from bayou.network import Call, Network, Shell, VmapOrLoop, Watch
from bayou.params import Params
from bayou.priors import BoundNormal

LAYERS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
TYPES = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
)  # layers that pass their whole weight to one of these calls
NUMBERS = 2**25  # maximum numbers in the patches of simultaneous draws


class Layer(nn.Module):
    """The pseudo-outputs v of a layer, in the shape of its outputs, with one log-precision per
    example.
    """

    def __init__(self, outputs: Tensor, precision: float) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs.clone())
        self.log_precision = nn.Parameter(outputs.new_full(outputs.shape[:1], math.log(precision)))

    def rows(self, groups: int, linear: bool) -> tuple[Tensor, Tensor]:
        """v (G, R, out/G) and √precision (R, 1)."""
        v = self.outputs if linear else self.outputs.movedim(1, -1)
        v = v.reshape(-1, groups, v.shape[-1] // groups).movedim(1, 0)
        root = (0.5 * self.log_precision).exp()
        return v, root.repeat_interleave(v.shape[1] // len(root)).unsqueeze(-1)


@dataclass(frozen=True)
class Conditional:
    """q(W | earlier layers) of one layer with its bias: W = center + exp(log_scale) ⊙ Z, W and Z
    (G, D, out/G).

    ``center`` and ``log_scale`` are the prior's, so that Z ~ N(0, I) is the prior of W.
    """

    z: Regression
    center: Tensor
    log_scale: Tensor

    def log_prob(self, w: Tensor) -> Tensor:
        """log q(W): a scalar."""
        return (
            self.z.log_prob((w - self.center) * (-self.log_scale).exp())
            - self.log_scale.expand_as(w).sum()
        )


class Pass(TorchFunctionMode):
    """Inside, a network runs on the inducing inputs; ``value_of`` computes a weight at the first
    call that uses it.

    ``tensors``: the placeholders of the guide's tensors in the network; ``known``: their values so
    far.
    """

    def __init__(
        self, tensors: Params, value_of: Callable[[Call, str, str | None, Params], Params]
    ) -> None:
        super().__init__()
        self.tensors, self.value_of = tensors, value_of
        self.known: Params = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in LAYERS:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs)
        weight, bias = self._name(call.weight), self._name(call.bias)
        if weight is not None and weight not in self.known:
            self.known |= self.value_of(call, weight, bias, self.known)
        if weight is not None:
            call.given["weight"] = self.known[weight]
        if bias is not None:
            call.given["bias"] = self.known[bias]
        return func(**call.given)

    def _name(self, tensor: Tensor | None) -> str | None:
        """By identity: torch.compile does not support ``id`` of its own tensors."""
        for name, mine in self.tensors.items():
            if mine is tensor:
                return name
        return None


class InducingGuide(JointGuide):
    """q(W) = Π_l q(W_l | W_1 .. W_{l−1}), by one run of the network on the inducing inputs U.

    At a layer whose inputs are φ, in the order of the calls: q(W_l | ..) = Π_o N(Σ·φᵀΛ·v_o, Σ), Σ =
    (1/s² + φᵀΛφ)⁻¹, s the prior's scales, v and Λ = diag(precision) learned; φ has a column of ones
    for a bias. φ·W_l is the output.
    """

    scales = ("log_precision",)

    def __init__(self, tensors: Tensors, points: int, precision: float) -> None:
        super().__init__(tensors, tensors.values)
        assert tensors.network is not None
        self.network = tensors.network
        self.given = tuple(name for name in self.network.names if name not in self.shapes)
        self.weights = tuple(name for name in self.names if len(self.shapes[name]) > 1)
        like = tensors.values[self.names[0]]
        for name, prior in self.bound_priors().items():
            if not isinstance(prior, BoundNormal):
                kind = type(prior).__name__.removeprefix("Bound")
                raise ValueError(
                    f"Inducing needs Normal priors, and that of {name!r} is a {kind}; use MeanField()"
                )
        self.shell = Shell(
            self.network.net, self.network.aliases
        )  # in eval mode, for torch.compile
        self.buffers_of_net = [
            (name, module, leaf)
            for name in self.network.buffers()
            for prefix, _, leaf in [name.rpartition(".")]
            for module in [self.network.net.get_submodule(prefix)]
        ]
        self.loop = False
        if tensors.inputs is None:  # set when a file is loaded
            outputs = dict.fromkeys(self.weights, like.new_empty(0))
            self._set_inputs(())
        else:
            inputs = _rows(tensors.inputs, points)
            outputs = dry_run(self.network, tensors.values, tensors.start, inputs)
            if missing := [name for name in self.names if name not in outputs]:
                raise ValueError(
                    f"Inducing cannot cover {', '.join(map(repr, missing))}: weights must be passed whole to linear or "
                    "convolution calls, biases together with their weights, and neither to others; give it another "
                    "family, such as MeanField() or Delta()"
                )
            if self.network.dry_run(lambda: tensors.start, inputs).random:
                raise ValueError(
                    "Inducing needs a deterministic network, and this one draws random numbers"
                )
            self._set_inputs(inputs)
        layers = [Layer(outputs[name], precision) for name in self.weights]
        self.layers: Modules[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]

    def _set_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        """U is initialized with rows of the data; if they are not real numbers (tokens) it is
        constant.
        """
        self.inputs = len(inputs)
        for i, value in enumerate(inputs):
            if value.is_floating_point():
                self.register_parameter(f"input{i}", nn.Parameter(value.clone()))
            else:
                self.register_buffer(f"input{i}", value.clone())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A guide without data gets its sizes from the file."""
        if self.inputs == 0:
            like = self.layers[0].outputs
            count = sum(key.startswith(f"{prefix}input") for key in state_dict)
            found = [state_dict[f"{prefix}input{i}"] for i in range(count)]
            self._set_inputs(
                tuple(v.to(like) if v.is_floating_point() else v.to(like.device) for v in found)
            )
            for i, layer in enumerate(self.layers):
                for leaf in ("outputs", "log_precision"):
                    size = state_dict[f"{prefix}layers.{i}.{leaf}"].shape
                    setattr(layer, leaf, nn.Parameter(like.new_empty(size)))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # --- one run on U ---

    @property
    def _like(self) -> Tensor:
        if self.inputs == 0:
            raise ValueError(
                "Inducing is initialized with rows of data and has none: pass example= some inputs to bayesianize"
            )
        return self.layers[0].outputs

    def _run(self, params: Params) -> None:
        """The network in eval mode on U."""
        inputs = [getattr(self, f"input{i}") for i in range(self.inputs)]
        for name, module, leaf in self.buffers_of_net:
            buffer = getattr(module, leaf)
            params[name] = buffer.to(self._like.dtype) if buffer.is_floating_point() else buffer
        if torch.compiler.is_compiling():
            tied = {alias: params[name] for alias, name in self.network._tied.items()}
            functional_call(self.shell.net, params | tied, tuple(inputs), tie_weights=False)
        else:
            self.network.evaluate(params, *inputs)

    def _conditional(self, call: Call, names: tuple[str, ...], bias: Tensor | None) -> Conditional:
        """q of the tensors ``names``, a weight and its bias if that is random; else ``bias`` is
        known, if any.
        """
        layer, linear = self.layers[self.weights.index(names[0])], call.func is F.linear
        phi = patches(call)
        groups = len(phi)
        v, root = layer.rows(groups, linear)
        exact = torch.float64 if phi.device.type != "mps" else phi.dtype  # small, ill-conditioned
        if bias is not None:
            v = v - columns(bias, groups)
        if len(names) > 1:
            phi = torch.cat([phi, torch.ones_like(phi[..., :1])], -1)
        center, scale = (part.to(exact) for part in self._prior(names, groups))
        # One Σ for all outputs: the scales are approximated by a factor per input times one per
        # output.
        inputs = scale.mean(-1, keepdim=True)  # (G, D, 1)
        outputs = (scale - inputs).mean(-2, keepdim=True)  # (G, 1, out/G or 1)
        phi, v, root = phi.to(exact), v.to(exact), root.to(exact)
        a = root * phi * inputs.mT.exp()
        t = root * (v - phi @ center) * (-outputs).exp()
        return Conditional(Regression.of(a, t), center, scale)

    def _prior(self, names: tuple[str, ...], groups: int) -> tuple[Tensor, Tensor]:
        """Mean and log-scale of the prior: (G, D, out/G), or (G, D, 1) for scalars."""
        means: list[Tensor] = []
        scales: list[Tensor] = []
        for name in names:
            prior, shape = self.priors[self.names.index(name)], self.shapes[name]
            assert isinstance(prior, BoundNormal)
            size = shape.numel() // shape[0]
            for value, parts in ((prior.mean, means), (prior.log_scale, scales)):
                single = value.numel() == 1
                parts.append(
                    value.expand(groups, size, 1)
                    if single
                    else columns(value.expand(shape), groups)
                )
        return _joined(means), _joined(scales)

    def _split(self, w: Tensor, names: tuple[str, ...], like: Tensor) -> Params:
        """(G, D, out/G) as the weight and the bias."""
        sizes = [self.shapes[name].numel() // w.shape[0] // w.shape[2] for name in names]
        parts = w.to(like.dtype).split(sizes, -2)
        return {
            name: part.mT.reshape(self.shapes[name])
            for name, part in zip(names, parts, strict=True)
        }

    def _draw(self, tree: dict[str, Params]) -> tuple[Params, Tensor]:
        """One draw with this noise, and its KL."""
        eps, like = tree["eps"], self._like
        kls: list[Tensor] = []

        def value_of(call: Call, weight: str, bias: str | None, known: Params) -> Params:
            names = (weight,) if bias is None or bias in known else (weight, bias)
            q = self._conditional(call, names, call.bias if bias is None else known.get(bias))
            groups = len(q.center)
            noise = torch.cat([columns(eps[name], groups) for name in names], -2).to(q.center.dtype)
            w = q.center + q.log_scale.exp() * q.z.draw(noise)
            kls.append(q.z.kl().to(like.dtype))
            return self._split(w, names, like)

        nothing = torch.full_like(like.flatten()[0], math.nan)  # a use before the draw gives NaN
        blanks = {name: nothing.expand(shape) for name, shape in self.shapes.items()}
        run = Pass(blanks, value_of)
        with run:
            self._run(tree["given"] | blanks)
        return {name: run.known[name] for name in self.names}, torch.stack(kls).sum()

    def _score(self, params: Params) -> Tensor:
        """log q of one set of tensors."""
        scores: list[Tensor] = []

        def value_of(call: Call, weight: str, bias: str | None, known: Params) -> Params:
            names = (weight,) if bias is None or bias in known else (weight, bias)
            q = self._conditional(call, names, call.bias if len(names) == 1 else None)
            w = torch.cat([columns(params[name], len(q.center)) for name in names], -2)
            scores.append(q.log_prob(w.to(q.center.dtype)))
            return {name: params[name] for name in names}

        with Pass({name: params[name] for name in self.names}, value_of):
            self._run(dict(params))
        return torch.stack(scores).sum().to(params[self.names[0]].dtype)

    def _map(self, function: Callable[[Any], Any], tree: Any, n: int) -> Any:
        """function of every draw of a tree of tensors (n, ...), stacked; some at a time."""
        if n == 1:
            one = torch.utils._pytree.tree_map(lambda value: value[0], tree)
            return torch.utils._pytree.tree_map(lambda value: value.unsqueeze(0), function(one))
        mapped = VmapOrLoop(function, (0,), loop=self.loop or torch.compiler.is_compiling())
        size = max(1, NUMBERS // self._numbers)
        parts = []
        for start in range(0, n, size):
            parts.append(
                mapped(torch.utils._pytree.tree_map(lambda v, i=start: v[i : i + size], tree))
            )
        self.loop = mapped.loop and not torch.compiler.is_compiling()
        return torch.utils._pytree.tree_map(lambda *each: torch.cat(each), *parts)

    @property
    def _numbers(self) -> int:
        """In the patches of one draw."""
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
        given: Params | None = None,
    ) -> Draw:
        like = self._like
        if n == 0:
            return Draw(
                {name: like.new_empty(0, *shape) for name, shape in self.shapes.items()},
                like.new_empty(0),
            )
        noise = {
            name: rng.normal(n, s, like, rng.fold(seed, name), start)
            for name, s in self.shapes.items()
        }
        parts, kl = self._map(self._draw, {"eps": noise, "given": self._others(given)}, n)
        return Draw(parts, kl)

    def sample(
        self, n: int, seed: rng.Seed = None, start: int = 0, given: Params | None = None
    ) -> Params:
        return dict(self.draw(n, seed=seed, start=start, given=given).parts)  # type: ignore[arg-type]

    def log_prob(self, params: Params) -> Tensor:
        first = params[self.names[0]]
        batch = first.shape[: first.ndim - len(self.shapes[self.names[0]])]
        flat = {
            name: params[name].reshape(-1, *params[name].shape[len(batch) :])
            for name in self.network.names
        }
        found: Tensor = self._map(self._score, flat, batch.numel())
        return found.reshape(batch)

    def mean(self, given: Params | None = None) -> Params:
        """The means of the layers one after another, each given the means before it."""
        like = self._like
        noise = {name: like.new_zeros(shape) for name, shape in self.shapes.items()}
        return self._draw({"eps": noise, "given": self._others(given)})[0]

    def _others(self, given: Params | None) -> Params:
        if given is None and self.given:
            raise ValueError(
                f"this guide is q({', '.join(self.names)} | {', '.join(self.given)}): draw with given= their values"
            )
        return {name: value for name, value in (given or {}).items() if name in self.given}


def _joined(parts: list[Tensor]) -> Tensor:
    """(G, D, out/G or 1) of a weight and of its bias, one after the other."""
    width = max(part.shape[-1] for part in parts)
    return torch.cat([part.expand(-1, -1, width) for part in parts], -2)


def _rows(inputs: tuple[Any, ...], points: int) -> tuple[Tensor, ...]:
    if not all(isinstance(value, Tensor) and value.ndim > 0 for value in inputs):
        got = ", ".join(type(value).__name__ for value in inputs)
        raise ValueError(
            f"Inducing needs inputs that are tensors with a row for every example, got {got}"
        )
    return tuple(value[:points].detach() for value in inputs)


@torch.no_grad()
def dry_run(
    network: Network, names: Collection[str], start: Params, inputs: tuple[Any, ...]
) -> Params:
    """The tensors that Inducing can cover: weights with the outputs of their first call, biases
    with an empty tensor. A tensor that is used by anything but linear or convolution calls cannot
    be covered."""
    fresh = {name: value.detach().clone() for name, value in start.items()}
    watch = Watch(
        {name: fresh[name] for name in names}, lambda call: call.func in LAYERS, copies=True
    )
    with rng.isolated(0, inputs[0].device), watch:
        network.evaluate(fresh, *inputs)
    found: Params = {}
    for (call, weight, bias), (x, _) in zip(watch.calls, watch.copies, strict=True):
        if weight is None or weight in watch.other or weight in found or fresh[weight].ndim < 2:
            continue
        out = call.func(**(call.given | {"input": x}))
        single = x.ndim == (
            1 if call.func is F.linear else fresh[weight].ndim - 1
        )  # no axis of examples
        found[weight] = out.unsqueeze(0) if single else out
        if bias is not None and bias not in watch.other:
            found.setdefault(bias, x.new_empty(0))
    return found


@dataclass(frozen=True)
class Inducing(GuideSpec):
    """Weights of every layer given M pseudo-data propagated through the earlier layers (Ober &
    Aitchison 2021).

    q(W_l | W_1 .. W_{l−1}) = Π_o N(Σ·φᵀΛ·v_o, Σ), Σ = (1/s² + φᵀΛφ)⁻¹, for inputs φ of layer l at
    the pseudo-inputs, pseudo-outputs v, Λ = diag(precision) and the scale s of the prior. It covers
    linear and convolution layers, used once or several times; as the only family it leaves other
    tensors to MeanField, and parameters of normalization layers are points. A step costs an
    additional pass over M rows, and per layer O(min(R, D)²·max(R, D)) for D inputs and R = M rows
    or positions.

    With ``VI(compile=True)`` it needs torch 2.10 or newer.

    Args:
        points: M. The pseudo-inputs are initialized with rows of the data (all of them, if there
            are fewer).
        precision: the initial precision of the pseudo-outputs, which start at the outputs of the
            network.
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
        return self.points

    def reach(
        self, network: Network, values: Params, inputs: tuple[Any, ...] | None
    ) -> Collection[str]:
        if inputs is not None:
            found: Collection[str] = dry_run(
                network, network.names, values, _rows(inputs, self.points)
            )
        else:
            owners = {
                name: network.net.get_submodule(name.rpartition(".")[0]) for name in network.names
            }
            found = {name for name, owner in owners.items() if type(owner) in TYPES}
        if not found:
            raise ValueError(
                f"{type(network.net).__name__} has no linear or convolution layer for Inducing to cover"
            )
        return found

    def build(self, tensors: Tensors) -> InducingGuide:
        return InducingGuide(tensors, self.points, self.precision)

    def for_vectors(self) -> GuideSpec:
        return MeanField()
