"""`make_private`: joins a model, an optimizer and a loader to a method, its budget and its ledger."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastdp.builder import Builder, RunOptions
from fastdp.private.criterion import Criterion
from fastdp.private.run import Private


def make_private(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    *,
    method: Any = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: float | None = None,
    noise_multiplier: float | None = None,
    max_physical_batch_size: int | None = None,
    sampling: str = "poisson",
    adjacency: str | None = None,
    user_ids: Sequence[Hashable] | None = None,
    max_examples_per_user: int | None = None,
    unit_map: str | None = None,
    loss_reduction: str | None = None,
    criterion: Criterion | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    secure_rounding: bool = True,
    noise_rounds: int = 20,
    two_pass: bool | None = None,
    self_check: bool = True,
    isolation: str | None = None,
    keep_logits: bool | None = None,
    capture: bool | str | None = "auto",
    shapes: Any = None,
    unsafe_seed: int | None = None,
    allow_large_delta: bool = False,
) -> Private:
    """Make training private: the same model and optimizer objects, and a loader to iterate over instead.

    Args:
        model: its parameters with ``requires_grad`` are trained; its forward returns the loss, or the loop computes it. In a
            process group each process gives its own, all alike (docs/scaling.md).
        optimizer: any `torch.optim.Optimizer` over those parameters.
        data_loader: its ``batch_size`` is the logical batch size (in users with ``user_ids``), its data set must have a
            length; the sampler is replaced. That of an earlier run is taken for the loader which that run was given.
        method: `fastdp.DPSGD` (default), or another method's settings.
        target_epsilon: budget to calibrate the noise for; inf means no noise. Or give noise_multiplier.
        target_delta: failure probability of the guarantee, below 1/N.
        epochs: passes over the data that the budget must last for; ceil(N / B) logical steps each.
        noise_multiplier: noise standard deviation over sensitivity; 0 means no privacy, and the card says so.
        max_physical_batch_size: most examples in one forward pass; memory, not privacy. Without it every logical batch is one
            batch of the loader, however many examples are drawn.
        sampling: "poisson", or "shuffled" (accounted without amplification).
        adjacency: "add_remove" (default, with Poisson sampling), "replace_one", or "zero_out": a unit that is left out leaves
            its place empty (default, with shuffled batches, which know no "add_remove").
        user_ids: the user of each example, to protect users instead of examples.
        max_examples_per_user: examples of one user that are used, with user_ids.
        unit_map: for collators that pack rows, the batch entry naming the example of every token.
        loss_reduction: "mean" or "sum" over rows, of a loss that the loop computes. By default the model's own loss, or the
            mean if it returns none. After its first batch the loader then hands out small ones of weight 0, which verify it.
        criterion: (output, batch) -> one loss a row ``[rows]``, for a loss outside the model; the loop then takes
            ``private.loss(output, batch)``.
        output_dir: where the ledger is kept; None keeps it in memory, and a crash forgets it.
        resume: continue the ledger found in output_dir.
        secure_rounding: round what is noised to a grid, exactly (docs/noise.md); without it the low bits of exact weights
            may tell what rounding did to a sum.
        noise_rounds: of ChaCha, which draws the noise of training steps: 20, or 12, which a GPU draws faster (docs/noise.md), and
            of counts that adaptive bounds follow. The sampling, and releases of a method's own, have 20 always.
        two_pass: run backward twice and keep no activations' factors; None: where gradient checkpointing is on and one
            pass does not fit into memory (docs/scaling.md).
        self_check: verify the first batch, longer ones, and later ones by a public schedule (SECURITY.md): that an example's
            loss and gradient are what they are alone. Without it the card says that this was assumed.
        isolation: "per_example" hands out and runs one example at a time, so that no example can reach another in the model
            or collator. It takes 1.0 to 3.2 times as long, most for short rows; use it for code that nobody reviewed.
        keep_logits: True lets the loop read ``output.logits`` of a large vocabulary beside the loss. False never computes them as
            a whole, which saves three times their memory. It takes up to 2.5 times as long for a trained head whose rows are
            shorter than twice its width. None: they are left out where that takes no longer: on processors, and on GPUs where
            the model does no more to them than to cast them.
        capture: "auto" records microbatches whose shapes come again as CUDA graphs, on a GPU, where a replay is faster; it pads
            rows and lengths to few shapes (docs/loops.md). False, or None, records none. True records whatever the gain, raises
            where it cannot, and lets tensors beside the loss hold until the next microbatch only.
        shapes: "public" gives every microbatch the same number of rows, and pads sequences to powers of two. No record then
            decides the rounding of another's gradient (docs/clipping.md). Or a list of sequence lengths, or a mapping of
            "lengths" and "pad", the pad values of batch entries. It takes longer, by the rows and tokens of padding.
            Isolated rows need none; packed rows and several processes are refused.
        unsafe_seed: makes sampling and noise reproducible, which protects nothing; for tests.
        allow_large_delta: take a target_delta of 1/N or more, which allows publishing a whole example.

    Raises:
        ValueError, TypeError: for what cannot be made private, before any budget is spent.

    >>> import torch, fastdp
    >>> model, rows = torch.nn.Linear(3, 1), [(torch.ones(3), torch.ones(1))] * 100
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=20)
    >>> private = fastdp.make_private(model, optimizer, loader, target_epsilon=8.0, target_delta=1e-3, epochs=1)
    >>> for x, y in private.data_loader:
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> private.steps_done, 7.5 < private.epsilon() <= 8
    (5, True)
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "optimizer", "data_loader")}
    return Builder(model, optimizer, data_loader, RunOptions(**options)).build()
