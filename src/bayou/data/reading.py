"""Reading tables: CSV with any common delimiter, Parquet, NPZ."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import lzma
import os
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from bayou.data.catalogue import TABLE_SUFFIXES, DataError
from bayou.data.columns import Column, are_exact, has_decimal_commas, number, quote

INPUT_KEYS = ("x", "X", "inputs", "features", "data", "images")
TARGET_KEYS = ("y", "Y", "target", "targets", "label", "labels")
MAX_BYTES = "BAYOU_MAX_BYTES"  # the environment variable for the limit of 4 GiB, uncompressed
MAX_QUOTED_NAMES = 40
_DELIMITERS = ",;\t|"
_BINARY = {
    b"PK\x03\x04": "an Excel or zip file",
    b"PAR1": "a Parquet file",
    b"\x93NUMPY": "a .npy file",
}


@final
@dataclass(frozen=True)
class RawTable:
    """Columns of equal length, before their interpretation as inputs.

    Args:
        name: of the file, for messages.
        columns: by name.
        notes: from reading them.
    """

    name: str
    columns: dict[str, Column]
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))


def quote_names(names: Iterable[str]) -> str:
    """Return the first names, quoted and separated by commas.

    Args:
        names: any number of them.
    """
    quoted = [quote(name) for name in itertools.islice(names, MAX_QUOTED_NAMES + 1)]
    if len(quoted) > MAX_QUOTED_NAMES:
        quoted[MAX_QUOTED_NAMES] = "..."
    return ", ".join(quoted)


def read(source: object, known: Collection[str] = ()) -> RawTable:
    """Read a table from a path or from columns.

    Args:
        source: a path, a mapping of columns or a data frame.
        known: names that are expected in a header.
    """
    if isinstance(source, RawTable):
        return source
    if isinstance(source, str | Path):
        return read_file(Path(source), known)
    if is_frame(source):
        return read_frame(source)
    if not isinstance(source, Mapping):
        raise DataError(
            "rows must be a path, a mapping of columns or a data frame, got "
            f"{type(source).__name__}"
        )
    return _to_table("the columns given", dict(source))


def is_frame(source: object) -> bool:
    """Return whether an object is a data frame: of pandas, of polars, or with the same methods.

    Args:
        source: anything.
    """
    methods = ("columns", "to_numpy", "__getitem__")
    is_array = isinstance(source, np.ndarray | Mapping)
    return not is_array and all(hasattr(source, name) for name in methods)


def read_frame(frame: Any) -> RawTable:
    """Return the columns of a data frame, as they would be read from a CSV file of it.

    Booleans are text, ``True`` and ``False``; dates and times are text in ISO notation; what is
    None, nan, NaT or NA is blank. Of columns that the frame calls categorical numbers are
    categories, too.

    Args:
        frame: see ``is_frame``; each of its columns has ``to_numpy``.
    """
    names = [str(name) for name in frame.columns]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(
            f"the data frame has several columns named {quote_names(repeated)}; rename them"
        )
    columns = {str(name): _frame_column(frame[name], str(name)) for name in frame.columns}
    return _to_table("the data frame", columns)


def is_categorical(series: object) -> bool:
    """Return whether a column of a data frame has a categorical type.

    Args:
        series: of pandas ("category"), polars ("Categorical", "Enum"), or alike.
    """
    type_name = str(getattr(series, "dtype", "")).lower()
    return type_name.startswith(("categor", "enum"))


def _frame_column(series: Any, name: str) -> Column:
    """Return a column of a data frame."""
    values = series.to_numpy()
    try:
        if not is_categorical(series):
            return Column.of(values)
        if values.dtype.kind == "M":
            values = values.astype("datetime64[s]").astype(np.str_)
        return Column.of_categories(values.tolist())
    except ValueError as problem:
        raise DataError(f"column {quote(name)} of the data frame: {problem}") from problem


def read_file(path: Path, known: Collection[str] = ()) -> RawTable:
    """Read a table from a file, by its suffix.

    Args:
        path: the file.
        known: names that are expected in a header.
    """
    lower = path.name.lower()
    if not path.exists():
        raise DataError(f"there is no file {path}")
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the path of a file in it")
    if not path.is_file():
        raise DataError(f"{path} is a pipe or device, not a file; write its rows to a file first")
    if lower.endswith(".parquet"):
        return _parquet(path)
    if lower.endswith(".npz"):
        return _npz_table(path)
    if not lower.endswith(TABLE_SUFFIXES):
        raise DataError(
            f"cannot read {path.name}: a table must end in {', '.join(TABLE_SUFFIXES)}; save it as "
            "CSV"
        )
    text, notes = _read_text(path)
    return _parse_csv(path, text, notes, known)


def check_size(path: Path, size: int) -> None:
    """Raise a DataError for a file above the memory limit, before it is read.

    Args:
        path: the file.
        size: bytes that it needs in memory.
    """
    limit_text = os.environ.get(MAX_BYTES, "")
    if not limit_text.isdecimal() and limit_text:
        raise DataError(f"{MAX_BYTES} must be a number of bytes, got {limit_text!r}")
    limit = int(limit_text or 2**32)
    if size > limit:
        raise DataError(
            f"{path.name} needs at least {size:,} bytes in memory, and the limit is {limit:,}; set "
            f"{MAX_BYTES} to raise it, or use fewer rows"
        )


def unpack(path: Path) -> bytes:
    """Return the bytes of a file, decompressed by its suffix, up to the limit.

    Args:
        path: the file.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        check_size(path, path.stat().st_size)
        open_file = gzip.open if path.name.lower().endswith(".gz") else open
        with open_file(path, "rb") as stream:
            while piece := stream.read(2**24):
                pieces.append(piece)
                size += len(piece)
                check_size(path, size)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"cannot read {path}: {problem}") from problem
    return b"".join(pieces)


def unpack_archive(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """Return files of a tar archive by name.

    Args:
        path: the archive.
        names: of the files.
    """
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if member.name in names:
                    stream = archive.extractfile(member)
                    if stream is not None:
                        contents[member.name] = stream.read()
                if len(contents) == len(names):
                    return contents
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error, lzma.LZMAError) as problem:
        raise DataError(f"cannot read {path}: {problem}") from problem
    missing = ", ".join(name for name in names if name not in contents)
    raise DataError(f"{path} does not contain {missing}")


def _read_text(path: Path) -> tuple[str, list[str]]:
    """Return the text of a file, and notes about its encoding."""
    raw = unpack(path)
    for start, file_type in _BINARY.items():
        if raw.startswith(start):
            raise DataError(
                f"{path.name} is {file_type}, not text; save it as CSV, or correct its suffix"
            )
    notes: list[str] = []
    is_utf16 = raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        text = raw.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("cp1252", errors="replace")
        notes.append(f"{path.name} is not UTF-8; read as Windows-1252.")
    if "\0" in text[:4096]:
        raise DataError(f"{path.name} is not text; save it as CSV in UTF-8")
    if "\n" not in text:  # line endings of old Macs
        text = text.replace("\r", "\n")
    return text, notes


def _parse_csv(path: Path, text: str, notes: list[str], known: Collection[str]) -> RawTable:
    """Return the table of a text of delimited cells.

    Args:
        path: the file, for messages.
        text: its content.
        notes: about its encoding.
        known: names that are expected in a header.
    """
    if not text.strip():
        raise DataError(f"{path.name} is empty")
    delimiter = _delimiter(text, path)
    try:
        lines = _lines(text, delimiter)
    except csv.Error as problem:
        raise DataError(f"cannot read {path.name} as CSV: {problem}") from problem
    if '"' in text and _has_open_quote(text, delimiter):
        raise DataError(
            f"row {len(lines) - 1} of {path.name} has an unclosed quote, which includes all that "
            "follows; close or remove it"
        )
    names = [cell.strip() for cell in lines[0]]
    has_header = _is_header(names, known)
    body = lines[1:]
    if not has_header:
        body = lines
        names = [f"c{i + 1}" for i in range(len(names))]
        notes.append(
            "The first line holds numbers, so it was taken as data; the columns are named c1 to "
            f"c{len(names)}."
        )
    if not body:
        raise DataError(f"{path.name} has a header but no rows")
    first_row_name = "the header" if has_header else "row 1"
    body = _with_width(body, len(names), first_row_name, delimiter, path, notes)
    if len(names) == 1 and len(body) > 1 and any(mark in lines[0][0] for mark in _DELIMITERS):
        raise DataError(
            f"{path.name} seems to have one column only; use a comma, semicolon, tab or | between "
            "cells"
        )
    names, repetition_notes = _distinct_names(names)
    cells = dict(zip(names, map(list, zip(*body, strict=True)), strict=True))
    decimal_comma = delimiter == ";" or has_decimal_commas(cells.values())
    columns = {name: Column(column, decimal_comma) for name, column in cells.items()}
    return RawTable(path.name, columns, notes + repetition_notes)


def _is_header(cells: list[str], known: Collection[str]) -> bool:
    """Return whether the first line has names: a known one, or no number."""
    if set(cells) & set(known):
        return True
    return all(number(cell) is None for cell in cells)


def _with_width(
    body: list[list[str]],
    width: int,
    first_row_name: str,
    delimiter: str,
    path: Path,
    notes: list[str],
) -> list[list[str]]:
    """Return rows with a cell for each column; short ones get empty cells.

    Args:
        body: the rows.
        width: the number of columns.
        first_row_name: "the header" or "row 1", for a message.
        delimiter: of the cells.
        path: the file, for a message.
        notes: to which one about short rows is added.
    """
    # A delimiter at the end of every line adds an empty cell.
    if all(len(row) == width + 1 and not row[-1].strip() for row in body):
        body = [row[:width] for row in body]
    long_row = next((i for i, row in enumerate(body) if len(row) > width), None)
    if long_row is not None:
        raise DataError(
            f"row {long_row + 1} of {path.name} has {len(body[long_row])} cells where "
            f"{first_row_name} has {width}; is there a {delimiter!r} in a cell that is not quoted?"
        )
    short_count = sum(len(row) < width for row in body)
    if not short_count:
        return body
    notes.append(
        f"{short_count} rows are shorter than the header; their last cells count as missing."
    )
    return [row + [""] * (width - len(row)) for row in body]


def _lines(text: str, delimiter: str) -> list[list[str]]:
    """Return the cells of every line that is not blank.

    A blank as delimiter means any number of blanks.
    """
    if delimiter == " ":
        return [cells for line in text.splitlines() if (cells := line.split())]
    return [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(row)]


def _has_open_quote(text: str, delimiter: str) -> bool:
    """Return whether the text ends inside quotes, which only a strict reader reports."""
    try:
        for _ in csv.reader(io.StringIO(text), delimiter=delimiter, strict=True):
            pass
    except csv.Error as problem:
        return "unexpected end of data" in str(problem)
    return False


def _delimiter(text: str, path: Path) -> str:
    """Return the delimiter that splits the first lines into the same number of cells.

    Of several, it is the one with the largest number.
    """
    sample = text[:65536]
    if len(text) > len(sample):
        sample = sample.rsplit("\n", 1)[0]

    def quality(delimiter: str) -> tuple[float, int]:
        try:
            counts = [len(row) for row in _lines(sample, delimiter)][:200]
        except csv.Error:
            return 0.0, 0
        width, frequency = Counter(counts).most_common(1)[0]
        share = frequency / len(counts) if width > 1 else 0.0
        return share, width

    candidates = _DELIMITERS
    if ".tsv" in path.name.lower():
        candidates = "\t" + _DELIMITERS
    best = max(candidates, key=quality)
    if quality(best)[1] < 2 and quality(" ") > (0.99, 1):
        return " "
    return best


def _distinct_names(names: list[str]) -> tuple[list[str], list[str]]:
    """Return names without blanks and repetitions, and notes about those that changed."""
    repetitions: dict[str, int] = {}  # by name, the number of its last repetition
    notes: list[str] = []
    taken = set(names)
    for i, name in enumerate(names):
        original = name or f"c{i + 1}"
        new_name = original
        if original in repetitions:
            while new_name in taken:
                repetitions[original] += 1
                new_name = f"{original}.{repetitions[original]}"
            notes.append(f"There are several columns named {original!r}; one is now {new_name}.")
        taken.add(new_name)
        repetitions[new_name] = 1
    return list(repetitions), notes


def _to_table(name: str, columns: Mapping[str, Any]) -> RawTable:
    """Return a table of arrays or lists of equal length."""
    try:
        cells = {
            str(key): values if isinstance(values, Column) else Column.of(values)
            for key, values in columns.items()
        }
    except ValueError as problem:
        raise DataError(f"{name}: {problem}") from problem
    lengths = {key: len(values) for key, values in cells.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns of {name} have different lengths: {lengths}")
    if not lengths or not next(iter(lengths.values())):
        raise DataError(f"{name} has no rows")
    return RawTable(name, cells)


def _parquet(path: Path) -> RawTable:
    """Read a Parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            f"reading {path.name} needs pyarrow; `pip install 'bayou[parquet]'`, or save it as CSV"
        ) from None
    columns: dict[str, Any] = {}
    try:
        with pq.ParquetFile(path) as file:
            check_size(path, 8 * file.metadata.num_rows * file.metadata.num_columns)
            table = file.read()
        names, notes = _distinct_names([str(name) for name in table.column_names])
        for name, column in zip(names, table.columns, strict=True):
            if _is_exact_in_float64(column):
                numbers = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
                columns[name] = np.asarray(numbers, np.float64)
            elif pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
                notes.append(
                    f"Column {name!r} has the type {column.type}, which is not a number or a "
                    "category; dropped."
                )
            else:
                columns[name] = ["" if cell is None else str(cell) for cell in column.to_pylist()]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot read {path.name} as Parquet: {problem}") from problem
    return RawTable(path.name, _to_table(path.name, columns).columns, notes)


def _is_exact_in_float64(column: Any) -> bool:
    """Return whether a column of pyarrow has numbers that float64 can hold."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        return True
    if pa.types.is_decimal(column.type) and column.type.scale > 0:
        return True
    return pa.types.is_integer(column.type) and are_exact(pc.min_max(column).as_py().values())


def arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an NPZ file; nothing in it is executed.

    Args:
        path: the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_size(path, sum(member.file_size for member in members))
            if len({member.filename for member in members}) < len(members):
                raise ValueError("it has several arrays with the same name")
        with np.load(path, allow_pickle=False) as file:
            by_name = {key: file[key] for key in file.files}
        not_arrays = [key for key, value in by_name.items() if isinstance(value, bytes)]
        if not_arrays:
            raise ValueError(f"{not_arrays[0]!r} is not an array")
        return by_name
    except DataError:
        raise
    except Exception as problem:  # any error of zipfile, its codecs and numpy for an untrusted file
        hint = ""
        if "pickle" in str(problem):
            hint = "; arrays of Python objects are not read, store numbers or strings"
        raise DataError(
            f"cannot read {path.name} as NPZ: {problem or type(problem).__name__}{hint}"
        ) from problem


def input_key(arrays: Mapping[str, Any]) -> str | None:
    """Return the name of the array of inputs (N, ...) in an NPZ file; None if there is none.

    Args:
        arrays: by name.
    """
    return next((key for key in INPUT_KEYS if key in arrays and np.ndim(arrays[key]) >= 2), None)


def _npz_table(path: Path) -> RawTable:
    """Read an NPZ file as a table: of its inputs and targets, or of columns by name."""
    by_name = arrays(path)
    key = input_key(by_name)
    if key is None:
        return _to_table(path.name, by_name)
    columns = {
        name: array for name, array in by_name.items() if np.ndim(array) == 1 and name != key
    }
    return npz_rows(path.name, by_name[key], columns)


def npz_rows(name: str, x: NDArray[Any], more_columns: Mapping[str, Any]) -> RawTable:
    """Return a table of the columns x1, x2, ... of a matrix and further columns.

    Args:
        name: of the file, for messages.
        x: (N, D).
        more_columns: those of the same length are added.
    """
    if np.ndim(x) != 2:
        raise DataError(
            f"the inputs of {name} have shape {np.shape(x)}; a table needs (rows, columns)"
        )
    columns = {f"x{i + 1}": x[:, i] for i in range(x.shape[1])}
    for key, values in more_columns.items():
        if len(values) == len(x):
            columns[key] = values
    return _to_table(name, columns)
