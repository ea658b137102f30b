"""Writes the small files of posteriors that later versions must still read, with what they
predicted at the time.

``python make_files.py``, once, by the version that they stand for: 1.0.0rc1 wrote those in
``files/``.
"""

import json
from pathlib import Path

import torch
from torch import nn

import bayou

HERE = Path(__file__).parent / "files"
X = torch.linspace(-1, 1, 12).unsqueeze(-1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.2), nn.Tanh(), nn.Linear(3, 1))


def main():
    start = bayou.MAP(steps=5)
    methods = {
        "guided": (bayou.VI(steps=5), net()),
        "empirical": (bayou.Ensemble(2, start), net()),
        "gaussian": (bayou.Laplace(start=start), net()),
        "masked": (bayou.MCDropout(start), net()),
        "mixture": (bayou.Ensemble(2, bayou.VI(steps=5)), net()),
    }
    said = {}
    for kind, (method, network) in methods.items():
        posterior = bayou.fit(
            network, (X, X**2), method=method, likelihood=bayou.Gaussian(0.2), progress=False
        )
        posterior.save(HERE / f"{kind}.bayou")
        said[kind] = posterior.predict(X[:3], 2, seed=0).outputs.flatten().tolist()
    (HERE / "files.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
