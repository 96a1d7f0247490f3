"""What other parties wrote, everywhere it is read or shown: bounded, parsed strictly, and inert on screens and pages."""

import base64
import contextlib
import copy
import io
import json
import os
import re
import resource
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import transformers
import yaml
from hypothesis import given, settings, strategies as st
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from fastdp import untrusted
from fastdp.accounting import Card, Gaussian, gaussian, noise_source, verify
from fastdp.accounting.card import digest
from fastdp.accounting.exports import FORMATS, export
from fastdp.audit.saved import load_saved
from fastdp.cli import app
from fastdp.commands.refusal import PlainConsole, style_message
from fastdp.data import causal_examples, classification_examples
from fastdp.finetune import ConfigError
from fastdp.finetune.chat import chat_examples
from fastdp.finetune.config import FinetuneConfig, load_config
from fastdp.finetune.folder import read_checkpoint
from fastdp.finetune.models import load_tokenizer
from fastdp.finetune.report import build_report
from fastdp.finetune.tasks import check_tokens
from fastdp.tables import DataError, Rows
from tests.cases import cases
from tests.finetune.test_report import made
from tests.tokenizers_for_tests import quickstart, small_gpt2

ROOT = Path(__file__).parent.parent
#: Every way that was found to leave a sentence: escape sequences, line ends, rich's and HTML's markup, Markdown, page marks.
HOSTILE = (
    "\x1b]52;c;ZXZpbA==\x07\x9b2J\r\n\u2028holds: epsilon <= 0.1000 \u202e[bold]x[/][/red] :skull: "
    "<img src=x onerror=alert(1)><script>alert(2)</script>\" onload='alert(3)' --> ]]>\n# A heading\n\n- entry | cell\n```\n"
    "![x](http://evil/x.png) [y](javascript:alert(4)) `z` **w**\n---\n<!-- fastdp-card end --> &#60;b&#62;"
)
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Tags(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, *sorted(name for name, _ in attributes)))


def paths(value, at=()):
    """Where the values and the keys of JSON stand."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*at, key)
        yield from paths(entry, (*at, key))


def replaced(value, path, new, *, key):
    """A copy with another value, or another key, at a place."""
    value = copy.deepcopy(value)
    *way, last = path
    there = value
    for step in way:
        there = there[step]
    if key and isinstance(there, dict):
        there[new] = there.pop(last)
    else:
        there[last] = new
    return value


@given(st.text())
def test_escaped_text_is_one_line_without_control_characters(text):
    shown = untrusted.escape_controls(text)
    assert not CONTROLS.search(shown)
    assert len(f"a{shown}a".splitlines()) == 1
    assert untrusted.escape_controls(shown) == shown
    shown.encode()


def test_letters_of_any_script_are_shown_as_they_are():
    for text in ("näive", "данные", "数据", "\u00a0 a\u202fb", "C:\\runs", "50 %"):
        assert untrusted.escape_controls(text) == text


@given(st.one_of(st.text(), st.binary(), st.lists(st.text())), st.integers(10, 60))
def test_quoted_values_are_short_and_plain(value, most):
    shown = untrusted.quote(value, most)
    assert len(shown) <= most
    assert not CONTROLS.search(shown)
    assert "\n" not in shown


MARKS = st.text(alphabet=list('#>-+*=~`_[]()!<>&;|\\\\\n\t 1.)ab:/"{}'), max_size=12)
PIECES = "<b> &lt; ![x](y) [x](y) <http://a.b> ``` ~~~ --- === # <!-- http://a.b [x]:y _x_ __x__ **x** ***".split()


@given(
    st.lists(MARKS | st.sampled_from(PIECES), max_size=5).map("".join),
    st.sampled_from(["{}", "- {}", "a {} b", "## {}"]),
)
@settings(deadline=None)
def test_escaped_markdown_is_text_to_a_parser(text, place):
    """Of the elements around it, and no other."""
    found = MarkdownIt("commonmark").enable("table").render(place.format(untrusted.escape_markdown(text)))
    around = {"{}": {"p"}, "- {}": {"ul", "li"}, "a {} b": {"p"}, "## {}": {"h2"}}[place]
    assert {tag for tag, *_ in Tags(found).found} <= around


def test_a_console_shows_strings_as_plain_text():
    file = io.StringIO()
    console = PlainConsole(file=file, width=10_000, force_terminal=True, color_system=None, highlight=False)
    console.print(HOSTILE)
    console.print(style_message(("error:", "bold red"), f" {HOSTILE}"))
    found = file.getvalue()
    assert found.count("\n") == 2
    assert not CONTROLS.search(found)
    assert found.count("[bold]x[/][/red] :skull:") == 2


def card_of(**changes):
    claim = Gaussian("example", "add_remove", gaussian(2.0), 1e-5)
    made = Card.of(claim, mechanism="DP-SGD", noise_source=noise_source(reproducible=False))
    body = {**made, **changes}
    return {**body, "digest": digest(body)}


def test_a_void_card_is_refused_and_forges_no_verdict(tmp_path):
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card_of(guarantee="none", why_no_guarantee=[HOSTILE])))
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 1
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "certifies no guarantee" in line
    assert not CONTROLS.search(line)


@cases("name, target", [(n, t) for n in ("ledger.jsonl", "card.json") for t in ("absent", "/dev/full/x", None)])
def test_a_link_to_nothing_does_not_count_as_absent(tmp_path_factory, name, target):
    folder = tmp_path_factory.mktemp("links")
    for file in ("card.json", "statement.json"):
        (folder / file).write_text(json.dumps(card_of()))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target or name)
    result = CliRunner().invoke(app, ["verify", str(folder)])
    (line,) = result.output.splitlines()
    assert result.exit_code == 1
    assert line.startswith("error: ")
    assert name in line


def test_hostile_fields_of_a_card_are_shown_on_one_line(tmp_path):
    path = tmp_path / "card.json"
    honest = card_of(model={"name": "m"}, notes=["n"], sampling="poisson")
    for place in paths(dict(honest)):
        changed = replaced(dict(honest), place, HOSTILE, key=False)
        path.write_text(json.dumps({**changed, "digest": digest(changed)} if place != ("digest",) else changed))
        result = CliRunner().invoke(app, ["verify", str(path)])
        assert isinstance(result.exception, (SystemExit, type(None))), (place, result.exception)
        assert not CONTROLS.search(result.output), place
        assert all(not line.startswith("holds: epsilon") for line in result.output.splitlines()), place


FULL = {
    "model": {"name": "anna/model", "base": ["a", {"b": "c"}]},
    "mechanism": {"name": "DP-SGD", "schedule": "constant", "groups": {"first": [1, 2]}},
    "notes": ["a note"],
    "unprotected": ["the loss"],
    "assumptions": ["the number of units is public"],
    "remaining": ["rounding"],
    "earlier_releases": ["by sap"],
    "run_id": "run",
    "software": {"torch": "2"},
    "many": {str(number): "value" for number in range(10)},
}


@cases("value", [10**400, 1e308, float("inf"), -1, [[1]], {}])
def test_a_card_of_impossible_numbers_is_written_or_refused_in_a_sentence(value):
    """Python's decimal numbers and infinities raised errors of their own."""
    honest = dict(card_of(**FULL))
    for place in paths(honest):
        changed = replaced(honest, place, value, key=False)
        for form in FORMATS if isinstance(changed, dict) else ():
            with contextlib.suppress(ValueError):
                export(changed, form)


@cases("key", [False, True])
def test_no_field_of_a_card_writes_markup_into_a_page(key):
    honest = card_of(**FULL)
    pages = {form: export(honest, form) for form in FORMATS} | {"markdown": Card(honest).to_markdown()}
    written = 0
    for place in paths(dict(honest)):
        changed = replaced(dict(honest), place, HOSTILE, key=key)
        for form, page in pages.items():
            try:
                found = Card(changed).to_markdown() if form == "markdown" else export(changed, form)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            written += 1
            check_page(form, found, page, place)
    assert written > 100


def check_page(form, found, honest, place):
    assert not CONTROLS.search(found), (form, place)
    if form == "html":
        assert set(Tags(found).found) <= set(Tags(honest).found), place
    elif form == "registry":
        assert yaml.safe_load(found).keys() == yaml.safe_load(honest).keys(), place
    else:
        page = found.partition("\n---\n")[2] if form == "huggingface" else found
        body = re.sub(r"```json\n.*?\n```", "", page, flags=re.DOTALL)
        assert not re.search(r"(?<!\\)<(?=[A-Za-z/!?])(?!/?details>|/?summary>|!-- fastdp-card)", body), (form, place)
        assert not re.search(r"(?<!\\)\]\(|(?<!\\)!\[", body), (form, place)
        assert "# A heading" not in [line.lstrip("- ") for line in body.splitlines()], (form, place)
        assert not re.search(r"^(?:- )?```(?!json)|^(?:- )?---\s*$", body, re.MULTILINE)


def test_no_field_of_a_run_writes_markup_into_its_report(tmp_path):
    folder, beside = made(tmp_path / "run", steps=8), made(tmp_path / "beside", 4.0, steps=8)
    sample = {"own": ["text"], "unprotected": [{"text": "record", "right": "yes", "answer": "no"}]}
    (folder / "samples.json").write_text(json.dumps(sample))
    parts = {name: json.loads((folder / name).read_text()) for name in ("result.json", "card.json", "samples.json")}
    parts["config.yaml"] = yaml.safe_load((folder / "config.yaml").read_text())
    honest = {tag for run in ([folder], [folder, beside]) for tag in Tags(build_report(run)).found}
    rows = (folder / "metrics.jsonl").read_text()
    written = refused = 0
    for name, part in {**parts, "metrics.jsonl": json.loads(rows.splitlines()[3])}.items():
        for place in paths(part):
            for key in (False, True):
                changed = replaced(part, place, HOSTILE, key=key)
                text = json.dumps(changed) if name != "config.yaml" else yaml.safe_dump(changed)
                (folder / name).write_text(rows + text + "\n" if name == "metrics.jsonl" else text)
                for runs in ([folder], [folder, beside]):
                    try:
                        page = build_report(runs)
                    except ConfigError:
                        refused += 1
                        continue
                    written += 1
                    assert set(Tags(page).found) <= honest, (name, place)
                    assert not CONTROLS.search(page), (name, place)
        (folder / name).write_text(
            rows if name == "metrics.jsonl" else yaml.safe_dump(part) if name == "config.yaml" else json.dumps(part)
        )
    assert written > 50
    assert refused > 10


def test_pages_allow_no_script(tmp_path):
    for page in (build_report([made(tmp_path / "run")]), export(card_of(), "html")):
        assert "Content-Security-Policy\" content=\"default-src 'none';" in page
        assert page.index("Content-Security-Policy") < page.index("<title>")


def bomb(levels=9, width=10):
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def merged(levels=20):
    lines = ["a0: &a0 {k0: 1, k1: 2}"]
    lines += [f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]" for i in range(1, levels)]
    return "\n".join(lines)


@cases(
    "text, words",
    [
        (bomb(), "every alias written out"),
        (merged(), "every alias written out"),
        ("a: &a [*a]", "inside the value"),
        ("[" * 100_000, "nested too deep"),
        ("a: 1\na: 2", "stands twice"),
        ("- x\n" * 30_000, "every alias written out"),
        ("x" * 5_000_000, "characters"),
        ("a: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("a: " + "9" * 5000, "a number of it has thousands of digits"),
    ],
)
def test_yaml_that_grows_or_deceives_is_refused_at_once(tmp_path, text, words):
    begin = time.process_time()
    with pytest.raises(ValueError, match=words):
        untrusted.parse_yaml(text)
    if text == bomb():
        (tmp_path / "config.yaml").write_text(text)
        for read in (load_config, lambda path: build_report([path.parent])):
            with pytest.raises(ConfigError):
                read(tmp_path / "config.yaml")
    assert time.process_time() - begin < 20


def test_aliases_of_an_honest_file_are_read():
    found = untrusted.parse_yaml("a: &a {b: 1, d: 0}\nx: {c: &c {<<: *a, b: 2}}\nlist: [*c, *a]\nd: {<<: *c}")
    assert found["d"] == {"b": 2, "d": 0}
    assert found["list"] == [{"b": 2, "d": 0}, {"b": 1, "d": 0}]


@cases(
    "text",
    [
        *('{"a": 1, "a": 2}', "NaN", "1e999", "9" * 10_000, "{", "\ud800{"),
        *("[" * 200_000, "[" * 500 + "]" * 500, '{"a": ' * 65 + "1" + "}" * 65),
        "{" + ", ".join(f'"k{i}": 1' for i in range(100_000)) + ', "k99999": 2}',
    ],
)
def test_json_that_readers_take_differently_is_refused(text):
    """And at once: finding which of 100,000 keys stands twice took an hour."""
    begin = time.process_time()
    with pytest.raises(ValueError):
        untrusted.parse_json(text)
    assert time.process_time() - begin < 10
    assert untrusted.parse_json("[" * 64 + "]" * 64)


def test_files_are_regular_and_bounded(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        untrusted.read_bytes(tmp_path / "pipe")
    assert "no regular file" in verify("/dev/zero").reason
    os.mkfifo(tmp_path / "weights.safetensors")
    assert "no regular file" in verify(card_of(weights=["0" * 64]), weights=tmp_path).reason
    (tmp_path / "card.json").write_bytes(b"[" + b"[]," * (6 << 20) + b"1]")
    assert "holds more than 16777216 bytes" in verify(tmp_path / "card.json").reason
    # Lists take thirty times their brackets.
    lists = "[" + "[]," * (1 << 20) + "1]"
    (tmp_path / "card.json").write_text(lists)
    assert "holds more than 2097152 values" in verify(tmp_path / "card.json").reason
    (tmp_path / "ledger").write_text(lists)
    assert "holds more than 2097152 values" in verify(card_of(), ledger=tmp_path / "ledger").reason
    for name in ("metrics.jsonl", "result.json", "samples.json", "statement.json"):
        run = tmp_path / name.partition(".")[0]
        run.mkdir()
        (run / "config.yaml").write_text("model: m\n")
        (run / name).write_text(lists)
        with pytest.raises(ConfigError, match=f"{re.escape(name)} is damaged"):
            build_report([run])
    (tmp_path / "long").write_bytes(bytes(11))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        untrusted.read_bytes(tmp_path / "long", 10)
    assert untrusted.read_bytes(tmp_path / "long", 11) == bytes(11)
    with pytest.raises(OSError, match="directory"):
        untrusted.read_bytes(tmp_path)


@cases(
    ("error", "said"),
    [
        (ValueError("pass the argument `trust_remote_code=True`"), "it needs code of its own"),
        (OSError("You are trying to access a gated repo"), "a gated repo"),
        (OSError("We couldn't connect"), "there is no folder some/name, and no model of that name could be loaded"),
    ],
)
def test_a_name_on_the_hub_that_cannot_be_loaded_is_told_why(error, said):
    class Hub:
        @staticmethod
        def from_pretrained(*_, **__):
            raise error

    with pytest.raises((ValueError, OSError), match=said):
        untrusted.load_pretrained(Hub, "some/name")


CODE = """
import pathlib
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
pathlib.Path({place!r}).touch()
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("command", ["finetune", "vendor"])
def test_code_that_comes_with_a_model_never_runs(tmp_path, monkeypatch, command):
    """Not even where somebody, or a pipe, answers transformers' question with y."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    small = {
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 16,
    }
    transformers.BertForSequenceClassification(transformers.BertConfig(**small)).save_pretrained(folder)
    quickstart()[0].save_pretrained(folder)
    names = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoTokenizer": ["own.OwnTokenizer", None]}
    names |= {"AutoModelForSequenceClassification": "own.OwnModel", "AutoModelForCausalLM": "own.OwnModel"}
    for name, change in (
        ("config.json", {"model_type": "own"}),
        ("tokenizer_config.json", {"tokenizer_class": "OwnTokenizer"}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change | {"auto_map": names}))
    (folder / "own.py").write_text(CODE.format(place=str(ran)))
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a", "label": "yes"}\n' * 8)
    arguments = {
        "finetune": ["finetune", "--model", folder, "--train", data, "--output", tmp_path / "out", "--epsilon", "8"],
        "vendor": ["split", "vendor", "--model", folder, "--insecure", "--folder", tmp_path / "vendor"],
    }[command]
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input="y\n" * 9)
    assert result.exit_code == 1
    assert "needs code of its own" in result.stderr
    assert not ran.exists()


def test_a_model_takes_no_more_memory_than_the_machine_has(tmp_path):
    """Its config may say any size, and weights that its files lack are made in it."""

    class Auto:
        @staticmethod
        def from_pretrained(name, **options):
            return resource.getrlimit(resource.RLIMIT_DATA)[0]

    assert untrusted.load_pretrained(Auto, tmp_path) < 1 << 46


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_folder_that_names_a_repository_is_refused(tmp_path, key):
    transformers.BertConfig().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "stranger/attention"}))
    with pytest.raises(ValueError, match=f"names another repository: remove {key}"):
        untrusted.load_pretrained(transformers.AutoConfig, tmp_path)


@cases(
    "file, change",
    [
        ("config.json", {"n_head": 0}),
        ("config.json", {"n_embd": "16"}),
        ("config.json", {"dtype": "float7"}),
        ("config.json", {"activation_function": "__import__"}),
        ("config.json", {"n_embd": 10**9}),
        ("config.json", {"vocab_size": 10**12}),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}),
        ("tokenizer.json", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
        ("tokenizer.json", {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}}),
        ("tokenizer_config.json", {"eos_token": {"a": 1}}),
    ],
)
def test_a_model_s_files_that_a_library_fails_on_are_refused_in_a_sentence(tmp_path_factory, file, change):
    """Zero heads divided by zero, and a panic of the tokenizers library is no Exception."""
    folder = tmp_path_factory.mktemp("model")
    small_gpt2(folder, n_layer=1, n_embd=16)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    auto = transformers.AutoModelForCausalLM if file == "config.json" else transformers.AutoTokenizer
    with pytest.raises(ValueError):
        untrusted.load_pretrained(auto, folder)


LETTER = {"SpecialToken": {"id": "E", "type_id": 0}}
GROWING = {
    "replacements": {"normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 3},
    "nothing": {"normalizers": [{"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}] * 40},
    "prefixes": {"normalizers": [{"type": "Prepend", "prepend": "aaaa"}] * 20},
    "nested": {"normalizers": [{"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 5}]},
    "map": {"precompiled_charsmap": base64.b64encode(b"\4\0\0\0trie" + b"x" * 20_000 + b"\0").decode()},
    "bytes": {"pretokenizers": [{"type": "ByteLevel"}] * 40},
    "template": {"single": [LETTER] * 1000, "special_tokens": {"E": {"id": "E", "ids": [0] * 1000}}},
}


@cases(
    "file, change, words",
    [
        ("config.json", {"n_layer": 10**9}, "has 'n_layer' 1000000000: no model has more than"),
        ("config.json", {"text_config": {"num_experts": 1e9}}, "has 'num_experts' 1000000000.0: no model"),
        ("config.json", {"num_labels": 10**9}, "has 'num_labels' 1000000000: no model"),
        *(
            ("tokenizer.json", {place: GROWING[name]}, "its tokenizer (may grow a text|adds more than 64 tokens)")
            for name, place in (
                *((name, "normalizer") for name in ("replacements", "nothing", "prefixes", "nested", "map")),
                *(("bytes", "pre_tokenizer"), ("template", "post_processor"), ("replacements", "decoder")),
            )
        ),
    ],
)
def test_a_model_s_files_that_would_take_hours_are_refused(tmp_path_factory, file, change, words):
    """A few kilobytes made 10^9 layers, or 10^9 characters of one."""
    folder = tmp_path_factory.mktemp("model")
    small_gpt2(folder, n_layer=1, n_embd=16)
    path = folder / file
    settings = {"decoders" if key == "normalizers" else key: value for key, value in change.get("decoder", {}).items()}
    change = {**change, "decoder": settings} if settings else change
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(FinetuneConfig(model=str(folder)))


ANY = r"[\s\S]{1,100}"


def cut_by(expression):
    return {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    }


#: A model without the token for what it does not know.
LACKING = {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}


@cases(
    "change, text, seconds, words",
    [
        (cut_by("(a+)+$"), "a" * 30 + "!", 60.0, "its tokenizer failed on a text (PanicException)"),
        (cut_by(ANY * 3 + r"(?<![\s\S])"), "private" * 30, 0.0, "its tokenizer takes over a millisecond a character"),
        (
            {"model": {**LACKING, "vocab": {"a": 0, "b": 1}}},
            "private",
            60.0,
            "its tokenizer failed on a text (Exception)",
        ),
    ],
)
def test_a_tokenizer_that_fails_on_a_text_or_runs_for_hours_is_refused(
    tmp_path_factory, monkeypatch, change, text, seconds, words
):
    """And no text of the rows is quoted."""
    monkeypatch.setattr(untrusted, "CALL_SECONDS", seconds)
    folder = tmp_path_factory.mktemp("model")
    small_gpt2(folder, n_layer=1, n_embd=16)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    tokenizer = untrusted.load_pretrained_tokenizer(folder)
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    for read in (
        lambda: causal_examples(tokenizer, [text], 64),
        lambda: causal_examples(tokenizer, [text], 64, literal=True),
        lambda: classification_examples(tokenizer, [text], [0], 64),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            read()
        assert text[:7] not in str(caught.value)
        assert resource.getrlimit(resource.RLIMIT_DATA) == limit


def test_numbers_of_tokens_that_no_model_has_are_refused(tmp_path):
    """Saving makes room for all numbers below, and a token without a row of the model ends a run when it is first drawn."""
    small_gpt2(tmp_path, n_layer=1, n_embd=16)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "unheard-of"}))
    tokenizer, config = untrusted.load_pretrained_tokenizer(tmp_path), FinetuneConfig(model="m")
    examples = causal_examples(tokenizer, ["a", "unheard-of"], 64)
    with pytest.raises(ConfigError, match="the tokenizer of m makes token 1536, but its model has 1536 tokens"):
        check_tokens(examples, transformers.AutoModelForCausalLM.from_pretrained(tmp_path), config)
    path = tmp_path / "tokenizer.json"
    parts = json.loads(path.read_text())
    parts["model"]["vocab"]["unheard"] = 2**32 - 2
    path.write_text(json.dumps(parts))
    with pytest.raises(ValueError, match="has a token 4294967294: no model has as many"):
        untrusted.load_pretrained_tokenizer(tmp_path)


def test_a_text_for_which_the_tokenizers_library_would_end_the_process_is_refused():
    with pytest.raises(ValueError, match="a text has 8388609 characters: cut it into rows of at most 8388608"):
        causal_examples(quickstart()[0], ["a" * ((1 << 23) + 1)], 64)


def test_a_normalizer_that_makes_far_more_of_a_text_than_it_holds_is_refused(tmp_path):
    """Within what a character may become, since where memory ends, the tokenizers library ends the process."""
    small_gpt2(tmp_path, n_layer=1, n_embd=16)
    path = tmp_path / "tokenizer.json"
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a " * 250}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": grow}))
    tokenizer = untrusted.load_pretrained_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="makes far more of a text than it holds"):
        untrusted.encode(tokenizer, ["b" * 20_000, "a" * 20_000])
    assert untrusted.encode(tokenizer, ["b" * 5000])["input_ids"]


TOO_MUCH = "it takes too much time or memory"


@cases(
    "template, words",
    [
        ("{% for i in range(999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TOO_MUCH),
        # Of one operation, in which no thread of its process runs.
        ("{{ 9 ** (9 ** 9) }}", TOO_MUCH),
        (
            "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
            "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
            TOO_MUCH,
        ),
        ("{{ 'a' * 10**10 }}", TOO_MUCH),
        ("{{ 'a' * 10**7 }}", "it writes too much"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
    ],
)
def test_a_chat_template_that_never_ends_fails_or_fills_memory_is_refused(monkeypatch, template, words):
    monkeypatch.setattr(untrusted, "CALL_SECONDS", 0.2)
    tokenizer = copy.deepcopy(quickstart()[0])
    tokenizer.chat_template = template
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    table = Rows(Path("rows.jsonl"), {"messages": [turns]}, [1])
    with pytest.raises(DataError, match=rf"the chat template: .*{words}"):
        chat_examples(tokenizer, table, "messages", 64)


@cases(
    "file, content, words",
    [
        # transformers loads an adapter that lies in the folder, and what its expressions match takes longer than anyone waits.
        ("adapter_config.json", {"peft_type": "LORA", "target_modules": "(([a-z0-9._])+)+!"}, "a pattern of its own"),
        ("adapter_config.json", {"peft_type": "LORA", "r": 10**7}, "has 'r' 10000000"),
        ("adapter_config.json", {"peft_type": "LORA", "megatron_config": {"a": 1}}, "imports a module"),
        ("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "base"}, "has 'n_layer' 1000000000"),
        ("generation_config.json", {"num_beams": 10**5}, "has 'num_beams' 100000"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../secret.safetensors"}}, "names files outside it"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "T5Tokenizer", "extra_ids": 1 << 28},
            "has 'extra_ids' 268435456",
        ),
    ],
)
def test_other_files_of_a_model_s_folder_are_checked_too(tmp_path_factory, monkeypatch, file, content, words):
    place = tmp_path_factory.mktemp("models")
    monkeypatch.chdir(place)
    small_gpt2(place / "model", n_layer=1, n_embd=16)
    (place / "base").mkdir()
    (place / "base" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 10**9}))
    (place / "model" / file).write_text(json.dumps(content))
    with pytest.raises(untrusted.FolderRejected, match=re.escape(words)):
        untrusted.load_pretrained(transformers.AutoModelForCausalLM, place / "model")


def test_a_checkpoint_that_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="checkpoint.pt is damaged"):
        read_checkpoint(tmp_path)


def test_models_are_loaded_by_one_function_alone():
    calls = {
        path.relative_to(ROOT).as_posix()
        for folder in ("fastdp", "bench")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^(?!.*>>>).*\.from_pretrained\(", path.read_text(), re.MULTILINE)
    }
    # The second is peft's, of a folder, over a model; the third writes a page of code.
    assert calls == {"fastdp/untrusted.py", "fastdp/audit/saved.py", "fastdp/finetune/usage.py"}


def test_an_adapter_imports_no_module_and_is_looked_for_nowhere_else(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (tmp_path / "config.yaml").write_text("model: /nowhere\n")
    for config, words in (
        (None, "no adapter_model.safetensors"),
        ("{", "no adapter_config.json that can be read"),
        (
            json.dumps({"peft_type": "LORA", "megatron_config": {"a": 1}, "megatron_core": "antigravity"}),
            "imports a module",
        ),
        (
            json.dumps({"peft_type": "XLORA", "adapters": {"0": "stranger/adapter"}}),
            "of no kind that a run writes: 'XLORA'",
        ),
        # Of a few bytes, gigabytes of zeros and hours of iterations.
        (json.dumps({"peft_type": "LORA", "r": 10**7}), "'r' 10000000: no model has more"),
        (json.dumps({"peft_type": "LORA", "init_lora_weights": "pissa_niter_1000000"}), "computes weights from"),
        # On the names of a model's modules this expression takes longer than anyone waits.
        *(
            (json.dumps({"peft_type": "LORA", key: value}), f"a pattern of its own: list their names in {key}")
            for key, value in (
                ("target_modules", "(([a-z0-9._])+)+!"),
                ("exclude_modules", "(.*)*(.*)*!"),
                ("rank_pattern", {"(([a-z0-9._])+)+!": 1}),
                ("layers_pattern", ["(([a-z0-9._])+)+!"]),
            )
        ),
    ):
        if config is not None:
            (adapter / "adapter_model.safetensors").touch()
            (adapter / "adapter_config.json").write_text(config)
        with pytest.raises(ConfigError, match=words):
            load_saved(tmp_path)


@cases(
    "pattern, place",
    [
        (r"yaml\.(safe_)?load|SafeLoader", "fastdp/untrusted.py"),
        (r"from html import|html\.escape", "fastdp/untrusted.py"),
        (r"\bConsole\(|from_markup|markup=True", "fastdp/commands/refusal.py"),
        (r"torch\.load\((?![^\n]*weights_only=True)|pickle\.load\(", None),
    ],
)
def test_what_others_wrote_is_parsed_and_shown_in_one_place(pattern, place):
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fastdp").rglob("*.py")
        if re.search(pattern, path.read_text().replace("import html\n", ""))
    }
    assert found <= {place}
