"""Recorded passes, with a recorder that runs a function again in the place of a GPU: the sums are those of ordinary passes."""

import dataclasses
import random
import warnings
from collections import deque
from functools import partial
from unittest import mock

import pytest
import torch
import transformers
from fastdp.bench import simulate
from fastdp.bench.workloads import Case, examples

from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.uses.layout import Ticket
from fastdp.private.graphs import Graphs
from fastdp.verify import Checks
from tests.cases import cases

#: Replays of a recording before it is used.
TRIES = 4
CASE = Case("llama", 2, 32, 64, 2, 2, 64, 4, 8, dtype=torch.float32)


def built(case=CASE):
    return simulate.build(case, torch.device("cpu"))


def batch_of(length=None, first=0):
    """Rows of the case's examples as one micro-batch."""
    rows = examples(CASE, first + 4)[first : first + 4]
    return {key: torch.stack([row[key][:length] for row in rows]) for key in rows[0]}


def let_go(engine):
    """What the next micro-batch must not find of this one."""
    engine.accumulator.reset()
    engine.complete = False


def recorded(model=None):
    """An engine that has recorded the passes of one micro-batch, and that."""
    engine, batch = engine_of(model or built(), tickets_of(6), runs := []), batch_of()
    for _ in range(4):
        output = engine.model(**batch)
        (output[1] if isinstance(output, tuple) else output.loss).backward()
        let_go(engine)
    assert runs
    return engine, batch


def again_on_a_processor(accumulator, runs):
    """What is recorded is run once more for each replay, and its results put where those of the recording are."""

    def record(function):
        found = function()

        @torch.no_grad()
        def again():
            runs.append(function.__name__)
            kept = dict(vars(accumulator))
            with torch.enable_grad():
                new = function()
            vars(accumulator).clear()
            vars(accumulator).update(kept)
            for there, value in zip(found, new):
                there.data.copy_(value)

        return found, again

    return record


def engine_of(model, tickets, runs=None, recorder=again_on_a_processor, bound=0.5, force=True):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    policy, watched = Policy((bound,), (0.0,), dict.fromkeys(trained, 0)), partial(Checks, enabled=False)
    engine = Engine(model, policy, tickets, verify=watched, keep_logits=True)
    if runs is not None:
        recorded = partial(recorder, engine.accumulator, runs)
        engine.graphs = Graphs(engine, engine.checks.watching, recorded, force=force)
    return engine


def trained_on(engine, lengths, change=lambda number: None):
    """Losses of micro-batches of these lengths, and the sums and counts of each two."""
    found = []
    for number, length in enumerate(lengths):
        change(number)
        loss = engine.model(**batch_of(length, 4 * number)).loss
        loss.backward()
        found.append({"loss": loss.detach().clone()})
        if number % 2:
            counts = (engine.accumulator.units, engine.accumulator.unclipped, engine.accumulator.nonfinite)
            found.append({name: total.clone() for name, total in engine.accumulator.sums.items()})
            found.append({str(i): torch.as_tensor(count) for i, count in enumerate(counts)})
            engine.accumulator.reset()
            engine.complete, engine.followed = False, engine.backwards
    engine.close()
    return found


def tickets_of(count):
    weights = [torch.tensor([1.0, 1.0, 1.0, float(number % 3 != 1)]) for number in range(count)]
    return deque(Ticket(torch.arange(4), own, number % 2 == 1) for number, own in enumerate(weights))


def both(lengths, change=lambda engine, number: None):
    torch.manual_seed(0)
    results, runs = [], []
    for recorded in (None, runs):
        engine = engine_of(built(), tickets_of(len(lengths)), recorded)
        results.append(trained_on(engine, lengths, lambda number, engine=engine: change(engine, number)))
    return results, runs


def require_equal(results):
    for ordinary, replayed in zip(*results, strict=True):
        assert ordinary.keys() == replayed.keys()
        for name, value in ordinary.items():
            torch.testing.assert_close(replayed[name], value, rtol=1e-5, atol=1e-7)


def test_other_lengths_go_the_ordinary_way_until_they_come_again():
    results, runs = both([8, 6, 8, 6, 8, 6, 8, 5, 8, 8])
    require_equal(results)
    # Looks at new lengths do not count.
    assert runs.count("forward") == (TRIES + 1) + (TRIES + 4)


def clip_otherwise(engine):
    policy = engine.accumulator.policy
    engine.accumulator.policy = Policy((0.25,), (0.0,), policy.group_of)


@cases(
    "alter",
    [
        lambda engine: vars(engine.model.model.layers[0].self_attn).update(training=False),
        lambda engine: vars(engine.model.model.layers[0].self_attn).update(scaling=0.5),
        clip_otherwise,
    ],
)
def test_a_changed_model_or_clip_is_not_replayed(alter):
    def change(engine, number):
        if number == 6:
            alter(engine)

    results, runs = both([8] * 8, change)
    require_equal(results)
    assert runs.count("forward") == TRIES + 4


def test_a_model_that_reads_what_a_replay_would_not_is_not_recorded(monkeypatch):
    """Hooks, a count of passes, and numbers drawn on the host."""
    monkeypatch.setattr("fastdp.private.recorder.MAX_TIME_SHARE", float("inf"))

    def count(module, args):
        module.passes = getattr(module, "passes", 0) + 1

    def draw(module, args):
        random.random()

    for hook, force, recorded in ((lambda *_: None, True, True), (lambda *_: None, False, False), (count, True, False)):
        engine = engine_of(built(), tickets_of(6), runs := [], force=force)
        engine.model.model.register_forward_pre_hook(hook)
        trained_on(engine, [8] * 6)
        assert bool(runs) == recorded
    engine = engine_of(built(), tickets_of(6), runs := [])
    engine.model.model.register_forward_pre_hook(draw)
    with pytest.warns(UserWarning, match="draws random numbers on the host"):
        trained_on(engine, [8] * 6)
    assert not runs


@cases("most, recorded", [(float("inf"), True), (0.0, False)])
def test_a_recording_that_is_not_faster_is_let_go_of(most, recorded, monkeypatch):
    monkeypatch.setattr("fastdp.private.recorder.MAX_TIME_SHARE", most)
    engine = engine_of(built(), tickets_of(8), [], force=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained_on(engine, [8] * 8)
    assert bool(engine.graphs.replays) == engine.graphs.open == recorded


def test_a_pass_that_finds_no_memory_lets_go_of_the_graphs_and_runs_again():
    results = []
    for fails in (False, True):
        torch.manual_seed(0)
        engine = engine_of(built(), tickets_of(10), [])

        def change(number, engine=engine, fails=fails):
            if fails and number == 7:
                assert engine.graphs.replays == 5
                engine.run_forward = out_of_memory

        def out_of_memory(*args, engine=engine, **options):
            del engine.run_forward
            raise torch.OutOfMemoryError("CUDA out of memory")

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            results.append(trained_on(engine, [8] * 7 + [6, 8, 8], change))
        assert [str(entry.message).rpartition(": ")[2] for entry in seen] == fails * [
            "the device has too little memory left"
        ]
        assert engine.graphs.open == (not fails)
    require_equal(results)


def test_outputs_beside_the_loss_are_the_users_own_unless_recording_was_asked_for(monkeypatch):
    monkeypatch.setattr("fastdp.private.recorder.MAX_TIME_SHARE", float("inf"))
    for force in (True, False):
        engine = engine_of(built(), tickets_of(6), [], force=force)
        held = []
        for number in range(6):
            output = engine.model(**batch_of(None, 4 * number))
            held.append(output.logits.detach())
            output.loss.backward()
            engine.accumulator.reset()
            engine.complete = False
        assert engine.graphs.replays == 4
        assert torch.equal(held[4], held[5]) == force
        engine.close()


@cases("fault", ["raises", "wrong", "old inputs"])
def test_a_recording_that_fails_or_differs_is_not_used_and_says_so(fault):
    def recorder(accumulator, runs):
        record = again_on_a_processor(accumulator, runs)

        def faulty(function):
            if fault == "raises":
                raise RuntimeError("nothing is recorded here\nat all")
            found, again = record(function)
            if fault == "old inputs":
                return found, lambda: None

            def other():
                again()
                found[0].data.mul_(1.5)

            return found, other

        return faulty

    plain = trained_on(engine_of(built(), tickets_of(6)), [8] * 6)
    engine = engine_of(built(), tickets_of(6), [], recorder)
    reason = "nothing is recorded here" if fault == "raises" else "gave another sum"
    with pytest.warns(UserWarning, match=reason) as seen:
        found = trained_on(engine, [8] * 6)
    assert len(seen) == 1
    require_equal((plain, found))


@cases("tuning", ["experts", "adapters of experts", "attention"])
def test_trained_experts_whose_tokens_the_host_counts_are_not_tried(tuning):
    """A recording would fail at the first count. The warning comes once, and no pass is run in vain."""
    import peft

    mixtral = dataclasses.replace(CASE, kind="mixtral", width=24, feed_forward=40)

    def tuned():
        model = built(mixtral)
        if tuning == "adapters of experts":
            parts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=parts))
        elif tuning == "attention":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("self_attn" in name)
        return model.train()

    plain = trained_on(engine_of(tuned(), tickets_of(8)), [8] * 8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = trained_on(engine_of(tuned(), tickets_of(8), runs := []), [8] * 8)
    require_equal((plain, found))
    said = [str(one.message) for one in seen if "recorded" in str(one.message)]
    if tuning == "attention":
        assert (said, runs.count("forward")) == ([], TRIES + 6)
    else:
        assert (len(said), runs) == (1, [])
        assert said[0].endswith("the host reads how many tokens each trained expert gets")


def test_a_recording_with_dropout_that_reads_old_inputs_is_not_used():
    """Masks may be drawn in another order, so that only the size of sums is compared; another batch must still give others."""

    def old_inputs(accumulator, runs):
        record = again_on_a_processor(accumulator, runs)
        return lambda function: (record(function)[0], lambda: None)

    def dropping():
        model = built()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        return model

    with pytest.warns(UserWarning, match="gave the same sums for another batch"):
        trained_on(engine_of(dropping(), tickets_of(6), [], old_inputs), [8] * 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained_on(engine_of(dropping(), tickets_of(6), runs := []), [8] * 6)
    assert runs.count("forward") == TRIES + 4


def test_a_policy_that_changes_before_the_backward_pass_of_a_replay_is_refused():
    engine, batch = recorded()
    loss, policy = engine.model(**batch).loss, engine.accumulator.policy
    engine.accumulator.policy = Policy((0.01,), (0.0,), policy.group_of)
    with pytest.raises(RuntimeError, match="change bounds between logical batches alone"):
        loss.backward()
    assert not engine.accumulator.sums
    engine.close()


def test_checkpointed_passes_are_replayed_and_recorded_without_reading_random_states(monkeypatch):
    monkeypatch.setattr("fastdp.private.recorder.MAX_TIME_SHARE", float("inf"))
    case, results, runs, read = (
        dataclasses.replace(CASE, checkpointed=True),
        [],
        [],
        torch.utils.checkpoint.get_device_states,
    )

    def recorder(accumulator, runs):
        record = again_on_a_processor(accumulator, runs)

        def strict(function):
            assert torch.utils.checkpoint.get_device_states(torch.ones(1)) == ([], [])
            return record(function)

        return strict

    for recorded in (None, runs):
        model = built(case)
        # transformers' own, for reentrant checkpoints: no reason to leave a model alone.
        assert any(module._forward_hooks for module in model.modules())
        engine = engine_of(model, tickets_of(8), recorded, recorder, force=False)
        results.append(trained_on(engine, [8] * 8))
    require_equal(results)
    assert runs.count("forward") == TRIES + 6
    assert torch.utils.checkpoint.get_device_states is read


def test_recorded_passes_make_no_cache_and_the_models_setting_stays(monkeypatch):
    """A cache of a sliding window copies from the host, which no CUDA graph can repeat."""
    within, made = [], []

    def recorder(accumulator, runs):
        record = again_on_a_processor(accumulator, runs)

        def watched(function):
            within.append(function)
            found = record(function)
            within.clear()
            return found

        return watched

    cache = transformers.cache_utils.DynamicCache
    init = cache.__init__
    monkeypatch.setattr(cache, "__init__", lambda self, *a, **k: (made.append(bool(within)), init(self, *a, **k))[1])
    model = built()
    model.config.use_cache = True
    trained_on(engine_of(model, tickets_of(8), runs := [], recorder), [8] * 8)
    assert model.config.use_cache
    assert runs
    assert made
    assert not any(made)


@cases("alone", [False, True])
def test_a_late_term_beside_the_loss_of_a_replay_has_an_ordinary_pass(alone):
    sums, runs = [], []
    for records in (None, runs):
        engine, batch = engine_of(built(), tickets_of(8), records), batch_of()
        for number in range(8):
            output = engine.model(**batch)
            term = output.logits.square().mean()
            (output.loss if number < 5 else term if alone else output.loss + term).backward()
            sums.append({name: total.clone() for name, total in engine.accumulator.sums.items()})
            let_go(engine)
        assert engine.graphs is None
        engine.close()
    require_equal((sums[:8], sums[8:]))
    # The first term came to a replay, and nothing is replayed afterwards.
    assert runs.count("forward") == runs.count("backward_to_shared") + 1 == TRIES + 4


class Ordered(torch.nn.Module):
    """A classifier whose matrix has rows of a table, in an order that comes with the batch."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(9, 6))

    def forward(self, x, labels, order):
        logits = x @ self.table[order].T
        return transformers.modeling_outputs.SequenceClassifierOutput(
            loss=torch.nn.functional.cross_entropy(logits, labels), logits=logits
        )


def test_an_order_that_comes_with_the_batch_is_looked_up_anew_within_a_recording():
    """A GPU refuses that, since the host would have to wait: a replay would go on with the order that was known."""
    compared = []

    def recorder(accumulator, runs):
        record = again_on_a_processor(accumulator, runs)

        def watched(function):
            with mock.patch("torch.equal", wraps=torch.equal) as equal:
                found = record(function)
            compared.append([call.args[0].tolist() for call in equal.call_args_list])
            return found

        return watched

    engine = engine_of(Ordered().train(), tickets_of(4), [], recorder)
    batch = {"x": torch.randn(4, 6), "labels": torch.arange(4) % 3, "order": torch.tensor([4, 1, 7])}
    for _ in range(4):
        engine.model(**batch).loss.backward()
        let_go(engine)
    assert engine.route == "uses"
    assert [4, 1, 7] in compared[0]
    engine.close()


class LossBetween(torch.nn.Module):
    """Returns its loss between logits and a figure for the log."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, **batch):
        output = self.body(**batch)
        return output.logits, output.loss, output.logits.detach().mean()


def test_a_replay_finds_the_loss_where_the_model_returned_it():
    (engine, batch), (plain, _) = recorded(LossBetween(built())), recorded()
    engine.model(**batch)[1].backward()
    plain.model(**batch).loss.backward()
    sums = [{name.removeprefix("body."): total for name, total in e.accumulator.sums.items()} for e in (engine, plain)]
    require_equal([[own] for own in sums])
    engine.close()
    plain.close()


def test_a_buffer_that_the_recorded_pass_writes_is_refused():
    model, writes = built(), []
    model.register_buffer("seen", torch.zeros(1))

    def count(module, args):
        if writes:
            model.seen.add_(1)

    model.model.register_forward_pre_hook(count)
    with pytest.raises(SelfCheckError, match="seen"):
        trained_on(
            engine_of(model, tickets_of(6), []), [8] * 6, lambda number: writes.append(1) if number == 2 else None
        )


def test_packed_rows_and_trial_passes_are_never_recorded():
    engine = engine_of(built(), tickets_of(2), [])
    graphs = engine.graphs
    call = ((), {"input_ids": torch.zeros(4, 8, dtype=torch.int64)})
    packed = Ticket(torch.arange(4), torch.ones(4), True, token_units=torch.zeros(4, 8, dtype=torch.int64))
    strange = ((), {"input_ids": torch.zeros(4, 8, dtype=torch.int64), "cache": object()})
    # Of a tensor beside another device than the model's, Python may have read the numbers: those of one batch.
    elsewhere = ((), {"input_ids": torch.zeros(4, 8, dtype=torch.int64), "lengths": torch.zeros(4, device="meta")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own, ticket in ((call, packed), (strange, tickets_of(1)[0]), (elsewhere, tickets_of(1)[0])):
            for _ in range(5):
                assert graphs.forward(own, ticket, lambda waiting, upstream: None) is None
    engine.close()
