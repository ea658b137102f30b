"""Predictions beside a reference posterior: a file format, its scores, and a board of rows.

A reference is the predictive distribution of a long HMC run for the test rows of a data set.
``score`` reads predictions of the same rows, computes their distance to the reference and the usual
scores, and puts them among the rows that were measured before. Nothing is downloaded.

>>> from bayou import truth
>>> truth.reference("hmc-digits").log_probs.shape
torch.Size([359, 10])
"""

from bayou.truth.board import (
    Board,
    Row,
    ScoredFile,
    committed_rows,
    fidelity,
    mean_row,
    score,
)
from bayou.truth.predictions import (
    PredictionError,
    Predictions,
    class_predictive,
    read_predictions,
    write_predictions,
)
from bayou.truth.references import (
    REFERENCES,
    Reference,
    Source,
    from_tfds_order,
    reference,
)

__all__ = [
    "REFERENCES",
    "Board",
    "PredictionError",
    "Predictions",
    "Reference",
    "Row",
    "ScoredFile",
    "Source",
    "class_predictive",
    "committed_rows",
    "fidelity",
    "from_tfds_order",
    "mean_row",
    "read_predictions",
    "reference",
    "score",
    "write_predictions",
]
