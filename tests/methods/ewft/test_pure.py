"""EW-FT at a pure epsilon: what leaves, how often, how it is counted, and that it is all that what follows sees."""

import copy
import math

import pytest
import torch

from fastdp.methods import ewft
from fastdp.methods.ewft.pooled import Codes, pool_rows
from tests.engine.models import batch, build
from tests.methods.ewft.test_releases import ROWS, TOKENS, numbered, seen_after
from tests.ops.test_dchi import FALSE_ALARM, chi_square

CODEBOOK = ewft.codebook(3, 2.0)


def attach(model, mechanism=CODEBOOK, learned=True, **options):
    settings = {"layer": 1, "sequence_length": TOKENS, "dataset_size": ROWS, **options}
    private = ewft.PureEWFT(model, mechanism=mechanism, **settings, unsafe_seed=0)
    if learned:
        private.learn([public()])
    return private


def public(name="bert", rows=24):
    return batch(name, rows=rows, tokens=TOKENS)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@torch.no_grad()
def test_what_follows_sees_one_state_that_stands_for_the_answer(name):
    model = build(name).eval()
    plain = model(**public(name)).logits
    private = attach(model, learned=False, lengths="public")
    private.learn([public(name)])
    hidden = seen_after(private, 1, lambda: model(**public(name)))
    assert torch.equal(hidden, hidden[:, :1].expand_as(hidden))
    assert len(hidden[:, 0].unique(dim=0)) <= 3
    assert private.inference_releases == 24
    private.remove()
    assert torch.equal(model(**public(name)).logits, plain)


def test_a_training_record_is_drawn_once_and_its_draw_kept():
    model = build("bert").train()
    private = attach(model)
    assert private.epsilon() == 0
    states = [seen_after(private, 1, lambda: model(**numbered())) for _ in range(3)]
    assert all(torch.equal(states[0], other) for other in states)
    assert private.inference_releases == 0
    assert private.epsilon() == math.inf  # of draws that can be repeated
    with pytest.raises(ValueError, match="example_ids"):
        model(**batch("bert", rows=ROWS, tokens=TOKENS))
    again = attach(build("bert").train(), learned=False)
    again.load_state_dict(private.state_dict())
    assert torch.equal(seen_after(again, 1, lambda: again.blocks.model(**numbered())), states[0])
    assert again.card()["released_records"] == ROWS
    with pytest.raises(ValueError, match="of 4 records, not 5"):
        attach(build("bert"), learned=False, dataset_size=5).load_state_dict(private.state_dict())
    with pytest.raises(ValueError, match="another thing"):
        private.learn([public()])


def ask(private, rows=ROWS):
    """Queries, each a release of its own."""
    model = private.blocks.model.eval()
    with torch.no_grad():
        model(**batch("bert", rows=rows, tokens=TOKENS))


def test_queries_are_counted_by_rows_and_never_rolled_back():
    private = attach(build("bert"))
    early = copy.deepcopy(private.state_dict())
    ask(private)
    ask(private, rows=1)
    assert private.inference_releases == ROWS + 1
    private.load_state_dict(early)
    assert private.inference_releases == ROWS + 1
    late = copy.deepcopy(private.state_dict())
    again = attach(build("bert"), learned=False)
    again.load_state_dict(late)
    assert again.inference_releases == ROWS + 1
    ask(again)
    assert again.inference_releases == 2 * ROWS + 1
    assert any(f"; {2 * ROWS + 1} were made" in note for note in again.card()["notes"])
    assert again.inference_epsilon(3) == math.inf  # of draws that can be repeated
    again.stream.reproducible = False
    assert (again.inference_epsilon(), again.inference_epsilon(3)) == (CODEBOOK.epsilon, 3 * CODEBOOK.epsilon)


def test_answers_follow_randomised_response_of_the_public_code():
    model = build("bert").eval()
    private = attach(model, ewft.codebook(3, 1.0), dataset_size=1)
    one = {key: value[:1].expand(400, *value.shape[1:]) for key, value in public().items()}
    drawn = torch.cat([private.read_layer(one, "code") for _ in range(8)])
    code = int(drawn.bincount().argmax())
    kept = math.e / (math.e + 2)
    law = torch.full((3,), (1 - kept) / 2, dtype=torch.float64)
    law[code] = kept
    assert chi_square(drawn, law.numpy()) > FALSE_ALARM


def test_labels_lead_the_codes_to_what_tells_classes_apart():
    """The labels differ in a direction of little variance: two codes find it with labels, and not without."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (400,), generator=generator)
    states = torch.randn(400, 6, generator=generator, dtype=torch.float64) * torch.tensor([9.0, 5, 3, 1, 1, 0.1])
    states[:, 5] += labels.double() - 0.5
    agree = []
    for given in ([labels], None):
        codes = Codes.learn([states], given, 2).encode(states)
        agree.append(max(float((codes == labels).double().mean()), float((codes != labels).double().mean())))
    assert agree[0] > 0.95
    assert agree[1] < 0.65


def test_padding_takes_no_part_and_what_is_not_finite_is_an_answer():
    hidden, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 0, 0]])
    found = pool_rows(hidden, mask)
    assert torch.allclose(found[0], hidden[0, :2].double().mean(0))
    assert not found[1].any()
    hidden[0, 0, 0] = math.nan
    assert torch.isfinite(pool_rows(hidden, mask)).all()


def test_refusals():
    with pytest.raises(ValueError, match="frozen|layer is"):
        attach(build("bert"), layer=9)
    for options in ({"sequence_length": 0}, {"dataset_size": True}, {"lengths": "none"}):
        with pytest.raises(ValueError):
            attach(build("bert"), **options)
    for make in (lambda: ewft.codebook(1, 1.0), lambda: ewft.codebook(2, 0.0)):
        with pytest.raises(ValueError):
            make()
    private = attach(build("bert").eval(), learned=False)
    with pytest.raises(RuntimeError, match="call learn"):
        private.blocks.model(**public())
    with pytest.raises(ValueError, match="no public text"):
        private.learn([])
    with pytest.raises(ValueError, match="different public texts"):
        private.learn([public(rows=2)], labels=False)
    with pytest.raises(ValueError, match="all of one class"):
        private.learn([public() | {"labels": torch.zeros(24, dtype=torch.int64)}])
