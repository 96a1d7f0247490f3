"""One traced forward: which operations read which trained parameters, in which modules, and what their inputs descend from."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.calls.batches import Call, Path, as_long_as, leaves, take_rows, tensors
from fastdp.calls.named import is_metadata, operation as meeting_name
from fastdp.calls.outputs import OutputRows
from fastdp.calls.randomness import DropoutDisabled, preserve_rng, rng_state, seeded
from fastdp.engine.capture.follow import Follow
from fastdp.engine.capture.intercept import OPERATIONS, operand
from fastdp.engine.errors import InnerBackward, UnsupportedUse, Untraceable
from fastdp.engine.loss.losses import LOSSES
from fastdp.engine.uses.logits import Logits, Source
from fastdp.engine.uses.rows import BatchAxis, BroadcastLayout, RowAxis, fold_between
from fastdp.engine.uses.selections import GROUPED, call_site

#: A kind of meeting: the operation, the ids of the parameters that one side was computed from, and the other side's dimensions.
MeetingKey = tuple[str, frozenset[int], int]


@dataclass(frozen=True)
class Read:
    """One operation of the forward pass that reads a trained parameter (or a loss, whose ``parameter`` is empty).

    ``chosen`` says that the data chose which tokens the operation sees. Reads of one input in a row have the same ``source``.
    """

    parameter: str
    operation: str
    module: str
    input_shape: tuple[int, ...]
    chosen: bool = False
    source: int = 0


@dataclass
class Trace:
    """What a model's forward pass does with its trained parameters.

    ``paths`` are the places of the call's tensors in (args, kwargs), ``carriers`` of those that carry rows.
    ``carries_rows`` says for each (operation, parameter, dimensions of the input) where the input's rows lie, None for an
    input without (DoRA calls one layer on activations and on an identity matrix). An operation on an activation and on values
    computed from parameters alone is a meeting: ``meetings`` says where the rows of the activation and of the results lie.
    ``selects`` says that some operation's result has a size that the data decide, wherever it ends up.
    ``unread`` lists trained parameters that the forward pass never reads: no gradient reaches them in ordinary
    training either.
    """

    reads: list[Read]
    paths: frozenset[Path]
    carriers: frozenset[Path]
    carries_rows: dict[tuple[str, str, int], BatchAxis | None]
    meetings: dict[MeetingKey, BroadcastLayout]
    unread: list[str]
    #: Whether every token that a loss function sees is known to belong to a row.
    mapped: bool = True
    selects: bool = False
    conflict: str | None = None
    uses: Counter[str] = field(default_factory=Counter)
    #: Matrices whose products nothing but a cross-entropy reads, and the modules that read them.
    heads: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    #: How many rows the inputs of ``reads`` had, and elements of a row of what carried them.
    rows: int = 1
    sizes: dict[Path, int] = field(default_factory=dict)
    #: What a pass on two rows saw, in order: two traces with one signature need not be compared further.
    signature: tuple[Any, ...] = ()
    #: Whether the forward pass draws random numbers, dropout aside, and whether it computes with weights in less than float32.
    draws: bool = False
    low: bool = False
    #: Calls that select by the data's values what a parameter or a loss sees, and of such losses, each with the module that
    #: makes it; "" where selections are followed through the whole model.
    selections: set[tuple[Any, str]] = field(default_factory=set)
    #: Where rows lie in what the model returns.
    outputs: OutputRows = field(default_factory=OutputRows)

    def rows_of(self, call: Call) -> int:
        """How many rows a call has."""
        return next((t.shape[0] for path, t in leaves(call) if path in self.carriers), 1)

    def require_same(self, latest: Trace) -> None:
        """Raise `UnsupportedUse` where a later trace says otherwise, or that the data chose what they had not."""
        if latest.conflict is not None:
            raise UnsupportedUse(latest.conflict)
        if latest.selects > self.selects or latest.mapped < self.mapped:
            raise UnsupportedUse("the data of a later batch choose what those of the first did not")
        known, found = (
            {**trace.carries_rows, **{key: met.fold for key, met in trace.meetings.items()}} for trace in (self, latest)
        )
        for key in known.keys() & found.keys():
            a, b = known[key], found[key]
            if a != b and (a is None or b is None or a.with_(b) is None):
                raise UnsupportedUse(f"rows lie elsewhere in the input of {key[0]} than when the model was traced")

    def add(self, latest: Trace) -> None:
        """Take what a later trace saw and this one did not. Raises `UnsupportedUse` where they differ in what both saw."""
        self.require_same(latest)
        known = {(read.parameter, read.operation, read.module) for read in self.reads}
        self.reads += [read for read in latest.reads if (read.parameter, read.operation, read.module) not in known]
        self.unread = [name for name in self.unread if name in latest.unread]
        self.carries_rows |= {key: fold for key, fold in latest.carries_rows.items() if key not in self.carries_rows}
        self.meetings |= {key: met for key, met in latest.meetings.items() if key not in self.meetings}
        self.uses |= latest.uses
        self.selections |= latest.selections
        self.low |= latest.low

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Undo what is added within, if the block raises."""
        own: list[Any] = [self.carries_rows, self.meetings, self.uses, self.selections]
        before, lists = [known.copy() for known in own], (list(self.reads), list(self.unread))
        try:
            yield
        except BaseException:
            for known, kept in zip(own, before):
                known.clear()
                known |= kept
            self.reads, self.unread = lists
            raise

    @property
    def tables(self) -> frozenset[str]:
        """Parameters whose rows are looked up, whatever else reads them (a tied head does)."""
        return frozenset(read.parameter for read in self.reads if read.operation in LOOKUPS)


#: Seeds at which a model that draws is traced again, at most.
_SEEDS = 8
_DEPENDS = "the model's reads of its parameters depend on the number of rows"
LOOKUPS = frozenset({OPERATIONS[F.embedding], OPERATIONS[F.embedding_bag]})
_HALF, _DTYPE = frozenset({torch.float16, torch.bfloat16}), torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_REFUSED = frozenset({torch.autograd.grad, torch.Tensor.backward, F.embedding_bag, F.batch_norm})


@dataclass(frozen=True)
class _TensorView:
    """A tensor that an operation saw: its shape, where its rows lie, and whether the data chose its first axis.

    ``owned`` says that they did, and that the row of each entry is known.
    """

    shape: tuple[int, ...]
    row_axis: RowAxis | None
    chosen: bool
    owned: bool


@dataclass(frozen=True)
class _Meeting:
    """An operation on a tensor and on ``values`` computed from the parameters ``sources``, and its results."""

    operation: str
    sources: frozenset[int]
    other: _TensorView
    values: tuple[_TensorView, ...]
    out: tuple[_TensorView, ...]


class _Recorder(Follow):
    """Records one forward pass on a few rows, beside what `Follow` follows; ``stack`` names the modules that are running."""

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        inputs: Sequence[torch.Tensor],
        rows: int,
        vocabulary: int | None,
    ):
        super().__init__(inputs, trained.values(), rows)
        self.names = {id(p): name for name, p in trained.items()}
        self.reads: list[Read] = []
        #: The input of each read.
        self.inputs: list[_TensorView | None] = []
        #: The input of the latest read, and how many different ones there were in a row.
        self._latest: Callable[[], torch.Tensor | None] = lambda: None
        self._sources = 0
        self.meetings: list[_Meeting] = []
        #: Logits left out, and the module that would have computed them; and the matrices whose logits were computed after all.
        self.left_out: list[tuple[Source, str] | None] = []
        self.computed: set[int] = set()
        self.vocabulary = vocabulary
        #: The calls that select what a parameter or a loss sees.
        self.selections: set[tuple[Any, str]] = set()
        self.draws, self.low = False, False
        #: What the model returned.
        self.outputs: dict[Path, _TensorView] = {}

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert self.vocabulary is not None
        plain = type(input) is torch.Tensor and isinstance(weight, torch.nn.Parameter) and weight.dim() == 2
        if not plain or input.dim() < 3 or weight.shape[0] < self.vocabulary:
            return F.linear(input, weight, bias)
        number = len(self.left_out)

        def product() -> torch.Tensor:
            # Most wide matrices are no heads: what they make must not live longer than the model's own code has it.
            self.computed.add(id(weight))
            self.left_out[number] = None
            return F.linear(input, weight, bias)

        source = Source(input, weight, bias, product, strict=False)
        self.left_out.append((source, self.stack[-1]))
        return Logits.of(source)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REFUSED:
            self._refuse(func, args, kwargs, tensors((args, kwargs)))
        if is_metadata(func):
            return func(*args, **kwargs)
        given = tensors((args, kwargs))
        self.note_reads(func, args, kwargs, given)
        if func is F.linear and self.vocabulary is not None:
            out = self._linear(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self.follow(func, args, kwargs, given, out)
        return out

    def view(self, t: torch.Tensor) -> _TensorView:
        return _TensorView(tuple(t.shape), self.row_axes.of(t), t in self.chosen, self.is_owned(t))

    def note_reads(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        """Note which parameters one operation is about to read."""
        found = [self.names[id(t)] for t in given if id(t) in self.names]
        if func in GROUPED:
            # A stack is mostly read through its transpose.
            found = [self.names[number] for number in self.sources(given)]
        operation = OPERATIONS.get(func, getattr(func, "__name__", str(func)))
        owned = any(map(self.is_owned, given))
        if owned and (func in LOSSES or self.sources(given)):
            self.selections = self.selecting_calls
        if func in LOSSES and kwargs.get("reduction", "mean") != "none" and given[0] in self.data:
            if owned:
                self.selections.add((call_site(), ""))
            others = [t for t in given if t not in self.weights]
            self._note_read("", operation, [] if owned else given[:1], any(t in self.chosen for t in others))
        elif found:
            others = [t for t in (given[:1] if func in GROUPED else given) if t not in self.weights]
            chosen = any(t in self.chosen for t in others)
            inputs = [operand(func, args, kwargs)] if func in OPERATIONS else others
            for name in found:
                self._note_read(name, operation, inputs[:1], chosen)

    def _refuse(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        """Raise `Untraceable`, or `InnerBackward`, for an operation that no per-example gradient can be followed through."""
        if func in (torch.autograd.grad, torch.Tensor.backward):
            raise InnerBackward("the model differentiates inside its own forward pass")
        if func is F.embedding_bag and given[0] not in self.data and any(t in self.data for t in given[2:]):
            raise Untraceable(
                f"{self.names.get(id(given[1]), 'an embedding bag')}: flat ids beside offsets cannot be cut into rows; pad ids "
                "to [rows, tokens] and set padding_idx"
            )
        if func is F.batch_norm and (kwargs.get("training") or True in args[5:6]):
            where = self.row_axes.of(given[0])
            if where is not None and where.axis != 1:
                raise Untraceable(
                    "F.batch_norm(training=True) normalizes by statistics of the batch, which couples examples: use F.layer_norm "
                    "or F.group_norm"
                )

    def _note_read(self, name: str, operation: str, inputs: list[torch.Tensor], chosen: bool) -> None:
        shape = tuple(inputs[0].shape) if inputs else ()
        if not inputs or self._latest() is not inputs[0]:
            self._sources += 1
            self._latest = weakref.ref(inputs[0]) if inputs else lambda: None
        self.reads.append(Read(name, operation, self.stack[-1], shape, chosen, self._sources))
        self.inputs.append(self.view(inputs[0]) if inputs else None)

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> bool:
        """Follow one operation, and note which tensors met what is computed from parameters."""
        sources = self.sources(given)
        befores = [self.view(t) for t in given if t not in self.weights and t.dim()] if sources else []
        values = tuple(self.view(t) for t in given if t in self.weights) if sources else ()
        found, results = super().follow(func, args, kwargs, given, out), tensors(out)
        self.low |= bool(sources) and not _HALF.isdisjoint(map(_DTYPE, results))
        if self.listed and not given:
            self.row_axes.begin(results)
        elif found:
            self.row_axes.follow(func, args, kwargs, given, results)
        if sources:
            made = tuple(self.view(t) for t in results)
            self.meetings += [_Meeting(meeting_name(func), sources, before, values, made) for before in befores]
        return found


class Tracer:
    """Watches forward passes of a model on a few rows.

    Args:
        model: owner of ``trained``; its hooks, buffers and random state are left as they were.
        trained: the parameters whose reads are followed, by name.
        vocabulary: the fewest rows of a matrix that may be a head, whose logits are then left out; None to leave out none.
    """

    def __init__(
        self, model: torch.nn.Module, trained: Mapping[str, torch.nn.Parameter], vocabulary: int | None = None
    ):
        self.model, self.trained, self.vocabulary = model, trained, vocabulary

    def trace(self, forward: Callable[..., Any], call: Call, rows: int, counts: tuple[int, int] = (2, 3)) -> Trace:
        """Run ``forward`` on 2 and on 3 of the call's rows (or ``counts``), without gradients, and compare what each read saw.

        What carries rows is decided here once: every tensor as long as the batch, unless the forward pass then fails and does
        not when some of them are left whole (a table of positions may be as long as the batch by chance). The larger pass
        repeats rows of the smaller one: another row might send it another way (a mask that is left out without padding).
        Raises whatever the forward pass raises on a few rows.
        """
        candidates = sorted(as_long_as(call, rows), key=str)
        failure: Exception | None = None
        for size in range(min(3, len(candidates))):
            for constant in itertools.combinations(candidates, size):
                carriers = frozenset(candidates) - set(constant)
                record = partial(self._record, forward, call, carriers, min(rows, *counts))
                compare = partial(_compare, record, counts, carriers, self.trained)
                try:
                    found = compare()
                except Exception as error:
                    failure = failure or error
                    continue
                found = _with_other_seeds(found, compare)
                found.paths = frozenset(path for path, _ in leaves(call))
                found.rows = counts[0]
                found.sizes = {path: t.numel() // t.shape[0] for path, t in leaves(call) if path in carriers}
                return found
        if failure is None:
            raise Untraceable("no tensor of this call has a row for each example")
        raise failure

    def require_same(self, first: Trace, forward: Callable[..., Any], call: Call, rows: int) -> None:
        """Raise `UnsupportedUse` unless the first call's trace says of this one, too, whose tokens are whose.

        A length that the rows divide does not: a model that branches on the shape of its batch may select or sort by content.
        A pass on two rows is looked at, and all that a trace looks at only where it is another.
        """
        two = self._record(forward, call, first.carriers, min(rows, 2), 2, None)
        # What was left out of this pass is given up again.
        _heads(two)
        if _signature(two) == first.signature:
            return
        first.require_same(self.trace(forward, call, rows))

    def _record(
        self, forward: Any, call: Call, carriers: frozenset[Path], among: int, count: int, seed: int | None
    ) -> _Recorder:
        """One pass without dropout on ``count`` rows: the first ``among`` of the call in their order, some of them twice."""
        call = take_rows(call, torch.arange(count) * among // count, carriers)
        data = [t for path, t in leaves(call) if path in carriers]
        recorder, handles = _Recorder(self.trained, data, count, self.vocabulary), []

        def enter(name: str, _module: Any, _args: Any) -> None:
            recorder.stack.append(name)

        def leave(_module: Any, _args: Any, _output: Any) -> None:
            recorder.stack.pop()

        for name, module in self.model.named_modules():
            if module is not self.model and not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(partial(enter, name)))
                handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with preserve_rng(self.model), torch.no_grad(), nullcontext() if seed is None else seeded(seed, self.model):
                before = rng_state(self.model)
                # Masks, which are larger for more rows, would move what is drawn behind them.
                with recorder, DropoutDisabled():
                    output = forward(*call[0], **call[1])
                recorder.outputs = {path: recorder.view(t) for path, t in leaves(output)}
                recorder.draws = rng_state(self.model) != before
        finally:
            for handle in handles:
                handle.remove()
        return recorder


def _with_other_seeds(found: Trace, compare: Callable[..., Trace]) -> Trace:
    """A trace together with those at other seeds, where the model skips layers at random."""
    for seed in range(_SEEDS if found.draws else 0):
        if found.conflict != _DEPENDS and (found.conflict is not None or not found.unread):
            break
        latest = compare(seed=seed)
        if latest.conflict == _DEPENDS:
            continue
        if found.conflict is not None or latest.conflict is not None:
            found = latest
            continue
        try:
            found.add(latest)
        except UnsupportedUse as error:
            found.conflict = str(error)
    return found


def _compare(
    record: Callable[[int, int | None], _Recorder],
    counts: tuple[int, int],
    carriers: frozenset[Path],
    trained: Mapping[str, Any],
    seed: int | None = None,
) -> Trace:
    """What passes on ``counts`` rows say together: a dimension of another size in the second one holds rows."""
    two, three = (record(count, seed) for count in counts)
    carries: dict[tuple[str, str, int], BatchAxis | None] = {}
    conflict, mapped = None, True
    uses: Counter[str] = Counter()
    for read, a, b in zip(two.reads, two.inputs, three.inputs):
        what, handled = read.parameter or "the loss", read.operation in OPERATIONS.values()
        # What is computed from a parameter, or selected by the data, may be used more than once.
        uses[read.parameter] += 1 if handled and not (a and a.owned) else 2
        if read.chosen:
            mapped = mapped and bool(read.parameter)
            conflict = f"{what}: the data choose which tokens {read.operation} sees"
        if a is None or b is None or not (handled or not read.parameter):
            continue
        fold = _fold_of(a, b, counts)
        if isinstance(fold, str) or (not read.parameter and fold is not None and not fold.natural):
            mapped = mapped and bool(read.parameter)
            conflict = f"{what}: the rows of the input of {read.operation} are not in order"
            continue
        key = (read.operation, read.parameter, len(a.shape))
        known = carries.setdefault(key, fold)
        both = fold.with_(known) if fold is not None and known is not None else None
        if known is not fold and both is None:
            conflict = f"{what}: {read.operation} reads it sometimes with rows and sometimes without, or elsewhere"
        carries[key] = both
    if [(r.parameter, r.operation) for r in two.reads] != [(r.parameter, r.operation) for r in three.reads]:
        conflict = _DEPENDS
    reads = [read for read in two.reads if read.parameter]
    seen = {read.parameter for read in reads}
    folds = {p: (_fold_of(a, three.outputs.get(p, a), counts), len(a.shape)) for p, a in two.outputs.items()}
    placed = {path: own for path, own in folds.items() if isinstance(own[0], BatchAxis) and not own[0].chosen}
    return Trace(
        reads,
        paths=frozenset(),
        carriers=carriers,
        carries_rows=carries,
        meetings=_layouts(two.meetings, three.meetings, counts),
        unread=[name for name in trained if name not in seen],
        mapped=mapped,
        selects=two.selects or three.selects,
        conflict=conflict,
        uses=uses,
        heads=_heads(two, three),
        signature=_signature(two) if counts[0] == 2 else (),
        draws=two.draws,
        low=two.low,
        selections=two.selections | three.selections,
        outputs=OutputRows(placed, frozenset([path for path, (fold, _) in folds.items() if fold is None])),
    )


def _heads(*recorders: _Recorder) -> dict[str, torch.nn.Parameter]:
    """The modules whose logits one cross-entropy took and nothing else read, and their weights."""
    left_out = [entry for recorder in recorders for entry in recorder.left_out if entry is not None]
    read = {id(source.weight) for source, _ in left_out if source.taken != 1 or source.versions != source.written()}
    read = read.union(*(recorder.computed for recorder in recorders))
    found = {}
    for source, module in left_out:
        if id(source.weight) not in read and isinstance(source.weight, torch.nn.Parameter):
            found[module] = source.weight
        source.close()
    return found


def _signature(two: _Recorder) -> tuple[Any, ...]:
    """Which operations read what, where the rows of their inputs lay, and whether the data chose something."""
    places = (x and (x.owned or (x.row_axis and (x.row_axis.axis, x.row_axis.fold(2)))) for x in two.inputs)
    reads = ((r.parameter, r.operation, len(r.input_shape), r.chosen, place) for r, place in zip(two.reads, places))
    return two.selects, *reads


def _fold_of(two: _TensorView, three: _TensorView, counts: tuple[int, int]) -> BatchAxis | None | str:
    """Where the rows of a tensor lie that was seen on ``counts`` rows; None if it has none, a text where nobody can say."""
    if two.owned and three.owned:
        return BatchAxis(chosen=True)
    if all(m == n for m, n in zip(two.shape, three.shape)):
        return None
    fold = fold_between(two.shape, three.shape, (two.row_axis, three.row_axis), counts)
    return "unknown" if fold is None else fold


def _layouts(
    two: Sequence[_Meeting], three: Sequence[_Meeting], counts: tuple[int, int]
) -> dict[MeetingKey, BroadcastLayout]:
    """The layout of each kind of meeting. One with a problem is refused where such a meeting is captured, if it is."""
    found: dict[MeetingKey, BroadcastLayout] = {}
    #: Shapes of what is beside parameters and has no rows.
    constants: dict[MeetingKey, list[tuple[int, ...]]] = {}
    for a, b in zip(two, three):
        key, fold = (a.operation, a.sources, len(a.other.shape)), _fold_of(a.other, b.other, counts)
        if a.other.chosen or isinstance(fold, str):
            found[key] = BroadcastLayout(
                problem=f"{a.operation} of a parameter and an activation whose rows are not in order in one dimension"
            )
        elif fold is None:
            constants.setdefault(key, []).append(a.other.shape)
        else:
            met = BroadcastLayout(fold, _folds(a.out, b.out, counts), _folds(a.values, b.values, counts))
            found[key] = _common_layout(found[key], met, a.operation) if key in found else met
    for key, shapes in constants.items():
        known = found.setdefault(key, BroadcastLayout())
        # A constant of one row is told from an activation of several.
        if known.fold is not None and any(shape[known.fold.axis] != 1 for shape in shapes):
            found[key] = BroadcastLayout(
                problem=f"{key[0]} of a parameter, and of activations and constants of {key[2]} dimensions"
            )
    return found


def _folds(
    two: Sequence[_TensorView], three: Sequence[_TensorView], counts: tuple[int, int]
) -> tuple[BatchAxis | None, ...]:
    folds = (_fold_of(a, b, counts) for a, b in zip(two, three))
    return tuple(None if isinstance(fold, str) else fold for fold in folds)


def _common_layout(a: BroadcastLayout, b: BroadcastLayout, operation: str) -> BroadcastLayout:
    """The layout of two meetings of one kind; what they do not share counts as unknown."""
    fold = None if a.fold is None or b.fold is None else a.fold.with_(b.fold)
    if fold is None or a.copies != b.copies:
        return BroadcastLayout(
            problem=a.problem or f"{operation} of a parameter and activations whose rows lie in different dimensions"
        )
    same = len(a.out) == len(b.out)
    out = tuple(None if x is None or y is None else x.with_(y) for x, y in zip(a.out, b.out)) if same else ()
    return BroadcastLayout(fold, out, a.copies)
