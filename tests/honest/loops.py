"""Habits of loops: what happens between batches, around steps, and in which order."""

from __future__ import annotations

import copy
import io
import math
import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .harness import BATCH, ROWS, Case, Run, program, register
from .kit import (
    MEAN,
    bert,
    causal,
    classify,
    crossentropy,
    gpt2,
    id_rows,
    labelled,
    llama,
    mlp,
    numbers,
    regression,
    unlabelled,
)

EPOCHS = 2


def looped(loop: Any, model: Any = None, **options: Any) -> Case:
    """BERT and a loop of its own."""
    return Case(model or bert(), labelled(), classify, loop=loop, **options)


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


@program()
def plain() -> Case:
    """The loop of the README."""
    return Case(bert(), labelled(), classify)


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


@program()
def zero_grad_in_place() -> Case:
    """zero_grad(set_to_none=False), which leaves zeros."""
    return habit(after_step=lambda m, o, step: o.zero_grad(set_to_none=False), epochs=1)


@program("uses or refused: zero_grad", "gradients of earlier batches would be added up")
def no_zero_grad() -> Case:
    """zero_grad() is never called."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()

    return looped(loop, late=True)


def _counted(physical: int | None) -> Case:
    def loop(run: Run) -> None:
        model, optimizer, loader = run.start(max_physical_batch_size=physical) if run.is_private else run.start()
        steps = EPOCHS * math.ceil(len(loader))
        schedule = hf.get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=steps)
        done = 0
        for _ in range(EPOCHS):
            for batch in loader:
                model(**batch).loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                done += 1
                if done >= steps:
                    break

    return looped(loop, epochs=EPOCHS)


for _size in (None, 8, 4):
    register(f"counts_up_to_max_train_steps_{_size or 'whole'}", lambda size=_size: _counted(size))


@program()
def steps_over_an_endless_iterator() -> Case:
    """`while step < max_steps` over an iterator that is begun again."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        iterator = iter(loader)
        for _ in range(EPOCHS * ROWS // BATCH):
            batch = next(iterator, None)
            if batch is None:
                iterator = iter(loader)
                batch = next(iterator)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return looped(loop, epochs=EPOCHS)


@program()
def epoch_cut_short() -> Case:
    """`if step == 2: break` in each epoch."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for _ in range(EPOCHS):
            for step, batch in enumerate(loader):
                if step == 2:
                    break
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return looped(loop, epochs=EPOCHS)


@program()
def early_stopping() -> Case:
    """The run ends after one of two epochs."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        evaluate(model)

    return looped(loop, epochs=EPOCHS)


@program("uses or refused: ahead", "a batch is taken before the backward pass of the one before it")
def prefetching() -> Case:
    """The next batch is taken before the step of this one."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        iterator = iter(loader)
        coming = next(iterator, None)
        while coming is not None:
            batch, coming = coming, next(iterator, None)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return looped(loop)


@program()
def first_batch_looked_at() -> Case:
    """next(iter(loader)) before training, to print shapes."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        {name: value.shape for name, value in next(iter(loader)).items()}
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return looped(loop)


def checked(check: Any) -> Case:
    """A guard against losses that are not finite, which never fires."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:
            loss = model(**batch).loss if isinstance(batch, dict) else F.mse_loss(model(batch[0]).squeeze(1), batch[1])
            if check(loss):
                optimizer.zero_grad()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return looped(loop)


def leave(loss: torch.Tensor) -> bool:
    """timm's and DETR's guard."""
    if not math.isfinite(loss.item()):
        print(f"Loss is {loss.item()}, stopping training")
        sys.exit(1)
    return False


GUARDS = {"exit": leave, "isfinite": lambda loss: not torch.isfinite(loss), "isnan": torch.isnan}
for _name, _check in GUARDS.items():

    def _outside(check: Any = _check) -> Case:
        case = checked(check)
        case.model, case.rows, case.collate, case.options = mlp(outputs=1), regression(), None, MEAN
        return case

    register(f"guard_{_name}_inside", lambda check=_check: checked(check))
    register(f"guard_{_name}_outside", _outside)


@program()
def guard_assert_in_loss() -> Case:
    """assert torch.isfinite(loss).all() in the loss of the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        found = crossentropy(model, batch)
        assert torch.isfinite(found).all()
        return found

    return Case(mlp(), numbers(), None, loss, options=MEAN)


@program()
def eval_mode_is_kept() -> Case:
    """model.eval() before training, for training without dropout."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        assert not model.training, "the model was put into training mode"
        return model(**batch).loss

    return habit(bert().eval(), loss=loss)


@program()
def partly_eval_is_kept() -> Case:
    """The body in eval mode, the head in training mode."""
    model = bert()
    model.bert.eval()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        assert model.training
        assert not model.bert.training, "the body was put into training mode"
        return model(**batch).loss

    return habit(model, loss=loss)


@program()
def train_forgotten_after_evaluation() -> Case:
    """model.eval() after the first epoch; model.train() is called once, before it."""
    return habit(after_epoch=lambda model, optimizer, epoch: (evaluate(model), model.eval()))


@program()
def evaluation_within_epoch() -> Case:
    """model.eval() and model.train() around an evaluation after every other step."""
    return habit(after_step=lambda model, optimizer, step: step % 2 or evaluate(model))


@program()
def evaluation_without_eval() -> Case:
    """Evaluation in training mode."""
    return habit(after_epoch=lambda model, optimizer, epoch: evaluate(model, switch=False))


@program()
def evaluation_with_gradients() -> Case:
    """Evaluation without torch.no_grad()."""
    return habit(after_epoch=lambda model, optimizer, epoch: evaluate(model, grad=True))


@program()
def evaluation_on_training_batch() -> Case:
    """An evaluating pass over the training batch before the training pass."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            model(**batch)
        model.train()
        return model(**batch).loss

    return habit(loss=loss)


@program()
def sampling_between_steps() -> Case:
    """Text is generated after each step."""

    def generate(model: Any, optimizer: Any, step: int) -> None:
        model.eval()
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=True, pad_token_id=0)
        model.train()

    return Case(gpt2(), id_rows(), causal, after_step=generate)


@program()
def saved_each_epoch() -> Case:
    """save_pretrained, torch.save of the model and of the optimizer."""

    def save(model: Any, optimizer: Any, epoch: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())

    return habit(after_epoch=save)


@program()
def whole_model_saved() -> Case:
    """torch.save(model) and copy.deepcopy(model) after the first epoch."""

    def save(model: Any, optimizer: Any, epoch: int) -> None:
        torch.save(model, io.BytesIO())
        copy.deepcopy(model)

    return habit(after_epoch=save)


@program()
def best_weights_at_the_end() -> Case:
    """Early stopping's best state is loaded after the last epoch."""
    kept: dict[str, Any] = {}

    def remember(model: Any, optimizer: Any, epoch: int) -> None:
        if epoch == 0:
            kept.update(copy.deepcopy(model.state_dict()))
        else:
            model.load_state_dict(kept)

    return habit(after_epoch=remember)


@program(
    "uses or refused: load_state_dict",
    "weights of an earlier step are released ones; but none may change between steps",
)
def best_weights_in_the_middle() -> Case:
    """The best state so far is loaded, and training goes on."""
    kept: dict[str, Any] = {}

    def remember(model: Any, optimizer: Any, epoch: int) -> None:
        if epoch == 0:
            kept.update(copy.deepcopy(model.state_dict()))
        elif epoch == 1:
            model.load_state_dict(kept)

    return habit(after_epoch=remember, epochs=3, late=True)


@program()
def averaged_model() -> Case:
    """EMA by torch's AveragedModel, evaluated apart."""
    model = bert()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return habit(
        model,
        after_step=lambda model, optimizer, step: average.update_parameters(model),
        after_epoch=lambda model, optimizer, epoch: evaluate(average.module),
    )


@program()
def average_by_hand() -> Case:
    """EMA of a deep copy, made before or after make_private."""
    copies: list[Any] = []

    def update(model: Any, optimizer: Any, step: int) -> None:
        if not copies:
            copies.append(copy.deepcopy(model).requires_grad_(False))
        with torch.no_grad():
            for mine, its in zip(copies[0].parameters(), model.parameters()):
                mine.lerp_(its, 0.1)

    return habit(after_step=update)


@program("uses or refused: outside", "weights are written outside of the private optimizer")
def average_swapped_in() -> Case:
    """Averaged weights are copied in for an evaluation, and the trained ones back."""
    model = bert()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def swap(model: Any, optimizer: Any, epoch: int) -> None:
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(shadow[name])
        evaluate(model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(trained[name])

    return habit(model, after_epoch=swap, late=True)


@program()
def clipped_by_hand() -> Case:
    """clip_grad_norm_ is left in the loop."""
    return habit(after_backward=lambda m, o, step: float(nn.utils.clip_grad_norm_(m.parameters(), 1.0)))


@program()
def gradient_norm_logged_before_step() -> Case:
    """Norms of p.grad before step(), None allowed."""
    return habit(after_backward=lambda m, o, step: [float(p.grad.norm()) for p in m.parameters() if p.grad is not None])


@program()
def gradient_norm_logged_after_step() -> Case:
    """Norms of p.grad after step()."""
    return habit(after_step=lambda m, o, step: [float(p.grad.norm()) for p in m.parameters() if p.grad is not None])


@program()
def gradient_hooks() -> Case:
    """Hooks on parameters, as wandb.watch hangs them, after make_private."""
    seen: list[float] = []

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: seen.append(float(gradient.norm())))
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return looped(loop)


@program()
def forward_hooks_for_monitoring() -> Case:
    """Forward hooks that keep means of activations."""
    model, seen = bert(), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, float(o.detach().mean())))
    return habit(model)


@program()
def hook_hung_later() -> Case:
    """A monitoring hook is hung after the first step."""

    def hang(model: Any, optimizer: Any, step: int) -> None:
        if step == 0:
            model.classifier.register_forward_hook(lambda m, i, o: None)

    return habit(after_step=hang, epochs=1)


SCHEDULES = {
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, total_steps=6),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "warmup": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


def scheduled(make: Any, each: str, model: Any = None) -> Case:
    """A schedule that is stepped after each step or epoch."""
    schedules: list[Any] = []

    def optimizer(model: Any) -> torch.optim.Optimizer:
        found = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedules.append(make(found))
        return found

    return habit(model, optimizer=optimizer, **{each: lambda m, o, step: schedules[0].step()})


for _name, _make in SCHEDULES.items():
    register(f"schedule_{_name}", lambda make=_make: scheduled(make, "after_step"))
register("schedule_by_epoch", lambda: scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), "after_epoch"))


@program()
def rate_set_by_hand() -> Case:
    """The loop sets lr in param_groups."""
    return habit(after_epoch=lambda m, o, epoch: [group.update(lr=1e-4) for group in o.param_groups])


@program("refused: plateau", "a loss of private data would choose the rate without noise")
def plateau() -> Case:
    """ReduceLROnPlateau."""
    schedules: list[Any] = []

    def optimizer(model: Any) -> torch.optim.Optimizer:
        found = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedules.append(torch.optim.lr_scheduler.ReduceLROnPlateau(found))
        return found

    return habit(optimizer=optimizer, after_epoch=lambda m, o, e: schedules[0].step(evaluate(m)), late=True)


@program()
def layerwise_rates() -> Case:
    """Layers have their own learning rates, biases no decay."""

    def optimizer(model: Any) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if "layer.0" in n], "lr": 1e-4},
            {"params": [p for n, p in named if "layer.0" not in n and "bias" not in n]},
            {"params": [p for n, p in named if "layer.0" not in n and "bias" in n], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3)

    return habit(optimizer=optimizer)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "adafactor": lambda p: hf.optimization.Adafactor(p, relative_step=True, warmup_init=True, lr=None),
}
for _name, _make in OPTIMIZERS.items():
    register(f"optimizer_{_name}", lambda make=_make: habit(optimizer=lambda m: make(m.parameters()), epochs=1))


@program()
def frozen_in_optimizer() -> Case:
    """Frozen parameters are among the optimizer's."""
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    return habit(model, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), exact=True)


def _changes_freezing(begin: bool) -> Case:
    model = bert()
    model.bert.embeddings.requires_grad_(begin)
    return habit(
        model,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        after_epoch=lambda m, o, epoch: m.bert.embeddings.requires_grad_(not begin),
        late=True,
    )


for _begin, _name in ((False, "unfrozen_later"), (True, "frozen_later")):
    register(
        _name,
        lambda begin=_begin: _changes_freezing(begin),
        "uses or refused: frozen" if _begin else "refused: frozen",
        "the trained parameters are chosen at make_private",
    )


@program("refused: optimizer", "parameters that no private optimizer steps would be trained without noise")
def two_optimizers() -> Case:
    """One optimizer for the body and one for the head."""
    model = bert()
    head = torch.optim.SGD(model.classifier.parameters(), lr=0.01)
    return habit(
        model,
        optimizer=lambda m: torch.optim.AdamW(m.bert.parameters(), lr=1e-3),
        after_step=lambda m, o, step: head.step(),
    )


@program("uses or refused: accumul", "one backward pass and one step belong to each batch")
def accumulated_by_hand() -> Case:
    """Two backward passes a step."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for step, batch in enumerate(loader):
            (model(**batch).loss / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    return looped(loop)


@program("refused: LBFGS", "LBFGS evaluates a batch several times")
def lbfgs() -> Case:
    """torch.optim.LBFGS with a closure."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = crossentropy(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)

    make = lambda model: torch.optim.LBFGS(model.parameters())  # noqa: E731
    return Case(mlp(), numbers(), None, optimizer=make, options=MEAN, loop=loop)


@program("uses or refused: forward", "the loop calls parts of the model instead of the model")
def head_called_by_the_loop() -> Case:
    """The loop calls body and head one after the other."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        hidden = model.bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state[:, 0]
        return F.cross_entropy(model.classifier(model.dropout(hidden)), batch["labels"])

    return habit(loss=loss, options=MEAN)


@program("refused: optimizer", "the optimizer holds parameters of another module")
def two_modules() -> Case:
    """Encoder and decoder are two modules of one optimizer."""

    def loop(run: Run) -> None:
        encoder, decoder = mlp(12, 8), nn.Linear(8, 3)
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
        encoder, optimizer, loader = run.start(encoder, optimizer)
        for x, y in loader:
            F.cross_entropy(decoder(encoder(x)), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Case(mlp(), numbers(), None, options=MEAN, loop=loop)


@program("uses or refused: state", "nobody can tell whether an optimizer's state was released")
def second_run_after_detach() -> Case:
    """A second private run of the model after detach(), with loaded states."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if run.is_private:
            run.private.detach()
        model = bert()
        model.load_state_dict(states[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.load_state_dict(states[1])
        model, optimizer, loader = run.start(model, optimizer)
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return looped(loop, late=True)


@program()
def compiled_in_place() -> Case:
    """model.compile() with an eager backend."""
    model = mlp()
    model.compile(backend="eager")
    return Case(model, numbers(), None, crossentropy, options=MEAN, exact=False)


@program()
def compiled_before() -> Case:
    """torch.compile(model) before make_private."""

    def loop(run: Run) -> None:
        compiled = torch.compile(run.case.model, backend="eager")
        model, optimizer, loader = run.start(compiled)
        for batch in loader:
            crossentropy(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Case(mlp(), numbers(), None, options=MEAN, loop=loop)


@program("uses or refused: GradScaler", "a loss scale follows gradients that the release has not made yet")
def gradient_scaler() -> Case:
    """autocast and GradScaler, as on a GPU."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        scaler = torch.amp.GradScaler("cpu")
        for batch in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return looped(loop)


@program()
def autocast_outside_loss() -> Case:
    """Autocast around forward pass and loss, both in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    return Case(mlp(), numbers(), None, loss, options=MEAN, exact=False)


@program()
def accuracy_by_numpy() -> Case:
    """Accuracies of training batches by numpy, loss in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        (output.detach().numpy().argmax(1) == batch[1].numpy()).mean()
        return nn.CrossEntropyLoss()(output, batch[1])

    return Case(mlp(), numbers(), None, loss, options=MEAN)


@program()
def labels_in_loop_with_schedule_and_clip() -> Case:
    """The usual loop of a tutorial, all habits together."""

    def loop(run: Run) -> None:
        model, optimizer, loader = run.start()
        schedule = hf.get_linear_schedule_with_warmup(optimizer, 1, EPOCHS * len(loader))
        for _ in range(EPOCHS):
            model.train()
            total = 0.0
            for batch in loader:
                labels = batch["input_ids"].clone()
                labels[batch["attention_mask"] == 0] = -100
                loss = model(**batch, labels=labels).loss
                total += loss.detach().float()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(**causal(id_rows(4)))

    return Case(llama(), id_rows(), unlabelled, loop=loop, epochs=EPOCHS)
