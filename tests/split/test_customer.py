"""The customer's side: each text is released once, whatever happens; and its run is the one it would be without stops."""

import errno
import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from tokenizers import normalizers

import fastdp
from fastdp.methods.sap import PrivateBottom, TextPrivatizer, split_model
from fastdp.split import MessageRejected, SplitCustomer, SplitVendor
from fastdp.split.connection import Connection
from fastdp.split.customer import batch_of
from fastdp.split.run import Run
from fastdp.split.wire import Outgoing
from tests.cases import cases
from tests.elsewhere import elsewhere
from tests.split.world import (
    LIMITS,
    ask,
    make_model,
    make_texts,
    make_tokenizer,
    make_vendor,
    merged_model,
    noisy_rows,
    train_in_process,
)


def adapter(service, name="alice"):
    return {key: value.detach().clone() for key, value in service.vendor.customer(name).run.parameters.items()}


@pytest.mark.parametrize("after", [0, 1])
def test_training_is_that_of_one_process(tmp_path, customer_of, corpus, after):
    texts, labels = corpus
    with make_vendor(tmp_path / "vendor", after=after).serve("127.0.0.1:0", insecure=True) as service:
        customer = customer_of(service, learning_rate=0.02)
        bottom = split_model(make_model(), after)[0]
        assert all(torch.equal(v, bottom.state_dict()[k]) for k, v in customer.bottom.state_dict().items())
        progress = []
        customer.send(texts, labels, noisy_rows(customer), on_example=lambda *counts: progress.append(counts))
        assert progress == [(8, 24), (16, 24), (24, 24)]
        losses = customer.train(5)
        batches = [batch_of(step, 24, 8, 0) for step in range(15)]
        expected, trained = train_in_process(make_model(), customer.store, labels, batches, after, learning_rate=0.02)
        assert losses == expected
        assert sum(losses[-3:]) < sum(losses[:3])
        assert all(torch.equal(value, trained[key]) for key, value in adapter(service).items())
        logged = [json.loads(line) for line in (customer.folder / "losses.jsonl").read_text().splitlines()]
        assert [row["loss"] for row in logged] == losses
        assert customer.train(5) == []
        # The adapter is what predicts; at this eta the noise hardly matters.
        quiet = PrivateBottom(customer.bottom, eta=1e7)
        ids = make_tokenizer()(texts[:3], padding=True, return_tensors="pt")
        model = make_model().eval()
        plain = model(**ids).logits
        found = customer.predict(texts[:3], quiet)
        assert found.shape == (3, 2)
        assert not torch.allclose(found, plain, atol=1e-3)
        with torch.no_grad():
            merged = merged_model(model, trained)
            assert torch.allclose(found, merged(**ids).logits, atol=1e-3)


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_texts_are_privatized_on_the_customers_device(service, customer_of, corpus, kind):
    texts, labels = corpus
    rows = []
    for name, device in (("alice", "cpu"), ("bob", "meta")):
        with elsewhere() as ran:
            customer = customer_of(service, name, device=device)
            privatizer = noisy_rows(customer)
            if kind == "tokens":
                model, tokenizer = customer.bottom.model, make_tokenizer()
                privatizer = TextPrivatizer(model, eta=40.0, tokenizer=tokenizer, duplicates="merge", unsafe_seed=3)
            customer.send(texts, labels, privatizer)
            rows.append(customer.store.read(0, len(texts))[0])
    assert ran["private_snap" if kind == "tokens" else "dchi_vectors"] == 3
    torch.testing.assert_close(*rows, rtol=0, atol=1e-5)


def test_every_pass_is_a_permutation():
    for epoch in range(3):
        batches = [batch_of(4 * epoch + at, 13, 4, 7) for at in range(4)]
        assert [len(batch) for batch in batches] == [4, 4, 4, 1]
        assert sorted(torch.cat(batches).tolist()) == list(range(13))
    assert batch_of(0, 13, 4, 7).tolist() != batch_of(4, 13, 4, 7).tolist()
    assert batch_of(0, 13, 4, 7).tolist() == batch_of(0, 13, 4, 7).tolist()


def test_each_text_is_privatized_once(service, customer_of, corpus):
    """The process ends after a part was sent; another goes on, and draws noise for the rest alone."""
    texts, labels = corpus
    customer = customer_of(service)

    class Killed(Exception):
        pass

    def kill(sent, _):
        if sent == 16:
            raise Killed

    with pytest.raises(Killed):
        customer.send(texts, labels, noisy_rows(customer), on_example=kill)
    before = customer.store.read(0, 16)[0]
    customer.close()
    again = customer_of(service)
    private = noisy_rows(again)
    again.send(texts, labels, private)
    assert private.rows_released == sum(again.store.lengths(16, 8))
    assert torch.equal(again.store.read(0, 16)[0], before)
    assert torch.equal(service.vendor.customer("alice").store.read(0, 24)[0], again.store.read(0, 24)[0])
    again.send(texts, labels, private)
    assert private.rows_released == sum(again.store.lengths(16, 8))
    # A vendor that lost everything gets the same rows, not new ones.
    again.discard()
    again.send(texts, labels, private)
    assert torch.equal(service.vendor.customer("alice").store.read(0, 16)[0], before)
    assert private.rows_released == sum(again.store.lengths(16, 8))
    statement = json.loads(again.save_statement(private).read_text())
    assert statement["examples_sent"] == 24
    assert statement["rows_sent"] == sum(again.store.lengths(0, 24))


def test_a_refused_customer_leaves_its_folder_to_others(tmp_path):
    """Also while its error is still held, as a caller that reports it does."""
    errors = []
    for _ in range(2):
        with pytest.raises(ValueError, match="has no certificates") as refused:
            SplitCustomer("localhost:1", tmp_path, tmp_path / "none")
        errors.append(refused.value)


def test_a_folder_has_one_customer(service, customer_of):
    first = customer_of(service)
    with pytest.raises(ValueError, match="in use by another program"):
        customer_of(service)
    first.close()
    customer_of(service).close()


SECRETS = [f"w{word}" for word in range(10, 60)]


def coded(words):
    """A tokenizer with the same vocabulary that turns the first half of ``words`` into two, and the others into four."""
    found = make_tokenizer()
    rules = [
        normalizers.Replace(f" {word} ", f" {' '.join([word] * (2 if at < len(words) // 2 else 4))} ")
        for at, word in enumerate(words)
    ]
    found.backend_tokenizer.normalizer = normalizers.Sequence(rules)
    return found


def test_a_vendor_s_tokenizer_tells_it_nothing(tmp_path, customer_of):
    """The vendor would read one word of each text off its length; the customer's own tokenizer keeps all lengths alike."""
    hostile = coded(SECRETS)
    texts = [f"w1 w2 {word} w3" for word in SECRETS]
    assert {len(ids) for ids in hostile(texts)["input_ids"]} == {7, 9}
    vendor = SplitVendor(make_model(), tmp_path / "vendor", tokenizer=hostile, limits=LIMITS)
    with vendor.serve("127.0.0.1:0", insecure=True) as service:
        customer = customer_of(service)
        labels = [0, 1] * 25
        customer.send(texts, labels, noisy_rows(customer))
        assert vendor.customer("alice").store.lengths(0, 60) == [6] * 50
        # Nor does a folder begun with one's own go on with the vendor's.
        customer.close()
        second = customer_of(service, tokenizer=hostile)
        with pytest.raises(ValueError, match="other tokenizer"):
            second.send(texts, labels, noisy_rows(second))
        other = customer_of(service, "bob", tokenizer=None)
        with pytest.raises(ValueError, match="needs a tokenizer"):
            other.send(texts, labels, noisy_rows(other))
    with make_vendor(tmp_path / "second").serve("127.0.0.1:0", insecure=True) as service:
        changed = make_tokenizer()
        changed.add_tokens(["another"])
        with pytest.raises(ValueError, match="another vocabulary"):
            customer_of(service, "carol", tokenizer=changed)


def test_texts_of_one_length(service, customer_of, corpus):
    """Every text fills its room; what fills it is drawn, privatized, and stands before the closing token."""
    texts, labels = corpus
    customer = customer_of(service, fixed_length=True)
    private = fastdp.TextPrivatizer(
        customer.bottom.model, eta=1e6, tokenizer=customer.tokenizer, mechanism="exponential", unsafe_seed=1
    )
    seen = []
    customer.bottom.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    customer.send(texts, labels, private)
    assert set(service.vendor.customer("alice").store.lengths(0, 24)) == {16}
    ids = torch.cat(seen)
    assert ids.shape == (24, 16)
    assert set(ids[:, 0].tolist()) == {2}
    assert set(ids[:, -1].tolist()) == {3}
    assert int(ids[:, 1:-1].min()) >= 4
    # At this eta the words stay, and the rest is not the same in any two texts.
    own = make_tokenizer()(texts)["input_ids"]
    assert all(row[: len(text) - 1].tolist() == text[:-1] for row, text in zip(ids, own))
    assert len({tuple(row[10:15].tolist()) for row in ids}) == 24
    assert private.tokens_released == 24 * 14
    with pytest.raises(ValueError, match="single texts"):
        customer.send(texts, labels, private, pairs=texts)
    customer.close()
    with pytest.raises(ValueError, match="other fixed length"):
        customer_of(service).send(texts, labels, private)


def test_texts_that_another_folder_sent_are_refused_or_said(service, customer_of, corpus, tmp_path, monkeypatch):
    """A stop between counting a release and its record is no second one; what a folder forgot, the account did not."""
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FASTDP_AGAIN")
    texts, labels = corpus
    first = customer_of(service)
    write = first._write_record

    def stopped():
        if "earlier" in first.record:
            raise KeyboardInterrupt
        write()

    def refuse(customer):
        private = noisy_rows(customer)
        with pytest.raises(ValueError, match="these data were released before, by split"):
            customer.send(texts, labels, private)
        assert private.rows_released == 0

    monkeypatch.setattr(first, "_write_record", stopped)
    with pytest.raises(KeyboardInterrupt):
        first.send(texts, labels, noisy_rows(first))
    first.close()
    other = customer_of(service, "elsewhere")
    refuse(other)
    again = customer_of(service)
    again.send(texts, labels, noisy_rows(again))
    assert again.store.count == len(texts)
    assert "earlier_releases" not in again.statement(noisy_rows(again))
    again.close()
    (again.folder / "customer.json").unlink()
    refuse(customer_of(service))
    monkeypatch.setenv("FASTDP_AGAIN", "1")
    other.send(texts, labels, noisy_rows(other))
    assert len(other.statement(noisy_rows(other))["earlier_releases"]) == 1


def test_a_stopped_customer_goes_on_where_it_was(service, customer_of, corpus):
    texts, labels = corpus
    whole = customer_of(service, "whole")
    whole.send(texts, labels, noisy_rows(whole))
    whole.train(3)
    first = customer_of(service, "alice")
    first.send(texts, labels, noisy_rows(first))
    done = []

    def kill(step, *_):
        done.append(step)
        if step == 4:
            # A forward pass is held when the process ends.
            ask(service, "alice", Outgoing.of("forward", {"step": 4}, {"indices": torch.arange(3)}))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.train(3, kill)
    first.close()
    second = customer_of(service, "alice")
    second.send(texts, labels, noisy_rows(second))
    second.train(3, lambda step, *_: done.append(step))
    assert done == list(range(1, 10))
    assert all(torch.equal(value, adapter(service)[key]) for key, value in adapter(service, "whole").items())


def test_tokens_are_replaced_before_the_bottom(service, customer_of, corpus):
    """Rows that leave are the bottom's rows of the tokens that were drawn; special tokens spelled out are words."""
    texts, labels = corpus
    customer = customer_of(service)
    words = fastdp.TextPrivatizer(
        customer.bottom.model, eta=1e6, tokenizer=customer.tokenizer, mechanism="exponential", unsafe_seed=1
    )
    customer.send(texts, labels, words)
    ids = make_tokenizer()(texts[:1], return_tensors="pt")
    rows, lengths = customer.store.read(0, 1)
    assert lengths == [ids["input_ids"].shape[1]]
    # At this eta no token changes.
    assert torch.allclose(rows, customer.bottom(**ids)[0], atol=1e-6)
    assert words.tokens_released == sum(len(text.split()) for text in texts)
    seen = []
    customer.bottom.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    customer.predict(["[SEP] w1"], words)
    customer.predict(["w1"], words, pairs=["w2"])
    (spelled, _), (pair, kinds) = seen
    assert spelled[0].tolist() == [[2, 1, 1, 1, 5, 3]]
    assert pair[0].tolist() == [[2, 5, 3, 6, 3]]
    assert kinds["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]


def test_nothing_else_leaves(service, customer_of, corpus, monkeypatch):
    """Every message of a whole run: its fields and tensors, none of which holds ids, labels or texts."""
    texts, labels = corpus
    sent = []
    customer = customer_of(service)
    call = Connection.call
    monkeypatch.setattr(
        Connection, "call", lambda self, message, *rest: sent.append(message) or call(self, message, *rest)
    )
    customer.send(texts, labels, noisy_rows(customer))
    customer.train(1)
    customer.predict(texts[:3], noisy_rows(customer))
    assert [m.op for m in sent] == ["open", "put", "put", "put", "open", *["forward", "backward"] * 3, "predict"]
    settings = {"run", "bottom", "classes", "dtype", "learning_rate", "weight_decay", "seed"}
    fields = {"open": settings, "put": {"first"}, "forward": {"step"}, "backward": {"step"}, "predict": set()}
    for message in sent:
        assert set(message.fields) == fields[message.op]
        content = b"".join(message)
        assert not any(word.encode() in content for text in texts for word in text.split() if len(word) > 2)
    served = [m for m in sent if m.op in ("put", "predict")]
    assert all(b'"rows"' in m.payload and b'"lengths"' in m.payload and b"input_ids" not in m.payload for m in served)


def test_refusals(service, customer_of, corpus, tmp_path):
    texts, labels = corpus
    customer = customer_of(service)
    private = noisy_rows(customer)
    trainable = split_model(make_model(), 0)[0].requires_grad_()
    with pytest.raises(ValueError, match="call send"):
        customer.train(1)
    for arguments, match in (
        ((texts, labels[1:], private), "labels for"),
        (([], [], private), "at least one"),
        ((texts, [2] * 24, private), "not one of 0 to 1"),
        ((texts, labels, PrivateBottom(trainable, eta=1.0)), "another bottom"),
        ((texts, labels, lambda ids: ids), "nothing is sent as it is"),
    ):
        with pytest.raises(ValueError, match=match):
            customer.send(*arguments)
    assert customer.store.count == 0
    customer.bottom.requires_grad_(True)
    with pytest.raises(ValueError, match="trainable"):
        customer.send(texts, labels, PrivateBottom(customer.bottom, eta=1.0))
    customer.bottom.requires_grad_(False)
    customer.send(texts, labels, private)
    with pytest.raises(ValueError, match="other examples"):
        customer.send(texts[:-1], labels[:-1], private)
    with pytest.raises(ValueError, match="other privatizer"):
        customer.send(texts, labels, PrivateBottom(customer.bottom, eta=1.0))
    bob = customer_of(service, "bob")
    with pytest.raises(MessageRejected, match="open one first"):
        bob.predict(texts[:1], noisy_rows(bob))
    for options, match in (
        ({"batch_size": 9}, "takes 8 at most"),
        ({"dtype": "int8"}, "dtype"),
        ({"batch_size": 0}, "least 1"),
    ):
        with pytest.raises(ValueError, match=match):
            customer_of(service, "carol", **options)
    customer.close()
    hasty = customer_of(service, learning_rate=0.5)
    with pytest.raises(MessageRejected, match="learning_rate"):
        hasty.send(texts, labels, noisy_rows(hasty))
    hasty.close()
    # The folder is lost: the vendor's rows are not sent again with other noise.
    (tmp_path / "alice").rename(tmp_path / "lost")
    fresh = customer_of(service)
    with pytest.raises(MessageRejected, match="discard it"):
        fresh.send(texts, labels, noisy_rows(fresh))
    fresh.close()
    with make_vendor(tmp_path / "other", after=1).serve("127.0.0.1:0", insecure=True) as other:
        (tmp_path / "alice").rename(tmp_path / "unused")
        (tmp_path / "lost").rename(tmp_path / "alice")
        with pytest.raises(ValueError, match="another bottom"):
            customer_of(other)


def test_customers_at_once(service, customer_of, corpus):
    """Four customers send and train at the same time, each of them as if it were alone."""
    texts, labels = corpus
    customers = [customer_of(service, f"customer-{number}", seed=number) for number in range(4)]

    def work(customer):
        customer.send(texts, labels, noisy_rows(customer))
        return customer.train(2)

    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(work, customers))
    for customer, found in zip(customers, losses):
        batches = [batch_of(step, 24, 8, customer.seed) for step in range(6)]
        assert found == train_in_process(make_model(), customer.store, labels, batches)[0]


def refused_by_customer(make, words, texts, labels):
    """How many examples a vendor, made in a folder, keeps of a customer that refuses with these words to train on texts."""
    with TemporaryDirectory() as place, mock.patch.dict(os.environ, {"FASTDP_STATE": f"{place}/state"}):
        vendor = make(f"{place}/vendor")
        options = {"insecure": True, "tokenizer": make_tokenizer(), "batch_size": 8, "patience": 5.0}

        def train(address):
            with SplitCustomer(address, f"{place}/customer", **options) as customer:
                customer.send(texts, labels, noisy_rows(customer))
                customer.train(1)

        with vendor.serve("127.0.0.1:0", insecure=True) as service, pytest.raises(ValueError, match=words):
            train(service.address)
        kept = vendor.customer("customer")
        return 0 if kept is None else kept.store.count


@cases(("value", "words"), [(float("nan"), "its weights hold a NaN"), (3e38, "the bottom gives a NaN or an infinity")])
def test_a_row_that_no_noise_hides_is_not_sent(value, words):
    """The vendor saw which tokens were the word whose row it had chosen."""
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = value
    make = functools.partial(SplitVendor, model, limits=LIMITS)
    assert refused_by_customer(make, words, ["w5 w1"] * 24, [0, 1] * 12) == 0


def test_training_waits_for_room_on_the_vendors_disk(service, customer_of, corpus, monkeypatch):
    """It gave up after ten tries, within a second or two."""
    texts, labels = corpus
    customer = customer_of(service)
    customer.send(texts, labels, noisy_rows(customer))
    save, failures = Run.save, 12

    def full(self, folder):
        nonlocal failures
        if self.step == 2 and failures > 0:
            failures -= 1
            raise OSError(errno.ENOSPC, "no space")
        save(self, folder)

    monkeypatch.setattr(Run, "save", full)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    assert len(customer.train(1)) == 3
    assert failures == 0
    customer.close()
    customer = customer_of(service, patience=0.5)
    customer.send(texts, labels, noisy_rows(customer))
    monkeypatch.setattr(Run, "save", mock.Mock(side_effect=OSError(errno.ENOSPC, "no space")))
    with pytest.raises(ConnectionError, match="did not answer within 0.5|took no step for 0.5 seconds"):
        customer.train(2)


class Lying(SplitVendor):
    """Answers one operation with other fields than are true."""

    lies: dict = {}

    def answer(self, name, message, seconds):
        found, lies = super().answer(name, message, seconds), dict(self.lies.get(message.op, {}))
        if (logits := lies.pop("logits", None)) is not None:
            return Outgoing.of(message.op, found.fields, {"logits": torch.tensor([logits] * 8)})
        return replace(found, fields={**found.fields, **lies})


@cases(
    ("lies", "words"),
    [
        ({"put": {"examples": 0}}, "counts 0 examples, of 8 that it was sent"),
        ({"put": {"examples": 1 << 53}}, "examples, of 8 that it was sent"),
        ({"backward": {"step": 0}}, "answered step 0 as if it were at 0"),
        ({"backward": {"step": 1 << 53}}, "answered step 0 as if it were at 9007199254740992"),
        # Finite, with an infinite loss.
        ({"forward": {"logits": [3e38, -3e38]}}, "the loss of step 0 is not finite"),
        ({"forward": {"logits": [float("nan"), 0.0]}}, "the loss of step 0 is not finite"),
        ({"describe": {"width": 64}}, "the bottom is 16 wide with 32 positions, and the vendor says 64 and 16"),
        ({"describe": {"max_tokens": 1 << 20}}, "with 32 positions, and the vendor says 16 and 1048576"),
    ],
)
def test_a_vendor_that_counts_wrong_is_left(lies, words):
    """One that answered with no progress was asked for ever, and one that named another width met an assertion."""
    Lying.lies = lies
    refused_by_customer(functools.partial(Lying, make_model(), limits=LIMITS), words, *make_texts(24))
