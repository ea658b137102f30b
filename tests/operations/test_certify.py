"""Certificates: distances by hand, what is kept in files, and students with and without a head."""

import json

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.likelihoods import Categorical
from bayou.likelihoods.predictive import Predictive
from bayou.metrics.certificate import Certificate, upper_bound
from bayou.operations import Augment, Distilled, StoredPredictions, certify
from tests.operations.test_distill import EYE, distilled, student, teacher

F64 = torch.float64
POSTERIOR = teacher(3, Categorical(), draws=6)
P = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])
Q = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [0.1, 0.7, 0.2]])
R = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.3, 0.2, 0.5], [0.1, 0.8, 0.1]])


def test_distances_are_those_by_hand():
    """Total variation of the rows: .25, 1, 0, .1; to the reference 0, .5, .1, 0 and .25, .5, .1, .1."""
    fixed = teacher(3, Categorical(), draws=1)
    fixed.stack["weight"] = P.double().clamp_min(1e-12).log().mT.unsqueeze(0)
    certificate = certify(fixed, {"test": Q}, {"test": EYE}, reference={"test": R})
    found = certificate.inputs["test"]
    assert found.rows == 4
    assert found.to_teacher.mean == pytest.approx(1.35 / 4, abs=1e-6)
    assert found.to_teacher.standard_error == pytest.approx(
        float(torch.tensor([0.25, 1.0, 0.0, 0.1]).std()) / 2, abs=1e-6
    )
    assert found.to_teacher.quantiles[0] == pytest.approx(0.175, abs=1e-6)
    assert found.to_teacher.bound == 1.0  # of four rows nothing can be said
    assert found.agreement == 0.75
    assert found.to_reference.mean == pytest.approx(0.15, abs=1e-6)
    assert found.teacher_to_reference.mean == pytest.approx(0.95 / 4, abs=1e-6)
    assert found.farther == pytest.approx(-0.35 / 4, abs=1e-6)
    paired = torch.tensor([-0.25, 0.0, 0.0, -0.1])
    assert found.farther_error == pytest.approx(float(paired.std()) / 2, abs=1e-6)
    assert found.information is None  # that of the teacher is not known


def test_bound_holds_for_almost_all_samples_and_tightens():
    torch.manual_seed(0)
    values = torch.rand(400, 200, dtype=F64).square()  # of expectation 1/3
    bounds = torch.tensor([upper_bound(row) for row in values])
    assert float((bounds < 1 / 3).double().mean()) <= 0.05
    longer = torch.rand(100_000, dtype=F64).square()
    assert 1 / 3 < upper_bound(longer) < 0.34
    assert upper_bound(longer[:1]) == 1.0


@pytest.mark.parametrize("keep", [None, "epistemic"])
def test_certificate_is_in_the_file_of_the_student(keep, tmp_path):
    found = distilled(POSTERIOR, 3, keep)
    certificate = certify(found, POSTERIOR, {"rows": EYE, "others": EYE[:2]})
    comparison = certificate.inputs["rows"]
    assert comparison.to_teacher.mean < 1e-4
    assert comparison.agreement == 1.0
    expected = float(POSTERIOR.predict(EYE).mutual_information.mean())
    assert comparison.teacher_information == pytest.approx(expected)
    assert (comparison.information > 0.5 * expected) is (keep is not None)
    assert comparison.to_reference is None
    point = found.point if keep else found
    assert point.certificate is certificate
    assert POSTERIOR.certificate is None
    point.save(tmp_path / "student")
    loaded = bayou.load(tmp_path / "student", student(3))
    assert loaded.certificate == certificate
    assert Certificate.from_json(json.loads(json.dumps(certificate.to_json()))) == certificate


def test_table_has_a_line_for_each_kind_of_inputs():
    found = distilled(POSTERIOR, 3, steps=5)
    lines = str(certify(found, POSTERIOR, {"a": EYE, "b": EYE}, reference={"a": R})).splitlines()
    assert lines[0].split()[:4] == ["inputs", "rows", "to", "teacher"]
    assert "farther" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["a", "b"]
    assert len({len(line) for line in lines}) == 1
    plain = str(certify(found, {"a": P}, {"a": EYE}))
    assert "farther" not in plain
    assert "information" not in plain


def test_teachers_may_be_posteriors_stored_predictions_or_predictives():
    found = distilled(POSTERIOR, 3, steps=5)
    stored = StoredPredictions.of(POSTERIOR, EYE)
    predictive = POSTERIOR.predict(EYE)
    forms = [POSTERIOR, {"x": stored}, {"x": predictive}, {"x": predictive.probabilities}]
    means = [certify(found, form, {"x": EYE}).inputs["x"].to_teacher.mean for form in forms]
    assert means == pytest.approx([means[0]] * 4, abs=1e-6)


def test_head_predicts_in_closed_form():
    """Mean and information of a Dirichlet, beside those of many draws."""
    found = distilled(POSTERIOR, 3, "epistemic")
    assert isinstance(found, Distilled)
    drawn = found.predict(EYE, 50_000)
    assert_close(found.probabilities(EYE), drawn.mean, atol=0.01, rtol=0)
    assert_close(found.mutual_information(EYE), drawn.mutual_information, atol=0.01, rtol=0.02)
    numbers = distilled(teacher(1, bayou.Gaussian(0.5)), 3, "epistemic", steps=5)
    with pytest.raises(ValueError, match="for numbers use"):
        numbers.probabilities(EYE)


@pytest.mark.parametrize("keep", [None, "epistemic"])
def test_students_of_numbers_are_certified_by_distribution_functions(keep):
    posterior = teacher(1, bayou.Gaussian(0.5), draws=5)
    found = distilled(posterior, 2 if keep is None else 3, keep)
    comparison = certify(found, posterior, {"x": EYE}, samples=5).inputs["x"]
    assert comparison.agreement is None
    assert 0 < comparison.to_teacher.mean < 0.5  # one normal is not a mixture of five


def test_augmented_rows_bring_a_student_closer_where_its_teacher_was_not_asked():
    """Between one-hot rows a linear student of these rows alone extrapolates."""
    torch.manual_seed(0)
    posterior = teacher(3, Categorical(), draws=40)
    between = torch.rand(300, 4, dtype=F64)
    between = between / between.sum(1, keepdim=True)
    means = []
    for augment in (None, Augment(copies=30)):
        found = bayou.distill(
            posterior, student(3), EYE, augment=augment, steps=400, lr=0.05, progress=False
        )
        means.append(certify(found, posterior, {"x": between}).inputs["x"].to_teacher.mean)
    assert means[1] < means[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: certify(POSTERIOR, POSTERIOR, {}), "a certificate needs inputs"),
        (lambda: certify(POSTERIOR, {"b": P}, {"a": EYE}), "no predictions of the teacher.*'b'"),
        (lambda: certify(POSTERIOR, {"a": P[:2]}, {"a": EYE}), "the same x"),
        (lambda: certify(POSTERIOR, P, {"a": EYE}), "the teacher must be a posterior"),
        (lambda: Certificate.from_json([]), "must be a dict, got list"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_predictives_of_rows_have_row_distances():
    a, b = (Predictive(Categorical().bind(), p.log().unsqueeze(0)) for p in (P + 1e-9, Q + 1e-9))
    rows = bayou.metrics.row_total_variation(a, b)
    assert_close(rows, torch.tensor([0.25, 1.0, 0.0, 0.1], dtype=F64), atol=1e-6, rtol=0)
    assert bayou.metrics.total_variation(a, b) == pytest.approx(float(rows.mean()))
