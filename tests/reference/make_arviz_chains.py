"""Write arviz_chains.json: draws and what ArviZ says of them. Needs arviz 0.2x; run from this
folder, no arguments.

The draws are autoregressive chains of several shapes: mixed, sticky, apart, antithetic, with ties,
odd in number.
"""

import json
import warnings
from pathlib import Path

import arviz
import numpy as np


def autoregressive(generator, chains, draws, coefficient, shift=0.0):
    x = np.zeros((chains, draws))
    noise = generator.standard_normal((chains, draws))
    x[:, 0] = noise[:, 0] / np.sqrt(1 - coefficient**2)
    for t in range(1, draws):
        x[:, t] = coefficient * x[:, t - 1] + noise[:, t]
    return x + shift * np.arange(chains)[:, None]


def main():
    generator = np.random.default_rng(0)
    cases = {
        "mixed": autoregressive(generator, 4, 50, 0.0),
        "sticky": autoregressive(generator, 4, 60, 0.9),
        "apart": autoregressive(generator, 3, 41, 0.3, shift=1.5),
        "antithetic": autoregressive(generator, 2, 64, -0.7),
        "one chain": autoregressive(generator, 1, 80, 0.5),
        "ties": np.round(autoregressive(generator, 4, 37, 0.5)),
        "heavy": generator.standard_cauchy((4, 45)),
        "short": autoregressive(generator, 2, 5, 0.2),
    }
    found = {}
    for name, draws in cases.items():
        draws = draws.round(6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = {
                "draws": draws.tolist(),
                "rhat": float(arviz.rhat(draws, method="rank"))
                if len(draws) > 1
                else None,  # it wants two chains
                **{
                    f"ess_{part}": float(arviz.ess(draws, method=part))
                    for part in ("bulk", "tail", "mean")
                },
                "mcse": float(arviz.mcse(draws, method="mean")),
            }
    content = {"arviz": arviz.__version__, "numpy": np.__version__, "cases": found}
    Path(__file__).with_name("arviz_chains.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
