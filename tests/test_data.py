"""Files in, examples out: formats, and one sentence for each way a file can be bad."""

import json

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from fastdp.data import (
    IGNORED,
    Collator,
    DataError,
    causal_examples,
    classification_examples,
    read_rows,
)


@pytest.fixture(scope="module")
def tokenizer():
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a text of little weight"], vocab_size=260, special_tokens=["<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<end>", eos_token="<end>", pad_token="<end>"
    )


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_csv_with_quotes_and_newlines_keeps_the_line_each_row_began_at(tmp_path):
    path = write(tmp_path, "a.csv", '\ufeffmr,ref\r\n"x, y","two\nlines"\r\nz,"a ""q"""\r\n')
    table = read_rows(path)
    assert table.columns == ("mr", "ref")
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
    with pytest.raises(DataError, match=r"name one of them: .*train.*test"):
        read_rows(tmp_path / "several")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "a,b\n1,2\n3\n", r"a\.csv, line 3: 1 fields where the header has 2"),
        ("a.csv", "a,a\n1,2\n", "two columns have the same name"),
        ("a.csv", 'a,b\n1,"2\n', r"a\.csv, line 2: unexpected end of data"),
        ("a.csv", b"a,b\n1,2\n1,\xff\n", r"a\.csv, line 3: not UTF-8 text \(byte 0xff\)"),
        ("a.csv", "", "holds no rows"),
        ("a.csv", "a,b\n", "holds no rows"),
        ("a.txt", " \n\n", "holds no rows"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", "[1]\n", r"line 1: expected an object"),
        ("a.feather", "x", "no known kind"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        read_rows(write(tmp_path, name, content))


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


def test_only_the_target_is_learned(tokenizer):
    (example,) = causal_examples(tokenizer, ["text"], 64, prompts=["weight"], separator=" = ")
    prompt = tokenizer("weight = ")["input_ids"]
    target = tokenizer("text")["input_ids"]
    end = tokenizer.eos_token_id
    assert example["input_ids"] == [end, *prompt, *target, end]
    assert example["labels"] == [IGNORED] * (1 + len(prompt)) + [*target, end]


def test_plain_text_is_learned_whole(tokenizer):
    (example,) = causal_examples(tokenizer, ["a text"], 64)
    assert example["labels"] == example["input_ids"]
    assert example["input_ids"][-1] == tokenizer.eos_token_id


@settings(max_examples=200)
@given(
    prompt=st.text(alphabet="abc ", max_size=60),
    target=st.text(alphabet="xyz ", max_size=60),
    limit=st.integers(4, 40),
)
def test_cutting_keeps_to_the_limit_and_leaves_something_to_learn(tokenizer, prompt, target, limit):
    examples = causal_examples(tokenizer, [target], limit, prompts=[prompt])
    (example,) = examples
    assert len(example["input_ids"]) == len(example["labels"]) <= limit
    learned = [label for label in example["labels"] if label != IGNORED]
    whole = [*tokenizer(target)["input_ids"], tokenizer.eos_token_id]
    assert learned
    assert learned == whole[: len(learned)]
    if not examples.truncated:
        assert learned == whole


def test_classification_examples(tokenizer):
    examples = classification_examples(tokenizer, ["a text", "li"], [1, 0], 5, pairs=["of weight", "a"])
    assert examples.truncated == 1
    assert len(examples[0]["input_ids"]) == 5
    assert [example["labels"] for example in examples] == [1, 0]
    assert examples.lengths == [len(example["input_ids"]) for example in examples]


def test_collator_masks_padding_and_not_the_end_token_that_looks_like_it(tokenizer):
    pad = tokenizer.pad_token_id
    examples = causal_examples(tokenizer, ["a text", "a text of little weight"], 64)
    batch = Collator(pad)([examples[0], examples[1]])
    short, long = len(examples[0]["input_ids"]), len(examples[1]["input_ids"])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (2, long)
    assert batch["attention_mask"].sum(1).tolist() == [short, long]
    assert batch["input_ids"][0, short - 1] == pad
    assert batch["labels"][0, short - 1] == pad
    assert (batch["labels"][0, short:] == IGNORED).all()
    assert (batch["input_ids"][0, short:] == pad).all()


def test_collator_on_classification(tokenizer):
    examples = classification_examples(tokenizer, ["a text", "little"], [1, 0], 8)
    batch = Collator(0)(list(examples))
    assert torch.equal(batch["labels"], torch.tensor([1, 0]))


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
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        read_rows(path)
