"""Makes ``cubic_hmc.json``: the posterior of a small tanh network on a cubic, by NumPyro's NUTS.

The problem, complete, so that any implementation can restate it
----------------------------------------------------------------
Data, i = 0 … 19, original units::

    x_i = linspace(-4, 4, 20)
    y_i = x_i**3 + 3 * Phi^-1((r_i + 0.5) / 20),   r_i = (7*i + 3) mod 20

so the noise is the 20 mid-quantiles of N(0, 3²), each used once, in the fixed order
r = 3 10 17 4 11 18 5 12 19 6 13 0 7 14 1 8 15 2 9 16.  Nothing is drawn at random.
Since r_i + r_(19-i) = 19 the data are exactly odd, y(-x) = -y(x), and with this prior so is the law
of the posterior: f(x) and -f(-x) are equal in distribution, hence mean(0) = 0 and sd(-x) = sd(x)
exactly. A free check of any sampler.

Model, scaled units u = x/4 (so u in [-1, 1]) and t = y/32 (so t in about [-2, 2])::

    f(u) = sum_k v_k tanh(w_k u + b_k) + c,     k = 1 … 20        (61 parameters: Linear(1,20),
    Tanh, Linear(20,1)) every w, b, v, c ~ N(0, 1)
    t_i ~ N(f(u_i), (3/32)²)                                      (noise sd 3 in original units,
    known)

All values of f, means and sds in the JSON are in ORIGINAL units (32·f); noise is not part of them:
"sd" is epistemic. ``log_joint_check`` holds log-likelihood and log-prior (scaled units, constants
included) at one fixed parameter vector, to make sure that another implementation has the same
target before it compares posteriors.

Weights are only identified up to 20!·2^20 symmetries, so convergence is judged in function space:
R-hat (rank-normalized, split) and ESS (bulk and tail) of f at every reported point, and of the
log-likelihood. Chains start at independent prior draws. Monte-Carlo standard errors are ArviZ's.

The JSON in the repository has two more entries, "plain" and "agreement": the same numbers by an HMC
in NumPy with a gradient derived by hand, and z = difference / combined Monte-Carlo standard error.
An earlier version of this script, until November 2026, has that sampler.

Commands
--------
::

    pip install jax==0.10.2 numpyro==0.22.0 numpy==2.4.6 arviz==0.23.4
    python make_cubic_hmc.py cubic_hmc.json       # about 5 minutes on one core

The versions used, the seed and the settings are recorded in the JSON.
"""

import json
import math
import platform
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_sample

HIDDEN = 20
X_SCALE = 4.0
Y_SCALE = 32.0
NOISE = 3.0
KEY_POINTS = [-6.0, -5.0, -4.0, 0.0, 4.0, 5.0, 6.0]
GRID = [round(-6.0 + 0.2 * i, 10) for i in range(61)]
SETTINGS = {
    "chains": 4,
    "warmup": 400,
    "draws": 1000,
    "target_accept": 0.9,
    "max_tree_depth": 12,
    "seed": 20240,
}


def data():
    x = np.linspace(-4.0, 4.0, 20)
    order = [(7 * i + 3) % 20 for i in range(20)]
    noise = np.array([NOISE * statistics.NormalDist().inv_cdf((r + 0.5) / 20) for r in order])
    return x, x**3 + noise


def network(x, w, b, v, c):
    """f in scaled units at x in original units; leading axes of the parameters are kept."""
    hidden = np.tanh(w[..., :, None] * (x / X_SCALE) + b[..., :, None])
    return (v[..., :, None] * hidden).sum(-2) + c[..., None]


def log_likelihood(*parameters):
    x, y = data()
    scale = NOISE / Y_SCALE
    z = (y / Y_SCALE - network(x, *parameters)) / scale
    return (-0.5 * z**2 - math.log(scale) - 0.5 * math.log(2 * math.pi)).sum(-1)


def log_prior(*parameters):
    values = np.concatenate([np.atleast_1d(p) for p in parameters])
    return float((-0.5 * values**2 - 0.5 * math.log(2 * math.pi)).sum())


def run_nuts():
    """Draws of w, b, v and c, (chains, draws, ...), and how they were made."""
    jax.config.update("jax_enable_x64", True)
    x, y = (jnp.asarray(values) for values in data())

    def model():
        normal = dist.Normal(0.0, 1.0)
        w, b, v = (
            numpyro.sample(name, normal.expand([HIDDEN]).to_event(1)) for name in ("w", "b", "v")
        )
        c = numpyro.sample("c", normal)
        f = jnp.tanh(x[:, None] / X_SCALE * w + b) @ v + c
        numpyro.sample("t", dist.Normal(f, NOISE / Y_SCALE), obs=y / Y_SCALE)

    kernel = NUTS(
        model,
        target_accept_prob=SETTINGS["target_accept"],
        max_tree_depth=SETTINGS["max_tree_depth"],
        init_strategy=init_to_sample,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=SETTINGS["warmup"],
        num_samples=SETTINGS["draws"],
        num_chains=SETTINGS["chains"],
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(SETTINGS["seed"]), extra_fields=("diverging", "num_steps"))
    draws = mcmc.get_samples(group_by_chain=True)
    extra = mcmc.get_extra_fields(group_by_chain=True)
    versions = {name: version(name) for name in ("numpyro", "jax", "jaxlib", "numpy", "arviz")}
    settings = SETTINGS | {
        "divergences": int(extra["diverging"].sum()),
        "mean_leapfrog_steps": float(extra["num_steps"].mean()),
        "versions": versions | {"python": platform.python_version()},
    }
    return [np.asarray(draws[name]) for name in ("w", "b", "v", "c")], settings


def summary(draws):
    """Rounded: mean, sd, their Monte-Carlo standard errors, R-hat, ESS of draws (chains, draws)."""
    d = np.ascontiguousarray(draws)
    low, median, high = np.quantile(d, [0.05, 0.5, 0.95])
    numbers = {
        "mean": d.mean(),
        "mean_mcse": az.mcse(d, method="mean"),
        "sd": d.std(ddof=1),
        "sd_mcse": az.mcse(d, method="sd"),
        "q05": low,
        "q50": median,
        "q95": high,
        "rhat": az.rhat(d, method="rank"),
        "ess_bulk": az.ess(d, method="bulk"),
        "ess_tail": az.ess(d, method="tail"),
    }
    return {name: float(f"{value:.6g}") for name, value in numbers.items()}


def main(path):
    x, y = data()
    parameters, settings = run_nuts()
    f = Y_SCALE * network(np.array(GRID), *parameters)
    theta = np.sin(np.arange(1, 3 * HIDDEN + 2))
    *vectors, c = np.split(theta, [HIDDEN, 2 * HIDDEN, 3 * HIDDEN])
    check = (*vectors, c[0])
    result = {
        "about": "Posterior of a 1-20-1 tanh network on a cubic by NUTS; see make_cubic_hmc.py.",
        "data": {"x": x.tolist(), "y": y.tolist()},
        "model": {
            "parameters": 3 * HIDDEN + 1,
            "x_scale": X_SCALE,
            "y_scale": Y_SCALE,
            "noise_sd_original": NOISE,
            "noise_sd_scaled": NOISE / Y_SCALE,
        },
        "log_joint_check": {
            "parameters": "theta_j = sin(j), j = 1 … 61, in the order "
            "first weight (20), first bias (20), second weight (20), second bias (1)",
            "log_likelihood": float(log_likelihood(*check)),
            "log_prior": log_prior(*check),
            "f_at_key_points": (Y_SCALE * network(np.array(KEY_POINTS), *check)).tolist(),
        },
        "nuts": {
            "settings": settings,
            "log_likelihood": summary(log_likelihood(*parameters)),
            "grid": [{"x": at, **summary(f[:, :, i])} for i, at in enumerate(GRID)],
        },
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
