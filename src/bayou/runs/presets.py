"""Methods by name, with settings that suit a first try. Torch is imported when one is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import bayou
from bayou.runs.config import Config
from bayou.specs import nearest

if TYPE_CHECKING:
    from torch import nn

Make = Callable[[Config], Any]  # from the settings of a run to a Method
POINT_LR = 5e-3
# Of the fan_in prior. Numbers are standardised, so that a function drawn from their prior should not be much wider than
# 1; logits of a class that is known are far from 0. Both are where the search of held-out rows begins.
GAIN = {"classification": 3.0, "regression": 2.0}
# Of gains of nodes, around 1. At 0.5 the gains of outputs go to 2, so that the prior of the weights is twice as wide as
# the one that held-out rows have chosen, and mislabelled rows are learned by heart.
GAIN_STD = 0.1


@final
@dataclass(frozen=True)
class Preset:
    """A named method: its label in reports, what it is, how it is made, and how the network is changed for it."""

    name: str
    label: str
    summary: str
    make: Make
    adapt: Callable[[nn.Module], nn.Module] | None = None


def _trained(config: Config, **defaults: Any) -> dict[str, Any]:
    """Settings of a method that descends a gradient."""
    names = ("steps", "epochs", "batch_size", "validation", "patience")
    shared = {name: getattr(config, name) for name in names} | {"compile": bool(config.compile)}
    given = {} if config.lr is None else {"lr": config.lr}
    return defaults | shared | {"autocast": config.precision == "bf16"} | given


def _point(config: Config) -> Any:
    """The mode that many methods begin at."""
    return bayou.MAP(**_trained(config, lr=POINT_LR))


def _held_out(make: Make, start: Make = _point) -> Make:
    """A method whose prior scale and, in a regression, noise are those that suit held-out rows."""

    def made(config: Config) -> Any:
        from bayou.runs.held_out import HeldOut, KeptPrior

        given = config.gain is not None or not isinstance(config.prior, str)
        return (KeptPrior if given else HeldOut)(make(config), start=start(config))

    return made


def _guided(family: str, lr: float = 1e-2, of: dict[str, Any] | None = None, **settings: Any) -> Make:
    """``settings`` of VI that the family needs, ``of`` the family itself; a warm-up that is asked for comes first."""

    def make(config: Config) -> Any:
        given = {"warmup": config.warmup} if config.warmup else {}
        guide = getattr(bayou, family)(**of or {})
        return bayou.VI(guide, beta=config.beta, **_trained(config, lr=lr) | settings | given)

    return make


def _vi(family: str, **settings: Any) -> Make:
    return _held_out(_guided(family, **settings))


def _laplace(config: Config) -> Any:
    from bayou.runs.held_out import BySize

    return BySize(bayou.Laplace("full", start=_point(config), prior="validation"), _last_layer(config))


def _last_layer(config: Config) -> Any:
    """Laplace of the last layer; over all of a large network a Kronecker posterior is far too wide.

    The scale of the prior is what held-out rows prefer: that of the largest evidence is far too wide for classes.
    """
    return bayou.Laplace("kronecker", where="last", curvature="ggn", start=_point(config), prior="validation")


def _chains(family: str, *settings: str, **options: Any) -> Make:
    """A sampler that takes some of the settings of training.

    The noise of a regression is that of held-out rows: a mode of weights *and* noise goes through the data if it can,
    and chains that draw the noise would have to find their way back from there.
    """

    def make(config: Config) -> Any:
        given = {name: getattr(config, name) for name in ("chains", *settings)}
        return getattr(bayou, family)(start=_point(config), **given, **options)

    return _held_out(make)


def _langevin(family: str, **options: Any) -> Make:
    return _chains(family, "steps", "epochs", "batch_size", **options)


def _swag(config: Config) -> Any:
    settings = _trained(config) | {"validation": 0.0, "patience": None, "lr": 0.05}
    return bayou.SWAG(start=_point(config), **settings)


def _ivon(config: Config) -> Any:
    return bayou.IVON(hessian=0.05, local=True, **_trained(config, lr=0.5))


def _auto(config: Config) -> Any:
    from bayou.runs.auto import CANDIDATES, Auto

    return Auto(CANDIDATES, tuple(find(name).make(config) for name in CANDIDATES))


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


# fmt: off
_PRESETS = (
    Preset("mle", "MLE", "maximum likelihood: the plain network", lambda c: bayou.MLE(**_trained(c, lr=POINT_LR))),
    Preset("map", "MAP", "the most probable weights: a plain network with weight decay", _held_out(_point)),
    Preset("dropout", "MC dropout", "dropout at test time (Gal & Ghahramani 2016)",
           _held_out(lambda c: bayou.MCDropout(start=_point(c))), with_dropout),
    Preset("batchnorm", "MC batch norm", "random batch statistics (Teye 2018)",
           _held_out(lambda c: bayou.MCBatchNorm(start=_point(c))), with_batch_norm),
    Preset("ensemble", "Ensemble", "several networks (Lakshminarayanan 2017)",
           _held_out(lambda c: bayou.Ensemble(c.members, of=_point(c), init="reset"))),
    Preset("ffg", "FFG", "variational, factorized Gaussian (Blundell 2015)", _vi("FFG")),
    Preset("mnf", "MNF", "variational, multiplicative normalizing flow (Louizos & Welling 2017)", _vi("MNF")),
    Preset("lowrank", "Low rank", "variational, diagonal plus low rank",
           _vi("LowRank", lr=5e-3, scale_lr=5e-3, samples=4)),
    Preset("nodeflow", "Node flow", "points with flow noise on units (Trinh 2020)",
           _vi("NodeFlow", of={"where": "both", "penalty": True, "prior_std": GAIN_STD})),
    Preset("sparse", "Sparse VD", "variational dropout that prunes (Molchanov 2017)",
           _vi("SparseVD", scale_lr=1e-2, warmup=0.5)),
    Preset("jeffreys", "Normal-Jeffreys", "variational, units that are not needed go (Louizos 2017)",
           _vi("NormalJeffreys", scale_lr=1e-2, warmup=0.5)),
    Preset("horseshoe", "Horseshoe", "the same with half-Cauchy scales of units and layers (Louizos 2017)",
           _vi("HalfCauchy", scale_lr=1e-2, warmup=0.5)),
    Preset("ivon", "IVON", "variational online Newton (Shen 2024)",
           _held_out(_ivon, start=lambda c: _point(replace(c, lr=None)))),  # a rate for IVON is no rate for Adam
    Preset("laplace", "Laplace",
           "linearised Gaussian at the mode: of all weights or, in a large network, the last layer's",
           _held_out(_laplace)),
    Preset("laplace-last", "Laplace, last layer", "the same of the last layer alone", _held_out(_last_layer)),
    Preset("swag", "SWAG", "Gaussian through the path of SGD (Maddox 2019)", _held_out(_swag)),
    Preset("sgld", "SGLD", "stochastic gradient Langevin dynamics (Welling & Teh 2011)", _langevin("SGLD")),
    Preset("psgld", "pSGLD", "preconditioned SGLD (Li 2016)", _langevin("pSGLD")),
    Preset("sghmc", "SGHMC", "stochastic gradient HMC (Chen 2014)", _langevin("SGHMC")),
    Preset("csgld", "cyclical SGLD", "SGLD in cycles (Zhang 2020)", _langevin("SGLD", schedule="cyclical")),
    Preset("hmc", "HMC", "Hamiltonian Monte Carlo: small networks and data", _chains("HMC")),
    Preset("nuts", "NUTS", "the no-U-turn sampler: small networks and data", _chains("NUTS")),
    Preset("annealed", "Annealed", "draws of FFG moved to the posterior by HMC (Neal 2001): small networks and data",
           _held_out(lambda c: bayou.Annealed(_guided("FFG")(c)))),
    Preset("auto", "Auto", "the best of map, ensemble, laplace, nodeflow and mnf on a fifth of the rows", _auto),
)
# fmt: on
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}


def find(name: str) -> Preset:
    """The preset of a name, or a ValueError that lists them."""
    if name not in PRESETS:
        raise ValueError(
            f"there is no method {name!r}{nearest(name, list(PRESETS))}; the names are {', '.join(PRESETS)}"
        )
    return PRESETS[name]
