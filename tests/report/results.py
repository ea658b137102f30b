"""Results of methods, as a run would have them."""


def score_method(label, nll, **values):
    """Return a result of a regression with the NLL of every row."""
    result = {
        "label": label,
        "seed": 0,
        "task": "regression",
        "metrics": {"nll": float(nll.mean())},
        "rows": nll.tolist(),
        "seconds": 1.0,
        "checks": [],
    }
    return result | values
