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

from bayou.data.catalogue import TABLE_SUFFIXES, DataError
from bayou.data.columns import Column, exact, has_decimal_commas, number, quote

INPUT_KEYS = ("x", "X", "inputs", "features", "data", "images")
TARGET_KEYS = ("y", "Y", "target", "targets", "label", "labels")
MAX_BYTES = "BAYOU_MAX_BYTES"  # the environment variable for the limit of 4 GiB, uncompressed
_DELIMITERS = ",;\t|"
_BINARY = {
    b"PK\x03\x04": "an Excel or zip file",
    b"PAR1": "a Parquet file",
    b"\x93NUMPY": "a .npy file",
}


@final
@dataclass(frozen=True)
class Table:
    """Columns of equal length by name, with notes from reading them."""

    name: str
    columns: dict[str, Column]
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(next(iter(self.columns.values()), ()))


def listed(names: Iterable[str]) -> str:
    """The first 40 names, quoted and separated by commas."""
    first = [quote(name) for name in itertools.islice(names, 41)]
    return ", ".join([*first[:40], *["..."] * (len(first) > 40)])


def read(source: Any, known: Collection[str] = ()) -> Table:
    """A table from a path or from columns (a mapping or a data frame). ``known``: names expected in
    a header.
    """
    if isinstance(source, Table):
        return source
    if isinstance(source, str | Path):
        return read_file(Path(source), known)
    if hasattr(source, "columns") and hasattr(source, "to_numpy"):
        source = {str(name): source[name].to_numpy() for name in source.columns}
    if not isinstance(source, Mapping):
        raise DataError(
            f"rows must be a path, a mapping of columns or a data frame, got {type(source).__name__}"
        )
    return _table("the columns given", dict(source))


def read_file(path: Path, known: Collection[str] = ()) -> Table:
    """A table from a file, by its suffix."""
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
            f"cannot read {path.name}: a table must end in {', '.join(TABLE_SUFFIXES)}; save it as CSV"
        )
    return _csv(path, *_text(path), known)


def check_size(path: Path, size: int) -> None:
    """A DataError for a file above the memory limit, before it is read."""
    said = os.environ.get(MAX_BYTES, "")
    if not said.isdecimal() and said:
        raise DataError(f"{MAX_BYTES} must be a number of bytes, got {said!r}")
    most = int(said or 2**32)
    if size > most:
        raise DataError(
            f"{path.name} needs at least {size:,} bytes in memory, and the limit is {most:,}; set {MAX_BYTES} to "
            "raise it, or use fewer rows"
        )


def unpack(path: Path) -> bytes:
    """The bytes of a file, decompressed by its suffix, up to the limit."""
    pieces, size = list[bytes](), 0
    try:
        check_size(path, path.stat().st_size)
        with (gzip.open if path.name.lower().endswith(".gz") else open)(path, "rb") as stream:
            while piece := stream.read(2**24):
                pieces.append(piece)
                check_size(path, size := size + len(piece))
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"cannot read {path}: {problem}") from problem
    return b"".join(pieces)


def unpack_archive(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """Files of a tar archive by name."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if member.name in names and (stream := archive.extractfile(member)) is not None:
                    found[member.name] = stream.read()
                if len(found) == len(names):
                    return found
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error, lzma.LZMAError) as problem:
        raise DataError(f"cannot read {path}: {problem}") from problem
    raise DataError(
        f"{path} does not contain {', '.join(name for name in names if name not in found)}"
    )


def _text(path: Path) -> tuple[str, list[str]]:
    raw = unpack(path)
    for start, what in _BINARY.items():
        if raw.startswith(start):
            raise DataError(
                f"{path.name} is {what}, not text; save it as CSV, or correct its suffix"
            )
    notes = list[str]()
    try:
        text = raw.decode(
            "utf-16" if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        )
    except UnicodeDecodeError:
        text = raw.decode("cp1252", errors="replace")
        notes.append(f"{path.name} is not UTF-8; read as Windows-1252.")
    if "\0" in text[:4096]:
        raise DataError(f"{path.name} is not text; save it as CSV in UTF-8")
    return text if "\n" in text else text.replace("\r", "\n"), notes  # old Mac line endings


def _csv(path: Path, text: str, notes: list[str], known: Collection[str]) -> Table:
    if not text.strip():
        raise DataError(f"{path.name} is empty")
    delimiter = _delimiter(text, path)
    try:
        lines = _lines(text, delimiter)
    except csv.Error as problem:
        raise DataError(f"cannot read {path.name} as CSV: {problem}") from problem
    if '"' in text and _left_open(text, delimiter):
        raise DataError(
            f"row {len(lines) - 1} of {path.name} has an unclosed quote, which includes all that follows; "
            "close or remove it"
        )
    first = [cell.strip() for cell in lines[0]]
    has_header = bool(set(first) & set(known)) or not any(
        number(cell) is not None for cell in first
    )
    if has_header:
        body, names = lines[1:], first
    else:
        body, names = lines, [f"c{i + 1}" for i in range(len(first))]
        notes.append(
            f"The first line holds numbers, so it was taken as data; the columns are named c1 to c{len(first)}."
        )
    if not body:
        raise DataError(f"{path.name} has a header but no rows")
    width = len(names)
    if all(
        len(row) == width + 1 and not row[-1].strip() for row in body
    ):  # a delimiter at the end of every line
        body = [row[:width] for row in body]
    wrong = next((i for i, row in enumerate(body) if len(row) > width), None)
    if wrong is not None:
        model = "the header" if has_header else "row 1"
        raise DataError(
            f"row {wrong + 1} of {path.name} has {len(body[wrong])} cells where {model} has {width}; "
            f"is there a {delimiter!r} in a cell that is not quoted?"
        )
    short = sum(len(row) < width for row in body)
    if short:
        notes.append(
            f"{short} rows are shorter than the header; their last cells count as missing."
        )
        body = [row + [""] * (width - len(row)) for row in body]
    if width == 1 and len(body) > 1 and any(mark in lines[0][0] for mark in _DELIMITERS):
        raise DataError(
            f"{path.name} seems to have one column only; use a comma, semicolon, tab or | between cells"
        )
    names, renamed = _distinct(names)
    cells = dict(zip(names, map(list, zip(*body, strict=True)), strict=True))
    comma = delimiter == ";" or has_decimal_commas(cells.values())
    return Table(
        path.name, {name: Column(column, comma) for name, column in cells.items()}, notes + renamed
    )


def _lines(text: str, delimiter: str) -> list[list[str]]:
    """The cells of every line that is not blank; a blank as delimiter means any number of
    blanks.
    """
    if delimiter == " ":
        return [cells for line in text.splitlines() if (cells := line.split())]
    return [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(row)]


def _left_open(text: str, delimiter: str) -> bool:
    """Whether the text ends inside quotes, which only a strict reader reports."""
    try:
        for _ in csv.reader(io.StringIO(text), delimiter=delimiter, strict=True):
            pass
    except csv.Error as problem:
        return "unexpected end of data" in str(problem)
    return False


def _delimiter(text: str, path: Path) -> str:
    """The delimiter that splits the first lines into the same and the largest number of cells."""
    sample = text[:65536]
    if len(text) > len(sample):
        sample = sample.rsplit("\n", 1)[0]

    def quality(delimiter: str) -> tuple[float, int]:
        try:
            counts = [len(row) for row in _lines(sample, delimiter)][:200]
        except csv.Error:
            return 0.0, 0
        width, times = Counter(counts).most_common(1)[0]
        return (times / len(counts) if width > 1 else 0.0), width

    order = "\t" + _DELIMITERS if ".tsv" in path.name.lower() else _DELIMITERS
    best = max(order, key=quality)
    return " " if quality(best)[1] < 2 and quality(" ") > (0.99, 1) else best


def _distinct(names: list[str]) -> tuple[list[str], list[str]]:
    """Names without blanks and repetitions, and notes about those that changed."""
    result, notes, taken = (
        dict[str, int](),
        list[str](),
        set(names),
    )  # a name, and the number of its last repetition
    for i, name in enumerate(names):
        name = old = name or f"c{i + 1}"
        if name in result:
            while name in taken:
                result[old] += 1
                name = f"{old}.{result[old]}"
            notes.append(f"There are several columns named {old!r}; one is now {name}.")
        taken.add(name)
        result[name] = 1
    return list(result), notes


def _table(name: str, columns: Mapping[str, Any]) -> Table:
    try:
        cells = {str(key): Column.of(values) for key, values in columns.items()}
    except ValueError as problem:
        raise DataError(f"{name}: {problem}") from problem
    lengths = {key: len(values) for key, values in cells.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns of {name} have different lengths: {lengths}")
    if not lengths or not next(iter(lengths.values())):
        raise DataError(f"{name} has no rows")
    return Table(name, cells)


def _parquet(path: Path) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
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
        names, notes = _distinct([str(name) for name in table.column_names])
        for name, column in zip(names, table.columns, strict=True):
            kind = column.type
            number = pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0)
            if number or (pa.types.is_integer(kind) and exact(pc.min_max(column).as_py().values())):
                columns[name] = np.asarray(
                    column.cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64
                )
            elif pa.types.is_nested(kind) or pa.types.is_binary(kind):
                notes.append(
                    f"Column {name!r} has the type {kind}, which is not a number or a category; dropped."
                )
            else:
                columns[name] = ["" if cell is None else str(cell) for cell in column.to_pylist()]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot read {path.name} as Parquet: {problem}") from problem
    return Table(path.name, _table(path.name, columns).columns, notes)


def arrays(path: Path) -> dict[str, Any]:
    """The arrays of an NPZ file; nothing in it is executed."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_size(path, sum(member.file_size for member in members))
            if len({member.filename for member in members}) < len(members):
                raise ValueError("it has several arrays with the same name")
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in file.files}
        if odd := [key for key, value in found.items() if isinstance(value, bytes)]:
            raise ValueError(f"{odd[0]!r} is not an array")
        return found
    except DataError:
        raise
    except Exception as problem:  # any error of zipfile, its codecs and numpy for an untrusted file
        hint = (
            "; arrays of Python objects are not read, store numbers or strings"
            if "pickle" in str(problem)
            else ""
        )
        raise DataError(
            f"cannot read {path.name} as NPZ: {problem or type(problem).__name__}{hint}"
        ) from problem


def input_key(found: Mapping[str, Any]) -> str | None:
    """The name of the array of inputs (N, ...) among the arrays of an NPZ file."""
    return next((key for key in INPUT_KEYS if key in found and np.ndim(found[key]) >= 2), None)


def _npz_table(path: Path) -> Table:
    found = arrays(path)
    key = input_key(found)
    if key is None:
        return _table(path.name, found)
    return npz_rows(
        path.name,
        found[key],
        {name: a for name, a in found.items() if np.ndim(a) == 1 and name != key},
    )


def npz_rows(name: str, x: Any, others: Mapping[str, Any]) -> Table:
    """A table of the columns x1, x2, ... of a matrix and other columns of the same length."""
    if np.ndim(x) != 2:
        raise DataError(
            f"the inputs of {name} have shape {np.shape(x)}; a table needs (rows, columns)"
        )
    columns = {f"x{i + 1}": x[:, i] for i in range(x.shape[1])}
    return _table(
        name, columns | {key: values for key, values in others.items() if len(values) == len(x)}
    )
