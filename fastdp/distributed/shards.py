"""Weights that torch's `fully_shard` has cut into pieces over several processes, as the engine sees them.

A pass gathers them module by module, and every gathering needs all processes. So what all do alike, the pass and the
backward pass of each micro-batch, is left to torch; whatever one of them does by itself, to trace a model or to check it,
happens within `Sharded.apart`: there each gathering is a round in which the others take part, whatever they are at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastdp.distributed import pieces
from fastdp.distributed.blocks import BlockReducer, Keep, LocalPieces
from fastdp.distributed.ranks import RankLost, Ranks, peers_required
from fastdp.ops.memory import free_bytes

T = TypeVar("T")
#: The group that a process asks for which wants no gathering any more.
_DONE = -1
#: The share of a device's free memory up to which sums stay whole over a logical batch, and are reduced once.
WHOLE_SUMS = 0.125
#: Numbers of a tensor that are copied in float64 at once.
_PART = 2**22


@dataclass(frozen=True)
class Measured:
    """Of a gradient, the values that are compared, and the norm of the whole of it."""

    values: torch.Tensor
    norm: float


def norm(values: torch.Tensor) -> float:
    """The norm of a tensor's numbers in float64, of which no copy is made as a whole."""
    return float(torch.stack([part.double().norm() for part in values.reshape(-1).split(_PART)]).norm())


class UnshardedParameters:
    """Weights that this process has as a whole: what is asked of `Sharded`, and nothing to do."""

    #: Whether weights are in pieces; and whether sums are, before a logical batch is complete.
    cut = cuts_sums = False
    #: What `agreed` was asked for.
    wanted = False

    def read(self, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
        """Parameters as the model's modules read them."""
        return dict(parameters)

    def cuts(self, name: str) -> bool:
        """Whether a parameter is in pieces."""
        return False

    def agreed(self, wanted: bool) -> bool:
        """Whether all ranks do what this one wants."""
        return wanted

    def answer(self, wanted: bool) -> None:
        """Do from here on what any rank wanted."""

    def alike(self, number: int) -> bool:
        """Whether all ranks are here with the same number."""
        return True

    def apart(self) -> AbstractContextManager[None]:
        """Meanwhile each rank may run passes of its own; what fails on one fails on all."""
        return nullcontext()

    def gathered(self) -> AbstractContextManager[None]:
        """What a backward pass reads is there meanwhile, and no weight afterwards but in its pieces."""
        return nullcontext()

    def settle(self) -> None:
        """Have modules hold their weights in pieces."""

    def stray(self) -> str | None:
        """The name of a parameter whose gradient was put aside, where nobody looks for it; it is forgotten."""
        return None

    def running(self, forward: Callable[..., T]) -> Callable[..., T]:
        """A forward pass that may fail and be run again."""
        return forward

    def reducer(self, names: Iterable[str], keep: Keep) -> BlockReducer | LocalPieces:
        """What takes whole sums over this rank's units, and keeps this rank's pieces of those over all units."""
        return LocalPieces({}, keep)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """These parameters, one block after another."""
        return list(names)

    def joined(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        """A parameter's whole sum, where ``kept`` is what this rank keeps of it."""
        return kept

    def counts(self, name: str) -> bool:
        """Whether it is for this rank to count what it keeps of a parameter's sum, of which others may keep the same."""
        return True

    def counted(self, numbers: torch.Tensor) -> torch.Tensor:
        """What was counted, over all ranks."""
        return numbers

    def measured(self, name: str, gradient: torch.Tensor) -> Measured:
        """What is compared of a gradient of one unit."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        return Measured(gradient, norm(gradient))

    def release(self) -> None:
        """Give the model back as it was."""


class Sharded(UnshardedParameters):
    """The pieces of a model's weights, and the rounds in which ranks gather them. Made by all ranks at once.

    The model's root, and perhaps modules within, went through `fully_shard`.
    """

    cut = True

    def __init__(self, model: Any, ranks: Ranks):
        from torch.distributed.fsdp import FSDPModule

        self.model = model
        self.ranks = ranks
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._groups = [group for module in self._modules for group in _groups(module)]
        #: Whether there was a pass since torch's notes of passes were last cleared.
        self._passed = False
        self._apart = False
        #: What `agreed` was asked for here, and what all ranks do.
        self.wanted = False
        self._agreed: bool | None = None
        self._parameters: dict[str, torch.nn.Parameter] = {}
        #: Trained parameters of each group of torch's, in the order in which sums are reduced.
        self._blocks: list[dict[str, torch.nn.Parameter]] = []
        self._keeps_whole_sums = False
        # Gradients are added up by the engine, after they are clipped.
        self._reduced = [group.reduce_grads for group in self._groups]
        self.model.set_requires_gradient_sync(False)

    def read(self, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
        """Parameters as modules read them in a pass: the same objects in every pass, with values only while it lasts."""
        self.settle()
        self._parameters = dict(parameters)
        names = {id(parameter): name for name, parameter in parameters.items()}
        # The backward pass comes to the last block first, and to the root's embedding at the end.
        every = [[names.get(id(held.sharded_param)) for held in group.fsdp_params] for group in reversed(self._groups)]
        self._blocks = [{name: parameters[name] for name in block if name is not None} for block in every]
        whole = 4 * sum(p.numel() for block in self._blocks for p in block.values())
        self._keeps_whole_sums = not self._anyone(whole > WHOLE_SUMS * free_bytes(self._device))
        left = {name for name, parameter in parameters.items() if pieces.is_dtensor(parameter)}
        found = dict(parameters)
        for module in self._modules:
            with peers_required(only_exchanges=False):
                module.unshard()
            for name in list(left):
                now = self.model.get_parameter(name)
                if not pieces.is_dtensor(now):
                    found[name] = now
                    left.remove(name)
            module.reshard()
        return found

    def cuts(self, name: str) -> bool:
        return pieces.is_dtensor(self._parameters[name])

    def agreed(self, wanted: bool) -> bool:
        """Whether a rank wanted this the first time, or before ranks met for a release; within `apart`, whether this one does.

        Later wishes are kept in `wanted` and answered by `answer`, so that no microbatch waits.
        """
        if self._apart:
            return wanted
        self.wanted |= wanted
        if self._agreed is None:
            self._agreed = self._anyone(wanted)
        return self._agreed

    def answer(self, wanted: bool) -> None:
        self._agreed = wanted or self._agreed

    def alike(self, number: int) -> bool:
        """Whether all ranks are here with the same number; within `apart`, each rank is by itself."""
        return self._apart or len(set(self._numbers(number))) == 1

    def _anyone(self, wanted: bool) -> bool:
        return any(self._numbers(int(wanted)))

    def _numbers(self, number: int) -> list[int]:
        return self.ranks.numbers(number, self._device)

    @property
    def _device(self) -> torch.device:
        return self._groups[0].device  # type: ignore[no-any-return]

    @contextmanager
    def apart(self) -> Iterator[None]:
        if self._apart:
            yield
            return
        self.settle()
        usual = [group._all_gather_comm for group in self._groups]
        for index, group in enumerate(self._groups):
            group._all_gather_comm = _GatherInTurn(self, index, usual[index])
        self._apart = True
        try:
            with self.ranks.together():
                failure: Exception | None = None
                try:
                    yield
                except Exception as error:
                    failure = error
                self.settle()
                self.wait_turn(_DONE)
                if failure is not None:
                    raise failure
        finally:
            self._apart = False
            for group, comm in zip(self._groups, usual):
                group._all_gather_comm = comm

    def wait_turn(self, index: int) -> None:
        """Take part in the gatherings that other ranks ask for until it is group ``index``'s turn, or everybody is done."""
        while True:
            turn = next((asked for asked in self._numbers(index) if asked != _DONE), _DONE)
            if turn == index:
                return
            self._take_part(self._groups[turn])

    def _take_part(self, group: Any) -> None:
        own = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in _own_pieces(group)])
        among = group._all_gather_process_group
        with peers_required():
            dist.all_gather_single(own.new_empty(own.numel() * among.size()), own, group=among)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """What a backward pass reads outside of the modules within is there meanwhile; torch gathers the rest.

        A pass that starts within the model, at units' losses, does not come by the hook on the model's own output.
        """
        with peers_required(only_exchanges=False):
            self.model.unshard()
        try:
            with peers_required(only_exchanges=False):
                yield
        finally:
            self.settle()

    def settle(self) -> None:
        """Have modules hold their weights in pieces, as after a backward pass.

        Torch also keeps the order of passes that no backward pass followed, and would gather by it ahead of need: on those
        ranks alone that made them.
        """
        for module in self._modules:
            module.reshard()
        if self._passed:
            self.model.reset_iter_state()
            self._passed = False

    def stray(self) -> str | None:
        """With a `reduce_dtype` torch takes gradients that are not to be added up yet away from parameters, and keeps them."""
        found = None
        for held in (held for group in self._groups for held in group.fsdp_params):
            if held.unsharded_accumulated_grad is not None:
                held.unsharded_accumulated_grad, found = None, held.sharded_param
        return None if found is None else next(n for n, p in self.model.named_parameters() if p is found)

    def running(self, forward: Callable[..., T]) -> Callable[..., T]:
        """A forward pass after whose failure another may begin."""

        def run(*args: Any, **kwargs: Any) -> T:
            try:
                with peers_required(only_exchanges=False):
                    found = forward(*args, **kwargs)
            except RankLost:
                raise
            except Exception:
                self.model.reset_iter_state()
                raise
            self._passed = True
            if not torch.is_grad_enabled():
                # Without a backward pass to come, nothing else would.
                self.settle()
            return found

        return run

    @property
    def cuts_sums(self) -> bool:  # type: ignore[override]
        """Whether each microbatch's sums are reduced to pieces, as whole ones would take much of the memory."""
        return self._apart or not self._keeps_whole_sums

    def reducer(self, names: Iterable[str], keep: Keep) -> BlockReducer | LocalPieces:
        """What takes whole sums of these parameters, and keeps this rank's pieces; within `apart`, of its own sums."""
        wanted = set(names)
        if self._apart:
            return LocalPieces({name: self._parameters[name] for name in wanted}, keep)
        blocks = [{name: p for name, p in block.items() if name in wanted} for block in self._blocks]
        return BlockReducer([block for block in blocks if block], self._device, keep)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """These parameters, one block after another, and then those that are not in pieces."""
        wanted = dict.fromkeys(names)
        return list(dict.fromkeys([name for block in self._blocks for name in block if name in wanted]) | wanted)

    def joined(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        """A parameter's whole sum, from the pieces of all ranks. Collective."""
        with peers_required():
            return pieces.full_tensor(pieces.from_piece(kept, self._parameters[name]))

    def counts(self, name: str) -> bool:
        """Of replicas of a piece one is counted, and of what all have the first rank's."""
        parameter = self._parameters[name]
        return pieces.counts(parameter) if pieces.is_dtensor(parameter) else self.ranks.leads

    def counted(self, numbers: torch.Tensor) -> torch.Tensor:
        """What was counted, over all ranks. Collective."""
        found = {"counted": numbers}
        self.ranks.add(found, found)
        return found["counted"]

    def measured(self, name: str, gradient: torch.Tensor) -> Measured:
        own = pieces.part(gradient, self._parameters[name])
        return Measured(own, norm(gradient))

    def release(self) -> None:
        self.settle()
        for group, reduced in zip(self._groups, self._reduced):
            group.reduce_grads = reduced


class _GatherInTurn:
    """A gathering that waits for its turn among those that other ranks ask for."""

    def __init__(self, shards: Sharded, index: int, usual: Any):
        self.shards, self.index, self.usual = shards, index, usual

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.usual.allocate(*args, **kwargs)  # type: ignore[no-any-return]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Gather, as bytes: those who only take part do not look at numbers."""
        self.shards.wait_turn(self.index)
        with peers_required():
            dist.all_gather_single(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group=group)


def weights_of(model: torch.nn.Module, ranks: Ranks) -> UnshardedParameters:
    return Sharded(model, ranks) if any(map(pieces.is_dtensor, model.parameters())) else UnshardedParameters()


def read_dtypes(model: torch.nn.Module) -> set[torch.dtype]:
    """The floating-point dtypes of a model's parameters, and those in which passes read them."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    for module in model.modules() if any(map(pieces.is_dtensor, model.parameters())) else ():
        if hasattr(module, "_get_fsdp_state"):
            found |= {group.mp_policy.param_dtype for group in _groups(module)} - {None}
    return found


def check_pieces(model: torch.nn.Module) -> None:
    """Raise ValueError for weights that are cut in another way than `fully_shard` does over all processes of the group."""
    cut = {name: parameter for name, parameter in model.named_parameters() if pieces.is_dtensor(parameter)}
    if not cut:
        return
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"{next(iter(cut))} is cut into pieces and not by fully_shard on the model itself: tensor, "
            "pipeline, context and expert parallelism are not followed. Use fully_shard."
        )
    if not hasattr(model, "reset_iter_state") or not hasattr(FSDPModule, "set_custom_all_gather"):
        raise ValueError(f"weights in pieces need torch 2.13 or later, and this is {torch.__version__}")
    for name, parameter in cut.items():
        held: Any = parameter
        if held.device_mesh.size() != torch.distributed.get_world_size():
            raise ValueError(
                f"{name} lies on {held.device_mesh.size()} of {torch.distributed.get_world_size()} processes: pipeline, context "
                "and tensor parallelism are not followed; give fully_shard a mesh of all processes"
            )
        for placement in held.placements:
            if type(placement).__name__ not in ("Shard", "Replicate") or getattr(placement, "dim", 0) != 0:
                raise ValueError(
                    f"{name} is cut as {placement}, and only fully_shard's own way along the first dimension is followed: leave "
                    "out shard_placement_fn, and tensor or expert parallelism"
                )
        if parameter.device.type == "meta":
            raise ValueError(f"{name} has no values yet: materialise the model (to_empty, then its weights) first")
    for module in model.modules():
        if isinstance(module, FSDPModule) and any(g._use_post_forward_mesh for g in _groups(module)):
            raise ValueError("reshard_after_forward is a number of processes: give fully_shard True or False")


def _groups(module: Any) -> list[Any]:
    """The groups of parameters that torch gathers together for a module that went through `fully_shard`."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def _own_pieces(group: Any) -> list[torch.Tensor]:
    """This rank's part of a gathering, whether or not it has the gathered weights just now."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    found = []
    for held in group.fsdp_params:
        state, held.sharded_state = held.sharded_state, ShardedState.SHARDED
        try:
            found += held.all_gather_inputs
        finally:
            held.sharded_state = state
    return found
