"""Untrusted input: text, files and models that another party wrote are decoded, bounded and escaped here alone.

Standard library and PyYAML only. `read_text` and the parsers bound what enters; `escape_controls`, `quote`, `escape_html` and
`escape_markdown` make text inert where it is shown; `load_pretrained` runs no code of a model's folder.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
import math
import os
import re
import resource
import stat
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import yaml

#: For the head of a page: no script, picture or form works there, whatever text got in.
PAGE_POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">"
)
#: Most bytes of a file; of a card, whose brackets take thirty times as much memory; and of YAML, whose parser is slow.
MAX_FILE, MAX_CARD, MAX_YAML = 1 << 28, 1 << 24, 1 << 22
#: Most values of a YAML document with every alias written out; and how deep those of YAML and JSON may be nested.
MAX_YAML_NODES, MAX_DEPTH = 20_000, 64
#: Most layers, heads or experts of a model and ranks of an adapter; most positions; most that a tokenizer makes of a character.
MAX_PARTS, MAX_POSITIONS, MAX_GROWTH = 1 << 12, 1 << 24, 10_000
#: Seconds and bytes that a call of a tokenizer may take beside those for its text.
CALL_SECONDS, CALL_BYTES = 60.0, 1 << 32

_DATA_LIMIT = resource.getrlimit(resource.RLIMIT_DATA)[0]
#: Settings of a model's config that count what is built of it whatever its weights hold, and the most of each.
_COUNTS = (
    (re.compile(r"(^|_)(layers?|heads?|experts|blocks|depth|virtual_tokens|r)$|^attention_types$"), MAX_PARTS),
    (re.compile(r"positions?(_embeddings)?$|^rotary_dim$"), MAX_POSITIONS),
    (re.compile(r"^num_labels$"), 1 << 20),
)
#: Of a tokenizer the parts that hold others, and how many characters those of fixed rules make of one.
_SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
_GROWTH = {"BertNormalizer": 12, "ByteLevel": 4, "Lowercase": 2, "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}
#: Expressions that may match nothing, and so between any two characters.
_MAY_BE_EMPTY = re.compile(r"[*?|^$]|\\[AbBGzZK]|\{0?,|\{0\}")
_MARKDOWN = re.compile(r"[\\`\[\]]|(?<! )\*|\*(?! )|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?])|&(?=[#\w]+;)")
_MARKDOWN_BLOCK = re.compile(r"^(#|>|~|[-+=](?=[-+=\s]|$)|\d+(?=[.)](?:\s|$)))")


class FolderRejected(ValueError):
    """A model's folder that is not read, and why."""


def escape_controls(text: str, *, keep_lines: bool = False) -> str:
    r"""Text in which no character moves a cursor, begins an escape sequence, reorders letters or, by default, ends a line.

    >>> escape_controls("a\x1b]52;c;aGk=\x07\nb")
    'a\\x1b]52;c;aGk=\\x07\\nb'
    """
    if text.isprintable():
        return text
    kept = "\n\t" if keep_lines else ""
    return "".join(c if c in kept or _is_visible(c) else repr(c)[1:-1] for c in text)


def quote(value: Any, most: int = 80) -> str:
    """A value as one line of at most ``most`` characters for a message or a log; text stands in quotation marks."""
    shown = repr(value[:most] if isinstance(value, (str, bytes)) else value)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def escape_html(value: Any) -> str:
    """A value as text of an HTML page, inside an element or a quoted attribute."""
    return html.escape(escape_controls(str(value), keep_lines=True))


def escape_markdown(value: str) -> str:
    r"""Text as one line of Markdown that begins no heading, list, quotation, link, code or HTML.

    >>> escape_markdown("# epsilon <= 0.1 <script>")
    '\\# epsilon <= 0.1 \\<script>'
    """
    line = _MARKDOWN.sub(r"\\\g<0>", escape_controls(value.replace("\n", " ")).strip())
    return _MARKDOWN_BLOCK.sub(lambda found: f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}", line)


def escape_all(value: Any, escape: Callable[[str], str]) -> Any:
    """A JSON value whose texts and keys are all escaped."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(str(key)): escape_all(entry, escape) for key, entry in value.items()}
    return [escape_all(entry, escape) for entry in value] if isinstance(value, list) else value


def read_bytes(path: str | os.PathLike[str], most: int = MAX_FILE) -> bytes:
    """The content of a regular file.

    Raises:
        ValueError: for a pipe or a device, and a file of more than ``most`` bytes.
        OSError: for a file that cannot be read.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} holds more than {most} bytes: it is no file of this kind")
    return data


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A regular file, open for reading. Raises ValueError for a pipe or a device, and OSError as `open`."""
    # Without O_NONBLOCK a pipe would block before its kind is known.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, os.strerror(21), os.fspath(path))
    raise ValueError(f"{path} is no regular file: name a file")


def read_text(path: str | os.PathLike[str], most: int = MAX_FILE) -> str:
    """The UTF-8 text of a regular file. Raises as `read_bytes`, and UnicodeDecodeError, a ValueError, for other bytes."""
    return read_bytes(path, most).decode("utf-8-sig")


def parse_json(text: str | bytes, *, constants: bool = False) -> Any:
    """A JSON value with unique keys and finite numbers, within this module's depth; bytes are UTF-8.

    ``constants`` accepts NaN and infinities, as Python writes them. Raises ValueError, in one sentence, for anything else.
    """
    refuse = {} if constants else {"parse_constant": _refuse_constant, "parse_float": _finite}
    try:
        found = json.loads(text, object_pairs_hook=_unique, **refuse)  # type: ignore[arg-type]
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise _without_settings(error) from None
    _check_depth(found, MAX_DEPTH)
    return found


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object as `parse_json` reads it. Raises ValueError for another value too."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    return found


def parse_yaml(text: str, *, as_text: bool = False) -> Any:
    """A YAML value of plain types with unique keys, within the limits of this module, every alias counted as written out.

    ``as_text`` keeps every scalar as the text that is written, such as ``no`` and ``007``. Raises ValueError, in one sentence,
    with the line where one is known.
    """
    if len(text) > MAX_YAML:
        raise ValueError(f"it holds more than {MAX_YAML} characters")
    try:
        return yaml.load(text, _BoundedTextLoader if as_text else _BoundedLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}not valid YAML ({getattr(error, 'problem', None) or quote(str(error))})") from None
    except ValueError as error:
        raise _without_settings(error) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def load_pretrained(auto: Any, name: str | os.PathLike[str], **options: Any) -> Any:
    """What ``auto.from_pretrained`` loads, ``auto`` being such as ``AutoModel``, without running code that comes with the model.

    A folder is read as it is: whatever its files name, no repository is looked up for it.

    Raises:
        FolderRejected: for a folder whose config names a repository or counts too much, or whose tokenizer may grow a text
            beyond `MAX_GROWTH`.
        ValueError: for a name that nothing has, a model that needs code of its own, and files that a library fails on.
    """
    place = Path(name)
    _check_folder(place)
    local = {"local_files_only": True} if place.is_dir() else {}
    try:
        for path in place.glob("tokenizer*.json") if auto.__name__ == "AutoTokenizer" else ():
            _check_tokenizer(parse_json(read_bytes(path), constants=True))
        return auto.from_pretrained(name, trust_remote_code=False, **local, **options)
    except RuntimeError as error:
        if "mismatched_sizes" in str(error) or "Storage size" in str(error):
            raise ValueError(f"cannot load {name}: its weights have other shapes than its config.json says") from None
        raise
    except (FolderRejected, ImportError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                "it needs code of its own, which is not run here: load it in Python, and use fastdp.make_private"
            ) from None
        if "gated" in str(error):
            raise
        if place.is_dir() and not (place / "config.json").is_file():
            raise ValueError(f"{name} holds no config.json: name a model's folder") from None
        if place.is_dir():
            raise ValueError(f"cannot load {name}: {str(error).strip().splitlines()[0].split('. ')[0]}") from None
        raise ValueError(
            f"there is no folder {name}, and no model of that name could be loaded: check it, or the connection"
        ) from None
    # A config of odd values meets any error of Python's, and a panic of the tokenizers library is no Exception.
    except BaseException as error:
        said = f"{type(error).__name__}: {quote(str(error), 160)}"
        raise ValueError(f"cannot load {name}: a library failed on its files ({said})") from None


def load_pretrained_tokenizer(name: str | os.PathLike[str]) -> Any:
    """The tokenizer of a model, as `load_pretrained` loads it. Raises ValueError where a model's folder has none of use."""
    from transformers import AutoTokenizer

    _check_folder(Path(name))
    lack = f"{name} has no tokenizer that can be loaded: put the tokenizer's files beside the model's"
    try:
        tokenizer = load_pretrained(AutoTokenizer, name)
    except FolderRejected:
        raise
    except (OSError, ValueError):
        if not any(place.is_file() for place in (Path(name) / "config.json", *Path(name).glob("tokenizer*.json"))):
            raise
        raise ValueError(lack) from None
    # Without its files transformers makes one that knows no text, and says nothing.
    if len(tokenizer) <= len(tokenizer.all_special_ids) + 1:
        raise ValueError(lack)
    return tokenizer


def encode(tokenizer: Any, *texts: Any, **options: Any) -> Any:
    """What a tokenizer makes of texts; see `call_bounded`."""
    given = [*texts, *(options.get(key) or () for key in ("text", "text_target"))]
    return call_bounded(lambda: tokenizer(*texts, **options), sum(map(_characters, given)))


def call_bounded(call: Callable[[], Any], characters: int) -> Any:
    """Call a tokenizer or its template, and wait a minute and a millisecond a character for what it returns.

    A thread of its own runs it, and is left behind: nothing ends the search of a regular expression. Meanwhile this process
    gets no more than `CALL_BYTES` and `MAX_GROWTH` bytes a character.

    Raises:
        ValueError: for one that takes more, and for a panic of the tokenizers library, which is no Exception and may quote
            a text.
    """
    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with _memory_limit(CALL_BYTES + MAX_GROWTH * characters):
        thread.start()
        thread.join(CALL_SECONDS + characters / 1000)
    if results:
        return results[0]
    if failures and isinstance(failures[0], Exception) and not isinstance(failures[0], MemoryError):
        raise failures[0]
    said = f"failed on a text ({type(failures[0]).__name__})" if failures else "takes over a millisecond a character"
    raise ValueError(f"its tokenizer {said}: use the published model's")


@contextlib.contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """Let this process take so many bytes beside those that it holds, where Linux says how many these are."""
    try:
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except (OSError, IndexError):
        yield
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [held + more, _DATA_LIMIT, hard]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limit for limit in limits if limit != resource.RLIM_INFINITY), hard))
    try:
        yield
    finally:
        # Not what was found above: another call's limit may have stood there.
        resource.setrlimit(resource.RLIMIT_DATA, (_DATA_LIMIT, hard))


class _BoundedComposer:
    """Counts values while they are composed, and refuses a key that stands twice."""

    def __init__(self, text: str) -> None:
        super().__init__(text)  # type: ignore[call-arg]
        self._sizes: dict[int, int] = {}
        self._total = self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)  # type: ignore[attr-defined]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("it is nested too deep")
        begin = self._total
        node = super().compose_node(parent, index)  # type: ignore[misc]
        if is_alias and id(node) not in self._sizes:
            raise ValueError("an alias stands inside the value that it names")
        self._total += self._sizes[id(node)] if is_alias else 1
        if self._total > MAX_YAML_NODES:
            raise ValueError(f"it holds more than {MAX_YAML_NODES} values, with every alias written out")
        if not is_alias:
            self._sizes[id(node)] = self._total - begin
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # type: ignore[misc]
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            raise ValueError(f"a key stands twice: {quote(Counter(keys).most_common(1)[0][0])}")
        return node


class _BoundedLoader(_BoundedComposer, yaml.SafeLoader):
    """Plain types."""


class _BoundedTextLoader(_BoundedComposer, yaml.BaseLoader):
    """Scalars as text."""


def _check_folder(place: Path) -> None:
    """Refuse a file in place of a model's folder, and a config that cannot be read or that `check_config` refuses."""
    config = place / "config.json"
    if place.is_file():
        raise ValueError(f"model {place} is a file: name the folder that holds it")
    if config.is_file():
        try:
            settings = parse_json(read_bytes(config, MAX_YAML), constants=True)
        except json.JSONDecodeError:
            raise ValueError(f"{config} holds no JSON: copy it again") from None
        check_config(settings)


def check_config(config: Any) -> None:
    """Raise FolderRejected for a model's config that names another repository, or counts parts of which no model has as many."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key.endswith("_implementation") and "/" in str(value) or key == "use_pretrained_backbone" and value:
            raise FolderRejected(f"its config.json names another repository: remove {key}")
        # GPT-Neo's pairs of kinds of attention, and how many layers each is repeated for.
        counted = max((pair[1] for pair in value), default=0) if key == "attention_types" else value
        most = next((most for name, most in _COUNTS if name.search(key)), math.inf)
        if isinstance(counted, (int, float)) and counted > most:
            raise FolderRejected(f"its config has {quote(key)} {quote(counted, 20)}: no model has more than {most}")
        check_config(value)


def _check_tokenizer(parts: dict[str, Any]) -> None:
    """Refuse a tokenizer that may make `MAX_GROWTH` times as much of a text, as that of a few kilobytes could hold for hours."""
    encoding = math.prod(_growth(parts.get(name)) for name in ("normalizer", "pre_tokenizer", "post_processor"))
    if max(encoding, _growth(parts.get("decoder"))) > MAX_GROWTH:
        raise FolderRejected(f"its tokenizer may grow a text more than {MAX_GROWTH}-fold: use the published model's")


def _growth(part: Any) -> float:
    """The most characters or tokens that a part of a tokenizer makes of one."""
    if not isinstance(part, dict):
        return 1.0
    found = math.prod(_growth(inner) for key in _SEQUENCES for inner in part.get(key) or ())
    found *= _GROWTH.get(part.get("type", ""), 1) * (1.0 + len(part.get("prepend") or ""))
    if pattern := part.get("pattern"):  # without content it cuts, and adds nothing
        made, literal = len(part.get("content") or ""), pattern.get("String")
        beside = not literal and _MAY_BE_EMPTY.search(pattern.get("Regex", "*")) is not None
        found *= max(1, made / len(literal or " ") + beside)
    if charsmap := base64.b64decode(part.get("precompiled_charsmap") or ""):
        trie = int.from_bytes(charsmap[:4], "little")
        found *= max(len(piece.decode(errors="replace")) for piece in charsmap[4 + trie :].split(b"\0")) or 1
    tokens = {name: len(special["ids"]) for name, special in dict(part.get("special_tokens") or {}).items()}
    templates = (part.get(key) or () for key in ("single", "pair"))
    return found * max(1.0, *(sum(tokens.get(p.get("SpecialToken", {}).get("id"), 1) for p in t) for t in templates))


def _characters(texts: Any) -> int:
    return len(texts) if isinstance(texts, str) else sum(map(_characters, texts))


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{quote(twice)} stands in it twice, and readers differ in which they take")
    return found


def _check_depth(value: Any, most: int) -> None:
    """Refuse what a reader that follows it would run out of stack for."""
    if isinstance(value, (dict, list)):
        if not most:
            raise ValueError("it is nested too deep")
        for entry in value.values() if isinstance(value, dict) else value:
            _check_depth(entry, most - 1)


def _without_settings(error: ValueError) -> ValueError:
    """The error, unless it speaks of a setting of the interpreter."""
    return ValueError("a number of it has thousands of digits") if "int_max_str" in str(error) else error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{quote(text)} is no finite number")
    return number
