"""The board of ``bayou score`` as text."""

from __future__ import annotations

from bayou.truth import Board, Row

MARK = "→ "  # before the scored row


def board_rows(board: Board) -> list[dict[str, str]]:
    """Return the cells of all rows, sorted by total variation; the scored one has a mark.

    Args:
        board: the scored row and the committed ones.
    """
    rows = []
    for row in board.rows:
        cells = row_cells(row)
        if row is board.row:
            cells["method"] = f"{MARK}{row.label}"
        rows.append(cells)
    return rows


def row_cells(row: Row) -> dict[str, str]:
    """Return the cells of a row by the heads of their columns.

    Args:
        row: of a board.
    """
    return {
        "method": row.label,
        "epochs": _cell(row.epochs, 0),
        "total variation": _distance(row),
        "agreement": _cell(row.agreement, 4),
        "NLL": _cell(row.nll, 4),
        "accuracy, %": _cell(100 * row.accuracy, 2),
        "ECE": _cell(row.ece, 4),
        "minutes": _cell(row.minutes, 1),
        "seeds": str(row.seeds),
    }


def summarize_board(board: Board) -> str:
    """Return a sentence about the scored row.

    Args:
        board: the scored row and the committed ones.
    """
    row = board.row
    return (
        f"{row.label}: total variation {_distance(row)} and agreement {row.agreement:.4f} to "
        f"{board.against}, place {board.rank} of {board.methods} by total variation"
    )


def _distance(row: Row) -> str:
    """Return the total variation with its standard error over seeds."""
    error = row.total_variation_error
    return f"{row.total_variation:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _cell(value: float | None, digits: int) -> str:
    """Return a number as text; "" if it is not known."""
    return "" if value is None else f"{value:.{digits}f}"
