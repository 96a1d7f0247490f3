"""Training through the vendor is training; every step is taken once; what cannot be accepted changes nothing."""

import shutil
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from safetensors.torch import load

from fastdp.split import Limits, MessageRejected
from fastdp.split.customer import batch_of
from fastdp.split.operations import expecting
from fastdp.split.vendor import default_lora
from fastdp.split.wire import Outgoing, receive
from tests.split.world import LIMITS, make_model, make_vendor
from tests.test_files import small_files

WIDTH = 16


def settings(vendor, **changes):
    return {
        "run": "0" * 32,
        "bottom": vendor.served.bottom,
        "classes": 2,
        "dtype": "float32",
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "seed": 5,
        **changes,
    }


def ask(vendor, op, fields=None, tensors=None, name="alice"):
    """As through the network: the answer's fields and tensors."""
    sent = Outgoing.of(op, fields or {}, tensors)
    message = receive(iter(sent), expecting(vendor.forms), vendor.limits.max_message_bytes)
    answer = vendor.answer(name, message, 20.0)
    return load(answer.payload)["logits"] if answer.payload else answer.fields


def rows_of(lengths, seed=0):
    rows = torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"rows": rows, "lengths": torch.tensor(lengths)}


def begin(vendor, name="alice", examples=12, **changes):
    ask(vendor, "open", settings(vendor, **changes), name=name)
    lengths = [3 + at % 4 for at in range(examples)]
    for first in range(0, examples, 6):
        ask(vendor, "put", {"first": first}, rows_of(lengths[first : first + 6], first), name)


def take(vendor, step, name="alice", seed=5, examples=12):
    """One step of a customer whose labels alternate."""
    indices = batch_of(step, examples, 4, seed)
    logits = ask(vendor, "forward", {"step": step}, {"indices": indices}, name).requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits, indices % 2)
    (gradient,) = torch.autograd.grad(loss, logits)
    ask(vendor, "backward", {"step": step}, {"gradient": gradient}, name)
    return float(loss.detach()), gradient


def adapter(vendor, name="alice"):
    return {key: value.detach().clone() for key, value in vendor.customer(name).run.parameters.items()}


@pytest.fixture
def vendor(tmp_path):
    made = make_vendor(tmp_path / "vendor")
    yield made
    made.close()


def revive(vendor, **options):
    """A vendor of what the sudden end of another's process leaves: a copy of its folder as it is."""
    folder = vendor.folder.with_name(f"{vendor.folder.name}-revived")
    shutil.copytree(vendor.folder, folder)
    return make_vendor(folder, **options)


def test_a_folder_has_one_vendor(tmp_path, vendor):
    first = make_vendor(tmp_path / "one")
    with pytest.raises(ValueError, match="in use by another program"):
        make_vendor(tmp_path / "one")
    first.close()
    make_vendor(tmp_path / "one").close()


def test_a_full_disk_loses_nothing(tmp_path, vendor):
    """Files stop growing: what is asked fails, changes nothing, and works when there is room again."""
    begin(vendor)
    folder = vendor.folder / "customers" / "alice"
    records = (folder / "rows.jsonl").read_bytes()
    lengths = [4] * 6
    size = (folder / "rows.bin").stat().st_size
    with small_files(size + 100), pytest.raises(MessageRejected, match="disk is full") as refused:
        ask(vendor, "put", {"first": 12}, rows_of(lengths, 3))
    assert refused.value.code == "UNAVAILABLE"
    assert str(tmp_path) not in str(refused.value)
    assert (folder / "rows.jsonl").read_bytes() == records
    with small_files(100), pytest.raises(MessageRejected, match="disk is full"):
        take(vendor, 0)
    assert ask(vendor, "describe")["open"] == 1
    assert ask(vendor, "open", settings(vendor)) == {"step": 0, "examples": 12}
    assert ask(vendor, "put", {"first": 12}, rows_of(lengths, 3)) == {"examples": 18}
    take(vendor, 0)
    revived = revive(vendor)
    assert ask(revived, "open", settings(revived)) == {"step": 1, "examples": 18}
    revived.close()


@pytest.mark.parametrize("damage", ["rows.bin", "rows.jsonl", "run.safetensors", "adapter"])
def test_a_damaged_run_can_be_discarded(tmp_path, damage):
    """And one whose adapter is not that of this vendor any more."""
    killed = make_vendor(tmp_path / "vendor")
    begin(killed)
    if damage == "adapter":
        vendor = revive(killed, lora=default_lora(make_model(), 4))
    else:
        vendor = revive(killed)
        (vendor.folder / "customers" / "alice" / damage).write_bytes(b"damaged\nagain\n")
    assert ask(vendor, "describe")["open"] == 1
    with pytest.raises(MessageRejected, match="discard it") as refused:
        ask(vendor, "open", settings(vendor))
    assert str(vendor.folder) not in str(refused.value)
    assert ask(vendor, "discard") == {}
    assert not list((vendor.folder / "customers").iterdir())
    assert ask(vendor, "open", settings(vendor)) == {"step": 0, "examples": 0}
    vendor.close()
    killed.close()


def test_a_vendor_that_was_killed_goes_on_bit_for_bit_with_dropout(tmp_path):
    """Another customer's steps between them change nothing either."""
    whole, broken = (make_vendor(tmp_path / name, dropout=0.3) for name in ("whole", "broken"))
    begin(whole, "bob", seed=3)
    for each in (whole, broken):
        begin(each)
        for step in range(3):
            take(each, step)
    take(whole, 0, "bob", seed=3)
    # A forward pass in memory is lost with the vendor; the customer asks for it again.
    ask(broken, "forward", {"step": 3}, {"indices": batch_of(3, 12, 4, 5)})
    revived = revive(broken, dropout=0.3)
    assert ask(revived, "open", settings(revived)) == {"step": 3, "examples": 12}
    with pytest.raises(MessageRejected, match="begin the step again") as refused:
        ask(revived, "backward", {"step": 3}, {"gradient": torch.zeros(4, 2)})
    assert refused.value.code == "ABORTED"
    for each in (whole, revived):
        for step in range(3, 6):
            take(each, step)
    assert all(torch.equal(value, adapter(revived)[key]) for key, value in adapter(whole).items())
    for each in (whole, broken, revived):
        each.close()


def test_a_replayed_step_is_answered_and_not_taken_twice(vendor):
    """Also after a kill: the vendor took the step, and did not come to say so."""
    begin(vendor)
    _, gradient = take(vendor, 0)
    revived, again = revive(vendor), {"gradient": gradient}
    for each in (vendor, revived):
        assert ask(each, "backward", {"step": 0}, again) == {"step": 1, "replayed": 1}
        with pytest.raises(MessageRejected, match="not taken twice") as refused:
            ask(each, "backward", {"step": 0}, {"gradient": gradient * 2})
        assert refused.value.code == "ALREADY_EXISTS"
    take(vendor, 1)
    with pytest.raises(MessageRejected, match="not taken twice"):
        ask(vendor, "backward", {"step": 0}, again)
    assert vendor.customer("alice").run.step == 2
    lengths = [3 + at % 4 for at in range(6)]
    assert ask(revived, "put", {"first": 0}, rows_of(lengths, 0)) == {"examples": 12}
    with pytest.raises(MessageRejected, match="here already, with other contents") as refused:
        ask(revived, "put", {"first": 0}, rows_of(lengths, 1))
    assert refused.value.code == "ALREADY_EXISTS"
    revived.close()


def test_prediction_uses_the_customers_adapter_and_keeps_nothing(vendor):
    for name in ("alice", "bob"):
        begin(vendor, name)
    rows = rows_of([4, 2, 7], 9)
    first = ask(vendor, "predict", None, rows, "alice")
    assert torch.equal(first, ask(vendor, "predict", None, rows, "bob"))
    take(vendor, 0, "alice")
    assert not torch.equal(first, ask(vendor, "predict", None, rows, "alice"))
    assert torch.equal(first, ask(vendor, "predict", None, rows, "bob"))
    assert vendor.customer("alice").store.count == 12
    # Padding has no say.
    assert torch.allclose(ask(vendor, "predict", None, rows_of([4], 9), "bob"), first[:1], atol=1e-6)


#: Operation, fields and tensors that a vendor turns away, and its words.
REJECTED = [
    ("put", {"first": 13}, rows_of([2]), "comes next"),
    ("put", {"first": 12}, rows_of([2]) | {"lengths": torch.tensor([3])}, "add up"),
    ("put", {"first": 12}, rows_of([17]), "length is out of range"),
    ("put", {"first": 12}, {"rows": torch.zeros(2, WIDTH), "lengths": torch.tensor([-1, 3])}, "length is out of range"),
    ("put", {"first": 12}, {"rows": torch.zeros(2, WIDTH + 1), "lengths": torch.tensor([2])}, "shape"),
    ("put", {"first": 12}, {"rows": torch.zeros(2, WIDTH).half(), "lengths": torch.tensor([2])}, "rows are"),
    ("put", {"first": 12}, {"rows": torch.zeros(2, WIDTH).double(), "lengths": torch.tensor([2])}, "dtype"),
    ("put", {"first": 12}, {"rows": torch.full((2, WIDTH), torch.nan), "lengths": torch.tensor([2])}, "NaN"),
    ("put", {"first": 12}, {"rows": torch.full((2, WIDTH), torch.inf), "lengths": torch.tensor([2])}, "NaN"),
    ("put", {"first": -1}, rows_of([2]), "whole number"),
    ("put", {"first": True}, rows_of([2]), "whole number"),
    ("put", {}, rows_of([2]), "takes the fields"),
    ("put", {"first": 12}, rows_of([1] * 9), "shape"),
    ("predict", {}, {"rows": torch.full((2, WIDTH), torch.nan), "lengths": torch.tensor([2])}, "NaN"),
    ("forward", {"step": 1}, {"indices": torch.tensor([12])}, "out of range"),
    ("forward", {"step": 1}, {"indices": torch.tensor([-1])}, "out of range"),
    ("forward", {"step": 0}, {"indices": torch.tensor([0])}, "at step 1"),
    ("backward", {"step": 1}, {"gradient": torch.full((4, 2), torch.nan)}, "NaN"),
    ("backward", {"step": 1}, {"gradient": torch.zeros(3, 2)}, "3 examples"),
    ("backward", {"step": 1}, {"gradient": torch.zeros(4, 3)}, "shape"),
    ("backward", {"step": 2}, {"gradient": torch.zeros(4, 2)}, "begin the step again"),
    ("open", {"learning_rate": 0.5}, None, "learning_rate"),
    ("open", {"run": "1" * 32}, None, "discard it"),
    ("open", {"classes": 3}, None, "classes is 3, this vendor's 2"),
    ("open", {"bottom": "f" * 64}, None, "bottom"),
    ("open", {"dtype": "float64"}, None, "dtype"),
    ("open", {"learning_rate": 1e300}, None, "learning_rate must be"),
    ("train", {}, None, "no operation"),
]


def test_what_is_rejected_changes_nothing(vendor):
    begin(vendor)
    take(vendor, 0)
    ask(vendor, "forward", {"step": 1}, {"indices": torch.tensor([0, 1, 2, 3])})
    before = adapter(vendor)
    run, store = vendor.customer("alice").run, vendor.customer("alice").store
    for op, fields, tensors, match in REJECTED:
        with pytest.raises(MessageRejected, match=match):
            ask(vendor, op, settings(vendor, **fields) if op == "open" else fields, tensors)
        assert (run.step, store.count) == (1, 12), (op, match)
        assert all(torch.equal(value, adapter(vendor)[key]) for key, value in before.items()), (op, match)
    # The forward pass is still held.
    assert ask(vendor, "backward", {"step": 1}, {"gradient": torch.ones(4, 2)}) == {"step": 2, "replayed": 0}


def test_limits(tmp_path):
    small = Limits(
        max_tokens=16, max_batch=8, max_message_bytes=1 << 18, max_examples=8, max_stored_bytes=900, max_customers=1
    )
    vendor = make_vendor(tmp_path, limits=small)
    with pytest.raises(MessageRejected, match="open one first"):
        ask(vendor, "put", {"first": 0}, rows_of([2]))
    ask(vendor, "open", settings(vendor))
    with pytest.raises(MessageRejected, match="1 customers are the most") as refused:
        ask(vendor, "open", settings(vendor), name="bob")
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    ask(vendor, "put", {"first": 0}, rows_of([1] * 6))
    with pytest.raises(MessageRejected, match="8 examples are the most"):
        ask(vendor, "put", {"first": 6}, rows_of([1] * 3))
    with pytest.raises(MessageRejected, match="900 bytes are the most"):
        ask(vendor, "put", {"first": 6}, rows_of([9]))
    assert ask(vendor, "discard") == {}
    assert list((tmp_path / "customers").iterdir()) == []
    assert ask(vendor, "discard") == {}
    assert ask(vendor, "open", settings(vendor, run="1" * 32), name="bob") == {"step": 0, "examples": 0}
    with pytest.raises(MessageRejected, match="name must be"):
        ask(vendor, "open", settings(vendor), name="../bob")
    vendor.close()
    for changes, match in (({"max_message_bytes": 1000}, "one example of"), ({"queue": 0}, "above 0")):
        with pytest.raises(ValueError, match=match):
            make_vendor(tmp_path, limits=Limits(**{**vars(LIMITS), **changes}))


def test_a_full_queue_asks_to_come_back(tmp_path):
    vendor = make_vendor(tmp_path, limits=Limits(**{**vars(LIMITS), "queue": 1}))
    begin(vendor)
    begun, go_on = threading.Event(), threading.Event()
    work = threading.Thread(target=vendor._submit, args=(lambda: (begun.set(), go_on.wait(60)), 90.0))
    work.start()
    assert begun.wait(60)
    with pytest.raises(MessageRejected, match="come back later") as refused:
        take(vendor, 0)
    assert refused.value.code == "UNAVAILABLE"
    go_on.set()
    work.join()
    take(vendor, 0)
    vendor.close()


def test_an_answer_comes_after_its_place_was_given_back(tmp_path, monkeypatch):
    """The computing thread may be slow to go on once its result is known: the next call was refused until then."""
    told = Future._invoke_callbacks
    monkeypatch.setattr(Future, "_invoke_callbacks", lambda future: (time.sleep(0.05), told(future)))
    vendor = make_vendor(tmp_path, limits=Limits(**{**vars(LIMITS), "queue": 1}))
    begin(vendor)
    for step in range(3):
        take(vendor, step)
    vendor.close()
