"""What several processes release is what one would: weights, spending, and what is refused."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from scipy import stats
from torch.distributed.fsdp import FSDPModule

from fastdp.accounting import Ledger
from tests.cases import cases
from tests.engine.runs import Classifier, start
from tests.private.conftest import ranks, run
from tests.private.ranked import CASES, MOMENTS, STEPS
from tests.private.sharded import WAYS
from tests.private.test_bad_input import readable

#: Weights after six steps may differ by the rounding of sums in another order.
ROUNDING = 1e-6
Shape = tuple[int, ...]
#: How often each of the tests of noise, some hundred, may fail with nothing wrong; each draws fresh noise.
FALSE_ALARM = 1e-9
#: Moments at which a rank is killed that has pieces.
IN_PIECES = [f"{moment}, of pieces" for moment in MOMENTS]
#: Older ones are refused by `fastdp.distributed.shards`, in a sentence; `make minimum` runs the other tests with one.
in_pieces = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_all_gather"), reason="weights in pieces need torch 2.13 or later"
)


def apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def equal(found: list[Mapping[str, torch.Tensor]]) -> bool:
    return all(torch.equal(other[name], found[0][name]) for other in found for name in found[0])


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The groups that fast tests share, if the parameter is empty; or those that it names, of every case."""
    if not request.param:
        return request.getfixturevalue("folder")  # type: ignore[no-any-return]
    every = ",".join(CASES)
    run(tmp_path, *request.param.split("; "), CASES=every, SHARDED=every)
    return tmp_path


def on(*slow: tuple[str, tuple[int, ...]]) -> pytest.MarkDecorator:
    """Run a test on two processes, and in the slow tier on the groups that are named, of these sizes."""
    rows = [pytest.param("", (2,), id="two"), *(pytest.param(*row, marks=pytest.mark.slow) for row in slow)]
    return pytest.mark.parametrize(("place", "sizes"), rows, indirect=["place"])


@on(("matrix:1; matrix:2; matrix:4", (2, 4)))
def test_several_processes_release_what_one_does(place: Path, sizes: tuple[int, ...]) -> None:
    (alone,) = ranks(place, "matrix", 1)
    for size in sizes:
        together = ranks(place, "matrix", size)
        for case in together[0]:
            expected, found = alone[case], [rank[case] for rank in together]
            assert apart(found[0]["weights"], expected["weights"]) < ROUNDING, (size, case)
            assert equal([rank["weights"] for rank in found]), (size, case)
            for rank in found:
                assert (rank["processes"], rank["route"], rank["spent"]) == (size, "uses", expected["spent"])


@in_pieces
@on(("matrix:1; sharded:1; sharded:2; sharded:4", (1, 2, 4)))
def test_so_do_those_that_have_pieces_of_the_weights(place: Path, sizes: tuple[int, ...]) -> None:
    """With `fully_shard`, and with activation checkpointing beside it; with releases of maps and magnitudes too."""
    (alone,) = ranks(place, "matrix", 1)
    for size in sizes:
        for rank in ranks(place, "sharded", size):
            for case, found in rank.items():
                assert apart(found["weights"], alone[case]["weights"]) < ROUNDING, (size, case)
                assert (found["processes"], found["route"], found["spent"]) == (size, "uses", alone[case]["spent"])


@in_pieces
@pytest.mark.slow
def test_so_do_pieces_of_every_kind(tmp_path: Path) -> None:
    """Replicas of pieces, weights on the host or made of nothing; in half precision the noise is the same, in float32."""
    run(tmp_path, "matrix:1", "ways:2", "ways:4", CASES="tied gpt2,llama,lora")
    (alone,) = ranks(tmp_path, "matrix", 1)
    for size in (2, 4):
        for rank in ranks(tmp_path, "ways", size):
            for way, (case, _) in WAYS.items():
                gap = apart(rank[way]["weights"], alone[case]["weights"])
                assert gap < (2e-3 if way == "half" else ROUNDING), (size, way)
                assert rank[way]["spent"] == STEPS


@in_pieces
@on(("noise:4", (4,)))
def test_noise_of_pieces_is_independent_between_ranks_and_of_the_stated_size(
    place: Path, sizes: tuple[int, ...]
) -> None:
    """Every piece's noise is standard normal, and independent of other pieces', ranks' and releases'; of four some are empty."""
    every = ranks(place, "noise", sizes[0])
    drawn = [torch.cat([part.double().reshape(-1) for part in found.values()]) for found in every]
    assert sum(map(len, drawn)) == 4 * (1501 * 16 + 7 * 8000 + 60_000), "the pieces make up the whole"
    for name in ("tall", "masked", "short"):
        assert every[0][name, 0].numel() > every[-1][name, 0].numel(), "the last piece is the smaller one"
    for values in (*drawn, torch.cat(drawn)):
        count, square = len(values), float(values.square().sum())
        assert 2 * min(stats.chi2.cdf(square, count), stats.chi2.sf(square, count)) > FALSE_ALARM
        assert 2 * stats.norm.sf(abs(float(values.sum())) / count**0.5) > FALSE_ALARM
    for found in every:
        plain = torch.cat([part.double().reshape(-1) for (_, number), part in found.items() if number < 2])
        assert stats.kstest(plain.numpy(), "norm").pvalue > FALSE_ALARM
    parts = {
        (rank, *which): part.double().reshape(-1) for rank, found in enumerate(every) for which, part in found.items()
    }
    for (one, left), (other, right) in itertools.combinations(parts.items(), 2):
        shared = min(len(left), len(right))
        if shared > 1000:
            product = float(left[:shared] @ right[:shared]) / shared**0.5
            # The product of two independent normals has heavier tails than a normal: 8 of its deviations in a mean of 1000 or
            # more lie beyond what 1e-9 takes (Bernstein, with moments of at most n! / 2).
            assert abs(product) < 8, (one, other)


def padded(shapes: Iterable[Shape]) -> int:
    """Bytes of both pieces together, in float32: the first axis is cut into equal ones, the last of which is filled up."""
    return sum(8 * -(-shape[0] // 2) * math.prod(shape[1:]) for shape in shapes)


@in_pieces
@cases("case", ["checkpointed", "two passes", "adapters", "whole sums"])
def test_a_step_sends_holds_and_waits_as_the_formulas_say(folder: Path, case: str) -> None:
    """Sums are reduced a block at a time: whole are those of the block that is made and of the one that is reduced."""
    whole, twice = case == "whole sums", case == "two passes"
    for rank in ranks(folder, "measured", 2):
        found = rank[case]
        blocks: dict[str, list[Shape]] = {"": []}  # the root's, which is gathered once and kept for its backward pass
        for name, shape in found["shapes"].items():
            block = re.search(r"(layers|h)\.\d+\.", name)
            blocks.setdefault(block[0] if block else "", []).append(shape)
        learned = [shape for name, shape in found["shapes"].items() if name in found["trained"]]
        root, *others = map(padded, blocks.values())
        sums = [padded(shape for shape in block if shape in learned) for block in blocks.values()]
        reduced = sum(map(bool, sums))
        gathered = (2 * root + 3 * sum(others)) if twice else (root + 2 * sum(others))
        # Two passes meet a head first and an embedding last, and keep the root's sums meanwhile.
        order = sums[1:] if twice else sums
        most = max(one + other for one, other in zip(order, [*order[1:], 0])) + (sums[0] if twice else 0)
        assert reduced <= found["blocks"] < len(found["trained"])
        assert max(len(step["microbatches"]) for step in found["steps"]) > 1
        for step in found["steps"]:
            for own in step["microbatches"]:
                assert whole or (own["gathered"], own["added"]) == (gathered, padded(learned))
                assert own["sums"] == (0 if whole else reduced)
            # What is counted of units goes with the release, in one message more.
            assert step["sums"] == reduced * (1 if whole else len(step["microbatches"])) + 1
            # Two passes compare the order of their captures, as sums are reduced within the second.
            assert step["host reads"] <= 1 + (len(step["microbatches"]) if twice else 0)
        assert 4 * sum(found["gradients"]) <= padded(learned) / 2
        assert found["gradients"] == found["moments"] == found["pieces"]
        assert whole or 0 < found["whole at once"] <= most + 4 * max(map(math.prod, learned))


@in_pieces
def test_a_later_microbatch_is_looked_at_before_its_release_and_no_microbatch_waits_for_others(folder: Path) -> None:
    """One rank's microbatch that couples examples is refused on both; one too large has all run two passes from the next step."""
    for rank in ranks(folder, "looked", 2):
        assert rank["coupled"].startswith("SelfCheckError: The loss of row"), rank["coupled"]
        assert rank["spent"] == 1
        assert rank["passes"] == [1, 1, 2]
    assert equal([rank["weights"] for rank in ranks(folder, "looked", 2)])


@in_pieces
def test_the_fused_update_of_pieces_is_that_of_one_process(folder: Path) -> None:
    """No gradient is made of a parameter whose piece begins at a block of noise; with axes, and two backward passes, too."""
    (alone,) = ranks(folder, "fused", 1)
    for rank, found in enumerate(ranks(folder, "fused", 2)):
        for case, own in found.items():
            assert apart(own["weights"], alone[case]["weights"]) < ROUNDING, (rank, case)
            assert apart(own["moments"], alone[case]["moments"]) < ROUNDING, (rank, case)
            assert set(own["unfused"]) == {0}


@in_pieces
def test_a_packed_base_under_adapters_is_gathered_and_left_as_it_is(folder: Path) -> None:
    """QLoRA: sums of adapters are one process's."""
    (alone,) = ranks(folder, "quantised", 1)
    for found in ranks(folder, "quantised", 2):
        assert found["base kept"]
        assert apart(found["adapters"], alone["adapters"]) < ROUNDING


@in_pieces
@pytest.mark.slow
def test_a_checkpoint_of_two_goes_on_in_four_and_then_in_one(tmp_path: Path) -> None:
    """Torch's distributed checkpoints of the pieces, the optimizer's too; what was spent stays spent."""
    run(tmp_path, "stretched:2", "stretched:4", "stretched:1")
    before, weights = 0, None
    for size in (2, 4, 1):
        stretch = ranks(tmp_path, "stretched", size)
        for found in stretch:
            assert (found["before"], found["after"], found["optimizer"]) == (before, before + 2, before + 2)
            assert weights is None or apart(found["begun"], weights) == 0
            assert apart(found["begun"], found["left"]) > 0
        before, weights = before + 2, stretch[0]["left"]
    assert Ledger.read(tmp_path / "stretched" / "ledger.jsonl").spent_steps == before
    assert ranks(tmp_path, "stretched", 1)[0]["said"].startswith("all 6 budgeted steps are spent")


@on(("shapes:1; shapes:4", (4,)))
def test_ranks_without_a_unit_take_part_all_the_same(place: Path, sizes: tuple[int, ...]) -> None:
    (alone,) = ranks(place, "shapes", 1)
    for size in sizes:
        together = ranks(place, "shapes", size)
        for name in alone:
            assert equal([rank[name] for rank in together]), (size, name)
            if name == "keyed":
                # Keys of the operating system: the same on each rank of a group, and others in each group.
                assert apart(together[0][name], alone[name]) > 0.1
            else:
                assert apart(together[0][name], alone[name]) < ROUNDING, (size, name)


def test_a_run_is_proved_by_each_process_itself(folder: Path) -> None:
    assert all(rank["proved"] for rank in ranks(folder, "shapes", 2))


def test_a_group_that_is_opened_later_is_told_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    private = start(noise_multiplier=1.0)
    batch = next(iter(private.data_loader))
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    with pytest.raises(RuntimeError, match="open the process group first, then call make_private") as caught:
        private.model(**batch)
    readable(caught.value)
    assert private.steps_done == 0


def test_parameters_in_other_pieces_are_refused_by_name() -> None:
    model = Classifier()
    model.first.weight.placements = ()  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match="first.weight is cut into pieces .* tensor, pipeline, context and expert"
    ) as caught:
        start(model)
    readable(caught.value)


@in_pieces
@cases(
    "what, match",
    [
        ("tensor parallel", "mlp.up_proj.weight is cut .* not by fully_shard on the model itself: tensor, pipeline"),
        ("blocks alone", "q_proj.weight is cut .* not by fully_shard on the model itself"),
        ("along columns", "leave out shard_placement_fn"),
        ("pipeline", "lies on 1 of 2 processes: pipeline, context and tensor parallelism are not followed"),
        ("no values", "has no values yet: materialise the model"),
        ("no logits", "keep_logits is False"),
        ("a proof", "weights in pieces cannot be copied"),
        ("afterwards", "fully_shard was called after make_private"),
        ("blocks afterwards", "fully_shard was called after make_private"),
        ("written", "second.weight was changed outside of a release"),
        ("no rule", "weights in pieces need a per-example rule"),
        ("put aside", "second.weight holds an unclipped gradient in the backward pass"),
    ],
)
def test_other_pieces_and_what_needs_a_whole_are_refused(folder: Path, what: str, match: str) -> None:
    for rank in ranks(folder, "pieces refused", 2):
        assert re.search(match, rank[what]), rank[what]
        readable(RuntimeError(rank[what].split(": ", 1)[-1]))
        assert rank["spent"] == 0


@cases("kind", ["FullyShardedDataParallel", "DeepSpeedEngine"])
def test_wrappers_that_take_gradients_away_are_refused_by_name(kind: str) -> None:
    wrapper = type(kind, (Classifier,), {})
    with pytest.raises(ValueError, match="give the bare model") as caught:
        start(wrapper())
    readable(caught.value)


def test_an_optimizer_that_leaves_steps_out_is_refused() -> None:
    model = Classifier()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        with pytest.raises(ValueError, match="gradient_accumulation_steps is 2") as caught:
            start(model, optimizer=optimizer)
        readable(caught.value)
    finally:
        accelerator.gradient_state._reset_state()


@cases(
    "what, match",
    [
        ("settings", "what make_private was given is not the same on rank 0 and rank 1"),
        ("seed", "what make_private was given is not the same"),
        ("public shapes", "Processes would run different numbers of passes"),
        ("size of the data", "the size of the data set is not the same"),
        ("data", "an example of the data set is not the same"),
        ("users", "the users of its examples is not the same"),
        ("weights", "a weight or a buffer of the model is not the same"),
        ("model", "the model is not the same"),
        ("one rank alone", "epochs is -1"),
        ("output", "give an output_dir that the first process may write to"),
        ("resume", "there is no ledger to resume"),
        ("public examples", "what the method was given to read is not the same"),
        ("learning rate", "a setting of the optimizer is not the same"),
        ("selection", "what DP-FROST chose is not the same"),
        ("mask", "a mask is not the same"),
    ],
)
def test_what_one_rank_cannot_do_is_refused_on_all(folder: Path, what: str, match: str) -> None:
    for rank in ranks(folder, "refusals", 2):
        assert match in rank[what], rank[what]
        assert rank["spent"] == 0
        readable(RuntimeError(rank[what].split(": ", 1)[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("ddp_e2e.py", ["torch.distributed.run", "--nproc-per-node", "2"]),
        ("fsdp2_lora.py", ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]),
    ],
)
def test_the_examples_reach_the_perplexity_of_one_process(name: str, launcher: list[str], tmp_path: Path) -> None:
    example = [str(Path(__file__).parents[2] / "examples" / name), "--records", "512", "--epochs", "2"]
    example += ["--unsafe-seed", "3"]
    said = []
    for group, launched in (("one", []), ("two", ["-m", *launcher])):
        command = [sys.executable, *launched, *example, "--output", str(tmp_path / group)]
        own = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=3600)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines()[1])
        assert Ledger.read(tmp_path / group / "ledger.jsonl").spent_steps == 4
    assert said[0].startswith("perplexity after 4 releases")
    assert said[0] == said[1]
    assert '"processes": 2' in (tmp_path / "two" / "card.json").read_text()


@pytest.mark.slow
def test_a_trainer_under_a_launcher(tmp_path: Path) -> None:
    run(tmp_path, "trainer:1", "trainer:2")
    (alone,), together = ranks(tmp_path, "trainer", 1), ranks(tmp_path, "trainer", 2)
    for found in together:
        assert found["rate"] == alone["rate"] == 6 / 18, "the batch of a device, times devices"
        assert found["epsilon"] == alone["epsilon"]
        assert found["kept"] == ["fastdp_state.pt"]
    assert equal([found["weights"] for found in together])


@pytest.mark.parametrize(
    ("place", "moment"),
    [
        *(("", MOMENTS[1]), pytest.param("", IN_PIECES[-1], marks=in_pieces)),
        *(
            pytest.param(f"{moment}:2; {moment}:1", moment, marks=[in_pieces, pytest.mark.slow])
            for moment in (MOMENTS[0], MOMENTS[2], *IN_PIECES[:-1])
        ),
    ],
    indirect=["place"],
)
def test_a_rank_that_is_killed_stops_the_others_and_loses_no_count(place: Path, moment: str) -> None:
    """Rank 1 is killed in its third release; then one process goes on."""
    left = torch.load(place / f"{moment}-2-0.pt", weights_only=False)
    assert left["said"].startswith("RankLost: another process of the group ended"), left
    assert left["seconds"] < 60
    assert left["released"] <= left["spent"]
    (resumed,) = ranks(place, moment, 1)
    assert resumed["said"].startswith("BudgetExceeded"), "the budget of six was spent, by both runs together"
    assert left["spent"] + resumed["released"] <= 6
    assert Ledger.read(place / moment / "ledger.jsonl").spent_steps == 6
