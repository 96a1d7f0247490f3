"""Canaries in the space of inputs: examples that pass through the model, its backward pass, and the clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import ConcatDataset, Dataset

from fastdp.audit.canaries import Canaries, noise_std
from fastdp.calls.batches import map_tensors
from fastdp.calls.modes import in_mode
from fastdp.engine.clip.policy import Policy
from fastdp.engine.loss.boundary import plain_gradients
from fastdp.ops.stream import NoiseStream
from fastdp.validate import one_of

if TYPE_CHECKING:
    from fastdp.private.run import Private

#: A model and a collated batch -> the scalar loss of that batch.
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


class ExampleCanaries(Canaries):
    """Canaries that are examples of the run's own data set; those whose coin says so are left out of every batch.

    The data set holds all of them, so its size says nothing about the coins: the run's sampler draws from all units, and
    excluded canaries are struck from what it drew.

    Args:
        private: as in `Canaries`; its data set holds the canaries beside the other examples.
        units: which units are canaries: indices of examples, or of users where users are the unit.
        score: "gradient" (white box) takes the inner product of each release with the canary's own gradient, found by a
            plain backward pass of the model. "variance" takes the energy of the release where that gradient lies, for noise
            whose size depends on the data. "loss" (black box) takes by how much a canary's loss fell from now to when the
            scores are asked for.
        refresh_every: steps after which the canaries' gradients are found anew, at one backward pass a canary. Above 1 they
            are kept in between: as many numbers as canaries times trained parameters.
        loss: a model and a collated batch -> scalar loss; needed where the model does not return its loss.
        unsafe_seed: as in `Canaries`.

    Raises ValueError as `Canaries`; for units that are outside the data set or named twice, or an unknown score.
    """

    def __init__(
        self,
        private: Private,
        units: Sequence[int],
        *,
        score: str = "gradient",
        refresh_every: int = 1,
        loss: Loss | None = None,
        unsafe_seed: int | None = None,
    ):
        self.units = [int(unit) for unit in units]
        available = len(private.data_loader.units)
        outside = next((unit for unit in self.units if not 0 <= unit < available), None)
        if outside is not None:
            raise ValueError(f"canary {outside} is not among the run's {available} units")
        if len(set(self.units)) != len(self.units):
            raise ValueError("a unit is named twice among the canaries; name each once")
        one_of(("gradient", "variance", "loss"), score=score)
        if refresh_every < 1:
            raise ValueError(f"refresh_every is {refresh_every}: it must be at least 1 step")
        self._loss = _returned_loss if loss is None else loss
        super().__init__(private, len(self.units), unsafe_seed=unsafe_seed)
        self.score, self.refresh_every = score, refresh_every
        self._kept: list[list[torch.Tensor | None]] = []
        self._scores = torch.zeros(len(self), dtype=torch.float64)
        self._before = self._losses() if score == "loss" else None
        self._excluded = {unit for unit, coin in zip(self.units, self.included.tolist()) if not coin}

    def drawn(self, units: list[int], kind: str) -> list[int]:
        """What was drawn for a release of any kind, less the excluded canaries."""
        return [unit for unit in units if unit not in self._excluded]

    def score_release(self, policy: Policy) -> None:
        """Add the projections of what was released on each canary's gradient to the scores."""
        if self.score == "loss":
            return
        parameters = self.private.parameters
        stds = [noise_std(policy, name, p.device) for name, p in parameters.items()]
        released = [
            None if p.grad is None else p.grad.detach().float() * self.private.expected_batch_size
            for p in parameters.values()
        ]
        for index, gradients in enumerate(self._directions()):
            inner = size = 0.0
            for seen, gradient, std in zip(released, gradients, stds):
                if gradient is None or seen is None:
                    continue
                scaled = gradient.float() / std
                product = seen / std * scaled if self.score == "gradient" else (seen * scaled).square()
                inner += float(product.sum())
                size += float(scaled.square().sum())
            self._scores[index] += inner / max(size, 1e-300) ** (0.5 if self.score == "gradient" else 1.0)

    def scores(self) -> torch.Tensor:
        """float64 [m], over the steps so far."""
        return self._scores.clone() if self._before is None else self._before - self._losses()

    def _batches(self) -> Iterator[Any]:
        loader = self.private.data_loader
        device = next(iter(self.private.parameters.values())).device
        for unit in self.units:
            batch = loader.collate_fn([loader.dataset[index] for index in loader.units.examples(unit)])
            yield map_tensors(batch, lambda tensor: tensor.to(device))

    def _losses(self) -> torch.Tensor:
        """Each canary's loss, without dropout, float64 [m]."""
        model = self.private.model
        with in_mode(model, training=False), torch.no_grad():
            return torch.tensor([float(self._loss(model, batch)) for batch in self._batches()], dtype=torch.float64)

    def _directions(self) -> Iterable[list[torch.Tensor | None]]:
        if self.refresh_every == 1:
            return self._gradients()
        if self.releases % self.refresh_every == 0:
            self._kept = list(self._gradients())
        return self._kept

    def _gradients(self) -> Iterator[list[torch.Tensor | None]]:
        """Each canary's gradient in turn, without dropout, by a backward pass that the engine has no part in."""
        model = self.private.model
        with in_mode(model, training=False):
            for batch in self._batches():
                with torch.enable_grad():
                    loss = self._loss(model, batch)
                    yield plain_gradients([loss], [torch.ones_like(loss)], self.private.parameters.values())


def _returned_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ValueError("the model returns no loss; pass `loss`, a function of the model and a batch")
    return loss


def with_canaries(dataset: Dataset, canaries: Sequence[Any]) -> tuple[ConcatDataset, range]:
    """The data set with the canaries after its own examples, and their indices.

    These places are the ``units`` of `ExampleCanaries` where each example is one. Raises TypeError without a length.

    Args:
        dataset: of the run, with a length.
        canaries: examples as the data set's collator takes them.

    >>> from fastdp.audit import random_sequences, with_canaries
    >>> longer, units = with_canaries(random_sequences(3, 8, 100), random_sequences(2, 8, 100))
    >>> len(longer), units
    (5, range(3, 5))
    """
    size = len(dataset)  # type: ignore[arg-type]
    return ConcatDataset([dataset, list(canaries)]), range(size, size + len(canaries))  # type: ignore[list-item]


def random_sequences(
    count: int, length: int, vocabulary: int, *, unsafe_seed: int | None = None
) -> list[dict[str, list[int]]]:
    """Canaries for a causal language model: sequences of tokens that no text holds, as examples of `fastdp.data`.

    Args:
        count, length: number of canaries, and of the tokens of each.
        vocabulary: the model's; tokens are drawn evenly from all of it. Raises ValueError below 2.
        unsafe_seed: makes them reproducible; for tests.

    >>> from fastdp.audit import random_sequences
    >>> random_sequences(1, 4, 100, unsafe_seed=0)
    [{'input_ids': [62, 1, 18, 68], 'labels': [62, 1, 18, 68]}]
    """
    if min(length, vocabulary) < 2:
        raise ValueError(f"length is {length} and vocabulary {vocabulary}: both must be at least 2")
    stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
    ids = (stream.uniform64(count * length) % vocabulary).astype("int64").reshape(count, length).tolist()
    return [{"input_ids": row, "labels": list(row)} for row in ids]


def mislabelled(
    examples: Sequence[Mapping[str, Any]], classes: int, *, label: str = "labels", unsafe_seed: int | None = None
) -> list[dict[str, Any]]:
    """Canaries for a classifier: copies of examples, each with another label than its own, all equally likely.

    Args:
        examples: of the run's data set, before collation.
        classes: how many labels there are, counted from 0. Raises ValueError for a label that is none of them.
        label: the name under which an example holds its label.
        unsafe_seed: makes the wrong labels reproducible; for tests.

    >>> from fastdp.audit import mislabelled
    >>> mislabelled([{"input_ids": [5, 6], "labels": 1}], classes=2)
    [{'input_ids': [5, 6], 'labels': 0}]
    """
    if classes < 2:
        raise ValueError(f"{classes} classes leave no wrong label: there must be at least 2")
    stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
    shifts = stream.uniform64(len(examples)) % (classes - 1) + 1
    wrong = []
    for example, shift in zip(examples, shifts.tolist()):
        own = int(example[label])
        if not 0 <= own < classes:
            raise ValueError(f"an example has label {own}: labels must lie between 0 and {classes - 1}")
        wrong.append({**example, label: (own + int(shift)) % classes})
    return wrong
