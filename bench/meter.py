"""The prices of GPUs, and a meter that counts and prices every operation on tensors of torch's ``meta`` device."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fastdp.calls.marks import Marks

META = torch.device("meta")


@dataclass(frozen=True)
class Gpu:
    """What a price is made of: of an H100, what its kernels took within steps (`bench/results/gpu/profile.json`).

    Shares of kernels written here are besides about nine tenths of what their compiled loops allow (docs/kernels.md).
    """

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes a second that a copy reaches
    half: float  # operations a second that cuBLAS reaches in bfloat16, beside `start`
    single: float  # and in float32, without tensor cores
    words: float  # 32-bit integer operations a second
    processors: int = 132
    start: float = (
        5e-6  # seconds of a product of torch's, of a sum over rows, and of a kernel of ours, beside the work itself
    )
    odd: float = 1.2e14  # operations a second of cuBLAS's where rows of 16-bit numbers do not begin at every 16 bytes
    own_share: float = 0.48  # of cuBLAS's rate, in products of our kernels
    wide_share: float = 0.66  # the same of those whose tiles are 128 by 256
    #: The same of such weighted sums and of Gram matrices, by tensor descriptors (`kernels-described.json` beside the profile).
    sums_share: float = 0.74
    gram_share: float = 0.58
    attention: float = 0.5  # the same of torch's attention
    own_bandwidth: float = 0.55  # of a copy's bandwidth, in our kernels that read more than they multiply
    launch: float = 5e-6  # of a torch operation from Python
    kernel_launch: float = 1.25e-5  # of a Triton kernel from Python
    captured_launch: float = 2e-6  # of either, replayed from a graph


GPUS = {
    "h100": Gpu("NVIDIA H100 SXM", 80 << 30, 2.95e12, 8.0e14, 5.0e13, 1.44e13),
    "h200": Gpu("NVIDIA H200", 141 << 30, 4.2e12, 8.0e14, 5.0e13, 1.44e13),
}
#: Operations for each rounded normal, and for what an update makes of it, at the rate of integers: so many that they take as
#: long as on an H100, where noise that is rounded took 5.6 ps a number, and an update with it 8.9 in steps (8.8 BERT's).
PER_NORMAL, PER_UPDATE = 81, 35
#: Of the former, for each double round of ChaCha below the ten of ChaCha20. Instructions are what a normal waits for: its 152
#: where it is rounded and 117 where it is not would take 5.1 and 3.9 ps if 128 were issued a clock, and took 5.6 and 4.2, where
#: those of the pipe for logic would take 3.7 and 3.5. A double round has 99 for 16 normals.
PER_DOUBLE_ROUND = PER_NORMAL * 99 / 16 / 152
#: And for each pair of moments that are rounded at random: a hash, and both roundings.
PER_ROUNDING = 12
#: How many tensors one launch of torch's multi-tensor kernels takes, by how many lists it reads.
_LIST_LIMITS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


#: Shares of a copy's bandwidth that these operations of torch's reach.
_BANDWIDTH_SHARES = {"aten::_fused_adamw_": 0.75, "aten::_log_softmax": 0.52, "aten::_log_softmax_backward_data": 0.74}
#: The same of sums over the rows of a matrix, which biases' gradients are, and of the kernel for a layer norm's own gradients.
_ROWS_SHARE, _NORMS_SHARE = 0.43, 0.3
#: Ops of ours that read as fast as a copy: norms by Gram matrices, and those that make noise.
_READ_FAST = ("gram_norms", "add_noise_", "adamw_noise_steps_")


class HostWaits(RuntimeError):
    """The host would wait for the device."""


@dataclass
class Tally:
    """What a step comes to."""

    launches: int = 0
    kernels: int = 0
    bytes: int = 0
    operations: float = 0.0
    seconds: float = 0.0
    captured_seconds: float = 0.0
    start_bytes: int = 0
    peak_bytes: int = 0
    #: How often the model's own code made the host wait, which no engine can help.
    model_waits: int = 0
    #: Of a micro-batch, in a private step.
    backward_passes: int = 1
    microbatches: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    spent: Counter[str] = field(default_factory=Counter)

    def mean(self, steps: int) -> Tally:
        """What one of so many steps comes to; peaks stay those of all."""
        for name in ("launches", "kernels", "bytes", "operations", "seconds", "captured_seconds", "microbatches"):
            setattr(self, name, type(getattr(self, name))(getattr(self, name) / steps))
        for own in (self.counts, self.spent):
            own.update({key: round(value / steps) - value for key, value in own.items()})
        return self


class Meter(TorchDispatchMode):
    """Follows operations and storages on the meta device; counts and prices while `measuring`, and refuses to wait then."""

    def __init__(self, gpu: Gpu, granularity: int = 512) -> None:
        super().__init__()
        self.gpu, self.granularity = gpu, granularity
        self.live = self.peak = 0
        self.tally: Tally | None = None
        self._storages: dict[int, int] = {}
        self._own: list[_Own] = []
        #: Answers to whether anything is out of the ordinary, which nothing is.
        self._exceptions: Marks[None] = Marks()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Tally]:
        """One step."""
        self.tally, self.peak = Tally(start_bytes=self.live), self.live
        try:
            yield self.tally
            self.tally.peak_bytes = self.peak
        finally:
            self.tally = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _on_meta((args, kwargs))
        answer = self._asked(func, args, kwargs, given)
        if answer is not None:
            return answer
        result = func(*args, **kwargs)
        found = _on_meta(result)
        if func is torch.ops.aten.any.default:
            self._exceptions[result] = None
        if not given and not found:
            return result
        fresh = sum(self._follow(t) for t in found)
        if self._own:
            self._own[-1].allocated += fresh
        if self.tally is not None and not _is_free(func, found, fresh):
            launches, operations = _launches(args), _operations(func, args, kwargs, result)
            moved = [*given, *(t for t in found if all(t is not own for own in given)), *_written(func, args)]
            if func is torch.ops.aten.native_layer_norm_backward.default and any(args[-1][1:]):
                # Torch's gradients of weight and bias are a kernel of their own.
                both = _size(args[0]) + _size(args[1])
                self.add("layer norms' own gradients", both, 0.0, both / (_NORMS_SHARE * self.gpu.bandwidth), 1, 0)
            size = sum(map(_size, moved))
            work = self._work_of_torch(func, args, size, operations, [*given, *found])
            self.add(str(func).removesuffix(".default"), size, operations, work, launches, 0)
        return result

    def add(self, name: str, moved: float, operations: float, work: float, launches: int, kernels: int) -> None:
        """Price one operation of ``work`` seconds on the device and this many launches, ``kernels`` of them Triton's."""
        tally = self.tally
        if tally is None:
            return
        host = (launches - kernels) * self.gpu.launch + kernels * self.gpu.kernel_launch
        tally.launches += launches
        tally.kernels += kernels
        tally.bytes += int(moved)
        tally.operations += operations
        tally.seconds += max(work, host)
        tally.captured_seconds += max(work, launches * self.gpu.captured_launch)
        tally.counts[name] += launches
        tally.spent[name] += round(1e9 * max(work, host))

    def _work_of_torch(
        self, func: Any, args: Any, moved: float, operations: float, tensors: list[torch.Tensor]
    ) -> float:
        """Seconds on the device of one of torch's own operations."""
        gpu, name = self.gpu, func._schema.name
        if func is torch.ops.aten.sum.dim_IntList and 0 in args[1]:
            return gpu.start + moved / (_ROWS_SHARE * gpu.bandwidth)
        read = moved / (_BANDWIDTH_SHARES.get(name, 1.0) * gpu.bandwidth)
        if not operations:
            return read
        half = any(t.dtype.itemsize == 2 for t in tensors)
        if "attention" in name:
            return max(read, gpu.start + operations / (gpu.attention * gpu.half))
        odd = half and any(size % 8 for t in tensors for size in t.shape[-2:])
        rate = (gpu.odd if odd else gpu.half) if half else gpu.single
        return max(read, gpu.start + operations / rate)

    def wait(self, why: str) -> None:
        """The host is about to wait for the device, which nothing of ours may make it do within a step."""
        if self.tally is None:
            return
        frame: Any = sys._getframe(1)
        while (
            frame.f_back is not None
            and frame.f_globals["__name__"].split(".")[0] == "torch"
            or frame.f_globals is globals()
        ):
            frame = frame.f_back
        where = frame.f_globals.get("__name__", "")
        if where.split(".")[0] == "fastdp":
            raise HostWaits(f"the host would wait for the device: {why}, in {where}, line {frame.f_lineno}")
        self.tally.model_waits += 1

    def _asked(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """What the host is told of values that nobody has; None for an operation that asks for none."""
        if func is torch.ops.aten._to_copy.default:
            to = kwargs.get("device")
            if given and to is not None and torch.device(to).type == "cpu":
                self.wait("a tensor is copied back")
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if not given and to == META and not kwargs.get("non_blocking"):
                self.wait("a tensor is copied to it by a blocking copy")
        elif not given:
            return None
        elif func is torch.ops.aten.nonzero.default:
            self.wait("values are looked for")
            return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
        elif func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.wait("rows are chosen by a mask")
        elif func is torch.ops.aten._local_scalar_dense.default:
            self.wait("a value is read")
            if args[0].dtype == torch.bool:
                return args[0] not in self._exceptions
            return 1.0 if args[0].is_floating_point() else 0
        elif func is torch.ops.aten.equal.default:
            self.wait("two tensors are compared")
            return args[0].shape == args[1].shape
        return None

    def _follow(self, tensor: torch.Tensor) -> int:
        """Count a storage until it is freed; its bytes if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return 0
        size = -(-storage.nbytes() // self.granularity) * self.granularity
        self._storages[key] = size
        weakref.finalize(storage, self._freed, key)
        self.live += size
        self.peak = max(self.peak, self.live)
        return storage.nbytes()

    def _freed(self, key: int) -> None:
        self.live -= self._storages.pop(key)

    def launched(self, _kernel: Any, *_args: Any, warmup: bool = False, **_options: Any) -> None:
        """Stands in for a Triton kernel's launch."""
        if self._own and not warmup:
            self._own[-1].kernels += 1

    def own(self, name: str, launcher: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
        """One of our ops on this device: its launcher runs, and the op is priced by its work and its launches."""

        def run(*args: Any) -> Any:
            self._own.append(_Own())
            try:
                result = launcher(*args)
                if result is NotImplemented:
                    result = reference(*args)
            finally:
                own = self._own.pop()
            # What a launcher does by torch's own operations is priced as these.
            if self.tally is not None and own.kernels:
                tensors = _on_meta((args if name not in _UNREAD else args[_UNREAD[name] :], result))
                results = sum(map(_size, _on_meta(result)))
                moved = sum(map(_size, tensors)) + 2 * max(0, own.allocated - results)
                moved += _read_and_written(name, args) - _table_rows(name, args)
                operations, rate = self._work(name, args)
                share = 1.0 if name in _READ_FAST else self.gpu.own_bandwidth
                work = own.kernels * self.gpu.start + max(moved / (share * self.gpu.bandwidth), operations / rate)
                self.add(f"fastdp::{name}", moved, operations, work, own.kernels, own.kernels)
            return result

        return run

    def _work(self, name: str, args: Any) -> tuple[float, float]:
        if name not in _WORK:
            raise KeyError(f"{name} has no price: say in bench/simulate.py how many operations it takes")
        operations, factor = _WORK[name](*args)
        if factor is None:
            return operations, self.gpu.words
        if factor.dtype.itemsize != 2:
            return operations, self.gpu.own_share * self.gpu.single
        share = self.gpu.gram_share if name == "gram_norms" else self.gpu.own_share
        if _has_wide_tiles(name, args):
            share = self.gpu.wide_share if name == "norms" else self.gpu.sums_share
        return operations, share * self.gpu.half


@dataclass
class _Own:
    kernels: int = 0
    allocated: int = 0


def _on_meta(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_meta]


def _size(tensor: torch.Tensor) -> int:
    """Bytes read or written of a tensor: an expanded one is read once."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _is_free(func: Any, found: list[torch.Tensor], fresh: int) -> bool:
    """Views, and memory that is only reserved."""
    if func._schema.is_mutable:
        return False
    name = func._schema.name.removeprefix("aten::")
    return func.is_view or (bool(found) and not fresh) or name in ("empty", "empty_like", "new_empty", "empty_strided")


def _written(func: Any, args: Any) -> list[torch.Tensor]:
    """Arguments that are written too: their bytes move twice."""
    named = [(a, given) for a, given in zip(func._schema.arguments, args) if a.alias_info and a.alias_info.is_write]
    # Fused optimizers declare their gradients as written, which they are with a scale alone.
    unscaled = func._schema.name.startswith("aten::_fused_adam")
    return [t for a, given in named if not (unscaled and a.name == "grads") for t in _on_meta(given)]


def _read_and_written(name: str, args: Any) -> int:
    """Bytes of arguments of one of our ops that it writes to after it has read them."""
    if name == "weighted_sum_group_":
        return sum(_size(out) for out, begun in zip(args[0], args[-1]) if begun)
    if name == "weighted_sum_" and args[1].dim() == 1:
        return 0  # of a table only the rows of the ids: `_table_rows`
    if name == "token_counts":
        return sum(_size(x[:, :128]) for x in _on_meta(args[:2]) if x.dim() == 2)
    # Logits are read once more before their gradient takes their place.
    again = _size(args[0]) if name == "cross_entropy_gradient_" else 0
    return again + sum(map(_size, _written(getattr(torch.ops.fastdp, name).default, args)))


def _table_rows(name: str, args: Any) -> int:
    """Bytes of a table that a sum by ids neither reads nor writes, less those of its rows that are written too."""
    if name != "weighted_sum_" or args[1].dim() > 1:
        return 0
    rows = min(args[0].shape[0], args[1].shape[0]) * args[0].shape[1] * args[0].itemsize
    return _size(args[0]) - 2 * rows


def _launches(args: Any) -> int:
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    if not lists:
        return 1
    return math.ceil(len(lists[0]) / _LIST_LIMITS[min(5, len(lists))])


def _operations(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    count = flop_registry.get(func._overloadpacket)
    # A product's dtype is no concern of its count, which takes it for a shape.
    sized = [given for given in args if not isinstance(given, torch.dtype)]
    return float(count(*sized, **kwargs, out_val=result)) if count is not None else 0.0


def _products(left: torch.Tensor, right: torch.Tensor, *_: Any) -> tuple[float, torch.Tensor]:
    columns = 1 if left.dim() == 1 else left.shape[1]
    return 2.0 * right.shape[0] * columns * right.shape[1], right


def _all_products(lefts: list[torch.Tensor], rights: list[torch.Tensor]) -> tuple[float, torch.Tensor]:
    return sum(_products(left, right)[0] for left, right in zip(lefts, rights)), rights[0]


def _gram(lefts: list[torch.Tensor], right: torch.Tensor, offsets: torch.Tensor) -> tuple[float, torch.Tensor]:
    units = max(1, offsets.shape[0] - 1)
    length = right.shape[0] / units
    # Half of each Gram matrix, and whole tiles of 128 on its diagonal.
    return units * length * (length + 128) * (right.shape[1] + sum(left.shape[1] for left in lefts)), right


def _gram_groups(
    lefts: list[torch.Tensor], rights: list[torch.Tensor], counts: list[int], offsets: torch.Tensor, *_: Any
) -> tuple[float, torch.Tensor]:
    queue = iter(lefts)
    groups = [([next(queue) for _ in range(count)], right) for count, right in zip(counts, rights)]
    return sum(_gram(own, right, offsets)[0] for own, right in groups), rights[0]


def _cross(left1: Any, right1: torch.Tensor, left2: Any, right2: torch.Tensor, *_: Any) -> tuple[float, torch.Tensor]:
    # Of each unit's tokens against its tokens of the other use; a one-hot factor takes no product.
    units = max(1, _[0].shape[0] - 1)
    width = right1.shape[1] + (left1.shape[1] if left1.dim() > 1 and left2.dim() > 1 else 0)
    return 2.0 * units * (right1.shape[0] / units) * (right2.shape[0] / units) * width, right1


def _of_a_normal(args: Any) -> float:
    """Operations for a rounded normal of as many rounds as the positions among the arguments say."""
    positions = next(a for a in args if isinstance(a, torch.Tensor) and a.dtype is torch.int32)
    return PER_NORMAL - PER_DOUBLE_ROUND * (10 - int(positions.numpy()[..., -1].max()))


def _normals(x: torch.Tensor, *args: Any) -> tuple[float, None]:
    return _of_a_normal(args) * x.numel(), None


def _fused_updates(params: list[torch.Tensor], *args: Any) -> tuple[float, None]:
    each = _of_a_normal(args) + PER_UPDATE + (PER_ROUNDING if args[1][0].itemsize == 2 else 0)
    return each * sum(p.numel() for p in params), None


def _has_wide_tiles(name: str, args: Any) -> bool:
    """Whether a launcher takes tiles of 128 by 256 for these 16-bit factors, as on Hopper."""
    if name in ("weighted_sum_", "weighted_sum_group_"):
        return max(out.shape[1] for out in ([args[0]] if name == "weighted_sum_" else args[0])) >= 256
    return name == "norms" and args[1].shape[1] >= 256 and args[0].dim() > 1


def _reading(*args: Any) -> tuple[float, torch.Tensor]:
    return 0.0, _on_meta(args)[0]


#: Operations of each op, and a factor that says at which rate; None for integer operations.
_WORK: dict[str, Callable[..., tuple[float, torch.Tensor | None]]] = {
    "norms": _products,
    "gram_norms": _gram_groups,
    "chosen_sqnorm": _reading,
    "row_products": _reading,
    "token_counts": lambda lefts, *_: _reading(lefts[0]),
    "cross_entropy_gradient_": _reading,
    "affine_sums_group": _reading,
    "instance_norms": _reading,
    "instance_sum": _reading,
    "instance_norms_group": _reading,
    "instance_sum_group": _reading,
    "per_unit": _products,
    "per_unit_group": lambda lefts, rights, _: _all_products(lefts, rights),
    "weighted_sum_": lambda out, left, right, *_: _products(left, right),
    "weighted_sum_group_": lambda outs, lefts, rights, *_: _all_products(lefts, rights),
    "cross_inner": _cross,
    "add_noise_": _normals,
    "adamw_noise_steps_": _fused_updates,
}


#: Ops that usually read none of their first arguments, and how many: units whose Gram norms hide too much are found on the
#: device and measured anew, and in a step as usual there are none. Of rows that are not zero the beginnings are read.
_UNREAD = {"chosen_sqnorm": 2, "token_counts": 2}


def _made_of_numbers(meter: Meter, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Tensors made of numbers on the device are blocking copies to it."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_meta and tensor.numel():
            meter.wait("a tensor is made of numbers, by a blocking copy")
        return tensor

    return made


def _attention(elsewhere: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention as a GPU computes it, without its matrix of scores."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not query.is_meta:
            rest = (attn_mask, dropout_p, is_causal)
            return elsewhere(query, key, value, *rest, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is not None:
            raise ValueError("attention with a mask is not simulated: give batches without padding")
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]

    return attention


@contextlib.contextmanager
def simulated(gpu: Gpu, granularity: int = 512) -> Iterator[Meter]:
    """Within, tensors on the meta device are those of the GPU: our ops' launchers run on them, and all is metered."""
    from torch.fx.experimental import _config as config
    from triton.runtime.jit import JITFunction

    from fastdp.calls.values import RowValues
    from fastdp.engine.capture import memory
    from fastdp.engine.clip import norms
    from fastdp.ops import routes
    from fastdp.ops.table import OPS
    from fastdp.verify import engine_check

    for family in ("norms", "sums", "bounds", "groups", "heads", "noise", "adamw"):
        importlib.import_module(f"fastdp.kernels.{family}")
    meter = Meter(gpu, granularity)
    constants = {("meta", width): value for (kind, width), value in routes.DEFAULTS.items() if kind == "cuda"}
    served = {name: op for name, op in OPS.items() if "cuda" in op.implementations}
    ours = {name: meter.own(name, op.implementations["cuda"], op.reference) for name, op in served.items()}
    autocast = torch.is_autocast_enabled
    with contextlib.ExitStack() as stack:
        for name, op in served.items():
            stack.enter_context(mock.patch.dict(op.implementations, {"meta": ours[name]}))
        stack.enter_context(mock.patch.dict(routes.DEFAULTS, constants))
        stack.enter_context(mock.patch.object(norms, "may_hold", return_value=gpu.memory // 32))
        stack.enter_context(mock.patch.object(memory, "free_bytes", side_effect=lambda _: gpu.memory - meter.live))
        for module in [m for name, m in sys.modules.items() if name.startswith("fastdp.kernels.")]:
            if hasattr(module, "multiprocessors"):
                stack.enter_context(mock.patch.object(module, "multiprocessors", return_value=gpu.processors))
        # Batches are verified, but tensors without values cannot be judged.
        stack.enter_context(mock.patch.object(engine_check, "judge"))
        stack.enter_context(mock.patch.object(RowValues, "gap", return_value=0.0))
        stack.enter_context(mock.patch.object(RowValues, "input_gap", return_value=0.0))
        # Asked for at each launch, as others may stand in for it; called as the method that it replaces is.
        launched = lambda kernel, *args, **options: meter.launched(kernel, *args, **options)  # noqa: E731
        stack.enter_context(mock.patch.object(JITFunction, "run", launched))
        # Torch knows no autocast on this device; nothing here uses any.
        ask = lambda kind="cuda": kind != "meta" and autocast(kind)  # noqa: E731
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", ask))
        supported = "torch.optim.optimizer._get_fused_kernels_supported_devices"
        stack.enter_context(mock.patch(supported, return_value=["meta", "cpu"]))
        # Torch lists the functions that a device's context reaches when one is first used, and keeps the list: not of ours.
        with torch.device("cpu"):
            torch.empty(0)
        # By name, since modes of torch's function layer do not reach into backward passes.
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, _made_of_numbers(meter, getattr(torch, name))))
        # On this device torch puts no random state back, not even the processor's, which checkpoints set.
        fork = torch.random.fork_rng
        forked = lambda devices=None, enabled=True, **_: fork(devices or [], enabled)  # noqa: E731
        stack.enter_context(mock.patch.object(torch.random, "fork_rng", forked))
        of_a_gpu = _attention(torch.nn.functional.scaled_dot_product_attention)
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", of_a_gpu))
        # Of values that nobody has, all are taken to be nonzero, until a step is measured.
        stack.enter_context(mock.patch.object(config, "meta_nonzero_assume_all_nonzero", True))
        stack.enter_context(meter)
        yield meter
