"""The network of infinite width as a method: units, unusual tables, files, checkpoints, errors."""

import pytest
import torch
from torch import nn

import bayou
from bayou.methods import Wide
from bayou.network.wide import PriorScales, wide_kernel
from bayou.operations.export import export
from bayou.select.standardize import UnitsWarning
from bayou.training import checkpoints

F64 = torch.float64
QUICK = Wide(draws=2, passes=10)


def table(rows=30, columns=3, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=F64)
    y = torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(rows, 1, generator=generator, dtype=F64)
    return x.to(dtype), y.to(dtype)


def fit(data, method=QUICK, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(data[0].shape[1], data[1][0].numel()).to(data[0].dtype)
    return bayou.fit(net, data, method, progress=False, **options)


@pytest.fixture(scope="module")
def posterior():
    return fit(table())


def test_it_predicts_a_sine_and_its_noise(posterior):
    x, y = table(200, seed=1)
    predictive = posterior.predict(x)
    assert float((predictive.mean - y).square().mean().sqrt()) < 0.25
    assert 0.05 < float(predictive.aleatoric_std.mean()) < 0.2
    low, high = predictive.interval(0.9)
    assert 0.8 < float(((y >= low) & (y <= high)).double().mean()) < 0.98
    assert posterior.relevance()["hidden_weight"].argmax() == 0
    assert posterior.stopped == "finished"
    assert posterior.history[0]["log_evidence"] == posterior.log_evidence
    assert len(posterior.selection[0]["trials"]) == 2
    assert posterior.members == 2


def test_a_fit_to_most_of_the_rows_decides_on_its_units(posterior):
    assert QUICK.units is None
    assert QUICK.narrowed_to(posterior).units == posterior.wide.units
    mode = bayou.fit(torch.nn.Linear(3, 1).double(), table(), bayou.MAP(steps=2), progress=False)
    assert QUICK.narrowed_to(mode) == QUICK


def test_the_units_of_x_and_y_change_nothing(posterior):
    """By object x and y are standardized inside, by name outside, too."""
    x, y = table()
    expected = posterior.predict(x)
    with pytest.warns(UnitsWarning):
        other = fit((50 + 20 * x, 1000 * y - 7)).predict(50 + 20 * x)
    torch.testing.assert_close(other.mean, 1000 * expected.mean - 7, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(other.std, 1000 * expected.std, rtol=1e-4, atol=0)


def test_by_name_it_answers_in_the_units_of_the_user(tmp_path):
    x, y = table(dtype=torch.float32)
    method = bayou.select.by_name("wide", effort=0.15)
    assert method == Wide(draws=2, passes=15)
    x, y = 50 + 20 * x, 1000 * y - 7
    posterior = fit((x, y), "wide")
    predictive = posterior.predict(x)
    assert predictive.mean.dtype == torch.float32
    assert float((predictive.mean - y).square().mean().sqrt()) < 200
    assert 30 < float(predictive.aleatoric_std.mean()) < 200
    functions = posterior.predict(x, 300, seed=1)
    error = 6 * predictive.epistemic_std / 300**0.5 + 1.0
    assert ((functions.mean - predictive.mean).abs() < error).all()
    torch.testing.assert_close(functions.aleatoric_std, predictive.aleatoric_std, rtol=0.1, atol=0)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", nn.Linear(1, 1))
    assert torch.equal(loaded.predict(x).outputs, predictive.outputs)
    assert torch.equal(loaded.predict(x, 5).outputs, posterior.predict(x, 5).outputs)
    assert loaded.log_evidence == posterior.log_evidence


def test_the_evidence_is_that_of_y_in_the_units_of_the_user():
    x, y = table()
    plain = fit((x, y), Wide(draws=1, passes=60, units="erf"))
    with pytest.warns(UnitsWarning):
        scaled = fit((x, 1000 * y), Wide(draws=1, passes=60, units="erf"))
    difference = plain.log_evidence - scaled.log_evidence
    assert difference == pytest.approx(30 * float(torch.tensor(1000.0).log()), abs=0.1)


def test_the_evidence_is_the_density_of_y_at_the_most_probable_scales():
    x, y = table(15)
    posterior = fit((x, 3 * y + 1), Wide(draws=1, passes=20))
    wide = posterior.wide
    scales = PriorScales.from_logs(posterior.log_scales[0])
    covariance = wide_kernel(wide.units, wide.inputs, wide.inputs, scales)
    covariance = covariance + scales.noise_variance * torch.eye(15, dtype=F64)
    normal = torch.distributions.MultivariateNormal(
        wide.target_shift.expand(15), covariance * wide.target_scale.square()
    )
    assert posterior.log_evidence == pytest.approx(float(normal.log_prob(3 * y[:, 0] + 1)))


STEPS = Wide(draws=2, passes=10, thresholds=20)


def steps(rows=60, seed=0):
    """Thresholds of three of four columns, with noise of .1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 4, generator=generator, dtype=F64)
    y = (x[:, :1] > 0.5) * (x[:, 1:2] > 0.3) + 0.5 * (x[:, 2:3] > 0.7)
    return x, y + 0.1 * torch.randn(rows, 1, generator=generator, dtype=F64)


def test_thresholds_learn_steps_that_smooth_units_blur():
    x, y = steps(1000, seed=1)
    rows = steps(300)
    posterior = fit(rows, Wide(draws=2, passes=40, thresholds=128))
    assert posterior.members == 2
    assert posterior.stopped == "finished"
    assert [trial["part"] for trial in posterior.selection[0]["trials"]] == [0, 1]
    relevance = posterior.relevance()["hidden_weight"]
    assert relevance.shape == (4,)
    assert relevance[3] < 0.5 * relevance[:3].min()
    nll = -posterior.predict(x).log_prob(y).mean()
    smooth = -fit(rows, Wide(draws=1, units="erf")).predict(x).log_prob(y).mean()
    assert nll < smooth - 0.2
    low, high = posterior.predict(x).interval(0.9)
    assert 0.8 < float(((y >= low) & (y <= high)).double().mean()) < 0.98


def test_thresholds_of_constant_and_wide_tables():
    x, y = table(20, 70)
    x[:, 0] = 2.0
    assert fit((x, y), STEPS).predict(x).log_prob(y).isfinite().all()
    x, y = table(4, 1)
    assert fit((x, y), STEPS).predict(x).log_prob(y).isfinite().all()


@pytest.mark.parametrize("writes", [1, 2])
def test_a_stopped_search_of_parts_continues_bit_for_bit(writes, tmp_path, monkeypatch):
    expected = fit(steps(), STEPS)
    stop_after(writes, monkeypatch, lambda: fit(steps(), STEPS, checkpoint=tmp_path / "run"))
    continued = fit(steps(), STEPS, checkpoint=tmp_path / "run")
    assert torch.equal(continued.log_scales, expected.log_scales)


def test_thresholds_are_a_setting_that_old_checkpoints_do_not_have():
    from bayou.core.specs import to_json

    assert "thresholds" not in to_json(Wide())["fields"]
    assert "thresholds" in to_json(STEPS)["fields"]


def test_a_known_noise_is_kept():
    posterior = fit(table(), likelihood=bayou.Gaussian(0.3))
    aleatoric = posterior.predict(table()[0]).aleatoric_std
    torch.testing.assert_close(aleatoric, torch.full_like(aleatoric, 0.3), rtol=1e-5, atol=0)


def test_several_outputs_share_a_kernel():
    x, y = table()
    posterior = fit((x, torch.cat([y, -y, y.square()], 1)))
    predictive = posterior.predict(x)
    assert predictive.mean.shape == (30, 3)
    torch.testing.assert_close(predictive.mean[:, 0], -predictive.mean[:, 1])


@pytest.mark.parametrize(("rows", "columns"), [(5, 1), (25, 2), (20, 70)])
def test_small_and_wide_tables(rows, columns):
    x, y = table(rows, columns)
    posterior = fit((x, y), Wide(draws=2, passes=5))
    assert posterior.predict(x).log_prob(y).isfinite().all()
    assert posterior.members == (1 if columns == 70 else 2)


def test_duplicates_and_constant_columns():
    x, y = table(10)
    x = torch.cat([x, torch.full((10, 1), 4.0, dtype=F64)], 1).repeat(4, 1)
    posterior = fit((x, y.repeat(4, 1)))
    predictive = posterior.predict(x)
    assert predictive.log_prob(y.repeat(4, 1)).isfinite().all()
    assert predictive.std.isfinite().all()


def test_y_of_one_axis():
    x, y = table()
    net = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()
    posterior = bayou.fit(net, (x, y[:, 0]), QUICK, progress=False)
    assert posterior.predict(x).mean.shape == (30,)


@pytest.mark.slow
def test_many_rows_refine_what_some_rows_found():
    """Above 500 rows the search has some of them, and the scales are not drawn."""
    x, y = table(540, 1)
    posterior = fit((x, y), Wide(passes=2, units="erf"))
    assert posterior.members == 1
    assert posterior.wide.rows.shape == (540, 1)


def refused(words, **options):
    """A case of a fit that is refused."""
    return pytest.param(words, options, id=words)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, a, b):
        return self.linear(a + b)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        refused("for classes.*use laplace", data=(table()[0], torch.arange(30) % 2)),
        refused("at most 3,000", data=table(3001)),
        refused("takes no prior", prior=bayou.Normal(1.0)),
        refused("got StudentT", likelihood=bayou.likelihoods.StudentT()),
        refused("one noise for all outputs, got 2", likelihood=bayou.Gaussian((0.1, 0.2))),
        refused("is frozen", where="weight"),
        refused("y is constant", data=(table()[0], torch.ones(30, 1, dtype=F64))),
        refused(
            "one tensor", data=((table()[0], table()[0]), table()[1]), net=TwoInputs().double()
        ),
        refused("cannot take", data=(table(30, 4)[0], table()[1])),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_way_out(words, options):
    options = {"net": nn.Linear(3, 1).double(), "data": table()} | options
    with pytest.raises(ValueError, match=words):
        bayou.fit(options.pop("net"), options.pop("data"), QUICK, progress=False, **options)


@pytest.mark.parametrize(
    "options", [{"draws": 0}, {"passes": 0.5}, {"units": "tanh"}, {"thresholds": -1}]
)
def test_settings_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Wide(**options)


class Killed(BaseException):
    """Nothing catches it."""


def stop_after(writes, monkeypatch, run):
    """Run until a number of checkpoints are written."""
    count = 0

    def write_then_stop(*arguments):
        nonlocal count
        write_file(*arguments)
        count += 1
        if count == writes:
            raise Killed

    write_file = checkpoints.write_file
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_file", write_then_stop)
        with pytest.raises(Killed):
            run()


@pytest.mark.parametrize("writes", [1, 2])
def test_a_stopped_run_continues_bit_for_bit(writes, tmp_path, monkeypatch, posterior):
    stop_after(writes, monkeypatch, lambda: fit(table(), checkpoint=tmp_path / "run"))
    continued = fit(table(), checkpoint=tmp_path / "run")
    assert torch.equal(continued.log_scales, posterior.log_scales)
    with pytest.raises(bayou.posteriors.FileError, match="another run"):
        fit(table(), checkpoint=tmp_path / "run", seed=7)


def test_a_fit_is_a_function_of_its_seed_and_writes_progress(capfd, posterior):
    net = nn.Linear(3, 1).double()
    state = torch.get_rng_state()
    again = bayou.fit(net, table(), QUICK, progress="plain")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again.log_scales, posterior.log_scales)
    assert "wide network, starts" in capfd.readouterr().err


def test_it_is_exported_as_one_graph(posterior):
    x, _ = table()
    program = export(posterior, x[:3], samples=4).module()
    expected = posterior.predict(x, 4, seed=0)
    torch.testing.assert_close(program(x)["mean"], expected.mean)
    torch.testing.assert_close(program(x)["std"], expected.std)


# --- noise that depends on x -----------------------------------------------------------------------

VARIED = Wide(draws=2, passes=20, varied_noise=True)


def varied_table(rows=150, seed=0):
    """Noise of standard deviation exp(−2 + x₂), the function sin(2x₁)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 2, generator=generator, dtype=F64) * 4 - 2
    std = torch.exp(-2 + x[:, 1:])
    return x, torch.sin(2 * x[:, :1]) + std * torch.randn(rows, 1, generator=generator, dtype=F64)


@pytest.fixture(scope="module")
def varied():
    return fit(varied_table(), VARIED)


def test_the_noise_follows_x(varied):
    """The log of its standard deviation is −2 + x₂ within .5, a standard error of 1/√(2·10)."""
    grid = torch.tensor([[0.0, -1.5], [0.0, 0.0], [0.0, 1.5]], dtype=F64)
    predictive = varied.predict(grid)
    logs = predictive.aleatoric_std.log()[:, 0]
    assert (logs - (-2 + grid[:, 1])).abs().max() < 0.5
    x, y = varied_table(500, seed=1)
    truth = torch.distributions.Normal(torch.sin(2 * x[:, :1]), torch.exp(-2 + x[:, 1:]))
    excess = truth.log_prob(y).mean() - varied.predict(x).log_prob(y).mean()
    constant = truth.log_prob(y).mean() - fit(varied_table()).predict(x).log_prob(y).mean()
    assert excess < 0.15 < 0.4 < constant


def test_given_the_noise_of_each_row_it_is_the_exact_posterior(varied):
    """Mean and variance are those of the Gaussian process with a known diagonal."""
    wide = varied.wide
    x = varied_table(5, seed=2)[0]
    factors = varied.noise(wide.rows).exp()
    assert float(factors.mean()) == pytest.approx(1.0)
    means, variances = varied.function(x)
    for index in range(varied.members):
        scales = PriorScales.from_logs(varied.log_scales[index])
        kernel = wide_kernel(wide.units, wide.inputs, wide.inputs, scales)
        diagonal = scales.noise.square() * factors + 1e-6
        inverse = torch.linalg.inv(kernel + torch.diag(diagonal))
        cross = wide_kernel(wide.units, wide.standardize(x), wide.inputs, scales)
        prior = wide_kernel(wide.units, wide.standardize(x), wide.standardize(x), scales)
        mean = cross @ inverse @ wide.outputs * wide.target_scale + wide.target_shift
        variance = (prior - cross @ inverse @ cross.T).diagonal() * wide.target_scale.square()
        torch.testing.assert_close(means[index], mean, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(variances[index, :, 0], variance, rtol=1e-4, atol=1e-8)


def test_functions_are_drawn_with_the_same_noise(varied):
    """400 functions: the mean within six standard errors, the noise as it is in closed form."""
    x = varied_table(6, seed=2)[0]
    exact = varied.predict(x)
    functions = varied.predict(x, 400, seed=1)
    error = 6 * exact.epistemic_std / 400**0.5
    assert ((functions.mean - exact.mean).abs() < error + 1e-9).all()
    torch.testing.assert_close(functions.aleatoric_std, exact.aleatoric_std, rtol=0.05, atol=0)


def test_varied_noise_is_saved_and_has_units(varied, tmp_path):
    x, y = varied_table()
    with pytest.warns(UnitsWarning):
        scaled = fit((50 + 20 * x, 1000 * y - 7), VARIED)
    expected, predictive = varied.predict(x), scaled.predict(50 + 20 * x)
    torch.testing.assert_close(
        predictive.aleatoric_std, 1000 * expected.aleatoric_std, rtol=1e-3, atol=0
    )
    scaled.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", nn.Linear(1, 1))
    assert torch.equal(loaded.predict(x).outputs, scaled.predict(x).outputs)
    assert torch.equal(loaded.predict(x, 3).outputs, scaled.predict(x, 3).outputs)


def test_by_name_varied_noise_is_in_the_units_of_the_user():
    x, y = varied_table()
    assert bayou.select.by_name("wide-noise", effort=0.2) == Wide(3, 20, varied_noise=True)
    posterior = fit((50 + 20 * x, 1000 * y - 7), "wide-noise")
    predictive = posterior.predict(50 + 20 * x)
    low, high = predictive.interval(0.9)
    covered = ((1000 * y - 7 >= low) & (1000 * y - 7 <= high)).double().mean()
    assert 0.8 < float(covered) < 0.98
    assert float(predictive.aleatoric_std.max() / predictive.aleatoric_std.min()) > 5


def test_thresholds_have_one_noise():
    with pytest.raises(ValueError, match="thresholds or a varied noise, not both"):
        Wide(thresholds=8, varied_noise=True)


def test_a_known_noise_does_not_vary():
    with pytest.raises(ValueError, match="the noise is known"):
        fit(varied_table(), VARIED, likelihood=bayou.Gaussian(0.3))


def test_an_interrupted_fit_of_varied_noise_goes_on(varied, tmp_path):
    """From the file after the search, which has the noise, to the same posterior."""
    file = tmp_path / "run.ckpt"
    whole = fit(varied_table(), VARIED, checkpoint=file)
    again = fit(varied_table(), VARIED, checkpoint=file)
    for other in (whole, again):
        assert torch.equal(other.log_scales, varied.log_scales)
        x = varied_table(5, seed=2)[0]
        assert torch.equal(other.predict(x).outputs, varied.predict(x).outputs)
