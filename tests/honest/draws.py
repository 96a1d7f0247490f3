"""Randomness in data sets, collators, loops and models, which is no mistake."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from .custom import outside, text_case
from .harness import ROWS, Case, program, register
from .kit import (
    CLASSES,
    MEAN,
    WIDTH,
    Wrapped,
    bert,
    convnet,
    id_rows,
    images,
    labelled,
    mlp,
    numbers,
    pictures,
    regression,
    unlabelled,
    unpack,
)

#: A number between 0 and 1 from each global generator.
GENERATORS = {"torch": lambda: float(torch.rand(())), "python": random.random, "numpy": numpy.random.rand}


class Flipped(Dataset):
    """Pictures that are mirrored at random."""

    def __init__(self, draw: Any):
        self.rows, self.draw = images(), draw

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture, label = self.rows[index]
        return (picture.flip(-1) if self.draw() < 0.5 else picture), label


def inside(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy inside the model."""
    return F.cross_entropy(self.net(x), y)


def by_rows(output: Any, batch: Any) -> torch.Tensor:
    """The same as a criterion."""
    return F.cross_entropy(output, batch[1], reduction="none")


for _name, _draw in GENERATORS.items():
    register(f"flip_{_name}_outside", lambda d=_draw: outside(convnet(), Flipped(d), exact=False))
    register(
        f"flip_{_name}_inside",
        lambda d=_draw: Case(Wrapped(inside, net=convnet()), Flipped(d), None, unpack, exact=False),
    )
    register(
        f"flip_{_name}_criterion",
        lambda d=_draw: Case(convnet(), Flipped(d), None, lambda m, b: m(b[0]), by_rows, exact=False),
    )


@program()
def crop_in_dataset_vit() -> Case:
    """Random crops and flips for a stock vision transformer."""
    import transformers as hf

    class Cropped(Flipped):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            picture, label = super().__getitem__(index)
            top, left = torch.randint(0, 5, (2,)).tolist()
            return F.pad(picture, (2, 2, 2, 2))[:, top : top + 16, left : left + 16], label

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=CLASSES))
    return Case(model, Cropped(random.random), pictures, exact=False)


@program()
def flip_in_workers() -> Case:
    """Augmentation in two workers."""
    return outside(convnet(), Flipped(random.random), exact=False, loader={"num_workers": 2})


@program()
def noise_in_collator() -> Case:
    """The collator adds noise to each row."""

    def collate(rows: list[Any]) -> list[torch.Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows))
        return [x + 0.1 * torch.randn_like(x), y]

    return outside(mlp(), numbers(), collate, exact=False)


@program()
def noise_in_loop_outside() -> Case:
    """A denoising autoencoder."""
    loss = lambda m, b: F.mse_loss(m(b[0] + 0.1 * torch.randn_like(b[0])), b[0])  # noqa: E731
    return outside(mlp(12, 12), numbers(), loss=loss, exact=False)


@program()
def noise_in_loop_inside() -> Case:
    """Noise in the loop, the loss inside the model."""
    loss = lambda m, b: m(b[0] + 0.1 * torch.randn_like(b[0]), b[1])  # noqa: E731
    return Case(Wrapped(inside, net=mlp()), numbers(), None, loss, exact=False)


@program()
def noise_in_loop_criterion() -> Case:
    """Noise in the loop, the loss as a criterion."""
    loss = lambda m, b: m(b[0] + 0.1 * torch.randn_like(b[0]))  # noqa: E731
    return Case(mlp(), numbers(), None, loss, by_rows, exact=False)


@program()
def noise_in_criterion() -> Case:
    """A criterion that draws."""

    def criterion(output: Any, batch: Any) -> torch.Tensor:
        return (output + 0.1 * torch.randn_like(output) - batch[0]).square().mean(1)

    return Case(mlp(12, 12), numbers(), None, lambda m, b: m(b[0]), criterion, exact=False)


@program()
def dropout_in_loop() -> Case:
    """F.dropout of the inputs in the loop."""
    return outside(mlp(), numbers(), loss=lambda m, b: F.cross_entropy(m(F.dropout(b[0], 0.2)), b[1]), exact=False)


@program()
def numpy_noise_in_loop() -> Case:
    """Noise of numpy in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        noise = numpy.random.normal(size=tuple(batch[0].shape))  # noqa: NPY002
        return F.cross_entropy(model(batch[0] + 0.1 * torch.as_tensor(noise, dtype=torch.float32)), batch[1])

    return outside(mlp(), numbers(), loss=loss, exact=False)


@program()
def masks_in_loop() -> Case:
    """Masked language modelling whose masks the loop draws."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"].clone()
        hit = torch.bernoulli(torch.full(ids.shape, 0.15)).bool() & (ids > 4)
        labels = ids.masked_fill(~hit, -100)
        ids[hit] = 4
        return model(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels).loss

    return Case(bert("MaskedLM"), id_rows(), unlabelled, loss, exact=False)


@program()
def word_dropout_in_loop() -> Case:
    """The loop replaces words at random."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        ids = torch.where((torch.rand(ids.shape) < 0.1) & (ids != 0), torch.ones_like(ids), ids)
        return model(input_ids=ids, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss

    from .kit import classify

    return Case(bert(), labelled(), classify, loss, exact=False)


_SIGNAL = torch.linspace(0.99, 0.01, 20)


def denoise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(noisy rows, timesteps, noise)."""
    noise, t = torch.randn_like(x), torch.randint(0, len(_SIGNAL), (len(x),))
    kept = _SIGNAL[t].view(-1, *[1] * (x.dim() - 1))
    return kept.sqrt() * x + (1 - kept).sqrt() * noise, t, noise


def _unet(forward: Any = None) -> Wrapped:
    def predict(self: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.last(F.silu(self.first(x) + self.time(t)[:, :, None, None]))

    parts = {"time": nn.Embedding(20, 8), "first": nn.Conv2d(3, 8, 3, 1, 1), "last": nn.Conv2d(8, 3, 3, 1, 1)}
    model = Wrapped(forward or predict, **parts)
    model.predict = predict
    return model


@program()
def diffusion_in_loop() -> Case:
    """DDPM: noise and timesteps drawn in the loop, mean squared error in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        noisy, t, noise = denoise(batch[0])
        return F.mse_loss(model(noisy, t), noise)

    return outside(_unet(), images(8), loss=loss, exact=False)


@program()
def diffusion_inside() -> Case:
    """The same inside the model."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noisy, t, noise = denoise(x)
        return F.mse_loss(self.predict(self, noisy, t), noise)

    return Case(_unet(forward), images(8), None, unpack, exact=False)


@program()
def diffusion_criterion() -> Case:
    """The same with a criterion, the noise travelling with the output."""

    def passed(model: Any, batch: Any) -> Any:
        noisy, t, noise = denoise(batch[0])
        return model(noisy, t), noise

    criterion = lambda output, batch: (output[0] - output[1]).square().flatten(1).mean(1)  # noqa: E731
    return Case(_unet(), images(8), None, passed, criterion, exact=False)


@program()
def diffusion_weighted() -> Case:
    """Min-SNR: losses of rows weighed by their timestep, then the mean."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        noisy, t, noise = denoise(batch[0])
        losses = F.mse_loss(model(noisy, t), noise, reduction="none").mean((1, 2, 3))
        return (losses * _SIGNAL[t].clamp(max=0.5)).mean()

    return outside(_unet(), images(8), loss=loss, exact=False)


@program()
def flow_matching() -> Case:
    """Flow matching: one time a row, a straight path between noise and data."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return F.mse_loss(self.net(torch.cat([t * x + (1 - t) * noise, t], 1)), x - noise)

    return Case(Wrapped(forward, net=mlp(13, 12)), numbers(), None, unpack, exact=False)


def _latent(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.relu(self.encoder(x))
    mean, spread = self.mean(hidden), self.spread(hidden)
    z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
    return self.decoder(z).sigmoid(), mean, spread


def _vae(forward: Any) -> Wrapped:
    parts = {"encoder": nn.Linear(12, WIDTH), "mean": nn.Linear(WIDTH, 4), "spread": nn.Linear(WIDTH, 4)}
    return Wrapped(forward, decoder=nn.Linear(4, 12), **parts)


def _elbo(x: torch.Tensor, found: Any, reduction: str) -> torch.Tensor:
    reconstruction, mean, spread = found
    own = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1)
    return (
        F.binary_cross_entropy(reconstruction, x, reduction="sum") / (len(x) if reduction == "mean" else 1)
        + getattr(own, reduction)()
    )


@program()
def variational_inside() -> Case:
    """A VAE that returns reconstruction plus divergence."""
    model = _vae(lambda self, x, y: _elbo(x, _latent(self, x), "mean"))
    return Case(model, numbers(), None, unpack, exact=False)


@program()
def variational_sum_inside() -> Case:
    """The same, both terms summed over the batch."""
    model = _vae(lambda self, x, y: _elbo(x, _latent(self, x), "sum"))
    return Case(model, numbers(), None, unpack, exact=False)


@program()
def variational_outside() -> Case:
    """torch's example: both terms summed over the batch, in the loop."""
    loss = lambda m, b: _elbo(b[0], m(b[0]), "sum")  # noqa: E731
    return Case(_vae(_latent), numbers(), None, loss, options={"loss_reduction": "sum"}, exact=False)


#: What a forward pass may draw for its rows: a factor for each number of [rows, features].
FORWARD = {
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.8)),
    "rand_like": lambda x: (torch.rand_like(x) > 0.2).to(x),
    "randint": lambda x: 1 + torch.randint(0, 2, (len(x), 1)).to(x),
    "normal": lambda x: torch.normal(1.0, 0.1, x.shape).to(x),
    "multinomial": lambda x: torch.zeros_like(x).scatter(1, torch.multinomial(torch.ones_like(x), 6), 1.0),
    "uniform_in_place": lambda x: torch.empty_like(x).uniform_(0.5, 1.5),
    "numpy_rows": lambda x: torch.as_tensor(numpy.stack([numpy.random.rand(12) > 0.2 for _ in x])).to(x),  # noqa: NPY002
    "numpy_once": lambda x: torch.as_tensor(numpy.random.rand(*x.shape)).to(x),  # noqa: NPY002
    "python_rows": lambda x: torch.tensor([[random.choice([0.8, 1.2])] for _ in x]).to(x),
    "randperm_rows": lambda x: torch.stack([torch.randperm(12) for _ in x]).to(x) / 12,
    "distribution": lambda x: torch.distributions.Beta(2.0, 2.0).sample((len(x), 1)).to(x),
    "one_number": lambda x: torch.rand(()).to(x),
}
for _name, _factor in FORWARD.items():
    register(
        f"forward_draws_{_name}",
        lambda f=_factor: Case(
            Wrapped(lambda self, x, y: F.cross_entropy(self.net(x * f(x)), y), net=mlp()),
            numbers(),
            None,
            unpack,
            exact=False,
        ),
    )


@program()
def span_mask_by_row() -> Case:
    """SpecAugment by hand: a span of each row, drawn with numpy, is set to a learned vector."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        spans = numpy.zeros(ids.shape, dtype=bool)
        for row in range(len(ids)):
            start = numpy.random.randint(0, max(1, int(mask[row].sum()) - 1))  # noqa: NPY002
            spans[row, start : start + 2] = True
        hidden = torch.where(torch.as_tensor(spans).unsqueeze(-1), self.hidden_vector, hidden)
        hidden = self.layers(hidden + self.position[: ids.shape[1]], src_key_padding_mask=mask == 0)
        return F.cross_entropy(self.head(hidden[:, 0]), labels)

    case = text_case(forward, hidden_vector=nn.Parameter(torch.randn(WIDTH)))
    case.exact = False
    return case


@program()
def patch_dropout() -> Case:
    """Each row keeps a random half of its patches."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        kept = torch.rand(patches.shape[:2]).argsort(1)[:, :8]
        hidden = patches.gather(1, kept.unsqueeze(-1).expand(-1, -1, WIDTH))
        return F.cross_entropy(self.head(hidden.mean(1)), y)

    model = Wrapped(forward, patches=nn.Conv2d(3, WIDTH, 4, 4), head=nn.Linear(WIDTH, CLASSES))
    return Case(model, images(), None, unpack, exact=False)


def _dropped_layers(skip: Any) -> Case:
    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.position[: ids.shape[1]]
        for layer in self.layers.layers:
            if not (self.training and skip() < 0.2):
                hidden = layer(hidden, src_key_padding_mask=mask == 0)
        return F.cross_entropy(self.head(hidden[:, 0]), labels)

    case = text_case(forward)
    case.exact = False
    return case


for _name, _draw in GENERATORS.items():
    register(f"layer_drop_{_name}", lambda d=_draw: _dropped_layers(d))


@program()
def stochastic_depth_by_row() -> Case:
    """DropPath: a residual branch is left out by row."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        kept = (torch.rand(len(x), 1) < 0.8).to(x) / 0.8
        return F.cross_entropy(self.head(hidden + kept * self.branch(hidden)), y)

    parts = {"first": nn.Linear(12, WIDTH), "branch": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, CLASSES)}
    return Case(Wrapped(forward, **parts), numbers(), None, unpack, exact=False)


@program()
def noisy_embeddings() -> Case:
    """NEFTune by a forward hook on the embeddings."""

    def noise(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.zeros_like(output).uniform_(-1, 1) * 5 / math.sqrt(output[0].numel())

    from .kit import causal, gpt2

    model = gpt2()
    model.get_input_embeddings().register_forward_hook(noise)
    return Case(model, id_rows(), causal, exact=False)


@program()
def gumbel_softmax() -> Case:
    """Straight-through Gumbel softmax."""
    model = Wrapped(lambda self, x, y: F.mse_loss(self.out(F.gumbel_softmax(self.net(x), hard=True)), x))
    model.net, model.out = mlp(), nn.Linear(CLASSES, 12)
    return Case(model, numbers(), None, unpack, exact=False)


@program()
def scheduled_sampling() -> Case:
    """A decoder step sees its own prediction or the target, drawn by row."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        state, losses, seen = torch.zeros(len(x), WIDTH), [], x[:, 0]
        for t in range(1, x.shape[1]):
            state = self.cell(self.embed(seen), state)
            logits = self.head(state)
            losses.append(F.cross_entropy(logits, x[:, t], reduction="none"))
            seen = torch.where(torch.rand(len(x)) < 0.5, x[:, t], logits.argmax(-1))
        return torch.stack(losses, 1).mean(1).mean()

    model = Wrapped(forward, embed=nn.Embedding(20, 8), cell=nn.GRUCell(8, WIDTH), head=nn.Linear(WIDTH, 20))
    return Case(model, TensorDataset(torch.randint(0, 20, (ROWS, 5))), None, unpack, exact=False)


@program()
def monte_carlo_samples() -> Case:
    """Several samples of a latent variable a row, averaged."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = [F.mse_loss(self.net(x + 0.1 * torch.randn_like(x)).squeeze(1), y) for _ in range(3)]
        return sum(losses) / 3

    return Case(Wrapped(forward, net=mlp(12, 1)), regression(), None, unpack, exact=False)


@program()
def seeded_by_step() -> Case:
    """The loop seeds torch before each step."""
    step = [0]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        step[0] += 1
        torch.manual_seed(step[0])
        return F.cross_entropy(model(F.dropout(batch[0], 0.1)), batch[1])

    return Case(mlp(), numbers(), None, loss, options=MEAN, exact=False)
