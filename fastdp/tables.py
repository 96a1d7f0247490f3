"""Reading the tables people have: CSV, TSV, JSON, text, Parquet, saved data sets, and folders of them."""

from __future__ import annotations

import bisect
import codecs
import csv
import glob
import io
import itertools
import json
import math
import re
import resource
import subprocess
import sys
import warnings
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastdp.untrusted import (
    CALL_SECONDS,
    escape_controls,
    limit_process,
    memory_limit,
    open_regular,
    parse_json,
    quote,
    read_text,
)

_PARQUET = ".parquet"
#: Most values of a Parquet file, and characters of its text, for each of its bytes once they are many: few bytes may say that
#: they are billions.
_MOST_VALUES, _MOST_TEXT = 100, 1000
_MANY_VALUES, MUCH_TEXT = 1 << 24, 1 << 30
#: Checks a Parquet file in a process of its own, isolated, so that no file of the working directory stands in for a module.
_CHECK = (
    "import sys; sys.path[:] = sys.argv[3:]; from fastdp.tables import check_parquet; check_parquet(*sys.argv[1:3])"
)
#: Codecs of names and of escapes, not of texts.
_OTHER_CODECS = ("idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined")


class DataError(ValueError):
    """A data file that cannot be used: the message names the file and, where there is one, the line."""


@dataclass(frozen=True)
class Rows:
    """A table: row i has the value ``columns[name][i]``, None where it has none, and begins at line ``lines[i]`` of its file.

    Attributes:
        path: the file, or the folder or pattern that names several.
        columns, lines: as above.
        word: what ``lines`` counts: a "line" of text, or a "row" of a file without lines.
        shards: index of the first row of each file, and the file, if ``path`` names several.
    """

    path: Path
    columns: Mapping[str, list[Any]]
    lines: Sequence[int]
    word: str = "line"
    shards: tuple[tuple[int, Path, str], ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Each row as a dict, which takes far more memory."""
        return [dict(zip(self.columns, row)) for row in zip(*self.columns.values())]

    def place(self, index: int) -> str:
        """File and line of a row, for a message."""
        path, word = self.path, self.word
        if self.shards:
            _, path, word = self.shards[bisect.bisect([first for first, *_ in self.shards], index) - 1]
        return f"{path}, {word} {self.lines[index]}"

    def take(self, chosen: Sequence[int]) -> Rows:
        """A table of the rows at these indices, in ascending order."""
        first = [bisect.bisect_left(chosen, start) for start, *_ in self.shards]
        shards = tuple((at, path, word) for at, (_, path, word) in zip(first, self.shards))
        columns = {name: [values[i] for i in chosen] for name, values in self.columns.items()}
        return replace(self, columns=columns, lines=[self.lines[i] for i in chosen], shards=shards)

    def values(self, name: str, role: str) -> list[Any]:
        """The values of one column as the file holds them; None where a row has none.

        Raises:
            DataError: if there is no such column.
        """
        if name not in self.columns:
            raise DataError(f"{self.path} has no column {name!r} ({role}); its columns are {_listed(self.columns)}")
        return self.columns[name]

    def column(self, name: str, role: str) -> list[str]:
        """The values of one column as text.

        Raises:
            DataError: if there is no such column, or a row holds no text or number in it.
        """
        return [self._text(value, index, name, role) for index, value in enumerate(self.values(name, role))]

    def lists(self, name: str, role: str, split: Callable[[str], list[str]]) -> list[list[str]]:
        """The values of one column as lists of text: lists as they are, and text (or a number) as ``split`` cuts it.

        Raises:
            DataError: as `column`; and for a list that holds null, lists or mappings, or a text that ``split`` refuses.
        """
        found = []
        for index, value in enumerate(self.values(name, role)):
            if isinstance(value, list):
                if any(item is None or isinstance(item, (dict, list)) for item in value):
                    raise DataError(
                        f"{self.place(index)}: column {name!r} ({role}) holds a list of more than words and numbers"
                    )
                found.append([self._text(item, index, name, role) for item in value])
                continue
            text = self._text(value, index, name, role)
            try:
                found.append(split(text))
            except ValueError:
                raise DataError(f"{self.place(index)}: column {name!r} ({role}) holds {text!r}, not a list") from None
        return found

    def _text(self, value: Any, index: int, name: str, role: str) -> str:
        try:
            return as_text(value)
        except ValueError as error:
            raise DataError(f"{self.place(index)}: column {name!r} ({role}) holds {error}") from None


def as_text(value: Any) -> str:
    """A value of a table as the text that a model reads. Raises ValueError, naming what it is, for what is no text."""
    if value is None or isinstance(value, (dict, list)):
        raise ValueError("nothing, not text" if value is None else "a nested value, not text: write one object a row")
    if isinstance(value, (bytes, bytearray)):
        raise ValueError("bytes, not text")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the number {value}, which is not finite")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ValueError(f"half of a surrogate pair ({half}, character {error.start + 1}), not text") from None
    return text


def read_rows(path: str | Path, encoding: str = "utf-8") -> Rows:
    """Read a table from a file, from several files, or from a folder written by `datasets.Dataset.save_to_disk`.

    CSV and TSV begin with a header. A .csv file may have semicolons, tabs or pipes for commas, and a warning says which were
    taken. TSV fields are taken literally (no quoting), as GLUE writes them. JSON is an array of objects, or one object a line.
    A plain text file has one example a line, in the column "text"; blank lines are skipped. Class numbers of Parquet files and
    saved data sets that carry class names become these names.

    Args:
        path: a file; a folder of files of one kind, or a pattern such as ``data/train-*.csv``, which are read as one table.
        encoding: of text files, by Python's names.

    Raises:
        DataError: a file that is missing, empty, of an unknown kind, or has a row that cannot be read (with its line).
    """
    path = Path(path)
    files = _files(path)
    if files is not None and len(files) > 1:
        warnings.warn(f"{path}: {len(files)} files are read as one table, {files[0].name} first", stacklevel=2)
    try:
        with memory_limit():
            if files is None:
                rows = _read_saved_dataset(path)
            else:
                rows = _join_tables(path, [_read_file(file, encoding) for file in files])
    except MemoryError:
        raise DataError(f"{path} takes more memory than this machine has left: split it") from None
    if not len(rows):
        raise DataError(f"{path} holds no rows")
    return rows


def _files(path: Path) -> list[Path] | None:
    """The files that a path names; None for a saved data set."""
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return None
        found = [file for file in sorted(path.iterdir()) if file.suffix.lower() in (*_READERS, _PARQUET)]
        found = [file for file in found if file.is_file() and not file.name.startswith(".")]
        if not found:
            raise DataError(
                f"{path} is a folder without data files, and no data set saved by datasets.Dataset.save_to_disk"
            )
        return found
    if path.exists():
        return [path]
    found = [Path(name) for name in sorted(glob.glob(str(path))) if Path(name).is_file()]
    if not found:
        web = re.match(r"\w+:/", str(path))
        raise DataError(f"there is no file {path}" + ": download it, and name the file" * bool(web))
    return found


def _read_file(path: Path, encoding: str) -> Rows:
    suffix = path.suffix.lower()
    if suffix == _PARQUET:
        return _read_parquet(path)
    if suffix not in _READERS:
        kinds = ", ".join([*_READERS, _PARQUET])
        raise DataError(f"{path} is of no known kind: expected {kinds} or a saved data set folder")
    return _READERS[suffix](path, _decode(path, encoding))


def _join_tables(path: Path, tables: Sequence[Rows]) -> Rows:
    """Tables of several files as one; of files without content, as some programs leave, nothing is taken."""
    if len(tables) == 1:
        return tables[0]
    tables = [table for table in tables if table.columns] or tables
    first = tables[0]
    names = dict.fromkeys(name for table in tables for name in table.columns)
    starts = itertools.accumulate((len(table) for table in tables), initial=0)
    for table in tables:
        # Objects of JSON may lack a field; a table's header says what every row has.
        if {table.path.suffix, first.path.suffix} - _JSON and set(table.columns) != set(first.columns):
            raise DataError(
                f"{table.path} has the columns {_listed(table.columns)}, but {first.path} has {_listed(first.columns)}: "
                "name files of one table"
            )
    return Rows(
        path,
        {name: [value for t in tables for value in t.columns.get(name) or [None] * len(t)] for name in names},
        [line for table in tables for line in table.lines],
        shards=tuple((start, table.path, table.word) for start, table in zip(starts, tables)),
    )


def check_encoding(encoding: str) -> None:
    """Raise DataError for what is no encoding of texts."""
    try:
        known = "".encode(encoding) is not None and codecs.lookup(encoding).name not in _OTHER_CODECS
    except (LookupError, ValueError):
        known = False
    if not known:
        raise DataError(f"encoding {quote(encoding)} is not known: write utf-8, latin-1 or utf-16")


def _decode(path: Path, encoding: str) -> str:
    check_encoding(encoding)
    try:
        with open_regular(path) as file:
            content = file.read()
    except ValueError as error:
        raise DataError(str(error)) from None
    advice = "set encoding to what it is written in, such as latin-1 or utf-16"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].decode(encoding, "replace").count("\n") + 1
        found = content[error.start] if error.start < len(content) else 0
        raise DataError(f"{path}, line {line}: not {encoding.upper()} text (byte {found:#04x}): {advice}") from None
    except UnicodeError:
        raise DataError(f"{path}: not {encoding.upper()} text: {advice}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"{path}, line {line}: a NUL character, which no {encoding.upper()} text holds: {advice}")
    return text.removeprefix("\ufeff")


def _read_delimited(path: Path, text: str, delimiter: str) -> Rows:
    # The module's own limit of 131,072 characters is below what a document takes; it holds for the process.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    taken = _delimiter(text, delimiter)
    if taken != delimiter:
        warnings.warn(f"{path}: its columns are taken to be separated by {taken!r}", stacklevel=2)
    dialect: dict[str, Any] = {"strict": True}
    if delimiter == taken == "\t":
        dialect = {"quoting": csv.QUOTE_NONE}
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=taken, **dialect)
    columns: dict[str, list[str]] = {}
    lines, header = array("q"), list[str]()
    begin = 1
    try:
        for fields in reader:
            if not header and fields == ["sep=", ""]:
                pass  # Excel's line that names the delimiter.
            elif not header:
                header = fields
                _check_header(path, header, begin)
                columns = {name: [] for name in header}
            elif fields:
                if len(fields) != len(header):
                    at = min(len(fields), len(header)) + 1
                    raise DataError(
                        f"{path}, line {begin}: {len(fields)} fields where the header has {len(header)} (column {at}): put "
                        "quotation marks around fields that hold separators"
                    )
                if fields == header and len(header) > 1:
                    raise DataError(f"{path}, line {begin}: it repeats the header: remove the line")
                for column, value in zip(columns.values(), fields):
                    column.append(value)
                lines.append(begin)
            begin = reader.line_num + 1
    except csv.Error:
        raise DataError(
            f"{path}, line {begin}: a quotation mark that is never closed, or stands inside a field: write it twice"
        ) from None
    values = itertools.chain.from_iterable(columns.values())
    if "quoting" in dialect and any(len(value) > 1 and value[0] == value[-1] == '"' for value in values):
        warnings.warn(
            f"{path}: quotation marks around fields of a .tsv are kept as text: rename it to .csv to remove them",
            stacklevel=2,
        )
    return Rows(path, columns, lines)


def _delimiter(text: str, usual: str) -> str:
    """What separates the names in the header: the usual character of the kind of file if it is there."""
    header = text.lstrip("\r\n").splitlines()[0] if text.strip() else ""
    if header[:-1] == "sep=":
        return header[-1]
    if usual in header:
        return usual
    try:
        return csv.Sniffer().sniff(header, delimiters=",;\t|").delimiter
    except csv.Error:
        return usual


def _check_header(path: Path, header: Sequence[str], line: int | None = None) -> None:
    seen: set[str] = set()
    place = path if line is None else f"{path}, line {line}"
    for column, name in enumerate(header, start=1):
        if name in seen:
            what = f"two columns have the same name {name!r}: rename one"
            what = what if name.strip() else "two columns have no name: name them, or remove the separators at the end"
            raise DataError(f"{place}, column {column}: {what}")
        seen.add(name)


def _listed(columns: Collection[str]) -> str:
    """The names of columns for a message, the first of many; within quotation marks where a space would not be seen."""
    shown = [quote(name, 40) for name in [*columns][:20]]
    shown = [name[1:-1] if name[1:-1].strip() == name[1:-1] != "" else name for name in shown]
    return ", ".join(shown + ["..."] * (len(columns) > 20))


def _read_json(path: Path, text: str) -> Rows:
    """An array of objects, or one object a line."""
    if text.lstrip().startswith("["):
        try:
            # A number that is not finite is refused where it stands for text.
            found = parse_json(text, constants=True)
        except json.JSONDecodeError as error:
            if path.suffix.lower() == ".json":
                raise DataError(f"{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg})") from None
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        else:
            return _objects(path, enumerate(found, start=1), "row", len(text))
    return _objects(path, _json_lines(path, text), "line", len(text))


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in _numbered(text):
        try:
            yield number, parse_json(line, constants=True)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not JSON ({error.msg}, column {error.colno}): write one object a line"
            ) from None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from None


def _objects(path: Path, numbered: Iterable[tuple[int, Any]], word: str, size: int) -> Rows:
    # A file of millions of short lines would take many times as much as dicts and Python's integers.
    columns, lines = dict[str, list[Any]](), array("q")
    for number, row in numbered:
        if not isinstance(row, dict):
            raise DataError(f"{path}, {word} {number}: expected an object with named fields, not {quote(row, 30)}")
        if not row:
            raise DataError(f"{path}, {word} {number}: an object without fields: remove it, or give it a text")
        for name, value in row.items():
            column = columns.setdefault(name, [])
            column += [None] * (len(lines) - len(column))
            column.append(value)
        lines.append(number)
        if len(columns) * len(lines) > max(_MANY_VALUES, size):
            raise DataError(
                f"{path}: its rows share too few of {len(columns)} names of fields: keep those that are learned"
            )
    for column in columns.values():
        column += [None] * (len(lines) - len(column))
    return Rows(path, columns, lines, word)


def _read_text(path: Path, text: str) -> Rows:
    return _objects(path, ((number, {"text": line.strip()}) for number, line in _numbered(text)), "line", len(text))


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers; they end as Unix, Windows or the first Macs end them."""
    # Not splitlines(): texts may hold U+2028 and other characters it would split at.
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if line.strip():
            yield number, line


_READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".csv": partial(_read_delimited, delimiter=","),
    ".tsv": partial(_read_delimited, delimiter="\t"),
    ".json": _read_json,
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".txt": _read_text,
}
_JSON = {".json", ".jsonl", ".ndjson"}


def _read_parquet(path: Path) -> Rows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow: pip install 'fastdp-lm[trainer]'") from None
    try:
        open_regular(path).close()
        size = path.stat().st_size
        room = max(MUCH_TEXT, _MOST_TEXT * size)
        # Where the parts of a header contradict each other, pyarrow ends the process.
        command = [sys.executable, "-I", "-c", _CHECK, str(path), str(room), *sys.path]
        checked = subprocess.run(command, stderr=subprocess.PIPE)
        with _refusing(path, "Parquet file"):
            if checked.returncode:
                raise ValueError(*checked.stderr.decode(errors="replace").splitlines()[-1:])
        file = parquet.ParquetFile(path)
        _check_header(path, file.schema_arrow.names)
        table = file.read()
    except (DataError, MemoryError):
        raise
    except (ArrowException, OSError, ValueError):
        raise DataError(f"{path} is no Parquet file that can be read: copy or export it again") from None
    features = {}
    if b"huggingface" in (table.schema.metadata or {}):
        kind = _features(path)
        with _refusing(path, "Parquet file of the datasets package"):
            features = kind.from_arrow_schema(table.schema)
    with _refusing(path, "Parquet file"):
        _check_table(table, size)
        columns: dict[str, list[Any]] = {name: [] for name in table.column_names}
        for batch in table.to_batches(max_chunksize=1024):
            for name, values in batch.to_pydict().items():
                columns[name] += values
                room -= sum(len(value) for value in values if isinstance(value, (str, bytes)))
            if room < 0:
                raise ValueError(f"its {size} bytes hold too much text")
        return _arrow_rows(path, columns, len(table), features)


def check_parquet(path: str, most: str) -> None:
    """Raise ValueError for a Parquet file of far more values than its bytes, or ``most`` bytes of them. Limits this process."""
    from pyarrow import parquet

    size, room, total = Path(path).stat().st_size, int(most), 0
    # Few bytes of a page or a dictionary may stand for gigabytes, of which no header speaks.
    limit_process(resource.RLIMIT_DATA, MUCH_TEXT + 2 * room)
    limit_process(resource.RLIMIT_CPU, int(CALL_SECONDS) + size // 1_000_000)
    file = parquet.ParquetFile(path)
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    # Of a nested column more than there are rows.
    values = sum(group.column(at).num_values for group in groups for at in range(group.num_columns))
    _check_room(values, 0, size)
    for part in file.iter_batches(256):
        total += part.nbytes
        if total > room:
            raise ValueError(f"its {size} bytes hold more than {room} bytes of text")


def _read_saved_dataset(path: Path) -> Rows:
    kind = "data set saved by datasets.Dataset.save_to_disk"
    splits = path / "dataset_dict.json"
    if splits.exists():
        with _refusing(splits, "list of data sets"):
            names = parse_json(read_text(splits))["splits"]
            if not isinstance(names, list):
                raise ValueError("splits is no list")
            places = ", ".join(escape_controls(str(path / name)) for name in names)
        raise DataError(f"{path} holds splits; name one of them: {places}")
    _features(path)
    from datasets import load_from_disk

    with _refusing(path, kind):
        parse_json(read_text(path / "dataset_info.json"))
        for file in parse_json(read_text(path / "state.json"))["_data_files"]:
            if Path(file["filename"]).name != file["filename"]:
                raise ValueError(f"it names {quote(file['filename'])}, which lies elsewhere")
            open_regular(path / file["filename"]).close()
        saved = load_from_disk(str(path))
        _check_table(saved.data, sum(file.stat().st_size for file in path.glob("*.arrow")))
        # Not list(): that opens the pictures and sounds which it names, wherever they lie.
        return _arrow_rows(path, saved.to_dict(), len(saved), saved.features)


def _check_table(table: Any, size: int) -> None:
    """Refuse an Arrow table from a file of ``size`` bytes that would be far larger as objects of Python."""
    _check_room(sum(_values(part) for column in table.columns for part in column.chunks), table.nbytes, size)


def _check_room(values: int, nbytes: int, size: int) -> None:
    if values > max(_MANY_VALUES, _MOST_VALUES * size) or nbytes > max(MUCH_TEXT, _MOST_TEXT * size):
        raise ValueError(f"its {size} bytes hold {values} values, in {nbytes} bytes: too many")


def _values(array: Any) -> int:
    """The values of an Arrow array, at every level."""
    if hasattr(array, "storage"):
        return _values(array.storage)
    if hasattr(array, "values"):
        return len(array) + _values(array.values)
    parts = range(array.type.num_fields) if hasattr(array, "field") else ()
    return len(array) + sum(_values(array.field(at)) for at in parts)


@contextmanager
def _refusing(path: Path, kind: str) -> Iterator[None]:
    """Raise DataError in place of whatever a library raises on a file of another party that is not what it says."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        said = str(error).splitlines()
        reason = escape_controls(said[0][:200]) if said else ""
        raise DataError(
            f"{path} is no {kind} that can be read: save it again ({type(error).__name__}: {reason})"
        ) from None


def _features(path: Path) -> Any:
    try:
        from datasets import Features
    except ImportError:
        raise DataError(f"reading {path} needs the datasets package: pip install 'fastdp-lm[trainer]'") from None
    return Features


def _arrow_rows(path: Path, columns: dict[str, list[Any]], count: int, features: Mapping[str, Any]) -> Rows:
    for name, feature in features.items():
        inner = getattr(feature, "feature", feature)
        if classes := getattr(inner, "names", None):
            columns[name] = _class_names(columns[name], classes)
    return Rows(path, columns, range(1, count + 1), "row")


def _class_names(value: Any, classes: Sequence[str]) -> Any:
    """The names of class numbers; a number without a name stays."""
    if isinstance(value, list):
        return [_class_names(item, classes) for item in value]
    return classes[value] if isinstance(value, int) and 0 <= value < len(classes) else value
