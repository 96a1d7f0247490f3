"""Private runs in groups of processes, forked from one parent; run as a program by `conftest.py`.

    python -m tests.private.ranked FOLDER SCENARIO SIZE [SIZE ...]

The parent imports everything, runs no backward pass (autograd does not survive a fork) and forks the processes of one group
after another. What each rank found is saved in FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import dp_accounting  # noqa: F401 - what ranks send each other are its events: a second in each child
import torch
import torch._dynamo  # an optimizer imports it, which would take each child two seconds
import torch.distributed as dist
import transformers  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader

import fastdp
import fastdp.private.prove as proving
from fastdp.distributed import pieces, shards
from fastdp.methods.rapft import NoisyMap, PublicMap
from fastdp.private.preparation import Findings, Outcome
from tests.engine.models import build
from tests.engine.runs import Classifier, collate, examples

#: Steps of every run of the matrix: one after the second selection of "sums".
STEPS = 5


def texts(count: int = 18, tokens: int = 9) -> list[dict[str, torch.Tensor]]:
    """Sequences of different lengths, some much rarer than others in the batches' share of a rank."""
    generator = torch.Generator().manual_seed(4)
    return [{"input_ids": torch.randint(3, 40, (tokens - i % 4,), generator=generator)} for i in range(count)]


def padded(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([i["input_ids"] for i in items], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(i["input_ids"]) for i in items], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Examples one after another in rows of 20 tokens; the space left at the end belongs to nobody."""
    rows: list[list[int]] = [[]]
    for index in reversed(range(len(items))):  # packers put examples where they fit, in any order
        if sum(len(items[i]["input_ids"]) for i in [*rows[-1], index]) > 20:
            rows.append([])
        rows[-1].append(index)
    ids = torch.zeros(len(rows), 20, dtype=torch.int64)
    labels, units = torch.full_like(ids, -100), torch.full_like(ids, -1)
    positions = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        at = 0
        for index in row:
            text = items[index]["input_ids"]
            here = (number, slice(at, at + len(text)))
            ids[here] = labels[here] = text
            units[here], positions[here] = index, torch.arange(len(text))
            at += len(text)
        positions[number, at:] = torch.arange(20 - at)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "units": units}


def _selecting(**settings: Any) -> fastdp.DPFrost:
    return fastdp.DPFrost(unfreezing_ratio=0.5, selection_noise_multiplier=2.0, selection_rate=0.5, **settings)


#: model, tuning, options of make_private.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tied gpt2": ("gpt2", "full", {}),
    "llama": ("llama", "full", {"method": fastdp.DPSGD(max_grad_norm=0.5)}),
    "lora": ("llama", "lora", {}),
    "bitfit": ("phi", "bitfit", {}),
    "users": ("llama", "full", {"user_ids": [i // 3 for i in range(18)], "max_examples_per_user": 2}),
    "packed": ("llama", "full", {"unit_map": "units"}),
    "rapft": ("gpt2", "full", {"method": fastdp.RapFT(NoisyMap(2.0, 0.5))}),
    "frost": ("llama", "full", {"method": _selecting(selection_steps=2)}),
    "selected anew": ("llama", "lora", {"method": _selecting(selection_steps=2, select_every=4)}),
    "public": ("gpt2", "full", {"method": fastdp.RapFT(PublicMap([padded(texts(3))]), map_after=2, map_every=3)}),
    "axes": ("llama", "full", {"method": fastdp.RapFT(NoisyMap(2.0, 0.5), allocation="axes")}),
    "random": ("phi", "bitfit", {"method": fastdp.DPFrost(0.5, choose_by="random")}),
    "layers": ("gpt2", "full", {"method": fastdp.DPSGD(groups="per_layer")}),
    "adaptive": ("llama", "lora", {"method": fastdp.DPSGD(adaptive=fastdp.AdaptiveClipping(count_noise_std=2.0))}),
}

#: Those whose methods make releases besides steps.
SELECTING = ("rapft", "frost", "selected anew", "public", "axes", "random")


def trained(case: str, prepare: Callable[[nn.Module], None] = lambda model: None) -> dict[str, Any]:
    """One run of the matrix: the weights after `STEPS` steps, and what the run says of itself."""
    name, tuning, options = CASES[case]
    model: Any = build(name, tuning)
    model.config.use_cache = False
    prepare(model)
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
    loader: DataLoader = DataLoader(
        texts(),  # type: ignore[arg-type]
        batch_size=3 if "user_ids" in options else 6,
        collate_fn=packed if "unit_map" in options else padded,
    )
    given = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 3, "unsafe_seed": 5, **options}
    # What ranks verify together takes as long as four steps: in one case, and in `looked`.
    given["self_check"] = case == "tied gpt2"
    # Rounded to a grid, a difference in the last digit of a sum may move a weight by a step of the grid.
    private = fastdp.make_private(model, optimizer, loader, max_physical_batch_size=2, secure_rounding=False, **given)
    go_on(private, STEPS)
    card = private.card()
    private.detach()
    return {
        "weights": whole(model),
        "processes": card["model"]["processes"],
        "route": private.route,
        "spent": card["steps"]["spent"],
    }


def shard(model: nn.Module, **options: Any) -> None:
    """`fully_shard`, as its documentation says: each block, then the model."""
    from torch.distributed.fsdp import fully_shard

    for module in list(model.modules()):
        if type(module).__name__.endswith(("Block", "DecoderLayer")):
            fully_shard(module, **options)
    fully_shard(model, **options)


def checkpointed(model: nn.Module) -> None:
    """The same, whose blocks compute their activations anew in the backward pass."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    shard(model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, from all its pieces."""
    return {name: pieces.full_tensor(parameter).clone() for name, parameter in model.named_parameters()}


def matrix(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """The cases that are asked for."""
    return {case: trained(case) for case in os.environ.get("CASES", ",".join(CASES)).split(",")}


def sharded(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """The same with weights in pieces, of blocks that are checkpointed or, where a method selects, of others."""
    found = {}
    for case in os.environ.get("SHARDED", ",".join(CASES)).split(","):
        way = shard if case in SELECTING else checkpointed
        # Sums are reduced in each microbatch, or stay whole over a logical batch.
        shards.WHOLE_SUMS = 0.0 if way is shard else 1.0
        found[case] = trained(case, way)
    return found


def small(**options: Any) -> Any:
    """A run of a small classifier that is ready to train."""
    model = options.pop("model", None) or Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.1))
    data = options.pop("data", None) or examples()
    loader: DataLoader = DataLoader(data, batch_size=options.pop("batch_size", 8), collate_fn=collate)  # type: ignore[arg-type]
    given = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 2, **options}
    return fastdp.make_private(model, optimizer, loader, **given)


def go_on(private: Any, steps: int, at: Callable[[str, int], None] = lambda moment, step: None) -> None:
    """Take steps, calling ``at`` before each."""
    done = 0
    while done < steps:
        for batch in private.data_loader:
            at("forward", done)
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
            done += private.last_step_done
            if done == steps:
                return


def said(call: Callable[[], Any], otherwise: str = "done") -> str:
    """What a call is refused with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return otherwise


def refusals(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """What every rank is told where one of them is not like the others."""
    second = rank == 1
    blocked = folder / "a file"
    if rank == 0:
        blocked.write_text("")
    tried: dict[str, Callable[[], Any]] = {
        "settings": lambda: small(noise_multiplier=2.0 if second else 1.0),
        "seed": lambda: small(unsafe_seed=rank),
        "public shapes": lambda: small(shapes="public"),
        "size of the data": lambda: small(data=examples(24 - rank)),
        "data": lambda: small(data=examples(seed=rank)),
        "users": lambda: small(user_ids=[(i + rank) // 2 for i in range(24)], max_examples_per_user=2, batch_size=4),
        "weights": lambda: small(model=Classifier(seed=rank)),
        "model": lambda: small(model=Classifier() if not second else nn.Sequential(nn.Linear(5, 3))),
        "one rank alone": lambda: small(epochs=-1 if second else 2),
        "output": lambda: small(output_dir=blocked),
        "resume": lambda: small(output_dir=folder / "nothing", resume=True),
        "public examples": lambda: small(method=fastdp.RapFT(PublicMap([{"x": torch.full((1, 5), float(rank))}]))),
    }
    found: dict[str, Any] = {name: said(lambda: start().detach(), "taken") for name, start in tried.items()}  # noqa: B023

    def step(private: Any, change: Callable[[str, int], None] = lambda moment, step: None) -> str:
        ended = said(lambda: go_on(private, 1, change))
        found["spent"] = found.get("spent", 0) + private.steps_done
        private.detach()
        return ended

    private = small()
    private.optimizer.param_groups[0]["lr"] = 0.1 + rank
    found["learning rate"] = step(private)
    found["selection"] = step(small(method=Drifting(0.9, choose_by="random")))
    masked = small(method=fastdp.RapFT(PublicMap([collate(examples()[:6])])))
    found["mask"] = step(masked, lambda *_: second and next(iter(masked.outcome.values())).logical_not_())
    return found


class Drifting(fastdp.DPFrost):
    """Comes to something else on each rank."""

    def conclude(self, findings: Findings) -> Outcome:
        outcome = super().conclude(findings)
        return {**outcome, "observed": outcome["observed"] + dist.get_rank()}


def shapes(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Runs whose ranks have little to do: fewer units than ranks, and draws that are mostly empty."""
    found = {}
    for name, options in {
        "one example": {"data": examples(1), "batch_size": 1, "epochs": 2},
        "fewer than ranks": {"data": examples(6), "batch_size": 1, "epochs": 1},
        "criterion": {"loss_reduction": None, "batch_size": 2, "epochs": 0.25},
        "shuffled": {"sampling": "shuffled", "data": examples(9), "batch_size": 3, "epochs": 1},
    }.items():
        private = small(unsafe_seed=2, **options)
        go_on(private, private.total_steps)
        found[name] = {n: p.detach().clone() for n, p in private.model.named_parameters()}
        private.detach()
    model = build("llama", "lora")
    model.config.use_cache = False
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    rows: DataLoader = DataLoader(texts(6), batch_size=1, collate_fn=packed)  # type: ignore[arg-type]
    private = fastdp.make_private(
        model, optimizer, rows, noise_multiplier=1.0, epochs=0.5, unit_map="units", unsafe_seed=1, secure_rounding=False
    )
    go_on(private, 3)
    found["packed"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    private.detach()
    # A run that is replayed belongs to its own process.
    if size == 2:
        private, extremes = small(data=examples(6), batch_size=2, epochs=1), proving.extremes
        # One unusual record is enough to see whether ranks wait for each other.
        proving.extremes = lambda *given: islice(extremes(*given), 1)  # type: ignore[assignment]
        found["proved"] = bool(private.prove())
        private.detach()
    # Keys of a group come from rank 0's operating system.
    private = small(noise_multiplier=50.0)
    go_on(private, 1)
    found["keyed"] = {n: p.detach().clone() for n, p in private.model.named_parameters()}
    private.detach()
    return found


def killed(
    moment: str, rank: int, size: int, folder: Path, *, model: nn.Module | None = None, name: str | None = None
) -> dict[str, Any]:
    """Rank 1 ends at a given moment of the third release; what the others see, and how fast."""
    from fastdp.distributed.blocks import BlockReducer
    from fastdp.engine.clip.accumulator import Accumulator
    from fastdp.private.release import ReplicatedLedger

    place = folder / (name or moment)
    private = small(model=model, output_dir=place, resume=(place / "ledger.jsonl").exists())
    began = 0.0
    released = 0

    def ending(owner: Any, name: str, *, after: bool) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = inner(*args, **kwargs) if after else None
            if rank == 1 and released == 2:
                os._exit(9)
            return found if after else inner(*args, **kwargs)

        setattr(owner, name, call)

    if moment == "before the record":
        ending(ReplicatedLedger, "record", after=False)
    elif moment == "after the record":
        ending(ReplicatedLedger, "record", after=True)
    elif moment == "in the reduction":
        ending(*((Accumulator, "merge") if model is None else (BlockReducer, "finish")), after=False)

    def clock(_moment: str, step: int) -> None:
        nonlocal began, released
        began, released = time.monotonic(), step

    ended = said(lambda: go_on(private, 6, clock))
    return {"said": ended, "seconds": time.monotonic() - began, "released": released, "spent": private.steps_done}


def trainer(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """`DPTrainer`, as a launcher would start it."""
    from transformers import TrainingArguments

    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": str(size)}
    model = build("gpt2")
    arguments = TrainingArguments(
        output_dir=str(folder / f"trainer-{size}"),
        per_device_train_batch_size=6 // size,
        max_steps=4,
        learning_rate=0.1,
        optim="sgd",
        save_steps=2,
        ddp_find_unused_parameters=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=2,
    )
    privacy = fastdp.PrivacyArguments(
        noise_multiplier=1.0, target_delta=1e-3, max_physical_batch_size=2, method=fastdp.DPSGD(max_grad_norm=0.5)
    )
    # Keys of a run cannot be stated here, so that only what both ranks get can be compared.
    found = fastdp.DPTrainer(model, arguments, train_dataset=texts(), data_collator=padded, privacy=privacy)
    found.train()
    return {
        "rate": found.private.sample_rate,  # type: ignore[union-attr]
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "kept": sorted(p.name for p in (folder / f"trainer-{size}").glob("checkpoint-2/fastdp_state.pt")),
        "epsilon": [entry["epsilon"] for entry in found.state.log_history if "epsilon" in entry],
    }


def crashes(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A run of one process that is killed between lines."""
    from tests.private.killed_run import crashed

    (folder / "crashes").mkdir()
    return crashed(folder / "crashes", int(os.environ.get("SEED", 2)), int(os.environ.get("BUDGET", 6)))


def unfinished(epochs: int) -> list[Any]:
    """What a script still holds that made one epoch of so many, and left another loop among the batches that check it."""
    model, optimizer, data = kept = list(small(epochs=epochs))
    for batch in data:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer, data = small(noise_multiplier=0.0, target_delta=None, loss_reduction="mean")
    batches = iter(data)
    for batch in islice(batches, 3):
        model(batch["x"])["logits"].square().mean().backward()
        optimizer.step()
    return [*kept, model, optimizer, batches]


#: Moments of a release at which a rank is killed.
MOMENTS = ("before the record", "after the record", "in the reduction")
Scenario = Callable[[int, int, Path], dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {
    "matrix": matrix,
    "sharded": sharded,
    "refusals": refusals,
    "shapes": shapes,
    "trainer": trainer,
    "crashes": crashes,
    **{moment: partial(killed, moment) for moment in MOMENTS},
}


def group(scenario: str, size: int, folder: Path, scenarios: Mapping[str, Scenario]) -> list[int]:
    """Fork the processes of one group; their exit statuses."""
    meeting = folder / f"meeting-{scenario}-{size}-{time.monotonic_ns()}"
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                if size > 1 or scenario not in SCENARIOS or scenario == "sharded":
                    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
                found = scenarios[scenario](rank, size, folder)
                torch.save(found, folder / f"{scenario}-{size}-{rank}.pt")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    from tests.private import killed_run as killed_run, sharded as cut

    for scenario, size in (each.split(":") for each in sys.argv[2:]):
        if scenario == "ends":
            # A script that ends by itself, with its run still there, after one epoch of so many.
            if (child := os.fork()) == 0:
                os.dup2(os.open(place / f"ends-{size}.txt", os.O_WRONLY | os.O_CREAT), 2)
                kept = unfinished(int(size))
                sys.exit()
            os.waitpid(child, 0)
            continue
        statuses = group(scenario, int(size), place, {**SCENARIOS, **cut.SCENARIOS})
        print(scenario, size, statuses, flush=True)
