"""Methods by name, with settings that suit a first try. Torch is imported when one is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch import nn

    from bayou.methods.method import Method

POINT_LR = 5e-3
# Of the fan_in prior. Numbers are standardised, so that a function drawn from their prior should not be much wider than
# 1; 2 is about the mean of what the evidence chooses over tables. Logits of a class that is known are far from 0.
GAIN = {"classification": 3.0, "regression": 2.0}


@final
@dataclass(frozen=True)
class Plan:
    """What all methods of a comparison share: how long, how fast, and for how many data.

    ``steps`` or ``epochs`` (None, None: each method's own default), ``lr`` (None: the method's), ``batch_size``.
    ``members``: networks of an ensemble; ``beta``: weight of the KL; ``compile``: the step.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 128
    lr: float | None = None
    members: int = 5
    beta: float = 1.0
    warmup: float = 0.0
    chains: int = 2
    compile: bool = False
    validation: float = 0.0
    patience: int | None = None
    checkpoint_every: int = 200
    autocast: bool = False

    def trained(self, **defaults: Any) -> dict[str, Any]:
        """Settings of a method that descends a gradient."""
        given = {"lr": self.lr} if self.lr is not None else {}
        shared = {
            "steps": self.steps,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "compile": self.compile,
            "validation": self.validation,
            "patience": self.patience,
            "checkpoint_every": self.checkpoint_every,
            "autocast": self.autocast,
        }
        return defaults | shared | given


@final
@dataclass(frozen=True)
class Preset:
    """A named method: its label in reports, what it is, how it is made, and how the network is changed for it."""

    name: str
    label: str
    summary: str
    make: Callable[[Plan], Method]
    adapt: Callable[[nn.Module], nn.Module] | None = None


def _point(plan: Plan) -> Any:
    """The mode that many methods begin at."""
    import bayou

    return bayou.MAP(**plan.trained(lr=POINT_LR))


def _at_evidence(method: Any, plan: Plan) -> Any:
    """A method whose prior scale and noise, in a regression, are those of the largest evidence."""
    from bayou.runs.evidence import AtEvidence

    return AtEvidence(method, start=_point(plan))


def _mle(plan: Plan) -> Any:
    import bayou

    return bayou.MLE(**plan.trained(lr=POINT_LR))


def _map(plan: Plan) -> Any:
    return _at_evidence(_point(plan), plan)


def _ensemble(plan: Plan) -> Any:
    import bayou

    return _at_evidence(bayou.Ensemble(plan.members, of=_point(plan)), plan)


def _vi(family: str, lr: float = 1e-2, **settings: Any) -> Callable[[Plan], Any]:
    """``settings`` of VI that the family needs; a warm-up that is asked for comes first."""

    def make(plan: Plan) -> Any:
        import bayou

        given = {"warmup": plan.warmup} if plan.warmup else {}
        method = bayou.VI(getattr(bayou, family)(), beta=plan.beta, **plan.trained(lr=lr) | settings | given)
        return _at_evidence(method, plan)

    return make


def _laplace(plan: Plan) -> Any:
    import bayou
    from bayou.runs.evidence import BySize

    whole = bayou.Laplace("full", start=_point(plan), prior="evidence")
    return _at_evidence(BySize(whole, _head(plan)), plan)


def _laplace_last(plan: Plan) -> Any:
    return _at_evidence(_head(plan), plan)


def _head(plan: Plan) -> Any:
    """Laplace of the last layer; over all of a large network a Kronecker posterior is far too wide."""
    import bayou

    return bayou.Laplace("kronecker", where="last", curvature="ggn", start=_point(plan), prior="evidence")


def _langevin(family: str, **options: Any) -> Callable[[Plan], Any]:
    def make(plan: Plan) -> Any:
        import bayou

        settings: dict[str, Any] = {"steps": plan.steps, "epochs": plan.epochs, "batch_size": plan.batch_size}
        return getattr(bayou, family)(start=_point(plan), chains=plan.chains, **settings, **options)

    return make


def _exact(family: str) -> Callable[[Plan], Any]:
    def make(plan: Plan) -> Any:
        import bayou

        return getattr(bayou, family)(start=_point(plan), chains=plan.chains)

    return make


def _swag(plan: Plan) -> Any:
    import bayou

    settings = plan.trained() | {"validation": 0.0, "patience": None, "lr": 0.05}
    return _at_evidence(bayou.SWAG(start=_point(plan), **settings), plan)


def _ivon(plan: Plan) -> Any:
    import bayou

    method = bayou.IVON(hessian=0.05, local=True, **plan.trained(lr=0.5))
    return _at_evidence(method, replace(plan, lr=None))  # a rate for IVON is no rate for Adam


def _dropout(plan: Plan) -> Any:
    import bayou

    return bayou.MCDropout(start=_point(plan))


def _batch_norm(plan: Plan) -> Any:
    import bayou

    return bayou.MCBatchNorm(start=_point(plan))


def with_dropout(net: nn.Module, p: float = 0.2) -> nn.Module:
    """A sequential network with dropout after every activation; one that has dropout already is left alone."""
    from torch import nn

    return _beside_activations(net, nn.Dropout, lambda layer: nn.Dropout(p), "dropout")


def with_batch_norm(net: nn.Module) -> nn.Module:
    """A sequential network with batch norm before every activation; one that has it already is left alone."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    def norm(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Conv2d):
            return nn.BatchNorm2d(layer.out_channels)
        assert isinstance(layer, nn.Linear)
        return nn.BatchNorm1d(layer.out_features)

    return _beside_activations(net, _BatchNorm, norm, "batch norm")


def _beside_activations(net: nn.Module, kind: Any, make: Callable[[Any], nn.Module], what: str) -> nn.Module:
    from torch import nn

    if any(isinstance(module, kind) for module in net.modules()):
        return net
    activations = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU)
    if not isinstance(net, nn.Sequential):
        raise ValueError(f"{type(net).__name__} has no {what} layers, and only a Sequential can be given some")
    layers: list[nn.Module] = []
    last: nn.Module | None = None
    for layer in net:
        if isinstance(layer, activations):
            layers += [make(last), layer] if what == "batch norm" else [layer, make(last)]
        else:
            layers.append(layer)
        last = layer if isinstance(layer, nn.Linear | nn.Conv2d) else last
    if len(layers) == len(net):
        raise ValueError(f"the network has no hidden units to give {what} to; choose another method")
    return nn.Sequential(*layers)


_PRESETS = (
    Preset("mle", "MLE", "maximum likelihood: the plain network", _mle),
    Preset("map", "MAP", "the most probable weights: a plain network with weight decay", _map),
    Preset("dropout", "MC dropout", "dropout at test time (Gal & Ghahramani 2016)", _dropout, with_dropout),
    Preset("batchnorm", "MC batch norm", "random batch statistics (Teye 2018)", _batch_norm, with_batch_norm),
    Preset("ensemble", "Ensemble", "several networks (Lakshminarayanan 2017)", _ensemble),
    Preset("ffg", "FFG", "variational, factorized Gaussian (Blundell 2015)", _vi("FFG")),
    Preset("mnf", "MNF", "variational, multiplicative normalizing flow (Louizos & Welling 2017)", _vi("MNF")),
    Preset(
        "lowrank", "Low rank", "variational, diagonal plus low rank", _vi("LowRank", lr=5e-3, scale_lr=5e-3, samples=4)
    ),
    Preset("nodeflow", "Node flow", "points with flow noise on units (Trinh 2020)", _vi("NodeFlow")),
    Preset(
        "sparse",
        "Sparse VD",
        "variational dropout that prunes (Molchanov 2017)",
        _vi("SparseVD", scale_lr=1e-2, warmup=0.5),
    ),
    Preset("ivon", "IVON", "variational online Newton (Shen 2024)", _ivon),
    Preset(
        "laplace",
        "Laplace",
        "linearised Gaussian at the mode: of all weights or, in a large network, the last layer's",
        _laplace,
    ),
    Preset("laplace-last", "Laplace, last layer", "the same of the last layer alone", _laplace_last),
    Preset("swag", "SWAG", "Gaussian through the path of SGD (Maddox 2019)", _swag),
    Preset("sgld", "SGLD", "stochastic gradient Langevin dynamics (Welling & Teh 2011)", _langevin("SGLD")),
    Preset("psgld", "pSGLD", "preconditioned SGLD (Li 2016)", _langevin("pSGLD")),
    Preset("sghmc", "SGHMC", "stochastic gradient HMC (Chen 2014)", _langevin("SGHMC")),
    Preset("csgld", "cyclical SGLD", "SGLD in cycles (Zhang 2020)", _langevin("SGLD", schedule="cyclical")),
    Preset("hmc", "HMC", "Hamiltonian Monte Carlo: small networks and data", _exact("HMC")),
    Preset("nuts", "NUTS", "the no-U-turn sampler: small networks and data", _exact("NUTS")),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}


def find(name: str) -> Preset:
    """The preset of a name, or a ValueError that lists them."""
    if name not in PRESETS:
        close = get_close_matches(name, list(PRESETS), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"there is no method {name!r}{hint}; the names are {', '.join(PRESETS)}")
    return PRESETS[name]
