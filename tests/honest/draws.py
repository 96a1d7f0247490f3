"""Randomness in data sets, collators, loops and models, which is no mistake."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from . import kit
from .custom import outside, text_case
from .harness import ROWS, Case, program, register, register_all

#: A number between 0 and 1 from each global generator, and from the data set's own.
GENERATORS = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": numpy.random.rand,
    "own": numpy.random.default_rng(0).random,
}


class Flipped(Dataset):
    """Pictures that are mirrored at random."""

    def __init__(self, draw: Any):
        self.rows, self.draw = kit.images(), draw

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


_OWN = GENERATORS["own"]
FLIPS = {
    "torch_outside": lambda: outside(kit.convnet(), Flipped(GENERATORS["torch"]), exact=False),
    "own_outside": lambda: outside(kit.convnet(), Flipped(_OWN), exact=False),
    "own_inside": lambda: Case(kit.Wrapped(inside, net=kit.convnet()), Flipped(_OWN), None, kit.unpack, exact=False),
    "own_criterion": lambda: Case(kit.convnet(), Flipped(_OWN), None, lambda m, b: m(b[0]), by_rows, exact=False),
}
register_all(FLIPS, lambda build: build(), "flip_")


@program()
def noise_in_collator() -> Case:
    def collate(rows: list[Any]) -> list[torch.Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows))
        return [x + 0.1 * torch.randn_like(x), y]

    return outside(kit.mlp(), kit.numbers(), collate, exact=False)


@program()
def noise_in_collator_from_its_own_generator() -> Case:
    """The collator adds noise from a generator that it keeps."""
    generator = torch.Generator().manual_seed(0)

    def collate(rows: list[Any]) -> list[torch.Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows))
        return [x + 0.1 * torch.randn(x.shape, generator=generator), y]

    return outside(kit.mlp(), kit.numbers(), collate, exact=False)


@program()
def noise_in_criterion() -> Case:
    def criterion(output: Any, batch: Any) -> torch.Tensor:
        return (output + 0.1 * torch.randn_like(output) - batch[0]).square().mean(1)

    return Case(kit.mlp(12, 12), kit.numbers(), None, lambda m, b: m(b[0]), criterion, exact=False)


@program()
def negatives_in_loop() -> Case:
    """Bayesian personalised ranking: the loop draws a film that the user did not rate, of few."""

    def forward(self: Any, users: torch.Tensor, films: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * (self.films(films) - self.films(others))).sum(1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return -F.logsigmoid(model(*batch, torch.randint(0, 9, batch[1].shape))).mean()

    rows = TensorDataset(torch.arange(ROWS) % 6, torch.arange(ROWS) % 9)
    model = kit.Wrapped(forward, users=nn.Embedding(6, 8), films=nn.Embedding(9, 8))
    return outside(model, rows, loss=loss, exact=False)


_SIGNAL = torch.linspace(0.99, 0.01, 20)


def denoise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(noisy rows, timesteps, noise)."""
    noise, t = torch.randn_like(x), torch.randint(0, len(_SIGNAL), (len(x),))
    kept = _SIGNAL[t].view(-1, *[1] * (x.dim() - 1))
    return kept.sqrt() * x + (1 - kept).sqrt() * noise, t, noise


def _unet() -> kit.Wrapped:
    def predict(self: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.last(F.silu(self.first(x) + self.time(t)[:, :, None, None]))

    parts = {"time": nn.Embedding(20, 8), "first": nn.Conv2d(3, 8, 3, 1, 1), "last": nn.Conv2d(8, 3, 3, 1, 1)}
    return kit.Wrapped(predict, **parts)


@program()
def diffusion_criterion() -> Case:
    """DDPM: noise and timesteps drawn in the loop, and a criterion; the noise travels with the output."""

    def passed(model: Any, batch: Any) -> Any:
        noisy, t, noise = denoise(batch[0])
        return model(noisy, t), noise

    criterion = lambda output, batch: (output[0] - output[1]).square().flatten(1).mean(1)  # noqa: E731
    return Case(_unet(), kit.images(8), None, passed, criterion, exact=False)


def _latent(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.relu(self.encoder(x))
    mean, spread = self.mean(hidden), self.spread(hidden)
    z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
    return self.decoder(z).sigmoid(), mean, spread


def _vae(forward: Any) -> kit.Wrapped:
    parts = {"encoder": nn.Linear(12, kit.WIDTH), "mean": nn.Linear(kit.WIDTH, 4), "spread": nn.Linear(kit.WIDTH, 4)}
    return kit.Wrapped(forward, decoder=nn.Linear(4, 12), **parts)


def _elbo(x: torch.Tensor, found: Any, reduction: str) -> torch.Tensor:
    reconstruction, mean, spread = found
    own = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1)
    return (
        F.binary_cross_entropy(reconstruction, x, reduction="sum") / (len(x) if reduction == "mean" else 1)
        + getattr(own, reduction)()
    )


#: What a forward pass may draw for its rows: a factor for each number of [rows, features].
FORWARD = {
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.8)),
    "normal": lambda x: torch.normal(1.0, 0.1, x.shape).to(x),
    "multinomial": lambda x: torch.zeros_like(x).scatter(1, torch.multinomial(torch.ones_like(x), 6), 1.0),
    "numpy_rows": lambda x: torch.as_tensor(numpy.stack([numpy.random.rand(12) > 0.2 for _ in x])).to(x),  # noqa: NPY002
    "python_rows": lambda x: torch.tensor([[random.choice([0.8, 1.2])] for _ in x]).to(x),
    "one_number": lambda x: torch.rand(()).to(x),
}


def drawing(factor: Any) -> Case:
    """forward multiplies its inputs by what it draws."""
    forward = lambda self, x, y: F.cross_entropy(self.net(x * factor(x)), y)  # noqa: E731
    return Case(kit.Wrapped(forward, net=kit.mlp()), kit.numbers(), None, kit.unpack, exact=False)


register_all(FORWARD, drawing, "forward_draws_")


@program()
def patch_dropout() -> Case:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        kept = torch.rand(patches.shape[:2]).argsort(1)[:, :8]
        hidden = patches.gather(1, kept.unsqueeze(-1).expand(-1, -1, kit.WIDTH))
        return F.cross_entropy(self.head(hidden.mean(1)), y)

    model = kit.Wrapped(forward, patches=nn.Conv2d(3, kit.WIDTH, 4, 4), head=nn.Linear(kit.WIDTH, kit.CLASSES))
    return Case(model, kit.images(), None, kit.unpack, exact=False)


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


register_all({kind: draw for kind, draw in GENERATORS.items() if kind != "own"}, _dropped_layers, "layer_drop_")


@program()
def layer_drop_of_two_widths() -> Case:
    """M2M100 with a layer on each side, say: a batch may skip the one, and the next batch the other."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) if torch.rand(()) < 0.5 else x
        return F.cross_entropy(self.head(x), y)

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, n), nn.ReLU(), nn.Linear(n, 12)) for n in (8, 16))
    model = kit.Wrapped(forward, blocks=blocks, head=nn.Linear(12, kit.CLASSES))
    return Case(model, kit.numbers(), None, kit.unpack, exact=False)


@program()
def seeded_by_step() -> Case:
    step = [0]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        step[0] += 1
        torch.manual_seed(step[0])
        return F.cross_entropy(model(F.dropout(batch[0], 0.1)), batch[1])

    return Case(kit.mlp(), kit.numbers(), None, loss, options=kit.MEAN, exact=False)


#: Programs of one line.
ONE_LINE: dict[str, Any] = {
    "noise_in_loop_outside": lambda: outside(
        kit.mlp(12, 12),
        kit.numbers(),
        loss=lambda m, b: F.mse_loss(m(b[0] + 0.1 * torch.randn_like(b[0])), b[0]),
        exact=False,
    ),
    "variational_inside": lambda: Case(
        _vae(lambda self, x, y: _elbo(x, _latent(self, x), "mean")), kit.numbers(), None, kit.unpack, exact=False
    ),
    "variational_outside": lambda: Case(
        _vae(_latent),
        kit.numbers(),
        None,
        lambda m, b: _elbo(b[0], m(b[0]), "sum"),
        options={"loss_reduction": "sum"},
        exact=False,
    ),
}
register_all(ONE_LINE, lambda build: build())
register(
    "variational_sum_unsaid",
    lambda: Case(_vae(_latent), kit.numbers(), None, lambda m, b: _elbo(b[0], m(b[0]), "sum"), exact=False),
    "refused: loss_reduction='sum'",
    "gradients would grow with the batch, whatever the model draws",
)


@program()
def masked_autoencoder_own_generator() -> Case:
    """The model hides half of a picture's patches, by a generator that it keeps."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        ranks = torch.rand(patches.shape[:2], generator=self.generator).argsort(1)
        hidden = (ranks < patches.shape[1] // 2).unsqueeze(-1).to(patches)
        found = self.net(self.mix(((1 - hidden) * patches).transpose(1, 2)).transpose(1, 2))
        return ((found - patches).square() * hidden).mean()

    parts: dict[str, Any] = {"net": kit.mlp(48, 48), "mix": nn.Linear(16, 16), "generator": torch.Generator()}
    return Case(kit.Wrapped(forward, **parts), kit.images(), None, kit.unpack, exact=False)


class _Diffusion:
    """A noise schedule with numpy's generator, as diffusion tutorials write it."""

    def __init__(self) -> None:
        self.generator, self.kept = numpy.random.default_rng(0), torch.linspace(0.99, 0.1, 20)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.kept[torch.from_numpy(self.generator.integers(0, 20, len(x)))].unsqueeze(1)
        noise = torch.from_numpy(self.generator.standard_normal(tuple(x.shape))).to(x)
        return kept.sqrt() * x + (1 - kept).sqrt() * noise, noise


@program()
def diffusion_own_generator() -> Case:
    """The loop calls an object that draws timesteps and noise."""
    diffusion = _Diffusion()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        noised, noise = diffusion(batch[0])
        return F.mse_loss(model(noised), noise)

    return outside(kit.mlp(12, 12), kit.numbers(), loss=loss, exact=False)


class _Erasing(nn.Module):
    """A transform in torchvision's form, with Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.generator.random() < 0.3:
            x = x.clone()
            x[:, : self.generator.randrange(4, 8)] = 0
        return x


class _Transformed(Flipped):
    def __init__(self) -> None:
        super().__init__(random.random)
        self.transforms = [_Erasing(), nn.Identity()]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture, label = self.rows[index]
        for transform in self.transforms:
            picture = transform(picture)
        return picture, label


@program()
def list_of_transforms() -> Case:
    """A list of transforms, one of which is a module with a generator."""
    return outside(kit.convnet(), _Transformed(), exact=False)
