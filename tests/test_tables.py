"""Files in, tables out: formats, and one sentence for each way a file can be bad."""

import gc
import json
import os
import time
import tracemalloc

import numpy
import pytest
from hypothesis import given, settings, strategies as st

from fastdp import tables
from fastdp.tables import DataError, read_rows
from tests.cases import cases, pairs


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_csv_with_quotes_and_newlines_keeps_the_line_each_row_began_at(tmp_path):
    path = write(tmp_path, "a.csv", '\ufeffmr,ref\r\n"x, y","two\nlines"\r\nz,"a ""q"""\r\n')
    table = read_rows(path)
    assert [*table.columns] == ["mr", "ref"]
    assert table.rows == [{"mr": "x, y", "ref": "two\nlines"}, {"mr": "z", "ref": 'a "q"'}]
    assert list(table.lines) == [2, 4]


def test_tsv_takes_quotes_literally(tmp_path):
    table = read_rows(write(tmp_path, "a.tsv", 'sentence\tlabel\n"half a quote\t1\n'))
    assert table.rows == [{"sentence": '"half a quote', "label": "1"}]


def test_jsonl_and_text(tmp_path):
    table = read_rows(write(tmp_path, "a.jsonl", '{"text": "one\u2028line"}\n\n{"text": 2}\n'))
    assert table.column("text", "text_column") == ["one\u2028line", "2"]
    assert list(table.lines) == [1, 3]
    table = read_rows(write(tmp_path, "a.txt", "first\n\n second \n"))
    assert table.column("text", "text_column") == ["first", "second"]
    assert list(table.lines) == [1, 3]


def test_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    data.save_to_disk(tmp_path / "one")
    table = read_rows(tmp_path / "one")
    assert table.column("label", "label_column") == ["0", "1"]
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "several")
    with pytest.raises(DataError, match=r"holds splits; name one of them: .*train.*test"):
        read_rows(tmp_path / "several")


@cases(
    "name, content, message",
    [
        ("a.csv", "a,b\n1,2\n3\n", r"a\.csv, line 3: 1 fields where the header has 2"),
        (
            "a.csv",
            "a,b\n1,2,,\n",
            r"a\.csv, line 2: 4 fields where the header has 2 \(column 3\): put quotation marks around",
        ),
        ("a.csv", "a,a\n1,2\n", "line 1, column 2: two columns have the same name 'a'"),
        ("a.csv", "a,b,,\n1,2,,\n", "line 1, column 4: two columns have no name.*remove the separators at the end"),
        ("a.csv", "a,b\n1,2\na,b\n", "line 3: it repeats the header"),
        ("a.csv", "a;b\n1;2;3\n", "line 2: 3 fields where the header has 2"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), r"line 1: not UTF-8 text \(byte 0xff\): set encoding"),
        ("a.txt", "one\ntwo\n".encode("utf-16-le"), "line 1: a NUL character.*set encoding.*utf-16"),
        ("a.json", '[{"a": 1},\n {"a": ]', r"a\.json, line 2, column 8: not JSON"),
        ("a.json", '[{"a": 1}, 2]', r"a\.json, row 2: expected an object"),
        ("a.jsonl", '{"a": 1},\n', r"a\.jsonl, line 1: not JSON \(Extra data, column 9\)"),
        ("a.jsonl", '{"a": 1, "a": 2}\n', r"a\.jsonl, line 1: 'a' stands in it twice"),
        ("a.csv", 'a,b\n1,"2\n', r"a\.csv, line 2: a quotation mark that is never closed"),
        ("a.csv", b"a,b\n1,2\n1,\xff\n", r"a\.csv, line 3: not UTF-8 text \(byte 0xff\)"),
        ("a.csv", "", "holds no rows"),
        ("a.csv", "a,b\n", "holds no rows"),
        ("a.txt", " \n\n", "holds no rows"),
        ("a.jsonl", '{"a": 1}\n{}\n', r"a\.jsonl, line 2: an object without fields"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", f'{{"a": {"9" * 5000}}}\n', r"a\.jsonl, line 1: a number of it has thousands of digits"),
        ("a.jsonl", "[1]\n", r"row 1: expected an object"),
        ("a.feather", "x", "no known kind"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        read_rows(write(tmp_path, name, content))


@pytest.mark.parametrize(*pairs(("delimiter", [";", "\t", "|"]), ("quote", ["", '"']), ("name", ["a.csv", "a.tsv"])))
def test_other_delimiters_are_taken_and_said(tmp_path, recwarn, delimiter, quote, name):
    fields = [["text", "label"], ["Der Film 0 war gut", "neg"], ["ganz gut, na ja", "pos"]]
    lines = [delimiter.join(f"{quote}{field}{quote}" for field in row) for row in fields]
    table = read_rows(write(tmp_path, name, "\r\n".join(lines)))
    said = [str(warning.message) for warning in recwarn]
    if name == "a.tsv" and delimiter == "\t":
        assert len(said) == bool(quote)
        assert not quote or "quotation marks" in said[0]
        return
    assert table.rows == [dict(zip(fields[0], row)) for row in fields[1:]]
    assert said == [f"{tmp_path / name}: its columns are taken to be separated by {delimiter!r}"]


def test_a_single_column_of_prose_is_not_taken_apart(tmp_path, recwarn):
    table = read_rows(write(tmp_path, "a.csv", "text\none; two | three\n"))
    assert table.rows == [{"text": "one; two | three"}]
    assert not list(recwarn)


@cases(
    "name, content, encoding",
    [
        ("a.csv", "text,label\ncafé,1\n", "latin-1"),
        ("a.csv", "text,label\ncafé,1\n", "utf-16"),
        ("a.csv", "text,label\ncafé,1\n", "utf-8-sig"),
        ("a.csv", "text,label\rcafé,1\r", "utf-8"),
        ("a.jsonl", '{"text": "café", "label": "1"}\r{"text": "b", "label": "1"}\r', "utf-8"),
        ("a.json", '[{"text": "café", "label": 1},\n{"text": "b", "label": 2}]', "latin-1"),
        ("a.txt", "café\rb\r", "utf-8"),
        ("a.txt", "café\r\nb", "utf-16"),
        ("a.csv", "sep=;\r\ntext;label\r\ncafé;1\r\n", "latin-1"),
    ],
)
def test_encodings_and_line_ends(tmp_path, name, content, encoding):
    table = read_rows(write(tmp_path, name, content.encode(encoding)), encoding)
    assert table.column("text", "text")[0] == "café"
    assert len(table) == (1 if name == "a.csv" else 2)


@cases(
    "value, words",
    [
        ("NaN", "the number nan, which is not finite"),
        ("1e400", "the number inf"),
        ("-Infinity", "the number -inf"),
        ("null", "nothing, not text"),
        ('"a \\ud83d b"', r"half of a surrogate pair \('\\ud83d', character 3\)"),
    ],
)
def test_what_is_no_text_is_refused_where_it_is_used(tmp_path, value, words):
    table = read_rows(write(tmp_path, "a.jsonl", f'{{"text": "a", "other": 1}}\n{{"text": {value}, "other": 2}}\n'))
    assert table.column("other", "label_column") == ["1", "2"]
    for read in (table.column, lambda *given: table.lists(*given, str.split)):
        with pytest.raises(DataError, match=rf"a\.jsonl, line 2: column 'text' \(text_column\) holds {words}"):
            read("text", "text_column")


def test_several_files_are_one_table_and_each_row_knows_its_own(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    write(folder, "b.csv", "text,label\nthree,1\n")
    write(folder, "a.csv", 'label,text\n0,"one\nmore"\n1,two\n')
    write(folder, "README.md", "no data")
    for path in (folder, folder / "*.csv"):
        with pytest.warns(UserWarning, match=r"2 files are read as one table, a\.csv first"):
            table = read_rows(path)
        assert table.column("text", "text") == ["one\nmore", "two", "three"]
        assert [table.place(i) for i in range(3)] == [
            *(f"{folder / 'a.csv'}, line 2", f"{folder / 'a.csv'}, line 4"),
            f"{folder / 'b.csv'}, line 2",
        ]
        assert table.take([1, 2]).place(1) == f"{folder / 'b.csv'}, line 2"
        assert table.take([2]).place(0) == f"{folder / 'b.csv'}, line 2"
    write(folder, "0.csv", "")
    with pytest.warns(UserWarning, match="3 files"):
        assert len(read_rows(folder)) == 3
    (folder / "0.csv").unlink()
    write(folder, "c.csv", "text,other\nfour,1\n")
    with (
        pytest.raises(DataError, match=r"c\.csv has the columns text, other, but .*a\.csv has label, text"),
        pytest.warns(UserWarning, match="3 files"),
    ):
        read_rows(folder)
    with pytest.raises(DataError, match="there is no file"):
        read_rows(folder / "*.parquet")


def test_class_numbers_become_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["neg", "pos"])
    features = {"text": datasets.Value("string"), "label": names, "tags": datasets.List(names)}
    data = datasets.Dataset.from_dict(
        {"text": ["a", "b"], "label": [0, -1], "tags": [[1, 0], []]}, features=datasets.Features(features)
    )
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    for path in (tmp_path / "saved", tmp_path / "a.parquet"):
        table = read_rows(path)
        assert table.column("label", "label") == ["neg", "-1"]
        assert table.lists("tags", "label", str.split) == [["pos", "neg"], []]
        assert table.place(1) == f"{path}, row 2"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("dataset_dict.json", "[]", "TypeError"),
        ("dataset_dict.json", '{"splits": null}', "splits is no list"),
        ("dataset_dict.json", b"\xff\xfe", "UnicodeDecodeError"),
        ("dataset_dict.json", None, "no regular file"),
        ("dataset_info.json", "", "JSONDecodeError"),
        ("dataset_info.json", None, "no regular file"),
        ("state.json", "{}", "KeyError: '_data_files'"),
        ("state.json", '{"_data_files": [{"filename": "absent.arrow"}]}', "FileNotFoundError"),
        ("state.json", '{"_data_files": [{"filename": "../other/data.arrow"}]}', "lies elsewhere"),
        ("state.json", '{"_data_files": [{"filename": "/etc/passwd"}]}', "lies elsewhere"),
        ("data-00000-of-00001.arrow", b"junk" * 100, "ArrowInvalid"),
    ],
)
def test_a_saved_data_set_of_another_party_is_read_or_refused(tmp_path, file, content, said):
    """Whatever its files hold: one sentence, and no file elsewhere is opened; None is a pipe, which nobody writes to."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    path = tmp_path / "saved" / file
    path.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match="that can be read: save it again") as found:
        read_rows(tmp_path / "saved")
    assert said in str(found.value)
    assert len(str(found.value).splitlines()) == 1


def test_a_saved_data_set_fills_no_memory_and_opens_no_picture(tmp_path):
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "saved"
    rows = {"text": ["a"], "seen": [{"bytes": None, "path": str(tmp_path / "private.png")}]}
    pictures = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"text": datasets.Value("string"), "seen": pictures})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)
    info = json.loads((folder / "dataset_info.json").read_text())
    info["features"]["seen"] = {"_type": "Image"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    assert read_rows(folder).rows == [{"text": "a", "seen": rows["seen"][0]}]
    datasets.Dataset.from_dict({"text": ["a"], "long": [[1]]}).save_to_disk(folder)
    long = pyarrow.ListArray.from_arrays([0, 2 * 10**7], pyarrow.array(numpy.zeros(2 * 10**7, "int64")))
    table = pyarrow.table({"text": ["a"], "long": long})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema, options=options) as stream:
        stream.write_table(table)
    with pytest.raises(DataError, match="values, in .*: too many"):
        read_rows(folder)


def test_names_of_splits_are_shown_and_move_no_cursor(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["\\u001b[2Jtrain"]}')
    with pytest.raises(DataError, match=r"name one of them: .*\\x1b\[2Jtrain"):
        read_rows(tmp_path)


def test_features_that_a_parquet_file_states_and_nobody_knows(tmp_path):
    pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for stated in (b"nothing", b"\xff", b'{"info": {"features": {"text": {"_type": "Nope"}}}}'):
        table = pyarrow.table({"text": ["a"]}).replace_schema_metadata({b"huggingface": stated})
        parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(DataError, match="that can be read: save it again"):
            read_rows(tmp_path / "a.parquet")


def test_missing_file_and_foreign_folder(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        read_rows(tmp_path / "absent.csv")
    with pytest.raises(DataError, match="no data set saved"):
        read_rows(tmp_path)


def test_missing_column_and_value(tmp_path):
    table = read_rows(write(tmp_path, "a.jsonl", '{"text": "x"}\n{"other": [1]}\n'))
    with pytest.raises(DataError, match=r"no column 'ref' \(target_column\); its columns are text, other"):
        table.column("ref", "target_column")
    with pytest.raises(DataError, match="line 2: column 'text'.*holds nothing"):
        table.column("text", "text_column")
    with pytest.raises(DataError, match="line 1: column 'other'.*holds nothing"):
        table.column("other", "text_column")


@settings(max_examples=50)
@given(rows=st.lists(st.dictionaries(st.sampled_from("ab"), st.text(max_size=8), min_size=2), min_size=1, max_size=5))
def test_jsonl_gives_back_any_text(tmp_path_factory, rows):
    path = write(tmp_path_factory.mktemp("any"), "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_rows(path).rows == rows


def test_a_field_may_be_as_long_as_a_document(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("text\n" + "word " * 100_000 + "\n")
    assert len(read_rows(path).column("text", "text")[0]) == 500_000


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow, of the extra 'trainer'")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "label": [0, 1]}), path)
    rows = read_rows(path)
    assert rows.column("text", "text") == ["one", "two"]
    assert rows.column("label", "label") == ["0", "1"]
    parquet.write_table(pyarrow.table({"text": [b"one", b"two"], "label": [True, False]}), path)
    with pytest.raises(DataError, match="row 1: column 'text'.*holds bytes, not text"):
        read_rows(path).column("text", "text")
    assert read_rows(path).column("label", "label") == ["true", "false"]
    parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"]), path)
    with pytest.raises(DataError, match="column 2: two columns have the same name 'text'"):
        read_rows(path)
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        read_rows(path)
    # A few kilobytes that say they are billions.
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2 * 10**7, pyarrow.string())}), path)
    with pytest.raises(DataError, match="bytes hold 20000000 values"):
        read_rows(path)
    for kind in (pyarrow.int8(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        one = pyarrow.array(["a" * 100] if pyarrow.types.is_dictionary(kind) else [0], kind)
        long = pyarrow.ListArray.from_arrays([0, 2 * 10**7], one.take(pyarrow.array(numpy.zeros(2 * 10**7, "int32"))))
        parquet.write_table(pyarrow.table({"text": ["a"], "long": long}), path, compression="zstd")
        with pytest.raises(DataError, match="values, in .*: too many"):
            read_rows(path)
    many = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 10_000, "int32"), pyarrow.array(["a" * 10**6]))
    parquet.write_table(pyarrow.table({"text": many}), path)
    with pytest.raises(DataError, match="bytes hold too much text"):
        read_rows(path)


@cases("name", ["pipe.csv", "zeros.jsonl"])
def test_what_is_no_file_is_not_waited_for(tmp_path_factory, name):
    path = tmp_path_factory.mktemp("devices") / name
    os.mkfifo(path) if name == "pipe.csv" else path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is no regular file: name a file"):
        read_rows(path)


@cases("name", ["wide.csv", "wide.jsonl"])
def test_many_columns_are_read_at_once_and_named_in_short(tmp_path_factory, name):
    names = [f"c{i}" for i in range(100_000)]
    content = (
        f"{','.join(names)}\n{','.join('1' * len(names))}\n" if "csv" in name else json.dumps(dict.fromkeys(names, 1))
    )
    path = write(tmp_path_factory.mktemp("wide"), name, content)
    begin = time.process_time()
    with pytest.raises(DataError, match=r"its columns are c0, c1, .*, c19, \.\.\.$"):
        read_rows(path).column("text", "text_column")
    assert time.process_time() - begin < 10


def test_a_parquet_dictionary_or_page_of_far_more_text_is_not_written_out(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 10_000] * 5000}), path, compression="zstd")
    monkeypatch.setattr(tables, "MUCH_TEXT", 1 << 20)
    with pytest.raises(DataError, match="bytes hold more than 1048576 bytes of text"):
        read_rows(path)
    # Pages of all columns are in memory at once, before any is counted.
    column = pyarrow.array(["a" * (1 << 26)])
    parquet.write_table(pyarrow.table({f"c{i}": column for i in range(12)}), path, compression="zstd")
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        read_rows(path)


@cases("codec", ["snappy", "lz4", "zstd", "brotli", "gzip"])
def test_a_parquet_page_that_inflates_beyond_its_header_is_refused(tmp_path_factory, codec):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path_factory.mktemp("pages") / "a.parquet"
    size = 1 << 26
    parquet.write_table(pyarrow.table({"text": ["a" * size]}), path, compression=codec, use_dictionary=False)
    honest = path.read_bytes()
    # The page's sizes, as Thrift writes them: 67,108,874 bytes, and 74 in their place.
    path.write_bytes(honest.replace(b"\x94\x80\x80\x40", b"\x94\x81\x80\x00", 1))
    assert path.read_bytes() != honest
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        read_rows(path)


@cases("name, line", [("a.jsonl", '{"a":1}\n'), ("a.csv", "1\n"), ("a.txt", "a\n")])
def test_short_rows_fill_no_memory(tmp_path_factory, name, line):
    path = write(tmp_path_factory.mktemp("short"), name, line * 20_000)
    gc.collect()
    tracemalloc.start()
    try:
        read_rows(path)
        assert tracemalloc.get_traced_memory()[1] < 20 * path.stat().st_size + (1 << 16)
    finally:
        tracemalloc.stop()


def test_objects_that_share_no_field_are_refused(tmp_path):
    path = write(tmp_path, "a.jsonl", "".join(f'{{"{i}":1}}\n' for i in range(5000)))
    with pytest.raises(DataError, match="its rows share too few of 4097 names of fields"):
        read_rows(path)


def test_a_parquet_header_that_contradicts_itself_ends_no_process(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two", None]}), path)
    honest = path.read_bytes()
    # The column is of no known kind of repetition, and counts of its levels stand beside it.
    path.write_bytes(honest.replace(b"%\x02\x18\x04text", b"%\x06\x18\x04text"))
    assert path.read_bytes() != honest
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        read_rows(path)
