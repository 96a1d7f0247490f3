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
import subprocess
import sys
import threading
import time
import unicodedata
import weakref
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
#: Most values of what a run leaves, each of which takes a hundred bytes or more.
MAX_VALUES = 1 << 21
#: Most values of a YAML document with every alias written out; and how deep those of YAML and JSON may be nested.
MAX_YAML_NODES, MAX_DEPTH = 20_000, 64
#: Most layers, heads or experts of a model and ranks of an adapter; most positions; most that a tokenizer makes of a character.
MAX_PARTS, MAX_POSITIONS, MAX_GROWTH = 1 << 12, 1 << 24, 10_000
#: Most characters of a text, of which the tokenizers library takes a gigabyte; highest number of a token, as saving makes room
#: for all below.
MAX_TEXT, MAX_TOKEN = 1 << 23, 1 << 24
#: Most tokens that a template adds to a text. Most characters that a normalizer makes of texts, and of each of theirs beyond:
#: each may be a token of 370 bytes. Characters that it is tried on at once.
MAX_ADDED, MAX_NORMALIZED, MAX_MEAN_GROWTH, SLICE = 64, 1 << 22, 8, 1 << 10
#: The most that a tokenizer's normalizer makes of a character.
_NORMALIZER_GROWTH: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
#: Seconds that a call of a tokenizer or a chat template may take beside those for its text.
CALL_SECONDS = 60.0
#: Most bytes of the process that renders a chat template, and of what it makes beside a hundred for each of a conversation.
TEMPLATE_MEMORY, TEMPLATE_TEXT = 1 << 31, 1 << 20

_DATA_LIMIT = resource.getrlimit(resource.RLIMIT_DATA)[0]
#: Settings of a model or tokenizer that count what is built of it whatever its files hold, and the most of each.
_COUNTS = (
    (re.compile(r"^(extra_ids|offset|num_madeup_words)$"), MAX_PARTS),
    (re.compile(r"(^|_)(layers?|heads?|experts|blocks|depth|virtual_tokens|r)$|^attention_types$"), MAX_PARTS),
    (re.compile(r"positions?(_embeddings)?$|^rotary_dim$"), MAX_POSITIONS),
    (re.compile(r"^num_labels$"), 1 << 20),
    (re.compile(r"^num_(beams|beam_groups|return_sequences)$"), 1 << 8),
)
#: Settings whose text, or keys, peft matches with the names of modules as regular expressions, for as long as that takes.
_PATTERNS = (
    *("target_modules", "exclude_modules", "feedforward_modules"),
    *("rank_pattern", "alpha_pattern", "layers_pattern"),
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


def check_values(text: str | bytes, most: int = MAX_VALUES) -> None:
    """Refuse JSON of more values than a run writes, before any is made. Raises ValueError."""
    marks: Any = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, marks)) > most:
        raise ValueError(f"it holds more than {most} values: it is no file of this kind")


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
    """A JSON object as `parse_json` reads it. Raises ValueError for another value too, and for more than `MAX_VALUES`."""
    check_values(text)
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
    _check_folder(place, adapter=auto.__name__ != "AutoTokenizer")
    local = {"local_files_only": True} if place.is_dir() else {}
    try:
        for path in place.glob("tokenizer*.json") if auto.__name__ == "AutoTokenizer" else ():
            _check_tokenizer(parse_json(read_bytes(path), constants=True))
        # Weights that its files lack are made in the sizes that its config says.
        with memory_limit():
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
    if (highest := max(tokenizer.get_vocab().values())) > MAX_TOKEN:
        raise FolderRejected(f"its tokenizer has a token {highest}: no model has as many")
    return tokenizer


def encode(tokenizer: Any, *texts: Any, **options: Any) -> Any:
    """What a tokenizer makes of texts, within a minute and a millisecond a character.

    A thread of its own runs it, and is left behind: nothing ends the search of a regular expression. Meanwhile this process
    gets no more memory than the machine has.

    Raises:
        ValueError: for one that takes more, whose normalizer grows these texts manifold, and for errors and panics of the
            tokenizers library, which may quote a text.
    """
    given = [*texts, *(options.get(key) or () for key in ("text", "text_target"))]
    if (longest := max(map(len, _strings(given)), default=0)) > MAX_TEXT:
        raise ValueError(f"a text has {longest} characters: cut it into rows of at most {MAX_TEXT}")
    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            _check_normalized(tokenizer, given)
            results.append(tokenizer(*texts, **options))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with memory_limit():
        thread.start()
        thread.join(CALL_SECONDS + sum(map(_characters, given)) / 1000)
    if results:
        return results[0]
    # The tokenizers library raises the plain class.
    if failures and isinstance(failures[0], Exception) and type(failures[0]) not in (Exception, MemoryError):
        raise failures[0]
    said = f"failed on a text ({type(failures[0]).__name__})" if failures else "takes over a millisecond a character"
    raise ValueError(f"its tokenizer {said}: use the published model's")


@contextlib.contextmanager
def memory_limit() -> Iterator[None]:
    """Let this process take no more than the machine has left, where Linux says how much that is.

    A smaller limit would end what other threads do: it holds for all of them.
    """
    try:
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        left = re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        more = int(left[0]) << 10
    except (OSError, IndexError):
        yield
        return
    limit_process(resource.RLIMIT_DATA, held + more)
    try:
        yield
    finally:
        # Not what was found above: another call's limit may have stood there.
        resource.setrlimit(resource.RLIMIT_DATA, (_DATA_LIMIT, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class ChatTemplate:
    """A tokenizer's chat template, rendered in a process of its own; a context manager.

    A template is a program. One multiplication or comparison may take hours, in which no thread of its process runs.
    """

    def __init__(self, tokenizer: Any):
        self._request = {"chat_template": tokenizer.get_chat_template(), **tokenizer.special_tokens_map}
        # Isolated, so that no file of the working directory stands in for a module.
        code = "import sys; sys.path[:] = sys.argv[1:]; from fastdp.untrusted import answer_chats; answer_chats()"
        command = [sys.executable, "-I", "-c", code, *sys.path]
        self._process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def render(self, turns: list[dict[str, Any]], *, ask: bool = False) -> str:
        """What the template makes of a conversation, with a prompt for an answer if ``ask``.

        Raises ValueError, with the template's reason or because it takes too much time or memory.
        """
        request = json.dumps({**self._request, "conversations": [turns], "add_generation_prompt": ask}, default=str)
        try:
            self._process.stdin.write(f"{CALL_SECONDS + len(request) / 1000}\t{request}\n")
            self._process.stdin.flush()
            text, reason = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError):
            reason = "it takes too much time or memory, use the published model's"
        if reason is not None:
            raise ValueError(f"the chat template: {reason}")
        return str(text)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer_chats() -> None:
    """Render the requests of a `ChatTemplate`, one a line, until there are no more."""
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_process(resource.RLIMIT_DATA, TEMPLATE_MEMORY)
    for line in sys.stdin:
        seconds, request = line.split("\t", 1)
        # Beyond it the system ends the process, whatever it does.
        limit_process(resource.RLIMIT_CPU, math.ceil(time.process_time() + float(seconds)))
        try:
            (text,), _ = render_jinja_template(**json.loads(request))
            answer = [text, None] if len(text) <= TEMPLATE_TEXT + 100 * len(line) else [None, "it writes too much"]
        except MemoryError:
            return
        except Exception as error:
            answer = [None, str(error)[:300] or type(error).__name__]
        print(json.dumps(answer), flush=True)


def limit_process(kind: int, most: int) -> None:
    """Set a limit of this process, within the one that it may not exceed."""
    hard = resource.getrlimit(kind)[1]
    limits = [most, _DATA_LIMIT if kind == resource.RLIMIT_DATA else hard, hard]
    resource.setrlimit(kind, (min(limit for limit in limits if limit != resource.RLIM_INFINITY), hard))


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


def _check_folder(place: Path, *, adapter: bool = False) -> None:
    """Refuse a file in place of a model's folder, and files of it that cannot be read or ask for too much.

    With ``adapter`` also that which transformers loads where it finds one, over the model that its config names.
    """
    if place.is_file():
        raise ValueError(f"model {place} is a file: name the folder that holds it")
    small = [place / "config.json", place / "generation_config.json"]
    for path in (*small, place / "tokenizer_config.json", *place.glob("*.index.json")):
        if path.is_file():
            settings = _read_config(path, MAX_YAML if path in small else MAX_FILE)
            check_config(settings)
            shards = settings.get("weight_map") if isinstance(settings, dict) else None
            if isinstance(shards, dict) and any(Path(str(name)).name != name for name in shards.values()):
                raise FolderRejected(f"its {path.name} names files outside it: copy the model again")
    if adapter and (place / "adapter_config.json").is_file():
        settings = _read_config(place / "adapter_config.json", MAX_YAML)
        check_adapter(settings)
        if base := settings.get("base_model_name_or_path"):
            _check_folder(Path(str(base)))


def _read_config(path: Path, most: int) -> Any:
    try:
        return parse_json(read_bytes(path, most), constants=True)
    except json.JSONDecodeError:
        raise ValueError(f"{path} holds no JSON: copy it again") from None


def check_adapter(config: Any, own: str = "") -> None:
    """Raise FolderRejected for an adapter's config by which peft imports, searches or computes at length.

    ``own`` is an expression for names of modules that may stand in it.
    """
    check_config(config)
    if config.get("megatron_config"):
        raise FolderRejected("its adapter imports a module of its own choice: remove megatron_config")
    if isinstance(config.get("init_lora_weights"), str):
        raise FolderRejected("its adapter computes weights from its model's: set init_lora_weights to true")
    for key in _PATTERNS:
        names = isinstance(config.get(key), list) and key != "layers_pattern"
        if config.get(key) and not names and config[key] not in (own, "all-linear"):
            raise FolderRejected(f"its adapter chooses modules by a pattern of its own: list their names in {key}")


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


def _check_normalized(tokenizer: Any, texts: Any) -> None:
    """Refuse a normalizer that makes far more of these texts: where memory ends, the tokenizers library ends the process."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None:
        return
    if tokenizer not in _NORMALIZER_GROWTH:
        # Some hold a table of hundreds of kilobytes.
        _NORMALIZER_GROWTH[tokenizer] = _growth(json.loads(normalizer.__getstate__()))
    characters = _characters(texts)
    most = max(MAX_NORMALIZED, MAX_MEAN_GROWTH * characters)
    if _NORMALIZER_GROWTH[tokenizer] * characters <= most:
        return
    for text in _strings(texts):
        for begin in range(0, len(text), SLICE):
            most -= len(normalizer.normalize_str(text[begin : begin + SLICE]))
            if most < 0:
                raise ValueError("its tokenizer makes far more of a text than it holds: use the published model's")


def _check_tokenizer(parts: dict[str, Any]) -> None:
    """Refuse a tokenizer that may make `MAX_GROWTH` times as much of a text, as that of a few kilobytes could hold for hours."""
    encoding = math.prod(_growth(parts.get(name)) for name in ("normalizer", "pre_tokenizer", "post_processor"))
    if _growth(parts.get("post_processor")) > MAX_ADDED:
        raise FolderRejected(f"its tokenizer adds more than {MAX_ADDED} tokens to a text: use the published model's")
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
    return sum(map(len, _strings(texts)))


def _strings(texts: Any) -> Iterator[str]:
    if isinstance(texts, str):
        yield texts
    else:
        for inner in texts:
            yield from _strings(inner)


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
