"""Makes ``cubic_hmc.json``: the posterior of a small tanh network on a cubic, by two samplers
independent of bayou.

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
log-likelihood.

Samplers
--------
``nuts``   NumPyro's NUTS, float64, diagonal mass matrix, chains started at independent prior draws.
The reference.
``plain``  HMC written out below in NumPy with a hand-derived gradient: identity mass, jittered
step, random path
           length, many chains in lockstep. The cross-check; it shares the data, the evaluation of f
           at the reported points and the diagnostics with the first, no sampling code.

The JSON gives the NUTS numbers on the whole grid, both samplers at the key points, and z =
difference / combined Monte-Carlo standard error (its largest values over the grid too). Monte-Carlo
standard errors are ArviZ's (ESS based).

Commands
--------
::

    pip install jax==0.10.2 numpyro==0.22.0 numpy==2.4.6 arviz==0.23.4
    python make_cubic_hmc.py nuts  --draws nuts.npz       # about 5 minutes on one core
    python make_cubic_hmc.py plain --draws plain.npz      # about 3 minutes on one core
    python make_cubic_hmc.py write --nuts nuts.npz --plain plain.npz --out cubic_hmc.json

The versions used, seeds and settings are recorded in the JSON.
"""

import argparse
import json
import math
import platform
import statistics
import time
from importlib.metadata import version

import numpy as np

HIDDEN, X_SCALE, Y_SCALE, NOISE = 20, 4.0, 32.0, 3.0
KEY_POINTS = [-6.0, -5.0, -4.0, 0.0, 4.0, 5.0, 6.0]
GRID = [round(-6.0 + 0.2 * i, 10) for i in range(61)]  # contains the key points

NUTS = {
    "chains": 4,
    "warmup": 400,
    "draws": 1000,
    "target_accept": 0.9,
    "max_tree_depth": 12,
    "seed": 20240,
}
PLAIN = {
    "chains": 32,
    "warmup": 300,
    "draws": 700,
    "target_accept": 0.95,
    "path_length": [0.5, 2.5],
    "step_jitter": 0.2,
    "seed": 7,
}


def data():
    x = np.linspace(-4.0, 4.0, 20)
    order = [(7 * i + 3) % 20 for i in range(20)]
    noise = np.array([NOISE * statistics.NormalDist().inv_cdf((r + 0.5) / 20) for r in order])
    return x, x**3 + noise, order


def scaled():
    x, y, _ = data()
    return x / X_SCALE, y / Y_SCALE, NOISE / Y_SCALE


def functions(w, b, v, c):
    """f on GRID in original units; leading axes of the parameters are kept."""
    u = np.array(GRID) / X_SCALE
    f = np.tanh(w[..., :, None] * u + b[..., :, None])
    return Y_SCALE * ((v[..., :, None] * f).sum(-2) + c[..., None])


def log_likelihood(w, b, v, c):
    u, t, s = scaled()
    f = (v[..., :, None] * np.tanh(w[..., :, None] * u + b[..., :, None])).sum(-2) + c[..., None]
    return -0.5 * (((t - f) / s) ** 2).sum(-1) - len(t) * (
        math.log(s) + 0.5 * math.log(2 * math.pi)
    )


def log_prior(w, b, v, c):
    n = 3 * HIDDEN + 1
    return -0.5 * ((w**2).sum(-1) + (b**2).sum(-1) + (v**2).sum(-1) + c**2) - 0.5 * n * math.log(
        2 * math.pi
    )


# --- sampler 1: NumPyro ----------------------------------------------------------------------------------------------


def run_nuts(path):
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS as Kernel, init_to_sample

    u, t, s = (jnp.asarray(a) for a in scaled())

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([HIDDEN]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([HIDDEN]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([HIDDEN]).to_event(1))
        c = numpyro.sample("c", dist.Normal(0.0, 1.0))
        numpyro.sample("t", dist.Normal(jnp.tanh(u[:, None] * w + b) @ v + c, s), obs=t)

    k = NUTS
    kernel = Kernel(
        model,
        target_accept_prob=k["target_accept"],
        max_tree_depth=k["max_tree_depth"],
        init_strategy=init_to_sample,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=k["warmup"],
        num_samples=k["draws"],
        num_chains=k["chains"],
        chain_method="sequential",
        progress_bar=False,
    )
    start = time.time()
    mcmc.run(
        jax.random.PRNGKey(k["seed"]),
        extra_fields=("diverging", "num_steps", "accept_prob", "adapt_state.step_size"),
    )
    p = {n: np.asarray(a) for n, a in mcmc.get_samples(group_by_chain=True).items()}
    extra = {n: np.asarray(a) for n, a in mcmc.get_extra_fields(group_by_chain=True).items()}
    info = dict(
        k,
        divergences=int(extra["diverging"].sum()),
        mean_leapfrog_steps=float(extra["num_steps"].mean()),
        at_max_tree_depth=int((extra["num_steps"] >= 2 ** k["max_tree_depth"] - 1).sum()),
        mean_acceptance=float(extra["accept_prob"].mean()),
        step_size_per_chain=[round(float(a), 6) for a in extra["adapt_state.step_size"][:, -1]],
        versions={n: version(n) for n in ("numpyro", "jax", "jaxlib", "numpy")}
        | {"python": platform.python_version()},
    )
    p = [p[n] for n in "wbvc"]
    np.savez(path, f=functions(*p), ll=log_likelihood(*p), info=json.dumps(info))
    print(f"{time.time() - start:.0f} s", info)


# --- sampler 2: plain HMC in NumPy -----------------------------------------------------------------------------------


def run_plain(path):
    k = PLAIN
    rng = np.random.default_rng(k["seed"])
    u, t, s = scaled()
    n, h = k["chains"], HIDDEN

    def potential_and_gradient(q):
        """U = -log p(t, q) up to a constant, and its gradient, for q of shape (chains, 61) = (w, b,
        v, c).
        """
        w, b, v, c = q[:, :h], q[:, h : 2 * h], q[:, 2 * h : 3 * h], q[:, 3 * h]
        a = np.tanh(w[:, :, None] * u + b[:, :, None])  # chains, hidden, data
        e = (np.matmul(v[:, None, :], a)[:, 0] + c[:, None] - t) / s**2  # chains, data: dU/df
        d = v[:, :, None] * (1.0 - a * a)  # df/d(pre-activation)
        g = np.empty_like(q)
        g[:, :h] = np.matmul(d, (e * u)[:, :, None])[:, :, 0]
        g[:, h : 2 * h] = np.matmul(d, e[:, :, None])[:, :, 0]
        g[:, 2 * h : 3 * h] = np.matmul(a, e[:, :, None])[:, :, 0]
        g[:, 3 * h] = e.sum(1)
        return 0.5 * s**2 * (e**2).sum(1) + 0.5 * (q**2).sum(1), g + q

    q = rng.standard_normal((n, 3 * h + 1))
    probe, direction = q[:4], rng.standard_normal((4, 3 * h + 1))  # the gradient is right
    up, down = (
        potential_and_gradient(np.concatenate([probe + z * direction, q[4:]]))[0][:4]
        for z in (1e-6, -1e-6)
    )
    exact = (potential_and_gradient(q)[1][:4] * direction).sum(1)
    assert np.allclose((up - down) / 2e-6, exact, rtol=1e-5, atol=1e-4), "gradient"

    U, g = potential_and_gradient(q)
    log_step, average, count, steps_total, accepted, bad = math.log(0.002), 0.0, 0, 0, 0.0, 0
    keep_f, keep_ll = np.empty((n, k["draws"], len(GRID))), np.empty((n, k["draws"]))
    start = time.time()
    for i in range(k["warmup"] + k["draws"]):
        step = math.exp(log_step) * (1.0 + k["step_jitter"] * rng.uniform(-1.0, 1.0))
        steps = min(1000, max(1, round(rng.uniform(*k["path_length"]) / step)))
        p0 = rng.standard_normal(q.shape)
        qn, pn, gn = q, p0 - 0.5 * step * g, g
        for j in range(steps):
            qn = qn + step * pn
            Un, gn = potential_and_gradient(qn)
            pn = pn - (step if j < steps - 1 else 0.5 * step) * gn
        dH = Un + 0.5 * (pn**2).sum(1) - U - 0.5 * (p0**2).sum(1)
        dH = np.where(np.isfinite(dH), dH, np.inf)
        prob = np.exp(-np.maximum(dH, 0.0))
        take = rng.uniform(size=n) < prob
        q, U, g = (
            np.where(take[:, None], qn, q),
            np.where(take, Un, U),
            np.where(take[:, None], gn, g),
        )
        if i < k["warmup"]:
            # pooled Robbins-Monro on the log step, averaged over the last half of the warm-up, then
            # frozen
            log_step += (prob.mean() - k["target_accept"]) / (1.0 + i) ** 0.6 * 2.0
            if i >= k["warmup"] // 2:
                average, count = average + log_step, count + 1
            if i == k["warmup"] - 1:
                log_step = average / count
        else:
            z = q[:, :h], q[:, h : 2 * h], q[:, 2 * h : 3 * h], q[:, 3 * h]
            keep_f[:, i - k["warmup"]], keep_ll[:, i - k["warmup"]] = (
                functions(*z),
                log_likelihood(*z),
            )
            steps_total, accepted, bad = (
                steps_total + steps,
                accepted + prob.mean(),
                bad + int((dH > 1000).sum()),
            )
        if i % 100 == 0:
            print(
                f"{i} {time.time() - start:.0f} s step {math.exp(log_step):.5f} steps {steps} accept {prob.mean():.3f}",
                flush=True,
            )
    info = dict(
        k,
        divergences=bad,
        mean_leapfrog_steps=steps_total / k["draws"],
        mean_acceptance=float(accepted / k["draws"]),
        step_size=round(math.exp(log_step), 6),
        versions={"numpy": version("numpy"), "python": platform.python_version()},
    )
    np.savez(path, f=keep_f, ll=keep_ll, info=json.dumps(info))
    print(info)


# --- summary ---------------------------------------------------------------------------------------------------------


def digits(a, n=6):
    return float(f"{a:.{n}g}")


def summary(draws):
    """mean, sd, their Monte-Carlo standard errors, R-hat, ESS of draws (chains, draws)."""
    import arviz as az

    d = np.ascontiguousarray(draws)
    low, median, high = np.quantile(d, [0.05, 0.5, 0.95])
    return {
        "mean": digits(d.mean()),
        "mean_mcse": digits(az.mcse(d, method="mean"), 3),
        "sd": digits(d.std(ddof=1)),
        "sd_mcse": digits(az.mcse(d, method="sd"), 3),
        "q05": digits(low),
        "q50": digits(median),
        "q95": digits(high),
        "rhat": round(float(az.rhat(d, method="rank")), 5),
        "ess_bulk": round(float(az.ess(d, method="bulk"))),
        "ess_tail": round(float(az.ess(d, method="tail"))),
    }


def compare(a, b):
    out = {}
    for n in ("mean", "sd"):
        out[f"z_{n}"] = round((a[n] - b[n]) / math.hypot(a[n + "_mcse"], b[n + "_mcse"]), 2)
    out["sd_ratio"] = round(b["sd"] / a["sd"], 4)
    return out


def oddness(f):
    last = len(GRID) - 1
    sums = [summary(f[:, :, i] + f[:, :, last - i]) for i in range(last // 2 + 1)]
    pairs = [compare(summary(f[:, :, i]), summary(f[:, :, last - i])) for i in range(last // 2)]
    return {
        "max_abs_z_mean": round(max(abs(r["mean"]) / r["mean_mcse"] for r in sums), 2),
        "max_abs_z_sd": max(abs(r["z_sd"]) for r in pairs),
    }


def write(nuts_path, plain_path, out):
    x, y, order = data()
    runs = {}
    for name, path in (("nuts", nuts_path), ("plain", plain_path)):
        z = np.load(path)
        runs[name] = z["f"], z["ll"], json.loads(str(z["info"]))
    (fa, la, ia), (fb, lb, ib) = runs["nuts"], runs["plain"]
    a = [dict(x=g, **summary(fa[:, :, i])) for i, g in enumerate(GRID)]
    b = [dict(x=g, **summary(fb[:, :, i])) for i, g in enumerate(GRID)]
    zs = [compare(p, q) for p, q in zip(a, b, strict=True)]
    log_lik_a, log_lik_b = summary(la), summary(lb)
    theta = np.sin(np.arange(1, 3 * HIDDEN + 2))
    split = (
        theta[:HIDDEN],
        theta[HIDDEN : 2 * HIDDEN],
        theta[2 * HIDDEN : 3 * HIDDEN],
        theta[3 * HIDDEN],
    )
    at = lambda rows: [rows[GRID.index(k)] for k in KEY_POINTS]  # noqa: E731
    extremes = lambda rows: {  # noqa: E731
        "max_rhat": max(r["rhat"] for r in rows),
        "min_ess_bulk": min(r["ess_bulk"] for r in rows),
        "min_ess_tail": min(r["ess_tail"] for r in rows),
    }
    result = {
        "about": "Posterior of a 1-20-1 tanh network on a cubic by NUTS, checked by an independent HMC. "
        "Made by make_cubic_hmc.py, which explains it. "
        "f, mean, sd, quantiles in original units, without observation noise.",
        "data": {
            "x": x.tolist(),
            "y": y.tolist(),
            "noise_order": order,
            "noise_rule": "y_i = x_i^3 + 3 Phi^-1((r_i + 0.5)/20), r_i = (7 i + 3) mod 20",
        },
        "model": {
            "network": "Linear(1,20), Tanh, Linear(20,1)",
            "parameters": 3 * HIDDEN + 1,
            "x_scale": X_SCALE,
            "y_scale": Y_SCALE,
            "prior": "N(0,1) on every weight and bias, network acting on x/x_scale and giving y/y_scale",
            "noise_sd_original": NOISE,
            "noise_sd_scaled": NOISE / Y_SCALE,
        },
        "log_joint_check": {
            "parameters": "theta_j = sin(j), j = 1 … 61, in the order "
            "first weight (20), first bias (20), second weight (20), second bias (1)",
            "log_likelihood": float(log_likelihood(*split)),
            "log_prior": float(log_prior(*split)),
            "f_at_key_points": functions(*split)[[GRID.index(k) for k in KEY_POINTS]].tolist(),
        },
        "nuts": {
            "settings": ia,
            "worst": extremes([*a, log_lik_a]),
            "log_likelihood": log_lik_a,
            "key_points": at(a),
            "grid": a,
        },
        "plain": {
            "settings": ib,
            "worst": extremes([*b, log_lik_b]),
            "log_likelihood": log_lik_b,
            "key_points": at(b),
        },
        "agreement": {
            "meaning": "z = (nuts - plain) / sqrt(mcse_nuts^2 + mcse_plain^2); sd_ratio = plain / nuts",
            "key_points": [dict(x=k, **r) for k, r in zip(KEY_POINTS, at(zs), strict=True)],
            "log_likelihood": compare(log_lik_a, log_lik_b),
            "grid_max_abs_z_mean": max(abs(r["z_mean"]) for r in zs),
            "grid_max_abs_z_sd": max(abs(r["z_sd"]) for r in zs),
        },
        "symmetry": {
            "meaning": "exact: mean(-x) = -mean(x), sd(-x) = sd(x); "
            "largest |z| of the violation over the grid, Monte-Carlo error only",
            "nuts": oddness(fa),
            "plain": oddness(fb),
        },
        "arviz": version("arviz"),
    }
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    # one line per row of numbers: small, and diffs stay readable
    import re

    text = re.sub(
        r"\{\s+(\"x\": [^{}\[\]]*?)\s+\}",
        lambda m: "{" + re.sub(r"\s+", " ", m.group(1)) + "}",
        text,
    )
    text = re.sub(
        r"\[\s+([-\d.eE,\s]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m.group(1)) + "]", text
    )
    assert json.loads(text) == result
    with open(out, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    for p, q, r in zip(at(a), at(b), at(zs), strict=True):
        print(f"x {p['x']:+.0f}")
        for name, row in (("nuts", p), ("plain", q)):
            print(f"  {name:5s}", {n: v for n, v in row.items() if not n.startswith(("x", "q"))})
        print("  agreement", r)
    print(result["nuts"]["worst"], result["plain"]["worst"], result["agreement"]["log_likelihood"])
    print(
        {n: v for n, v in result["agreement"].items() if n.startswith("grid")}, result["symmetry"]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="reference posterior of a tanh network on a cubic")
    parser.add_argument("what", choices=["nuts", "plain", "write"])
    parser.add_argument("--draws", help="npz to write (nuts, plain)")
    parser.add_argument("--nuts", default="nuts.npz")
    parser.add_argument("--plain", default="plain.npz")
    parser.add_argument("--out", default="cubic_hmc.json")
    args = parser.parse_args()
    if args.what == "write":
        write(args.nuts, args.plain, args.out)
    else:
        (run_nuts if args.what == "nuts" else run_plain)(args.draws or f"{args.what}.npz")
