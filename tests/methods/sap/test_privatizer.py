"""TextPrivatizer: what it moves and what it leaves, in every form of input, and what it refuses."""

import math

import pytest
import torch

import fastdp
from fastdp.methods.encoding import encode_private
from fastdp.methods.sap import CTI
from tests.cases import cases
from tests.ops.test_dchi import FALSE_ALARM, chi_square
from tests.tokenizers_for_tests import word_tokenizer

WORDS = [f"w{i}" for i in range(40)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
KNOWN = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL))


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer([*SPECIAL, *WORDS, "[", "]", "SEP"], **KNOWN)


@pytest.fixture(scope="module")
def table(tokenizer):
    return torch.randn(len(tokenizer), 6, generator=torch.Generator().manual_seed(0))


def privatizer(table, eta=0.01, **options):
    return fastdp.TextPrivatizer(table, eta=eta, unsafe_seed=0, **options)


def test_large_eta_changes_nothing_and_small_eta_everything(table, tokenizer):
    texts = ["w1 w2 w3", "", "w39"]
    assert privatizer(table, 1e6, tokenizer=tokenizer)(texts) == texts
    hidden = privatizer(table, tokenizer=tokenizer)(["w1 " * 300])[0].split()
    assert len(hidden) == 300
    assert sum(word == "w1" for word in hidden) < 100
    assert len(set(hidden)) > 5


def test_special_and_padding_tokens_stay_and_are_never_drawn(table, tokenizer):
    ids = torch.tensor([[2, 5, 6, 7, 3, 0, 0]] * 400)
    private = privatizer(table, tokenizer=tokenizer)(ids)
    for column in (0, 4, 5, 6):
        assert (private[:, column] == ids[:, column]).all()
    moved = private[:, 1:4]
    assert not torch.isin(moved, torch.tensor([0, 2, 3])).any()
    assert (moved != ids[:, 1:4]).float().mean() > 0.8
    ids = torch.arange(40).reshape(4, 10)
    mask = (torch.arange(10) < 7).long().expand(4, -1)
    private = privatizer(table)(ids, attention_mask=mask)
    assert torch.equal(private[:, 7:], ids[:, 7:])
    assert (private[:, :7] != ids[:, :7]).float().mean() > 0.8


def test_unknown_words_do_not_leave_unchanged(table, tokenizer):
    text = "xyzzy " * 300
    private = privatizer(table, tokenizer=tokenizer)(text).split()
    assert sum(word == "[UNK]" for word in private) < 100
    with pytest.raises(ValueError, match="unknown token"):
        privatizer(table, tokenizer=tokenizer, unknown="refuse")(text)
    assert privatizer(table, 1e6, tokenizer=tokenizer, unknown="refuse")("w5") == "w5"


def test_a_special_token_spelled_out_in_a_text_is_text(table, tokenizer):
    ids = privatizer(table, 1e6, tokenizer=tokenizer)("w1 [SEP] w2", output="ids")
    assert 3 not in ids
    assert len(ids) == 5


def vendors_tokenizer(**roles):
    """One whose maker calls words of the vocabulary special, to have them left alone."""
    made = word_tokenizer(SPECIAL + WORDS, "[CLS] $A [SEP] $B [SEP]", **{**KNOWN, **roles})
    made.add_special_tokens({"additional_special_tokens": ["w3", "w4"]})
    return made


ROLES = [
    {},
    *({role: "w5"} for role in ("sep_token", "cls_token", "bos_token", "eos_token", "pad_token", "mask_token")),
]


@cases("roles, mechanism", [(roles, ("laplace", "exponential")[at % 2]) for at, roles in enumerate([*ROLES, {}])])
def test_a_word_that_a_tokenizer_calls_special_does_not_leave_as_it_is(table, roles, mechanism):
    """In text, in ids with the encoder's mask, and in what ``unchanged`` counts."""
    tokenizer = vendors_tokenizer(**roles)
    private = privatizer(table[: len(tokenizer)], tokenizer=tokenizer, mechanism=mechanism)
    text = "w3 w4 w5 " * 100
    # Left alone, a word would stay 100 times; drawn from 40 words it stays 18 times on average, the likeliest of them.
    for at, word in enumerate(("w3", "w4", "w5")):
        assert private(text).split()[at::3].count(word) < 60
    found = encode_private(tokenizer, [text, "w5"], special=True)
    rows = private(found["input_ids"], special_tokens_mask=found["special_tokens_mask"])
    for at, token in enumerate(tokenizer.convert_tokens_to_ids(["w3", "w4", "w5"])):
        assert rows[0][1 + at :: 3].count(token) < 60
    assert rows[0][0] == 2 or roles.get("cls_token")
    assert private.displacement().unchanged < 0.35


def test_what_stays_is_stated_counted_and_pinned(table, tokenizer):
    private = privatizer(table, tokenizer=tokenizer)
    assert private.statement()["policy"]["kept"] == ["[PAD]", "[CLS]", "[SEP]"]
    private([[2, 5, 6, 3]], special_tokens_mask=[[1, 0, 0, 1]])
    private([[2, 5, 6, 3]], special_tokens_mask=[[0, 0, 0, 1]])
    assert (private.tokens_kept, private.tokens_released) == (3, 5)
    assert private.statement()["tokens_kept"] == 3
    other = vendors_tokenizer(sep_token="w5")
    digests = {privatizer(table[:44], tokenizer=t).digest() for t in (vendors_tokenizer(), other)}
    assert len(digests) == 2
    # At an eta that changes nothing else, the share still counts what is kept, and at one that changes all it is all there is.
    assert privatizer(table, 1e6, tokenizer=tokenizer).displacement().unchanged == 1.0
    least = privatizer(table, 1e-6, tokenizer=tokenizer).displacement()
    assert least.unchanged >= 3 / least.tokens


def test_a_token_that_is_never_drawn_stands_for_the_nearest_that_is(table):
    """It has the law of that token, so that the bound between texts holds for it too."""
    tokenizer = vendors_tokenizer()
    mine = table[:44]
    private = privatizer(mine, 3.0, tokenizer=tokenizer, mechanism="exponential")
    allowed = torch.tensor([i for i in range(44) if i not in (0, 2, 3, 7, 8)])
    nearest = int(allowed[(mine[allowed] - mine[7]).norm(dim=1).argmin()])
    drawn = private(torch.full((4000,), 7), special_tokens_mask=torch.zeros(4000))
    assert chi_square(drawn, private.log_probabilities(nearest).exp().numpy()) > FALSE_ALARM


def test_forms_of_input_agree(table, tokenizer):
    def fresh():
        return privatizer(table, 2.0, tokenizer=tokenizer)

    texts = ["w1 w2 w3 w4", "w5", "w6 w7"]
    ids = [[5, 6, 7, 8], [9], [10, 11]]
    as_ids = fresh()(ids)
    assert as_ids != ids
    assert fresh()(texts, output="ids") == as_ids
    assert fresh()(texts) == [" ".join(f"w{i - 4}" if i > 3 else "[UNK]" for i in row) for row in as_ids]
    assert fresh()(ids[0]) == as_ids[0]
    assert fresh()(texts[0], output="ids") == as_ids[0]
    assert list(fresh().stream_texts(iter(texts), output="ids")) == as_ids
    flat = torch.tensor([i for row in ids for i in row])
    assert fresh()(flat).tolist() == [i for row in as_ids for i in row]
    assert fresh()(flat.reshape(1, 7, 1)).shape == (1, 7, 1)
    assert fresh()([]) == []


def test_streaming_takes_no_more_than_it_needs(table, tokenizer):
    taken = 0

    def source():
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield "w1 w2 w3 w4"

    stream = privatizer(table, 1e6, tokenizer=tokenizer).stream_texts(source(), batch_tokens=64)
    assert next(stream) == "w1 w2 w3 w4"
    assert taken < 40
    assert sum(1 for _ in stream) == 999
    assert taken == 1000


def test_displacement_and_the_cliff():
    table = torch.randn(3000, 300, generator=torch.Generator().manual_seed(0))
    found = [privatizer(table, eta).displacement(300) for eta in (1.0, 30.0, 1000.0)]
    unchanged = [entry.unchanged for entry in found]
    assert unchanged[0] < 0.02
    assert unchanged[-1] == 1.0
    assert found[0].mean_displacement > 20 > found[-1].mean_displacement == 0
    assert found[0].tokens == 300


def test_labels(table, tokenizer):
    counts = torch.ones(2, len(table))
    counts[0, 6] = counts[1, 7] = 1e6
    cti = CTI.from_counts(counts, source="public", tilt=1.0, min_support=0)
    made = privatizer(table, 0.01, tokenizer=tokenizer, cti=cti)
    texts = ["w9 " * 50, "w9 " * 50]
    first, second = made(texts, labels=[0, 1], output="ids")
    assert first.count(6) > 40
    assert second.count(7) > 40
    assert set(made(texts[0], output="ids")) <= {6, 7}
    assert made("w9 " * 50, labels=1, output="ids").count(7) > 40
    grid = made(torch.full((2, 50), 13), labels=torch.tensor([0, 1]))
    assert (grid[0] == 6).sum() > 40
    assert (grid[1] == 7).sum() > 40
    for wrong in ([0], [0, 1, 0]):
        with pytest.raises(ValueError, match="one for each"):
            made(texts, labels=wrong)
    with pytest.raises(ValueError, match="one for each"):
        made(torch.full((2, 5), 13), labels=[0, 1, 1])


def test_a_digest_tells_privatizers_apart(table, tokenizer):
    """By everything that its draws follow, such as a table a hundred times as wide or other counts."""
    ones = torch.ones(2, len(table))
    other = ones.clone()
    other[0, 5] = 90
    made = [
        privatizer(table),
        privatizer(100 * table),
        privatizer(table, 0.02),
        privatizer(table, tokenizer=tokenizer),
        *(privatizer(table, cti=CTI.from_counts(c, source="public", min_support=1)) for c in (ones, other)),
        privatizer(table, cti=CTI.from_counts(ones, source="public", form="paper")),
        privatizer(table, cti=CTI.from_counts(ones, source="public", min_support=9)),
    ]
    assert len({entry.digest() for entry in made}) == len(made)
    assert privatizer(table.clone()).digest() == made[0].digest()


def test_refused_tables_and_etas(table):
    with pytest.raises(ValueError, match="no input embeddings"):
        fastdp.TextPrivatizer(torch.nn.Linear(2, 2), eta=1.0)
    for eta in (0, -3, math.nan, math.inf, torch.ones(5), "x", None):
        with pytest.raises(ValueError, match="eta is"):
            fastdp.TextPrivatizer(table, eta=eta)
    for value in (math.nan, math.inf):
        broken = table.clone()
        broken[7, 2] = value
        with pytest.raises(ValueError, match="token 7 holds a NaN"):
            fastdp.TextPrivatizer(broken, eta=1.0)
    doubled = torch.cat([table, table[3:4]])
    with pytest.raises(ValueError, match="tokens 3 and 47 have equal rows"):
        fastdp.TextPrivatizer(doubled, eta=1.0)
    assert fastdp.TextPrivatizer(doubled, eta=1e6, duplicates="merge")(torch.tensor([47])).tolist() == [3]
    signed = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 1.0]])
    with pytest.raises(ValueError, match="equal rows"):
        fastdp.TextPrivatizer(signed, eta=1.0)
    for wrong in (table[0], torch.ones(3, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="rows of floats"):
            fastdp.TextPrivatizer(wrong, eta=1.0)
    with pytest.raises(ValueError, match="fewer than two"):
        fastdp.TextPrivatizer(table[:3], eta=1.0, special_ids=[0, 1])


def test_other_refusals(table, tokenizer):
    made, counts, padded = privatizer(table), torch.ones(2, len(table)), torch.cat([table, torch.randn(3, 6)])
    assert made(torch.tensor([[]], dtype=torch.int64)).shape == (1, 0)
    prior, paper = (CTI.from_counts(counts, source="public", form=form) for form in ("prior", "paper"))
    outside = "token id 47 is outside the vocabulary of 47: give the ids"
    calls = [
        *((lambda ids=ids: made(ids), outside) for ids in (torch.tensor([3, 47]), [47], [[1], [47]])),
        (lambda: made(torch.tensor([-1])), "token id -1 is outside"),
        *(
            (lambda x=x: made(x), "whole numbers")
            for x in (torch.tensor([1.5]), [1.5], [[1, 2.5]], torch.tensor([True]))
        ),
        (lambda: made("w1"), "needs a tokenizer"),
        (lambda: made(torch.ones(2, 2).long(), attention_mask=torch.ones(2)), "attention_mask has shape"),
        (lambda: privatizer(padded, tokenizer=tokenizer)(torch.tensor([48])), "not in the tokenizer"),
        *((lambda o=o: privatizer(table, **{o: "keep"}), o) for o in ("mechanism", "unknown", "duplicates")),
        (lambda: privatizer(table, cti=prior, mechanism="laplace"), "choose 'exponential'"),
        (lambda: privatizer(table, cti=paper, mechanism="exponential"), "choose 'laplace'"),
        (lambda: privatizer(table[:46], cti=prior), "the table has 46"),
        (lambda: made.log_probabilities(1), "no closed form"),
        (lambda: privatizer(table, special_ids=[99]), "outside the table"),
    ]
    for call, match in calls:
        with pytest.raises(ValueError, match=match):
            call()
