"""Habits of loops: what happens between batches, around steps, and in which order."""

from __future__ import annotations

import copy
import io
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastdp

from .harness import BATCH, ROWS, Case, Run, plain_loss, program, register, register_all
from .kit import MEAN, Wrapped, bert, classify, crossentropy, labelled, mlp, numbers, regression

EPOCHS = 2


def steps(model: Any, optimizer: Any, batches: Iterable[Any], loss: Any = plain_loss) -> Iterator[int]:
    """One backward pass and one step for each batch; yields after each."""
    for step, batch in enumerate(batches):
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def looped(loop: Any, **options: Any) -> Case:
    """BERT and a loop of its own."""
    return Case(bert(), labelled(), classify, loop=loop, **options)


def habit(model: Any = None, **options: Any) -> Case:
    """BERT, two epochs, and something that the loop does besides."""
    return Case(model or bert(), labelled(), classify, **{"epochs": EPOCHS, "exact": False, **options})


def evaluate(model: Any, switch: bool = True, grad: bool = False) -> float:
    """Loss of eight rows."""
    was = model.training
    if switch:
        model.eval()
    with torch.set_grad_enabled(grad):
        found = float(model(**classify(labelled(8, seed=3))).loss)
    model.train(was)
    return found


def norms(model: Any) -> list[float]:
    """Gradient norms for a log."""
    return [float(p.grad.norm()) for p in model.parameters()]


def save(model: Any, optimizer: Any, epoch: int) -> None:
    """Everything that scripts save after an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
    for value in (optimizer.state_dict(), model.state_dict(), model, copy.deepcopy(model)):
        torch.save(value, io.BytesIO())


#: What the loop does beside training.
HABITS: dict[str, dict[str, Any]] = {
    "plain": {"exact": True},
    "train_forgotten_after_evaluation": {"after_epoch": lambda m, o, epoch: (evaluate(m), m.eval())},
    "evaluation_within_epoch": {"after_step": lambda m, o, step: step % 2 or evaluate(m)},
    "evaluation_with_gradients": {"after_epoch": lambda m, o, epoch: evaluate(m, grad=True)},
    "evaluation_as_in_training": {"after_epoch": lambda m, o, epoch: evaluate(m, switch=False, grad=True)},
    "saved_each_epoch": {"after_epoch": save},
    "clipped_by_hand": {"after_backward": lambda m, o, step: float(nn.utils.clip_grad_norm_(m.parameters(), 1.0))},
    "gradient_norm_logged_before_step": {"after_backward": lambda m, o, step: norms(m)},
    "hook_hung_later": {"after_step": lambda m, o, step: m.classifier.register_forward_hook(lambda *args: None)},
}
register_all(HABITS, lambda options: habit(**options))


@program()
def anomalies_detected() -> Case:
    """torch.autograd.set_detect_anomaly(True), and a look at the loader's settings."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        assert (loader.num_workers, loader.pin_memory, loader.drop_last) == (0, False, False)
        with torch.autograd.set_detect_anomaly(True):
            list(steps(model, optimizer, loader))

    return looped(loop)


@program()
def zero_first() -> Case:
    """zero_grad() before the forward pass, tqdm around the loader, loss.item() kept."""
    from tqdm import tqdm

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        losses = []
        for batch in tqdm(loader, disable=True):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    return looped(loop)


def _reset(in_place: bool) -> Case:
    """zero_grad(set_to_none=False), which leaves zeros, or no zero_grad() at all."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            if in_place:
                optimizer.zero_grad(set_to_none=False)

    return looped(loop, late=not in_place)


_ADDED = "gradients of earlier batches would be added up"
register("zero_grad_in_place", lambda: _reset(True))
register("no_zero_grad", lambda: _reset(False), "uses or refused: zero_grad", _ADDED)


def _counted(physical: int | None) -> Case:
    """transformers' *_no_trainer scripts, which count batches."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start(max_physical_batch_size=physical)
        limit = EPOCHS * math.ceil(len(loader))
        schedule, done = hf.get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=limit), 0
        for _ in range(EPOCHS):
            for _ in steps(model, optimizer, loader):
                schedule.step()
                done += 1
                if done >= limit:
                    break

    return looped(loop, epochs=EPOCHS)


register_all({"whole": None, "8": 8, "4": 4}, _counted, "counts_up_to_max_train_steps_")


@program()
def steps_over_an_endless_iterator() -> Case:
    """`while step < max_steps` over an iterator that is begun again."""

    def endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for step in steps(model, optimizer, endless(loader)):
            if step + 1 == EPOCHS * ROWS // BATCH:
                break

    return looped(loop, epochs=EPOCHS)


def _short(epochs: int, batches: int) -> Case:
    def loop(run: Run) -> None:
        parts = run.start()
        for _ in range(epochs):
            for step in steps(*parts):
                if step + 1 == batches:
                    break

    return looped(loop, epochs=EPOCHS)


register("epoch_cut_short", lambda: _short(EPOCHS, 2))
register("early_stopping", lambda: _short(1, 100))


@program("uses or refused: ahead", "a batch is taken before the backward pass of the one before it")
def prefetching() -> Case:
    def ahead(loader: Any) -> Iterator[Any]:
        iterator = iter(loader)
        coming = next(iterator, None)
        while coming is not None:
            batch, coming = coming, next(iterator, None)
            yield batch

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        list(steps(model, optimizer, ahead(loader)))

    return looped(loop)


def leave(loss: torch.Tensor) -> bool:
    """timm's and DETR's guard."""
    if not math.isfinite(loss.item()):
        print(f"Loss is {loss.item()}, stopping training")
        sys.exit(1)
    return False


def _guarded(check: Any, outside: bool) -> Case:
    """A guard against losses that are not finite, which never fires."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:
            loss = F.mse_loss(model(batch[0]).squeeze(1), batch[1]) if outside else model(**batch).loss
            if check(loss):
                optimizer.zero_grad()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return Case(mlp(outputs=1), regression(), None, options=MEAN, loop=loop) if outside else looped(loop)


register("guard_isfinite_inside", lambda: _guarded(lambda loss: not torch.isfinite(loss), False))
register("guard_exit_outside", lambda: _guarded(leave, True))


@program()
def eval_mode_is_kept() -> Case:
    """model.eval() before training, for training without dropout."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        assert not model.training, "the model was put into training mode"
        return model(**batch).loss

    return habit(bert().eval(), loss=loss)


def _best(epochs: int) -> Case:
    kept: dict[str, Any] = {}

    def remember(model: Any, optimizer: Any, epoch: int) -> None:
        if epoch == 0:
            kept.update(copy.deepcopy(model.state_dict()))
        elif epoch == 1:
            model.load_state_dict(kept)

    return habit(after_epoch=remember, epochs=epochs, late=True)


_WRITTEN = "weights are written outside of the private optimizer"
register("best_weights_at_the_end", lambda: _best(2))
register("best_weights_in_the_middle", lambda: _best(3), "uses or refused: load_state_dict", _WRITTEN)


@program()
def averaged_model() -> Case:
    model = bert()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    update, look = lambda m, o, step: average.update_parameters(m), lambda m, o, epoch: evaluate(average.module)
    return habit(model, after_step=update, after_epoch=look)


@program("uses or refused: outside", _WRITTEN)
def average_swapped_in() -> Case:
    """Averaged weights are copied in for an evaluation, and the trained ones back."""
    model = bert()
    shadow = copy.deepcopy(model.state_dict())

    def swap(model: Any, optimizer: Any, epoch: int) -> None:
        trained = copy.deepcopy(model.state_dict())
        model.load_state_dict(shadow)
        evaluate(model)
        model.load_state_dict(trained)

    return habit(model, after_epoch=swap, late=True)


@program()
def gradient_hooks() -> Case:
    """Hooks on parameters, as wandb.watch hangs them, after make_private."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: print(float(gradient.norm())))
        list(steps(model, optimizer, loader))

    return looped(loop)


def scheduled(make: Any, each: str) -> Case:
    """A schedule that is stepped after each step or epoch."""
    made: list[Any] = []

    def optimizer(model: Any) -> torch.optim.Optimizer:
        found = torch.optim.AdamW(model.parameters(), lr=1e-3)
        made.append(make(found))
        return found

    def advance(model: Any, optimizer: Any, step: int) -> None:
        made[0].step(*([evaluate(model)] if isinstance(made[0], schedules.ReduceLROnPlateau) else []))

    return habit(optimizer=optimizer, late=True, **{each: advance})


register("schedule_one_cycle", lambda: scheduled(lambda o: schedules.OneCycleLR(o, 1e-3, total_steps=6), "after_step"))
_FIGURE = "a loss of private data would choose the rate without noise"
register("plateau", lambda: scheduled(schedules.ReduceLROnPlateau, "after_epoch"), "refused: plateau", _FIGURE)

OPTIMIZERS = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: hf.optimization.Adafactor(p, relative_step=True, warmup_init=True, lr=None),
}
register_all(OPTIMIZERS, lambda make: habit(optimizer=lambda m: make(m.parameters()), epochs=1), "optimizer_")


class Signed(torch.optim.SGD):
    """Steps by signs, and takes every parameter's gradient for granted."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


@program()
def optimizer_by_signs() -> Case:
    own = lambda m: Signed(m.parameters(), lr=1e-3)  # noqa: E731
    return Case(mlp(), numbers(), None, crossentropy, optimizer=own, options=MEAN, exact=False)


def _frozen(begin: bool, end: bool) -> Case:
    """Embeddings are trained or frozen at first, and in the second epoch."""
    model = bert()
    model.bert.embeddings.requires_grad_(begin)
    change = lambda m, o, epoch: m.bert.embeddings.requires_grad_(end)  # noqa: E731
    everything = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)  # noqa: E731
    return habit(model, optimizer=everything, after_epoch=change, late=True, exact=True)


register("frozen_in_optimizer", lambda: _frozen(False, False))
register("unfrozen_later", lambda: _frozen(False, True))
register("frozen_later", lambda: _frozen(True, False))


@program()
def unfrozen_by_layers() -> Case:
    """Gradual unfreezing: everything is trainable at make_private, and the body is frozen for the first epoch."""

    def loop(run: Run) -> None:
        parts = run.start()
        for frozen in (True, False):
            parts[0].bert.requires_grad_(not frozen)
            list(steps(*parts))

    return looped(loop, epochs=EPOCHS)


@program()
def teacher_follows_within_the_model() -> Case:
    """Mean teacher: a frozen part of the model that follows its weights after each step."""

    def forward(self: Any, **batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(**batch).logits
        found = self.student(**batch)
        return found.loss + F.mse_loss(found.logits.softmax(-1), wanted.softmax(-1))

    @torch.no_grad()
    def follow(model: Any, optimizer: Any, step: int) -> None:
        for own, new in zip(model.teacher.parameters(), model.student.parameters()):
            own.lerp_(new, 0.1)

    model = Wrapped(forward, student=bert(), teacher=bert().requires_grad_(False).eval())
    loss = lambda model, batch: model(**batch)  # noqa: E731
    return Case(model, labelled(), classify, loss, epochs=EPOCHS, after_step=follow)


def _adversarial(together: bool) -> Case:
    """A GAN whose discriminator is private: its passes on real and on made rows, and one for the generator."""

    def forward(self: Any, real: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        told = self.net(real).squeeze(1), *([] if made is None else [self.net(made).squeeze(1)])
        return sum(F.binary_cross_entropy_with_logits(z, torch.full_like(z, 1.0 - n)) for n, z in enumerate(told))

    model, generator = Wrapped(forward, net=mlp(outputs=1)), nn.Linear(4, 12)
    own = torch.optim.Adam(generator.parameters(), lr=1e-3)

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:
            made = generator(torch.randn(len(batch[0]), 4))
            optimizer.zero_grad()
            model(batch[0], *([made.detach()] if together else [])).backward()
            optimizer.step()
            own.zero_grad()
            model(made).backward()
            own.step()

    return Case(model, numbers(), None, loop=loop)


@program()
def discriminator_twice_before_backward() -> Case:
    """The same with the losses of both passes added up in the loop, as Opacus's example may be written."""
    generator = nn.Linear(4, 12)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        made = generator(batch[0][:, :4].float()).detach().to(batch[0])
        told = model(batch[0]), model(made)
        return sum(F.binary_cross_entropy_with_logits(z, torch.full_like(z, 1.0 - n)) for n, z in enumerate(told))

    return Case(mlp(outputs=1), numbers(), None, loss, options=MEAN)


register("discriminator_in_one_forward", lambda: _adversarial(True))
register("discriminator_twice", lambda: _adversarial(False))


@program()
def two_optimizers_in_a_chain() -> Case:
    """Its way on."""

    def joined(model: Any) -> torch.optim.Optimizer:
        head = torch.optim.SGD(model.classifier.parameters(), lr=0.01)
        return fastdp.optim.ChainedOptimizer(torch.optim.AdamW(model.bert.parameters(), lr=1e-3), head)

    return habit(bert(), optimizer=joined)


@program("refused: ChainedOptimizer", "parameters that no private optimizer steps would be trained without noise")
def two_optimizers() -> Case:
    model = bert()
    head = torch.optim.SGD(model.classifier.parameters(), lr=0.01)
    body = lambda m: torch.optim.AdamW(m.bert.parameters(), lr=1e-3)  # noqa: E731
    return habit(model, optimizer=body, after_step=lambda m, o, step: head.step())


@program("uses or refused: accumul", "one backward pass and one step belong to each batch")
def accumulated_by_hand() -> Case:
    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for step, batch in enumerate(loader):
            (model(**batch).loss / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    return looped(loop)


@program("refused: max_physical_batch_size", "the loader splits batches, and clips each row once")
def split_by_hand() -> Case:
    """Each batch in two halves, to save memory."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:
            for x, y in zip(*(part.chunk(2) for part in batch)):
                (crossentropy(model, (x, y)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Case(mlp(40), numbers(40), None, loop=loop)


@program("uses or refused: forward", "the loop calls parts of the model instead of the model")
def head_called_by_the_loop() -> Case:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        hidden = model.bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state[:, 0]
        return F.cross_entropy(model.classifier(model.dropout(hidden)), batch["labels"])

    return habit(loss=loss, options=MEAN)


@program("uses or refused: state", "nobody can tell whether an optimizer's state was released")
def second_run_after_detach() -> Case:
    """A second private run after detach(), from states of the first."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        list(steps(model, optimizer, loader))
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if run.is_private:
            run.private.detach()
        model = bert()
        model.load_state_dict(states[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.load_state_dict(states[1])
        list(steps(*run.start(model, optimizer)))

    return looped(loop, late=True)


@program()
def private_loader_evaluated() -> Case:
    """The training accuracy is measured on the training loader, under no_grad."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for _ in range(EPOCHS):
            list(steps(model.train(), optimizer, loader))
            with torch.no_grad():
                seen = sum(len(model.eval()(**batch).logits) for batch in loader)
            assert seen == ROWS

    return looped(loop, epochs=EPOCHS)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and calls no parent's __init__, as public code does."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


_HOOKS = "without torch's hooks nothing can release before its step"
register(
    "optimizer_wrapped",
    lambda: habit(optimizer=lambda m: Lookahead(torch.optim.AdamW(m.parameters(), lr=1e-3))),
    "refused: optimizer inside",
    _HOOKS,
)


def _wrapped(wrapper: Callable[[Any], Any], epochs: int | None = None) -> Case:
    """A model in a wrapper, or compiled in place; in so many epochs, or as many batches as releases are paid for."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start(wrapper(run.case.model) or run.case.model)
        batches = loader if epochs else itertools.islice(loader, len(loader))
        list(steps(model, optimizer, batches, crossentropy))

    return Case(mlp(), numbers(), None, options=MEAN, loop=loop)


def _clamped() -> Case:
    """Weights between two bounds, as critics and non-negative layers have them."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        optimizer.register_step_post_hook(lambda *_: model[0].weight.data.clamp_(-0.2, 0.2))
        list(steps(model, optimizer, loader, crossentropy))

    return Case(mlp(), numbers(), None, options=MEAN, loop=loop)


register("weights_clamped_by_a_hook", _clamped)
register_all(
    {
        "compiled_in_place": lambda model: model.compile(backend="eager"),
        "compiled_before": lambda model: torch.compile(model, backend="eager"),
        "copied_for_no_gpu": torch.nn.DataParallel,
    },
    lambda wrapper: _wrapped(wrapper, epochs=1),
)
#: Batches of weight 0 that check the loop are counted too: a warning says that releases are missing.
register("counts_batches_of_a_loss_outside", lambda: _wrapped(lambda model: model))


def _scaled(enabled: bool) -> Case:
    """autocast and GradScaler, as on a GPU."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        for batch in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return looped(loop)


register("gradient_scaler", lambda: _scaled(True))
register("gradient_scaler_disabled", lambda: _scaled(False))
