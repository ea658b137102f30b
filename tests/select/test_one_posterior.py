"""A name stands for one posterior: in Python, in scikit-learn and on the command line."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_iris

import bayou
from bayou.app.runs import nets
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run

F64 = torch.float64

NUMBERS, CLASSES = "numbers", "classes"


def table(kind, path):
    """Sixty rows of four columns as a CSV file."""
    X, y = (load_diabetes if kind == NUMBERS else load_iris)(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(X))[:60]
    names = ",".join(f"x{column}" for column in range(4))
    lines = [f"{names},y"]
    lines += [
        ",".join(f"{v:.6g}" for v in X[row, :4])
        + (f",{y[row]:g}" if kind == NUMBERS else f",c{y[row]}")
        for row in rows
    ]
    path.write_text("\n".join(lines))
    return path


def moments(posterior, x):
    """Predictive mean and standard deviation."""
    p = posterior.predict(x, samples=30, seed=1)
    return torch.stack([p.mean, p.std])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (NUMBERS, "laplace"),
        (CLASSES, "laplace"),
        pytest.param(NUMBERS, "ffg", marks=pytest.mark.slow),
    ],
)
def test_a_name_is_one_posterior_in_python_scikit_learn_and_on_the_command_line(
    kind, name, tmp_path
):
    settings = {"steps": 40, "effort": 0.1}
    config = Config(
        str(table(kind, tmp_path / "t.csv")), (name,), target="y", precision="float64", **settings
    )
    run = Run.create(tmp_path / "run", config)
    run.work()
    data = run.load_data()
    by_run = run.posterior(name)[0]

    x, y = data.train
    net = nets.build("silu-50", data.input_shape, data.output_size, seed=0).double()
    by_fit = bayou.fit(net, (x, y), bayou.select.by_name(name, **settings))
    estimator = bayou.BayesRegressor if kind == NUMBERS else bayou.BayesClassifier
    model = estimator(name, random_state=0, **settings).fit(x.numpy(), y.numpy())

    # Two ways of standardizing differ by 1e-8, which some hundred passes of L-BFGS amplify.
    new = data.test[0]
    expected = moments(by_fit, new)
    torch.testing.assert_close(moments(by_run, new), expected, rtol=1e-2, atol=1e-3)
    inputs = torch.as_tensor((new.numpy() - model.x_mean_) / model.x_scale_)
    torch.testing.assert_close(moments(model.posterior_, inputs), expected, rtol=1e-2, atol=1e-3)


def test_the_likelihood_of_a_name_follows_from_y():
    x = torch.randn(30, 2, dtype=F64)
    net, method = torch.nn.Linear(2, 3).double(), bayou.select.by_name("map", steps=3, effort=0.1)
    posterior = bayou.fit(net, (x, torch.arange(30) % 3), method)
    assert posterior.target.likelihood_spec == bayou.Categorical()
    y = 4 * torch.randn(30, 3, dtype=F64)
    fitted = bayou.fit(net, (x, y), "mle").target.likelihood_spec
    assert isinstance(fitted, bayou.Gaussian)
    assert fitted.learn
    assert fitted.noise == 0.5
    assert fitted.units == pytest.approx(y.std(0, correction=0).tolist())
    assert isinstance(bayou.fit(net, (x, y), method).target.likelihood_spec, bayou.Gaussian)
