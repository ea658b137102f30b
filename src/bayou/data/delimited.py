"""Text files of delimited cells: their format, by passes over the file, and blocks of their rows.

No pass holds more of the file than a block of rows.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import zlib
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

from bayou.data.catalogue import DataError
from bayou.data.columns import Column, has_decimal_commas, number
from bayou.data.limits import check_size

PIECE_BYTES = 2**18  # of a file that are decoded at a time
BLOCK_ROWS = 2**12  # of a file that is read as a whole
SAMPLE_CHARACTERS = 65536  # of the beginning, which tells the delimiter
SAMPLE_ROWS = 1000  # which tell decimal commas
_DELIMITERS = ",;\t|"
_BINARY = {
    b"PK\x03\x04": "an Excel or zip file",
    b"PAR1": "a Parquet file",
    b"\x93NUMPY": "a .npy file",
}


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed by its suffix.

    Args:
        path: the file.

    Raises:
        DataError: it cannot be read.
    """
    open_file = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with open_file(path, "rb") as stream:
            yield stream  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"cannot read {path}: {problem}") from problem


@final
@dataclass(frozen=True)
class TextFile:
    """How the characters of a file are encoded.

    Args:
        path: the file.
        encoding: the name of a codec.
        newline: what ends a line: a line feed, or a carriage return in files of old Macs.
        has_quotes: whether there is any quotation mark.
        notes: about the encoding.
    """

    path: Path
    encoding: str
    newline: str
    has_quotes: bool
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(path: Path, *, whole: bool) -> TextFile:
        """Find the encoding of a file, which all of it must have.

        Args:
            path: the file.
            whole: whether all of it will be in memory, or a line at a time.

        Raises:
            DataError: it is empty, no text, or above the memory limit.
        """
        if whole:
            check_size(path, path.stat().st_size)
        with open_bytes(path) as stream:
            start = stream.read(8)
        for mark, file_type in _BINARY.items():
            if start.startswith(mark):
                raise DataError(
                    f"{path.name} is {file_type}, not text; save it as CSV, or correct its suffix"
                )
        is_utf16 = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        try:
            return TextFile._decode(path, "utf-16" if is_utf16 else "utf-8-sig", whole)
        except UnicodeDecodeError:
            note = f"{path.name} is not UTF-8; read as Windows-1252."
            return TextFile._decode(path, "cp1252", whole, (note,))

    @staticmethod
    def _decode(path: Path, encoding: str, whole: bool, notes: tuple[str, ...] = ()) -> TextFile:
        """Decode a file once, or raise a UnicodeDecodeError."""
        decoder = codecs.getincrementaldecoder(encoding)(_errors(encoding))
        size = 0
        line_size = 0  # bytes since the last line ended
        newline = "\r"
        has_quotes = False
        is_blank = True
        with open_bytes(path) as stream:
            while piece := stream.read(PIECE_BYTES):
                size += len(piece)
                line_end = max(piece.rfind(b"\n"), piece.rfind(b"\r"))
                line_size = len(piece) - line_end - 1 + (line_size if line_end < 0 else 0)
                check_size(path, size if whole else line_size)
                text = decoder.decode(piece)
                if "\n" in text:
                    newline = "\n"
                has_quotes = has_quotes or '"' in text
                is_blank = is_blank and not text.strip()
        decoder.decode(b"", final=True)
        file = TextFile(path, encoding, newline, has_quotes, notes)
        if "\0" in file.beginning(4096):
            raise DataError(f"{path.name} is not text; save it as CSV in UTF-8")
        if is_blank:
            raise DataError(f"{path.name} is empty")
        return file

    def lines(self) -> Generator[str, None, None]:
        """Yield the lines of the file; their ends are line feeds."""
        with self._open() as text:
            if self.newline == "\n":
                yield from text
            else:
                for line in text:
                    yield line.replace("\r", "\n")

    def beginning(self, size: int) -> str:
        """Return the first characters.

        Args:
            size: at most as many.
        """
        with self._open() as text:
            characters = text.read(size)
        return characters if self.newline == "\n" else characters.replace("\r", "\n")

    @contextmanager
    def _open(self) -> Iterator[IO[str]]:
        with open_bytes(self.path) as stream:
            yield io.TextIOWrapper(
                stream, self.encoding, errors=_errors(self.encoding), newline=self.newline
            )


def _errors(encoding: str) -> str:
    """Return what a decoder does with bytes that have no meaning."""
    return "replace" if encoding == "cp1252" else "strict"


@final
@dataclass(frozen=True)
class DelimitedFile:
    """A file with delimited cells, whose format is known.

    Args:
        text: its characters.
        delimiter: between cells; a blank means any number of blanks.
        names: of the columns, all different.
        has_header: whether the first line has the names.
        ends_with_delimiter: whether every row has one more cell, which is blank.
        rows: the number of rows.
        decimal_comma: whether the comma is the decimal point.
        notes: sentences about the file.
    """

    text: TextFile
    delimiter: str
    names: tuple[str, ...]
    has_header: bool
    ends_with_delimiter: bool
    rows: int
    decimal_comma: bool
    notes: tuple[str, ...]

    @staticmethod
    def of(path: Path, known: Collection[str] = (), *, whole: bool = False) -> DelimitedFile:
        """Find the format of a file, and check all of its rows.

        Args:
            path: the file.
            known: names that are expected in a header.
            whole: whether all rows will be in memory, which is limited, or blocks of them.

        Raises:
            DataError: it is no file of delimited cells.
        """
        text = TextFile.of(path, whole=whole)
        delimiter = _find_delimiter(text)
        try:
            with closing(text.lines()) as lines:
                rows = split_lines(lines, delimiter)
                first = next(rows, None)
                if first is None:
                    raise DataError(f"{path.name} is empty")
                names = [cell.strip() for cell in first]
                has_header = _is_header(names, known)
                all_rows = rows if has_header else itertools.chain([first], rows)
                shape = _Shape.of(all_rows, len(names))
        except csv.Error as problem:
            raise DataError(f"cannot read {path.name} as CSV: {problem}") from problem
        if text.has_quotes and _has_open_quote(text, delimiter):
            last_row = shape.rows if has_header else shape.rows - 1
            raise DataError(
                f"row {last_row} of {path.name} has an unclosed quote, which includes all that "
                "follows; close or remove it"
            )
        notes = list(text.notes)
        if not has_header:
            names = [f"c{i + 1}" for i in range(len(names))]
            notes.append(
                "The first line holds numbers, so it was taken as data; the columns are named c1 "
                f"to c{len(names)}."
            )
        if not shape.rows:
            raise DataError(f"{path.name} has a header but no rows")
        first_row_name = "the header" if has_header else "row 1"
        shape.check(path, first_row_name, delimiter, notes)
        if len(names) == 1 and shape.rows > 1 and any(mark in first[0] for mark in _DELIMITERS):
            raise DataError(
                f"{path.name} seems to have one column only; use a comma, semicolon, tab or | "
                "between cells"
            )
        names, repetition_notes = distinct_names(names)
        sample = zip(*(_fit(row, len(names)) for row in shape.sample), strict=True)
        return DelimitedFile(
            text,
            delimiter,
            tuple(names),
            has_header,
            shape.ends_with_delimiter,
            shape.rows,
            delimiter == ";" or has_decimal_commas(map(list, sample)),
            tuple(notes + repetition_notes),
        )

    def blocks(self, size: int) -> Iterator[dict[str, Column]]:
        """Yield the columns of blocks of rows, in their order.

        Args:
            size: rows of a block; the last one may have fewer.

        Raises:
            DataError: the file is no longer as it was.
        """
        first_row = 0
        for cells in self._blocks_of_cells(size):
            columns = [
                Column(list(column), self.decimal_comma, False, first_row) for column in cells
            ]
            yield dict(zip(self.names, columns, strict=True))
            first_row += len(cells[0])

    def columns(self) -> dict[str, Column]:
        """Return the columns of all rows."""
        cells: list[list[str]] = [[] for _ in self.names]
        for block in self._blocks_of_cells(BLOCK_ROWS):
            for column, more in zip(cells, block, strict=True):
                column.extend(more)
        columns = [Column(column, self.decimal_comma) for column in cells]
        return dict(zip(self.names, columns, strict=True))

    def _blocks_of_cells(self, size: int) -> Iterator[list[tuple[str, ...]]]:
        """Yield the cells of each column of blocks of rows."""
        width = len(self.names)
        longest = width + self.ends_with_delimiter
        count = 0
        with closing(self.text.lines()) as lines:
            rows = split_lines(lines, self.delimiter)
            if self.has_header:
                next(rows, None)
            while block := list(itertools.islice(rows, size)):
                count += len(block)
                if count > self.rows or max(map(len, block)) > longest:
                    break
                fitted = (row if len(row) == width else _fit(row, width) for row in block)
                yield list(zip(*fitted, strict=True))
        if count != self.rows:
            raise DataError(
                f"{self.text.path} was changed while it was read; read it again when it is complete"
            )


@dataclass
class _Shape:
    """The number of rows of a file, and which of them have another number of cells.

    Args:
        width: the number of columns.
        rows: the number of rows.
        short_count: the number of rows with fewer cells.
        blank_end_count: the number of rows with one more cell, which is blank.
        first_long: the number of the first row with more cells, and the number of them.
        sample: the first rows.
    """

    width: int
    rows: int
    short_count: int
    blank_end_count: int
    first_long: tuple[int, int] | None
    sample: list[list[str]]

    @staticmethod
    def of(rows: Iterable[list[str]], width: int) -> _Shape:
        """Count the rows."""
        shape = _Shape(width, 0, 0, 0, None, [])
        for index, row in enumerate(rows, 1):
            shape.rows = index
            if index <= SAMPLE_ROWS:
                shape.sample.append(row)
            if len(row) < width:
                shape.short_count += 1
            elif len(row) > width:
                if shape.first_long is None:
                    shape.first_long = (index, len(row))
                if len(row) == width + 1 and not row[-1].strip():
                    shape.blank_end_count += 1
        return shape

    @property
    def ends_with_delimiter(self) -> bool:
        """Whether a delimiter at the end of every line adds a blank cell."""
        return self.blank_end_count == self.rows

    def check(self, path: Path, first_row_name: str, delimiter: str, notes: list[str]) -> None:
        """Raise a DataError if a row has too many cells, and add a note about short rows."""
        if self.first_long is not None and not self.ends_with_delimiter:
            row, size = self.first_long
            raise DataError(
                f"row {row} of {path.name} has {size} cells where {first_row_name} has "
                f"{self.width}; is there a {delimiter!r} in a cell that is not quoted?"
            )
        if self.short_count:
            notes.append(
                f"{self.short_count} rows are shorter than the header; their last cells count as "
                "missing."
            )


def _fit(row: list[str], width: int) -> list[str]:
    """Return a row with a cell for each column; what it lacks is blank."""
    return [*row[:width], *[""] * (width - len(row))]


def _is_header(cells: list[str], known: Collection[str]) -> bool:
    """Return whether the first line has names: a known one, or no number."""
    if set(cells) & set(known):
        return True
    return all(number(cell) is None for cell in cells)


def split_lines(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the cells of every row that is not blank.

    Args:
        lines: of a text.
        delimiter: between cells; a blank means any number of blanks.
    """
    if delimiter == " ":
        for line in lines:
            for part in line.splitlines():
                if cells := part.split():
                    yield cells
        return
    for row in csv.reader(lines, delimiter=delimiter):
        if any(row):
            yield row


def _has_open_quote(text: TextFile, delimiter: str) -> bool:
    """Return whether the text ends inside quotes, which only a strict reader reports."""
    try:
        for _ in csv.reader(text.lines(), delimiter=delimiter, strict=True):
            pass
    except csv.Error as problem:
        return "unexpected end of data" in str(problem)
    return False


def _find_delimiter(text: TextFile) -> str:
    """Return the delimiter that splits the first lines into the same number of cells.

    Of several, it is the one with the largest number.
    """
    sample = text.beginning(SAMPLE_CHARACTERS + 1)
    if len(sample) > SAMPLE_CHARACTERS:
        sample = sample[:SAMPLE_CHARACTERS].rsplit("\n", 1)[0]

    def quality(delimiter: str) -> tuple[float, int]:
        try:
            rows = split_lines(io.StringIO(sample), delimiter)
            counts = [len(row) for row in rows][:200]
        except csv.Error:
            counts = []
        if not counts:
            return 0.0, 0
        width, frequency = Counter(counts).most_common(1)[0]
        share = frequency / len(counts) if width > 1 else 0.0
        return share, width

    candidates = _DELIMITERS
    if ".tsv" in text.path.name.lower():
        candidates = "\t" + _DELIMITERS
    best = max(candidates, key=quality)
    if quality(best)[1] < 2 and quality(" ") > (0.99, 1):
        return " "
    return best


def distinct_names(names: list[str]) -> tuple[list[str], list[str]]:
    """Return names without blanks and repetitions, and notes about those that changed.

    Args:
        names: of columns, as they are in a file.
    """
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
