"""Reading tables: CSV with any common delimiter, Parquet, NPZ."""

from __future__ import annotations

import itertools
import lzma
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from bayou.data.catalogue import TABLE_SUFFIXES, DataError
from bayou.data.columns import Column, are_exact, quote
from bayou.data.delimited import DelimitedFile, distinct_names, open_bytes
from bayou.data.limits import check_size

INPUT_KEYS = ("x", "X", "inputs", "features", "data", "images")
TARGET_KEYS = ("y", "Y", "target", "targets", "label", "labels")
MAX_QUOTED_NAMES = 40


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


@final
@dataclass(frozen=True)
class TableBlocks:
    """A table that is read block by block.

    Args:
        rows: the number of all rows.
        tables: the blocks in the order of the rows, once; their columns know their first row.
    """

    rows: int
    tables: Generator[RawTable, None, None]


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
    suffix = _table_suffix(path)
    if suffix == ".parquet":
        return _parquet(path)
    if suffix == ".npz":
        return _npz_table(path)
    file = DelimitedFile.of(path, known, whole=True)
    return RawTable(path.name, file.columns(), list(file.notes))


def read_blocks(source: object, known: Collection[str], size: int) -> TableBlocks:
    """Read a table block by block.

    Of a text file only a block is in memory, of a Parquet file a row group, of any other source all
    rows are.

    Args:
        source: as for ``read``.
        known: names that are expected in a header.
        size: rows of a block; the last one may have fewer.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        suffix = _table_suffix(path)
        if suffix == ".parquet":
            return _parquet_blocks(path, size)
        if suffix != ".npz":
            file = DelimitedFile.of(path, known)
            notes = list(file.notes)
            tables = (RawTable(path.name, columns, notes) for columns in file.blocks(size))
            return TableBlocks(file.rows, tables)
    table = read(source, known)
    starts = range(0, table.rows, size)
    return TableBlocks(table.rows, (_rows_of(table, start, size) for start in starts))


def _rows_of(table: RawTable, start: int, count: int) -> RawTable:
    """Return some rows of a table, which keep their numbers in messages."""
    columns = {
        name: replace(column, cells=column.cells[start : start + count])
        for name, column in table.columns.items()
    }
    return _with_first_row(RawTable(table.name, columns, table.notes), start)


def _with_first_row(table: RawTable, first_row: int) -> RawTable:
    """Return a table whose columns are known to begin at a row of a file."""
    columns = {name: replace(column, first_row=first_row) for name, column in table.columns.items()}
    return RawTable(table.name, columns, table.notes)


def _table_suffix(path: Path) -> str:
    """Return the suffix of a table, ".csv" for all kinds of text, or raise a DataError."""
    lower = path.name.lower()
    if not path.exists():
        raise DataError(f"there is no file {path}")
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the path of a file in it")
    if not path.is_file():
        raise DataError(f"{path} is a pipe or device, not a file; write its rows to a file first")
    if lower.endswith((".parquet", ".npz")):
        return path.suffix.lower()
    if not lower.endswith(TABLE_SUFFIXES):
        raise DataError(
            f"cannot read {path.name}: a table must end in {', '.join(TABLE_SUFFIXES)}; save it as "
            "CSV"
        )
    return ".csv"


def unpack(path: Path) -> bytes:
    """Return the bytes of a file, decompressed by its suffix, up to the limit.

    Args:
        path: the file.
    """
    pieces: list[bytes] = []
    size = 0
    check_size(path, path.stat().st_size)
    with open_bytes(path) as stream:
        while piece := stream.read(2**24):
            pieces.append(piece)
            size += len(piece)
            check_size(path, size)
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
    with _open_parquet(path) as file:
        check_size(path, 8 * file.metadata.num_rows * file.metadata.num_columns)
        return _arrow_table(path, file.read())


def _parquet_blocks(path: Path, size: int) -> TableBlocks:
    """Read a Parquet file block by block."""
    with _open_parquet(path) as file:
        row_count = file.metadata.num_rows
    if not row_count:
        raise DataError(f"{path.name} has no rows")
    starts = itertools.count(0, size)
    blocks = zip(_arrow_blocks(path, size), starts, strict=False)
    tables = (_with_first_row(_arrow_table(path, block), start) for block, start in blocks)
    return TableBlocks(row_count, tables)


def _arrow_blocks(path: Path, size: int) -> Iterator[Any]:
    """Yield tables of pyarrow with as many rows each; the last one may have fewer."""
    import pyarrow as pa

    with _open_parquet(path) as file:
        rest = file.schema_arrow.empty_table()
        for batch in file.iter_batches(size):  # which may end with a row group
            rest = pa.concat_tables([rest, pa.Table.from_batches([batch])])
            while len(rest) >= size:
                yield rest.slice(0, size)
                rest = rest.slice(size)
        if len(rest):
            yield rest


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file; its errors become a DataError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            f"reading {path.name} needs pyarrow; `pip install 'bayou[parquet]'`, or save it as CSV"
        ) from None
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot read {path.name} as Parquet: {problem}") from problem


def _arrow_table(path: Path, table: Any) -> RawTable:
    """Return a table of pyarrow as columns of numbers or text."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    names, notes = distinct_names([str(name) for name in table.column_names])
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
