"""The distance of a student to its teacher, measured on inputs of several kinds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods.predictive import Predictive
from bayou.metrics.certificate import Answers, Certificate, compare
from bayou.operations.distill import Distilled
from bayou.operations.stored import TEACHER_ROWS, StoredPredictions, class_predictive
from bayou.posteriors import Posterior
from bayou.training.rows import as_unlabeled_data

Predictions = Predictive | StoredPredictions | Tensor
Predictor = Posterior | Distilled | Mapping[str, Predictions]


@torch.no_grad()
def certify(
    student: Posterior | Distilled,
    teacher: Predictor,
    inputs: Mapping[str, object],
    *,
    reference: Predictor | None = None,
    samples: int | None = None,
    seed: rng.Seed = 0,
) -> Certificate:
    """Measure how far a student is from its teacher, and keep the result with the student.

    The total variation of both predictions is measured for each row, as a mean with its standard
    error, quantiles, and an upper bound; so are the agreement of the most probable class and the
    mutual information. With a reference, such as a long run of HMC, the distances of student and
    teacher to it are measured on the same rows. Use rows that neither the fits nor the choice of
    the student have seen.

    The certificate is kept in ``student.certificate`` (``student.point.certificate`` of a student
    with a head) and is in its file.

    Args:
        student: what ``distill`` returned.
        teacher: a posterior, or its predictions for each of the inputs by name: a ``Predictive``,
            ``StoredPredictions`` or class probabilities (B, C).
        inputs: inputs by name, such as {"test": x, "corrupted": x2, "ood": x3}.
        reference: as the teacher; of predictions by name some may be missing. None (the default)
            for no reference.
        samples: the number of draws of each posterior; by default as many as ``predict`` takes.
        seed: of the draws.

    Returns:
        The certificate: ``print`` shows a table, ``to_json`` has its numbers.

    Raises:
        ValueError: if predictions are missing, or are not of the rows of the inputs.

    Example:
        >>> student = bayou.distill(posterior, net, x, keep="epistemic")
        >>> certificate = certify(student, posterior, {"test": x_test, "ood": x_far})
        >>> print(certificate)
    """
    if not inputs:
        raise ValueError("a certificate needs inputs, such as {'test': x}")
    settings = (samples, seed)
    student_answers = {}
    teacher_answers = {}
    references = {}
    for name, x in inputs.items():
        student_answers[name] = _answers(student, "student", name, x, *settings)
        teacher_answers[name] = _answers(teacher, "teacher", name, x, *settings)
        is_missing = isinstance(reference, Mapping) and name not in reference
        if reference is not None and not is_missing:
            references[name] = _answers(reference, "reference", name, x, *settings).predictive
    certificate = compare(student_answers, teacher_answers, references)
    point = student.point if isinstance(student, Distilled) else student
    point.certificate = certificate
    return certificate


def _answers(
    source: Predictor, role: str, name: str, x: object, samples: int | None, seed: rng.Seed
) -> Answers:
    """Return the predictions of a model for the inputs of one name."""
    if isinstance(source, Mapping):
        if name not in source:
            raise ValueError(
                f"there are no predictions of the {role} for the inputs {name!r}, only for "
                f"{', '.join(map(repr, source)) or 'none'}"
            )
        return _stored_answers(source[name])
    if not isinstance(source, Posterior | Distilled):
        raise ValueError(
            f"the {role} must be a posterior, what distill returned, or predictions by name, got "
            f"{type(source).__name__}"
        )
    batches = []
    for rows, _ in as_unlabeled_data(x, TEACHER_ROWS).epoch():
        if isinstance(source, Distilled):
            batches.append(_distilled_answers(source, rows, samples, seed))
        else:
            batches.append(_sampled_answers(source.predict(rows, samples, seed=seed)))
    return _join_answers(batches)


def _stored_answers(predictions: Predictions) -> Answers:
    """Return predictions that were made before."""
    if isinstance(predictions, StoredPredictions):
        return Answers(predictions.predictive(), predictions.mutual_information)
    if isinstance(predictions, Predictive):
        return _sampled_answers(predictions)
    return Answers(class_predictive(predictions))


def _sampled_answers(p: Predictive) -> Answers:
    """Return the mean of draws of classes, or all draws of numbers, with their information."""
    information = p.mutual_information
    if p.likelihood.support == "classes":
        p = class_predictive(p.probabilities)
    return Answers(p, information)


def _distilled_answers(
    student: Distilled, x: object, samples: int | None, seed: rng.Seed
) -> Answers:
    """Return what a student with a head predicts, in closed form for classes."""
    if student.is_dirichlet:
        return Answers(class_predictive(student.probabilities(x)), student.mutual_information(x))
    draws = {} if samples is None else {"samples": samples}
    return _sampled_answers(student.predict(x, seed=seed, **draws))


def _join_answers(batches: list[Answers]) -> Answers:
    """Return the answers for all rows."""
    outputs = torch.cat([batch.predictive.outputs for batch in batches], 1)
    known = [batch.information for batch in batches if batch.information is not None]
    return Answers(Predictive(batches[0].predictive.likelihood, outputs), torch.cat(known))
