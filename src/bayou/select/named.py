"""Methods by name, for ``bayou.fit(net, data, "laplace")``, the estimators and the command line.

Torch is imported when a method is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, final

import bayou
from bayou.core.progress import spell
from bayou.core.specs import nearest
from bayou.select.settings import VALIDATION, ConfigError, Training

if TYPE_CHECKING:
    from torch import nn

    from bayou.inference.method import Method
    from bayou.methods.point import MAP
    from bayou.select.recipes import Recipe

    Make = Callable[[Training], Method | Recipe]  # from settings to a method or a recipe
    MakeMethod = Callable[[Training], Method]
    AnyMethod = TypeVar("AnyMethod", bound=Method)

POINT_LR = 5e-3
# Of gains of nodes, around 1. At 0.5 the gains of outputs grow to 2, so that the prior of the
# weights is twice as wide as the one selected on held-out rows, and mislabeled rows are overfitted.
GAIN_STD = 0.1
CHAINS = 2
MEMBERS = 5
SHARED_MEMBERS = 16
SMALL_CHAINS = 8  # of stochastic gradients in a small network, where eight cost little more


@final
@dataclass(frozen=True)
class Named:
    """A method by name.

    Args:
        name: the name.
        label: its label in reports.
        summary: one line for lists of methods.
        make: makes a recipe or a method from settings.
        dropout: whether its network must have dropout.
        cost: the processor time of a fit of the default length on a small table, in thousands of
            plain steps of Adam on a batch; None if it varies too much. Means over the tables of
            `experiments.reproduce defaults`, of regressions or of classes, whichever is larger;
            that of mle is a guess, and laplace-last, psgld and csgld have those of their relatives.
        selects_prior: whether part of the cost is a search of the prior scale, which a number of
            steps does not shorten.
        needs_net: whether it fits the network that is given, and not one of its own.
    """

    name: str
    label: str
    summary: str
    make: Make
    dropout: bool = False
    cost: float | None = None
    selects_prior: bool = True
    needs_net: bool = True

    def prepare(self, net: nn.Module) -> nn.Module:
        """Return the network, with dropout added if the method needs it and the network has none.

        Args:
            net: the network of the user.
        """
        if not self.dropout:
            return net
        from bayou.select.layers import with_dropout

        return with_dropout(net)


def _training_settings(config: Training, **defaults: float) -> dict[str, Any]:
    """Return settings of a gradient-based method."""
    names = ("steps", "epochs", "effort", "batch_size", "validation", "patience", "autocast")
    shared = {name: getattr(config, name) for name in names} | {"compile": bool(config.compile)}
    lr = {} if config.lr is None else {"lr": config.lr}
    return defaults | shared | lr


def _mode(config: Training) -> MAP:
    """Return the method that finds the mode at which many methods start."""
    return bayou.MAP(**_training_settings(config, lr=POINT_LR))


def _held_out(
    make: MakeMethod,
    start: Callable[[Training], MAP] = _mode,
    *,
    selects_layers: bool = False,
    mixes_with_mode: bool = True,
) -> Make:
    """Select prior scale and, in a regression, noise of a method on held-out rows.

    Args:
        make: makes the method.
        start: makes the method that finds modes.
        selects_layers: whether it is selected, too, if all layers are random or the last one.
        mixes_with_mode: whether a method that is worse than its mode becomes a mixture with it.
            Methods that prune stay alone, since ``bayou.compress`` takes no mixture.
    """

    def make_recipe(config: Training) -> Recipe:
        from bayou.select.recipes import NamedMethod

        return NamedMethod(
            make(config),
            start(config),
            selects_layers=selects_layers,
            mixes_with_mode=mixes_with_mode,
        )

    return make_recipe


def _guide(
    family: str,
    options: Mapping[str, object] | None = None,
    lr: float = 1e-2,
    **settings: float,
) -> MakeMethod:
    """Make VI with a family and the settings of VI that it needs; a given warm-up has priority.

    Args:
        family: the name of a class in ``bayou.guides``.
        options: the fields of the family that are not its defaults.
        lr: the learning rate where none is given.
        **settings: fields of VI.
    """

    def make(config: Training) -> Method:
        warmup = {"warmup": config.warmup} if config.warmup else {}
        shared = _training_settings(config, lr=lr) | settings | warmup
        guide = getattr(bayou.guides, family)(**options or {})
        return bayou.VI(guide, beta=config.beta, **shared)  # type: ignore[arg-type]

    return make


def _laplace(config: Training) -> Recipe:
    """Make Laplace with a full covariance of all weights, or of the last layer of many."""
    from bayou.select.recipes import NamedMethod

    start = _full_batch_mode(config)
    full = bayou.Laplace("full", start=start, prior="validation")
    return NamedMethod(full, _mode(config), large=_last_layer(config), mixes_with_mode=True)


def _last_layer(config: Training) -> Method:
    """Make Laplace of the last layer, with the prior scale selected on held-out rows.

    Over all layers of a large network a Kronecker posterior is far too wide. For classes the prior
    scale of the largest evidence is far too wide as well.
    """
    return bayou.Laplace(
        "kronecker",
        where="last",
        curvature="ggn",
        start=_full_batch_mode(config),
        prior="validation",
    )


def _full_batch_mode(config: Training) -> Method:
    """Return the method that finds the mode by L-BFGS where it is applicable."""
    from bayou.select.full_batch import FullBatchModes

    return FullBatchModes(_mode(config))


def _with_effort(method: AnyMethod, effort: float, *counts: str) -> AnyMethod:
    """Return a method with its default counts, such as those of draws, multiplied."""
    longer = {name: max(2, round(effort * getattr(method, name))) for name in counts}
    return replace(method, **longer)  # type: ignore[type-var]


def _sampler(family: str) -> Make:
    """Make a sampler of all rows.

    The noise of a regression is selected on held-out rows: a joint mode of weights *and* noise
    interpolates the data if it can, and chains that sample the noise would start from there.
    """

    def make(config: Training) -> Method:
        sampler = getattr(bayou, family)(start=_mode(config), chains=config.chains or CHAINS)
        return _with_effort(sampler, config.effort, "draws", "warmup")

    return _held_out(make)


def _langevin(family: str, **options: str) -> Make:
    """Make chains of stochastic gradients: more and shorter ones in a small network."""

    def make(config: Training) -> Recipe:
        from bayou.select.recipes import NamedMethod

        settings = {
            name: getattr(config, name) for name in ("steps", "epochs", "effort", "batch_size")
        }
        start = _mode(config)
        chains = getattr(bayou, family)(
            start=start, chains=config.chains or CHAINS, **settings, **options
        )
        if config.chains is not None:
            return NamedMethod(chains, start, selects_layers=True, mixes_with_mode=True)
        many = replace(chains, chains=SMALL_CHAINS, effort=chains.effort / 2)
        return NamedMethod(many, start, large=chains, selects_layers=True, mixes_with_mode=True)

    return make


def _swag(config: Training) -> Method:
    """Make SWAG with at least two epochs: one has a single iterate."""
    settings = _training_settings(config) | {"validation": 0.0, "patience": None, "lr": 0.05}
    settings["effort"] = max(0.2, config.effort)
    return bayou.SWAG(start=_mode(config), **settings)


def _ivon(config: Training) -> Method:
    """Make IVON with draws of activations and a large step."""
    return bayou.IVON(hessian=0.05, local=True, **_training_settings(config, lr=0.5))


def _annealing(config: Training) -> Method:
    """Make Annealed with a tenth of its gradients: on tables the same NLL, with a looser bound."""
    if config.beta == VALIDATION:
        name = spell("beta", "--beta")
        raise ConfigError(
            f"{name} {VALIDATION} is not for annealed, whose family is only where its draws begin; "
            "give a number"
        )
    start = _guide("MeanField")(config)
    method = bayou.Annealed(start, temperatures=40, leapfrogs=5)
    return _with_effort(method, config.effort, "temperatures")


def _shared_members(config: Training) -> Recipe:
    """Make members that share all weights but for a rank-1 factor of each layer."""
    from bayou.select.recipes import SharedMembers

    family = bayou.guides.RankOne(config.members or SHARED_MEMBERS, spread=1.0)
    return SharedMembers(bayou.VI(family, **_training_settings(config, lr=2e-3)), _mode(config))


def _bins(config: Training) -> Recipe:
    """Make Laplace for the network of tables, or a wide network with thresholds where it can be."""
    from bayou.select.binned import Binned

    exact = bayou.methods.Wide(draws=3, passes=40, thresholds=128)
    return Binned(_laplace(config), exact=_with_effort(exact, config.effort, "draws", "passes"))


def _linear(config: Training) -> Recipe:
    """Make Laplace for one linear layer, whose posterior is exact given Gaussian noise."""
    from bayou.select.linear_model import LinearModel

    return LinearModel(_laplace(config))


def _predicted_noise(config: Training) -> Recipe:
    """Make the members of ``tabm`` for a network of tables that predicts its noise."""
    from bayou.select.predicted_noise import PredictedNoise

    return PredictedNoise(_shared_members(config))


def _auto(config: Training) -> Recipe:
    """Make the mixture of several names."""
    from bayou.select.auto import CANDIDATES, Auto
    from bayou.select.recipes import NamedMethod

    methods: dict[str, Method | Recipe] = {}
    for name in CANDIDATES:
        recipe = find(name).make(config)
        if isinstance(recipe, NamedMethod):  # the weights of the mixture judge the method
            recipe = replace(recipe, mixes_with_mode=False)
        methods[name] = recipe
    return Auto(methods)


_METHODS = (
    Named(
        "mle",
        "MLE",
        "maximum likelihood: the plain network",
        lambda c: bayou.MLE(**_training_settings(c, lr=POINT_LR)),
        selects_prior=False,
        cost=2.0,
    ),
    Named(
        "map",
        "MAP",
        "the most probable weights: a plain network with weight decay",
        _held_out(_mode),
        cost=3.5,
    ),
    Named(
        "dropout",
        "MC dropout",
        "dropout at test time (Gal & Ghahramani 2016)",
        _held_out(lambda c: bayou.MCDropout(start=_mode(c))),
        dropout=True,
        cost=33.0,
    ),
    Named(
        "ensemble",
        "Ensemble",
        "several networks (Lakshminarayanan 2017)",
        _held_out(lambda c: bayou.Ensemble(c.members or MEMBERS, of=_mode(c))),
        cost=5.0,
    ),
    Named(
        "tabm",
        "TabM",
        "an ensemble at the cost of one network, which shares its weights (Gorishniy 2024)",
        _shared_members,
        selects_prior=False,
        cost=4.0,
    ),
    Named(
        "tabm-noise",
        "TabM, own noise",
        "tabm of a network that predicts the noise of every row: numbers, from 1,000 rows on",
        _predicted_noise,
        selects_prior=False,
        needs_net=False,
        cost=8.0,
    ),
    Named(
        "ffg",
        "FFG",
        "variational, factorized Gaussian (Blundell 2015)",
        _held_out(_guide("MeanField"), selects_layers=True),
        cost=6.4,
    ),
    Named(
        "mnf",
        "MNF",
        "variational, multiplicative normalizing flow (Louizos & Welling 2017)",
        _held_out(_guide("MNF"), selects_layers=True),
        cost=11.7,
    ),
    Named(
        "lowrank",
        "Low rank",
        "variational, diagonal plus low rank",
        _held_out(_guide("LowRank", lr=5e-3, scale_lr=5e-3, samples=4)),
    ),
    Named(
        "nodeflow",
        "Node flow",
        "point weights with flow noise on units (Trinh 2020)",
        _held_out(_guide("NodeFlow", {"where": "both", "penalty": True, "prior_std": GAIN_STD})),
        cost=28.0,
    ),
    Named(
        "sparse",
        "Sparse VD",
        "variational dropout that prunes (Molchanov 2017)",
        _held_out(_guide("SparseVD", scale_lr=1e-2, warmup=0.5), mixes_with_mode=False),
    ),
    Named(
        "jeffreys",
        "Normal-Jeffreys",
        "variational, prunes irrelevant units (Louizos 2017)",
        _held_out(_guide("NormalJeffreys", scale_lr=1e-2, warmup=0.5), mixes_with_mode=False),
    ),
    Named(
        "horseshoe",
        "Horseshoe",
        "the same with half-Cauchy scales of units and layers (Louizos 2017)",
        _held_out(_guide("HalfCauchy", scale_lr=1e-2, warmup=0.5), mixes_with_mode=False),
    ),
    Named(
        "ivon",
        "IVON",
        "variational online Newton (Shen 2024)",
        # learning rates of IVON and Adam differ
        _held_out(_ivon, start=lambda c: _mode(replace(c, lr=None)), selects_layers=True),
        cost=6.8,
    ),
    Named(
        "laplace",
        "Laplace",
        "linearized Gaussian at the mode: of all weights or, in a large network, the last layer",
        _laplace,
        cost=3.8,
    ),
    Named(
        "laplace-last",
        "Laplace, last layer",
        "the same for the last layer only",
        _held_out(_last_layer),
        cost=3.8,
    ),
    Named(
        "vbll",
        "VBLL",
        "variational last layer, without draws (Harrison 2024)",
        _held_out(lambda c: bayou.methods.VBLL(**_training_settings(c, lr=POINT_LR))),
        cost=16.8,
    ),
    Named(
        "swag",
        "SWAG",
        "Gaussian fitted to the trajectory of SGD (Maddox 2019)",
        _held_out(_swag),
        cost=12.2,
    ),
    Named(
        "sgld",
        "SGLD",
        "stochastic gradient Langevin dynamics (Welling & Teh 2011)",
        _langevin("SGLD"),
        cost=12.5,
    ),
    Named(
        "psgld",
        "PSGLD",
        "preconditioned SGLD (Li 2016)",
        _langevin("PSGLD"),
        cost=12.5,
    ),
    Named(
        "sghmc",
        "SGHMC",
        "stochastic gradient HMC (Chen 2014)",
        _langevin("SGHMC"),
        cost=12.3,
    ),
    Named(
        "csgld",
        "cyclical SGLD",
        "SGLD in cycles (Zhang 2020)",
        _langevin("SGLD", schedule="cyclical"),
        cost=12.5,
    ),
    Named(
        "hmc",
        "HMC",
        "Hamiltonian Monte Carlo: small networks and data",
        _sampler("HMC"),
    ),
    Named(
        "nuts",
        "NUTS",
        "the no-U-turn sampler: small networks and data",
        _sampler("NUTS"),
    ),
    Named(
        "mclmc",
        "MCLMC",
        "microcanonical Langevin Monte Carlo (Robnik 2023): small networks and data",
        _sampler("MCLMC"),
    ),
    Named(
        "annealed",
        "Annealed",
        "draws of FFG annealed to the posterior by HMC (Neal 2001): small networks and data",
        _held_out(_annealing, selects_layers=True),
        cost=12.4,
    ),
    Named(
        "wide",
        "Wide network",
        "infinitely many units in place of the network, exact: numbers, up to 3,000 rows",
        lambda c: _with_effort(bayou.methods.Wide(), c.effort, "draws", "passes"),
        selects_prior=False,
        needs_net=False,
        cost=2.0,
    ),
    Named(
        "wide-noise",
        "Wide network, varied noise",
        "the same with noise that depends on x (Kersting 2007)",
        lambda c: _with_effort(bayou.methods.Wide(varied_noise=True), c.effort, "draws", "passes"),
        selects_prior=False,
        needs_net=False,
        cost=4.0,
    ),
    Named(
        "bins",
        "Bins",
        "a network that sees every number in bins as well, wide or by laplace: tables with steps",
        _bins,
        needs_net=False,
        cost=6.0,
    ),
    Named(
        "linear",
        "Linear model",
        "one linear layer in place of the network, exact for numbers: tables, trends in time",
        _linear,
        needs_net=False,
        cost=1.0,
    ),
    Named(
        "auto",
        "Auto",
        "a mixture of several of these methods, with weights by held-out rows",
        _auto,
        cost=61.0,
    ),
)
METHODS: dict[str, Named] = {named.name: named for named in _METHODS}


def find(name: str) -> Named:
    """Return the entry of a name, or raise a ValueError that suggests the nearest.

    Args:
        name: one of ``bayou.list_methods()``.
    """
    if name not in METHODS:
        raise ValueError(
            f"there is no method {name!r}{nearest(name, list(METHODS))}; the names are "
            f"{', '.join(METHODS)}"
        )
    return METHODS[name]


def by_name(name: str, **settings: Any) -> Method | Recipe:
    """Return the recipe of a name, as ``bayou.fit``, the estimators and the command line use it.

    Noise and prior scale are selected on held-out rows, the structure of "laplace" by the size of
    the network, the random layers of some methods on held-out rows (``NamedMethod``); "auto"
    is a mixture of several methods (``Auto``). ``bayou.select.plan`` makes the selection.

    Args:
        name: one of ``bayou.list_methods()``.
        **settings: fields of ``Training``, the options of ``bayou train``: steps, epochs, effort,
            batch_size, lr, members, chains, beta, warmup, validation, patience, compile.

    Raises:
        ValueError: for an unknown name, with the nearest one, or a setting that cannot be used.

    >>> by_name("ensemble", members=3).method.members
    3
    """
    known = [field.name for field in fields(Training)]
    for key in settings:
        if key not in known:
            raise ValueError(
                f"{key!r} is not a setting{nearest(key, known)}; the settings are "
                f"{', '.join(known)}"
            )
    return find(name).make(Training(**settings))


def list_methods() -> dict[str, str]:
    """Return the names of methods, each with a summary of the method.

    >>> list_methods()["mnf"]
    'variational, multiplicative normalizing flow (Louizos & Welling 2017)'
    """
    return {name: named.summary for name, named in METHODS.items()}
