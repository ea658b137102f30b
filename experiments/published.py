"""The published experiments: their rows, settings, and the numbers of the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import bayou
from bayou.inference.method import Method
from bayou.likelihoods import Likelihood
from bayou.network.target import PriorRules
from bayou.select import by_name
from bayou.select.named import find
from bayou.select.noise_and_prior import GAIN_OF_NUMBERS
from experiments.experiment import Budget, Experiment, Row


def _map(budget: Budget, **changes: Any) -> bayou.MAP:
    return bayou.MAP(**budget.settings(**changes))


def _vi(guide: Any, **changes: Any) -> Callable[[Budget], Method]:
    return lambda budget: bayou.VI(guide, **budget.settings(**changes))


def _lenet_rows(
    net: str, published: dict[str, str], prior: PriorRules, members: int = 5, **vi: Any
) -> tuple[Row, ...]:
    """L2, dropout, ensemble, FFG, FFLU, MNF, as in Louizos & Welling 2017; ``vi``: settings of the
    last three.
    """
    flat: dict[str, Any] = {"l2": 1e-4}
    rows = (
        Row("L2", lambda b: _map(b, **flat), net),
        Row("dropout", lambda b: bayou.MCDropout(_map(b, **flat)), f"{net}-dropout"),
        Row(f"ensemble of {members}", lambda b: bayou.Ensemble(members, of=_map(b, **flat)), net),
        Row("FFG", _vi(bayou.MeanField(), **vi), net, prior),
        Row("FFLU", _vi(bayou.SparseVD(), **vi), net, prior),
        Row("MNF", _vi(bayou.MNF(), **vi), net, prior),
    )
    return tuple(
        Row(r.label, r.method, r.net, r.prior, published.get(r.label.split(" of ")[0], ""))
        for r in rows
    )


def _last_layer(net: str, layer: str, **changes: Any) -> tuple[Row, ...]:
    """FFG and MNF over the last layer; the weights below are points, learned under the same bound
    with their prior.
    """
    guides: dict[str, Any] = {"FFG": bayou.MeanField(), "MNF": bayou.MNF()}
    prior = bayou.Normal("fan_in", gain=math.sqrt(2))
    return tuple(
        Row(
            f"{name}, last layer",
            _vi({f"{layer}.*": guide, "*": bayou.Delta(penalty=True)}, **changes),
            net,
            prior,
        )
        for name, guide in guides.items()
    )


def _one_pass(net: str, prior: PriorRules) -> tuple[Row, ...]:
    """Methods that cost about one network: a variational last layer, and members that share all but
    their nodes.
    """
    return (
        Row("VBLL", lambda b: bayou.methods.VBLL(**b.settings()), net, prior),
        Row("BatchEnsemble of 4", _vi(bayou.guides.RankOne(4)), net, prior),
        Row("rank-1, 4 components", _vi(bayou.guides.RankOne(4, std=0.1)), net, prior),
    )


def _lenet_chosen(net: str = "lenet") -> tuple[Row, ...]:
    """Rows whose settings were chosen on held-out images (mnist-lenet-choice): priors by unit,
    noise of nodes.
    """
    long: dict[str, Any] = {"times": 5, "lr": 3e-3, "schedule": "cosine"}
    nodes = bayou.NodeNoise(where="both", components=4, z="example")
    return (
        Row(
            "dropout, longer",
            lambda b: bayou.MCDropout(_map(b, times=3, l2=1e-4)),
            f"{net}-dropout",
        ),
        Row("FFG, by unit", _vi(bayou.MeanField(), **long), net, BY_UNIT),
        Row("MNF, by unit", _vi(bayou.MNF(), **long), net, BY_UNIT),
        Row("NodeFlow", _vi(bayou.NodeFlow(where="both")), net),
        Row("NodeNoise, 4 components", _vi(nodes, schedule="cosine"), net),
        *_last_layer(net, "9"),
        Row("MNF, last layer, wide points", _vi(LAST), net, WIDE_POINTS),
        *_one_pass(net, bayou.Normal("fan_in", gain=math.sqrt(2))),
    )


def _cifar_rows(net: str = "lenet-cifar") -> tuple[Row, ...]:
    """The rows of the paper with a tempered posterior, MNF as chosen (cifar5-choice), at other β,
    with moved images.
    """
    prior = bayou.Normal("fan_in", gain=math.sqrt(2))
    published = {
        "L2": "24",
        "dropout": "16",
        "ensemble": "21",
        "FFG": "22",
        "FFLU": "23",
        "MNF": "16",
    }
    moved, flat = f"{net}-moved", {"l2": 1e-4}

    def mnf(label: str, beta: float, times: int = 1, on: str = net) -> Row:
        return Row(
            label,
            _vi(bayou.MNF(), times=times, beta=beta, warmup=0.5),
            on,
            prior,
            published.get(label, ""),
        )

    return (
        *_lenet_rows(net, published, prior, beta=0.03, warmup=0.5)[:-1],
        mnf("MNF", 0.1, 2),
        mnf("MNF, β = 0.03", 0.03),
        mnf("MNF, β = 1", 1.0),
        Row("L2, moved", lambda b: _map(b, **flat), moved),
        Row(
            "dropout, moved",
            lambda b: bayou.MCDropout(_map(b, times=2, **flat)),
            f"{moved}-dropout",
        ),
        mnf("MNF, moved", 0.03, 2, moved),
        *_last_layer(net, "9"),
    )


def _cifar_choices(net: str = "lenet-cifar") -> tuple[Row, ...]:
    """What might have been chosen: β, priors, rates, noise of nodes, longer, moved images; noise by
    position before.
    """
    prior = bayou.Normal("fan_in", gain=math.sqrt(2))
    before: dict[str, Any] = {
        "std": 0.01,
        "z_std": 0.1,
        "mixing": 0,
    }  # where MNF started when these rows were made
    apart, apart_ffg = bayou.MNF(**before, local="positions"), bayou.MeanField(local="positions")
    inside = {
        "0.*": bayou.MNF(**before, local=False),
        "3.*": bayou.MNF(**before, local=False),
        "*": bayou.MNF(**before),
    }
    four: dict[str, Any] = {"where": "both", "components": 4, "z": "example"}

    def l2(weight: float) -> Row:
        return Row(f"L2 of {weight:g}", lambda b: _map(b, l2=weight), net)

    def vi(
        label: str,
        guide: Any,
        beta: float,
        times: int = 1,
        on: str = net,
        prior: PriorRules = prior,
        **changes: Any,
    ) -> Row:
        settings: dict[str, Any] = {"beta": beta, "times": times, "warmup": 0.5} | changes
        return Row(f"{label}, β = {beta:g}", _vi(guide, **settings), on, prior)

    return (
        *(l2(weight) for weight in (1e-4, 1e-3)),
        Row("dropout", lambda b: bayou.MCDropout(_map(b, l2=1e-4)), f"{net}-dropout"),
        Row(
            "dropout twice as long",
            lambda b: bayou.MCDropout(_map(b, times=2, l2=1e-4)),
            f"{net}-dropout",
        ),
        *(vi("FFG, noise by position", apart_ffg, beta) for beta in (0.01, 0.03, 0.1)),
        *(vi("MNF, noise by position", apart, beta) for beta in (0.01, 0.03, 0.1)),
        *(
            vi("MNF, moved, noise by position", apart, beta, 2, f"{net}-moved")
            for beta in (0.003, 0.01, 0.03)
        ),
        vi("MNF twice as long, noise by position", apart, 0.03, 2),
        vi("MNF as it was, convolutions sampled", inside, 0.03),
        *(vi("FFG", bayou.MeanField(), beta) for beta in (0.03, 0.1)),
        *(vi("MNF", bayou.MNF(), beta) for beta in (0.03, 0.1, 0.3)),
        vi("MNF twice as long", bayou.MNF(), 0.1, 2),
        *(vi("MNF, moved", bayou.MNF(), beta, 2, f"{net}-moved") for beta in (0.01, 0.03, 0.1)),
        *(vi("MNF, by unit", bayou.MNF(), beta, prior=BY_UNIT) for beta in (0.03, 0.1)),
        vi("MNF at 1e-3", bayou.MNF(), 0.03, lr=1e-3),
        vi("MNF, z by row", bayou.MNF(z="example"), 0.03),
        *(
            vi("NodeNoise, 4 components, z by row", bayou.NodeNoise(**four), beta, clip=1.0)
            for beta in (1.0, 30.0)
        ),
        vi("NodeFlow, z by row", bayou.NodeFlow(where="both", z="example"), 30.0, clip=1.0),
    )


def _lenet_choices(net: str = "lenet") -> tuple[Row, ...]:
    """What the rows with priors by unit and noise of nodes might have been: lengths, rates,
    warm-ups.
    """
    flat = bayou.Normal("fan_in", gain=math.sqrt(2))

    def vi(label: str, guide: Any, prior: PriorRules = BY_UNIT, **changes: Any) -> Row:
        return Row(label, _vi(guide, **changes), net, prior)

    def nodes(label: str, guide: Any, **changes: Any) -> Row:
        return Row(label, _vi(guide, **changes), net)  # points of weights, without a prior

    four: dict[str, Any] = {"where": "both", "components": 4}
    slow: dict[str, Any] = {"schedule": "cosine"}
    fast: dict[str, Any] = {"lr": 3e-3, "schedule": "cosine"}
    large: dict[str, Any] = {
        "lr": 1e-2,
        "scale_lr": 1e-2,
        "warmup": 0.4,
        "schedule": "cosine",
    }  # as VI by itself
    return (
        Row("L2", lambda b: _map(b, l2=1e-4), net),
        Row("dropout", lambda b: bayou.MCDropout(_map(b, l2=1e-4)), f"{net}-dropout"),
        Row(
            "dropout, three times as long",
            lambda b: bayou.MCDropout(_map(b, times=3, l2=1e-4)),
            f"{net}-dropout",
        ),
        vi("MNF, by unit", bayou.MNF()),
        vi("MNF, by unit, three times as long", bayou.MNF(), times=3),
        vi("MNF, by unit, cosine at 3e-3", bayou.MNF(), **fast),
        vi("MNF, by unit, cosine at 3e-3, three times as long", bayou.MNF(), times=3, **fast),
        vi("MNF, by unit, cosine at 3e-3, ten times as long", bayou.MNF(), times=10, **fast),
        vi(
            "MNF, by unit, cosine at 3e-3, two draws, three times as long",
            bayou.MNF(),
            times=3,
            samples=2,
            **fast,
        ),
        vi(
            "MNF, by unit, cosine at 3e-3, z by row, three times as long",
            bayou.MNF(z="example"),
            times=3,
            **fast,
        ),
        vi("MNF, by unit, cosine at 1e-2, three times as long", bayou.MNF(), times=3, **large),
        vi("MNF, by unit, warm-up 0.5", bayou.MNF(), warmup=0.5),
        vi("MNF, cosine at 3e-3, three times as long", bayou.MNF(), flat, times=3, **fast),
        vi("MNF, last layer", LAST, flat),
        vi("MNF, last layer, cosine at 3e-3, three times as long", LAST, flat, times=3, **fast),
        vi("MNF, last layer, cosine at 1e-3, three times as long", LAST, flat, times=3, **slow),
        vi("MNF, last layer, wide points", LAST, WIDE_POINTS),
        vi("FFG, by unit", bayou.MeanField()),
        vi("FFG, by unit, cosine at 3e-3, three times as long", bayou.MeanField(), times=3, **fast),
        vi("FFG, by unit, cosine at 3e-3, ten times as long", bayou.MeanField(), times=10, **fast),
        vi("NodeFlow, prior of points", bayou.NodeFlow(where="both", penalty=True), flat),
        vi("NodeNoise, 4 components, prior of points", bayou.NodeNoise(**four, penalty=True), flat),
        nodes("NodeFlow", bayou.NodeFlow(where="both")),
        nodes("NodeFlow, z by row", bayou.NodeFlow(where="both", z="example"), **slow),
        nodes("NodeNoise, 4 components", bayou.NodeNoise(**four)),
        nodes("NodeNoise, 4 components, z by row", bayou.NodeNoise(**four, z="example"), **slow),
        nodes(
            "NodeNoise, 4 components, z by row, three times",
            bayou.NodeNoise(**four, z="example"),
            times=3,
            **slow,
        ),
        nodes(
            "NodeNoise, 4 components, z by row, clipped, twice",
            bayou.NodeNoise(**four, z="example"),
            times=2,
            **slow,
            clip=1.0,
        ),
        vi("Inducing", bayou.Inducing(100), flat, start=_START, warmup=0.5, **fast, clip=1.0),
    )


_START = bayou.MAP(epochs=3, batch_size=128, lr=1e-3)
BY_UNIT = bayou.Normal("fan_in", gain=math.sqrt(2), learn="units")
LAST = {"9.*": bayou.MNF(), "*": bayou.Delta(penalty=True)}  # of LeNet
WIDE_POINTS = {
    "9.*": bayou.Normal("fan_in", gain=math.sqrt(2)),
    "*": bayou.Normal(math.sqrt(1 / 5)),
}
LENET_PUBLISHED = {
    "L2": "0.6",
    "dropout": "0.5",
    "ensemble": "0.7",
    "FFG": "0.9",
    "FFLU": "0.9",
    "MNF": "0.7",
}
FC_PUBLISHED = {  # units: SGD, dropout, Bayes by Backprop with a Gaussian and with a scale mixture (Blundell 2015)
    400: ("1.83", "1.51", "1.82", "1.36"),
    800: ("1.84", "1.33", "1.99", "1.34"),
    1200: ("1.88", "1.36", "2.04", "1.32"),
}


def _mnist_fc(data: str) -> tuple[Row, ...]:
    """Plain, dropout, Bayes by Backprop with two priors, two hidden layers of 400, 800, 1200 units;
    MNF beside.
    """
    gaussian, mixture = (
        bayou.Normal(math.exp(-2)),
        bayou.priors.ScaleMixture(0.25, 1.0, math.exp(-6)),
    )
    rows: list[Row] = []
    for units, (sgd, dropout, normal, mixed) in FC_PUBLISHED.items():
        net, thin = f"mlp-{units}", f"mlp-{units}-dropout"
        rows += [
            Row(f"SGD, {units}", lambda b: bayou.MLE(**b.settings()), net, published=sgd),
            Row(
                f"dropout, {units}",
                lambda b: bayou.MCDropout(bayou.MLE(**b.settings())),
                thin,
                published=dropout,
            ),
            Row(
                f"Bayes by Backprop, Gaussian, {units}",
                _vi(bayou.MeanField()),
                net,
                gaussian,
                normal,
            ),
            Row(
                f"Bayes by Backprop, scale mixture, {units}",
                _vi(bayou.MeanField()),
                net,
                mixture,
                mixed,
            ),
        ]
    long: dict[str, Any] = {"times": 2, "lr": 3e-3}
    nodes = bayou.NodeNoise(where="both", components=4, z="example")
    net, start = "mlp-400", math.log1p(math.exp(-5))
    return (
        *rows,
        Row("MNF, 400", _vi(bayou.MNF()), net, gaussian),
        Row(
            "scale mixture, one rate, 400", _vi(bayou.MeanField(start), scale_lr=1e-3), net, mixture
        ),
        Row("FFG, by unit, 400", _vi(bayou.MeanField(), **long), net, BY_UNIT),
        Row("MNF, by unit, 400", _vi(bayou.MNF(), **long), net, BY_UNIT),
        Row("NodeFlow, 400", _vi(bayou.NodeFlow(where="both")), net),
        Row("NodeNoise, 4 components, 400", _vi(nodes, clip=1.0), net),
    )


LARGE = ("protein", "naval", "power", "kin8nm")
UCI_PUBLISHED = {  # RMSE and NLL: deep ensembles (Lakshminarayanan 2017), MC dropout (Gal & Ghahramani 2016)
    "boston": ("3.28, 2.41", "2.97, 2.46"),
    "concrete": ("6.03, 3.06", "5.23, 3.04"),
    "energy": ("2.09, 1.38", "1.66, 1.99"),
    "kin8nm": ("0.09, −1.20", "0.10, −0.95"),
    "naval": ("0.00, −5.63", "0.01, −3.80"),
    "power": ("4.11, 2.79", "4.02, 2.80"),
    "protein": ("4.71, 2.83", "4.36, 2.89"),
    "wine": ("0.64, 0.94", "0.62, 0.93"),
    "yacht": ("1.58, 1.18", "1.11, 1.55"),
}


def _uci(data: str) -> tuple[Row, ...]:
    """One hidden layer, learned noise; variational rows learn the scale of the prior too (empirical
    Bayes).
    """
    ensemble, dropout = UCI_PUBLISHED[data]
    units = 100 if data == "protein" else 50
    net, thin = f"relu-{units}", f"relu-{units}-dropout"
    prior, learned = bayou.Normal("fan_in", gain=3.0), bayou.Normal("fan_in", gain=1.0, learn=True)
    return (
        Row("MAP", _map, net, prior),
        Row("dropout", lambda b: bayou.MCDropout(_map(b)), thin, prior, dropout),
        Row("ensemble of 5", lambda b: bayou.Ensemble(5, of=_map(b)), net, prior, ensemble),
        Row("Laplace", lambda b: bayou.Laplace("kronecker", start=_map(b)), net, prior),
        Row("FFG", _vi(bayou.MeanField(), warmup=0.3), net, learned),
        Row("MNF", _vi(bayou.MNF(), warmup=0.3), net, learned),
        *_noises(f"silu-{units}", ensemble, data),
        *(_named(name, f"silu-{units}") for name in ("laplace", "nodeflow", "mnf")),
        *_last_layer(net, "2", warmup=0.3),
        *_one_pass(net, prior),
        Row("MCLMC from 5 members", _microcanonical, net, prior),
    )


def _microcanonical(budget: Budget) -> Method:
    """A chain from each member of an ensemble, 500 draws of two steps each after a warm-up as
    long.
    """
    members = bayou.Ensemble(5, of=_map(budget))
    return bayou.MCLMC(chains=5, start=members, steps=2, warmup=500, draws=500)


def _noises(net: str, published: str, data: str) -> tuple[Row, ...]:
    """Ensembles with one noise (small sets: by name, its prior by held-out rows), with heads, and
    the best of these.
    """
    steps = (
        26_000 if data == "protein" else 10_000 if data in LARGE else 3000
    )  # 40 epochs or more, as published

    def plain(budget: Budget, share: int = 1) -> Method:
        return bayou.Ensemble(5, of=_map(budget, steps=steps // share), parallel="vmap")

    def head(label: str, likelihood: Likelihood, share: int = 1) -> Row:
        return Row(
            f"ensemble, {label}", lambda b: plain(b, share), net, NUMBERS, likelihood=likelihood
        )

    rivals = (
        head("one noise", bayou.Gaussian(0.5, learn=True))
        if data in LARGE
        else _named("ensemble", net),
        head("variance head", bayou.HeteroscedasticGaussian()),
        head("Student-t head", bayou.likelihoods.HeteroscedasticStudentT()),
        head("Student-t head, a third", bayou.likelihoods.HeteroscedasticStudentT(), 3),
    )
    return (*rivals, Row("ensemble, chosen noise", plain, net, NUMBERS, published, rivals=rivals))


def _named(name: str, net: str) -> Row:
    """A method by name as it comes, but for the network."""
    return Row(f"{find(name).label}, by name", lambda b: by_name(name), net, NUMBERS)


NUMBERS = bayou.Normal("fan_in", gain=GAIN_OF_NUMBERS)
LENET_NOTES = (
    "β = 1. MNIST has letters (notMNIST) out of distribution, Fashion digits (MNIST). By unit: the prior's scale is "
    "√(2/fan-in) times a learned factor for every input and output unit, 100 epochs of a cosine from 3e-3; dropout, "
    "longer: 60 epochs; both chosen on held-out images of MNIST (mnist-lenet-choice). NodeFlow and NodeNoise have "
    "points for weights and noise on the inputs and outputs of layers: their ELBO is that of the noise alone. Last "
    "layer: the weights below are points with a prior of variance 2/fan-in (wide points: 1/5, chosen on held-out "
    "images too), and there is no ELBO. Others:"
)
FC_NOTES = (
    "β = 1 in all rows. The scale of the Gaussian prior is e⁻²; the mixture is ¼·N(0, 1) + ¾·N(0, e⁻¹²). One rate: "
    "scales start at log(1 + e⁻⁵) and learn at the rate of means, ten times slower than in other rows. By unit: the "
    "prior's scale is √(2/fan-in) times a learned factor for every input and output unit, twice as long from 3e-3, as "
    "chosen for LeNet. NodeFlow and NodeNoise have points for weights: their ELBO is that of the noise alone. Others:"
)
UCI_NOTES = (
    "RMSE and NLL in the units of the data. Priors have scale 3/√fan-in; FFG and MNF learn theirs. Heads: five "
    "networks of SiLU units, 3,000 steps (10,000 on the four large sets, 26,000 on protein), priors of scale "
    "2/√fan-in; a head says the noise of each row, and a third is one of the steps. By name: presets as they come, on "
    "the same units. Chosen noise: that of the ensemble with one noise (on small sets by name) and the heads with the "
    "least NLL on a fifth of the training rows. Last layer: the weights below are points. Others:"
)
CIFAR_NOTES = (
    "β weighs the KL while training, warmed up over the first half; the ELBO is the true one, at β = 1. Still rising: "
    "what E[log-likelihood]/N − β·KL/N gained over the last quarter. Priors have variance 2/fan-in. Moved: training "
    "images mirrored and shifted by up to 2 pixels, and twice as many epochs (L2: as many). MNF trains twice as long "
    "too; that, its β and the β of FFG were chosen on held-out training images (cifar5-choice), where dropout that "
    "trains twice as long was no better by NLL. Its warm-up and prior were found earlier by test error, with one seed. "
    "FFLU has the settings of FFG; L2 was not tuned. Last layer: the weights below are points with the same prior."
)
CLASSES = ("error", "nll", "ece", "auroc_entropy", "elbo", "kl")
# fmt: off
_EXPERIMENTS = (
    Experiment(
        "mnist-fc", "MNIST, fully connected, two hidden layers: Bayes by Backprop (Blundell 2015)", ("mnist",),
        _mnist_fc, lambda data: 50, lambda data: bayou.Categorical(), CLASSES, schedule="cosine",
        notes=FC_NOTES,
    ),
    Experiment(
        "mnist-lenet", "MNIST and Fashion, LeNet 20-50-500 (Louizos & Welling 2017)", ("mnist", "fashion"),
        lambda data: (
            *_lenet_rows("lenet", LENET_PUBLISHED if data == "mnist" else {}, bayou.Normal(1.0)), *_lenet_chosen()),
        lambda data: 20, lambda data: bayou.Categorical(), CLASSES, notes=LENET_NOTES,
    ),
    Experiment(
        "mnist-lenet-choice", "MNIST, LeNet: what a sixth of the training images says about settings", ("mnist",),
        lambda data: _lenet_choices(), lambda data: 20, lambda data: bayou.Categorical(),
        ("error", "nll", "ece", "elbo", "kl", "rise"), seeds=1, held_out=6,
        notes="β = 1. Trained on 50,000 images, scored on 10,000 others of the training set; no test image is seen.",
    ),
    Experiment(
        "cifar5", "CIFAR-5, LeNet 192-192-1000, classes 5–9 out of distribution (Louizos & Welling 2017)", ("cifar5",),
        lambda data: _cifar_rows(), lambda data: 40, lambda data: bayou.Categorical(),
        ("error", "nll", "ece", "auroc_entropy", "beta", "elbo", "kl", "rise"),
        lr=3e-4, schedule="cosine", autocast=True, notes=CIFAR_NOTES,
    ),
    Experiment(
        "cifar5-choice", "CIFAR-5: what a fifth of the training images says about settings", ("cifar5",),
        lambda data: _cifar_choices(), lambda data: 40, lambda data: bayou.Categorical(),
        ("error", "nll", "ece", "beta", "elbo", "kl", "rise"),
        seeds=1, lr=3e-4, schedule="cosine", autocast=True, held_out=5,
        notes="Trained on 20,000 images, scored on 5,000 others of the training set; no test image is looked at.",
    ),
    Experiment(
        "uci", "UCI regression with the published splits (Hernández-Lobato & Adams 2015)", tuple(UCI_PUBLISHED), _uci,
        lambda data: 10_000 if data in LARGE else 5000,
        lambda data: bayou.Gaussian(0.5, learn=True), ("rmse", "nll", "coverage", "elbo"),
        seeds=5, splits=True, lr=5e-3, batch_size=64, schedule="cosine", in_steps=True,
        notes=UCI_NOTES,
    ),
)
# fmt: on
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _EXPERIMENTS}
