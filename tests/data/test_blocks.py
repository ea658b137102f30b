"""Rows that are read and encoded block by block are those that are read at once."""

import gzip
import itertools

import numpy as np
import pytest
from torch.testing import assert_close

from bayou.data import DataError, delimited, load, reading
from bayou.data.columns import Column
from bayou.data.delimited import DelimitedFile, TextFile

ROWS = 40
SIZES = (1, 7, 16, 1000)


def text_of(rows, delimiter=",", end=""):
    return "".join(f"{delimiter.join(map(str, row))}{end}\n" for row in rows)


def table_rows(header=True):
    rows = [(f"k{i}", i / 4, "uvw"[i % 3], f"2024-02-{i % 28 + 1:02}", i % 5) for i in range(ROWS)]
    return [("key", "a", "kind", "day", "y"), *rows] if header else rows


@pytest.fixture
def preprocessor(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(text_of(table_rows()))
    return load(path, target="y", task="regression", id="key").preprocessor


def unusual_text():
    """Return rows with an unusual cell of each kind, in different blocks."""
    rows = [list(row) for row in table_rows()]
    rows[5][1] = "oops"
    rows[31][1] = "again"
    rows[20][1] = ""
    rows[33][1] = "1e30"
    rows[38][1] = "1e40"
    rows[30][2] = "zz"
    for i, level in enumerate(("q", "p", "r", "o")):
        rows[10 + 7 * i][2] = level
    rows[25][3] = "yesterday"
    return text_of(rows)


FILES = {
    "comma.csv": text_of(table_rows()).encode(),
    "packed.csv.gz": gzip.compress(text_of(table_rows()).encode()),
    "tab.tsv": text_of(table_rows(), "\t").encode("utf-16"),
    "blank.txt": text_of(table_rows(), "   ").encode(),
    "semicolon.csv": text_of(table_rows(), ";").replace(".", ",").encode(),
    "ends.csv": text_of(table_rows(), end=",").encode(),
    "mac.csv": text_of(table_rows()).replace("\n", "\r").encode(),
    "windows.csv": text_of(table_rows()).replace("k3", "é\u20ac").encode("cp1252"),
    "quoted.csv": text_of(table_rows()).replace("k3", '"k,\n3"').replace(",u,", ',"u",').encode(),
    "short.csv": text_of([row[:4] if i % 9 == 2 else row for i, row in enumerate(table_rows())])
    .replace("k1,", "\n\nk1,")
    .encode(),
    "unusual.csv": unusual_text().encode(),
}


def compare(preprocessor, source):
    """Compare rows, identifiers, distances and notes of blocks of every size with all at once."""
    whole = preprocessor.rows(source)
    for size in SIZES:
        blocks = preprocessor.blocks(source, size)
        assert blocks.rows == len(whole.x)
        start = 0
        for block in blocks:
            count = min(size, len(whole.x) - start)
            part = slice(start, start + count)
            assert_close(block.x, whole.x[part], rtol=0, atol=0)
            assert block.kept == whole.kept[part]
            assert block.ids == (None if whole.ids is None else whole.ids[part])
            assert np.array_equal(block.distance, whole.distance[part])
            start += count
        assert start == len(whole.x)
        assert blocks.notes == whole.notes


@pytest.mark.parametrize("name", FILES)
def test_blocks_of_a_text_file_are_its_rows(name, preprocessor, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    compare(preprocessor, tmp_path / name)


def test_blocks_of_columns_and_of_an_npz_file_are_their_rows(preprocessor, tmp_path):
    _, *rows = table_rows()
    columns = dict(zip(("key", "a", "kind", "day", "y"), zip(*rows, strict=True), strict=True))
    compare(preprocessor, {name: list(cells) for name, cells in columns.items()})
    np.savez(tmp_path / "t.npz", **{name: np.array(cells) for name, cells in columns.items()})
    compare(preprocessor, tmp_path / "t.npz")
    del columns["key"]
    compare(preprocessor, columns)


@pytest.mark.peers
def test_blocks_of_a_parquet_file_are_its_rows(preprocessor, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    _, *rows = table_rows()
    columns = dict(zip(("key", "a", "kind", "day", "y"), zip(*rows, strict=True), strict=True))
    large = [i if i % 3 else 2**53 + i for i in range(ROWS)]  # exact in some blocks alone
    for group_size in (3, 16, 1000):
        table = pa.table({**columns, "a": [None, *columns["a"][1:]], "more": [[i] for i in large]})
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=group_size)
        compare(preprocessor, tmp_path / "t.parquet")
        table = pa.table({**columns, "a": large})
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=group_size)
        compare(preprocessor, tmp_path / "t.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has no rows"):
        preprocessor.blocks(tmp_path / "t.parquet", 7)


def test_notes_count_all_blocks_and_name_rows_of_the_file(preprocessor, tmp_path):
    path = tmp_path / "new.csv"
    path.write_text(unusual_text())
    blocks = preprocessor.blocks(path, 4)
    for _ in blocks:
        pass
    text = " ".join(blocks.notes)
    assert "'a': 2 cells are not numbers (row 5: 'oops'); they count as missing" in text
    assert "'a': 3 missing values, none of them in training" in text  # the blank and both others
    assert "(row 33: 1e+30) and were clipped" in text
    assert "5 cells have categories that are not in the training data ('o', 'p', 'q', ...)" in text
    assert "1 cells are not dates with the year first (row 25: 'yesterday')" in text


def test_every_row_is_checked_before_the_first_block(preprocessor, tmp_path):
    path = tmp_path / "new.csv"
    for text, message in (
        (
            text_of([*table_rows(), range(7)]),
            "row 41 of new.csv has 7 cells where the header has 5",
        ),
        (text_of(table_rows()) + 'k,"1,u,', "row 41 of new.csv has an unclosed quote"),
        (text_of(table_rows()).replace(",kind,", ",sort,"), "has no column 'kind'"),
        (",,\n", "has a header but no rows"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            preprocessor.blocks(path, 7)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "new.csv"
    for more in ("1,2\n", "1,2,3\n"):
        path.write_text("a,b\n" + "1,2\n" * 30)
        file = DelimitedFile.of(path)
        with path.open("a") as stream:
            stream.write(more)
        with pytest.raises(DataError, match="was changed while it was read"):
            list(file.blocks(8))


def test_the_memory_limit_of_blocks_is_that_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYOU_MAX_BYTES", "100000")
    path = tmp_path / "new.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 100_000))
    file = DelimitedFile.of(path)
    assert sum(len(block["a"]) for block in file.blocks(1000)) == 100_000
    with pytest.raises(DataError, match="needs at least .* bytes"):
        DelimitedFile.of(path, whole=True)
    path.write_bytes(gzip.compress(b"a,b\n" + b"1" * 2_000_000))
    with pytest.raises(DataError, match="needs at least .* bytes"):
        DelimitedFile.of(path)


def test_decimal_commas_are_those_of_the_first_rows(tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("a,b\n" + '"1,5",2\n' * 30 + '"2,125",3\n')
    blocks = list(reading.read_blocks(path, (), 30).tables)
    assert [block.columns["a"].values[0] for block in blocks] == [1.5, 2.125]


def test_characters_across_the_pieces_of_a_file_are_whole(tmp_path, monkeypatch):
    path = tmp_path / "new.csv"
    text = "name,b\n" + "é€𝄞,1\n" * 20
    for encoding, size in itertools.product(("utf-8", "utf-16"), (1, 3, 5)):
        monkeypatch.setattr("bayou.data.delimited.PIECE_BYTES", size)
        path.write_bytes(text.encode(encoding))
        file = TextFile.of(path, whole=False)
        assert file.newline == "\n"
        assert not file.notes
        assert "".join(file.lines()) == text


def test_an_underscore_makes_no_number_in_any_column():
    assert Column(["1_000", "2"]).bad.tolist() == [True, False]
    assert Column(["1_000", "x"]).bad.tolist() == [True, True]


def test_no_file_stays_open_after_an_error(tmp_path, monkeypatch):
    """Also while the error is kept, whose traceback has the frames that read the file."""
    table = tmp_path / "table.csv"
    table.write_text("a,y\n" + "".join(f"{i},{2 * i + i % 3}\n" for i in range(40)))
    preprocessor = load(table, target="y").preprocessor
    other = tmp_path / "other.csv"
    other.write_text("b\n" + "1\n" * 40)
    streams = []

    def tracked(*arguments):
        streams.append(open(*arguments))  # noqa: SIM115 - the caller closes it
        return streams[-1]

    monkeypatch.setattr(delimited, "open", tracked, raising=False)
    with pytest.raises(DataError, match="has no column 'a'") as error:
        preprocessor.blocks(other, 5)
    assert error.value.__traceback__ is not None
    assert streams
    assert all(stream.closed for stream in streams)
    streams.clear()
    rows = preprocessor.blocks(table, 5)
    next(iter(rows))
    rows.close()
    assert all(stream.closed for stream in streams)
