"""Lightning, with automatic and with manual optimization, over a private loader.

    python examples/lightning_loop.py --output runs/lightning
    python examples/lightning_loop.py --output runs/lightning-manual --manual

The model is small and the data are drawn at random: each row has 20 features, and its class is the sign of their sum.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastdp
from fastdp.integrations.lightning import Batches


class Classifier(lightning.LightningModule):
    """An ordinary module; of privacy it knows only the optimizer and what belongs into a checkpoint."""

    def __init__(self, manual: bool):
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
        self.private: Any = None

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of a batch, and its logits."""
        logits = self.layers(features)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def training_step(self, batch: Any, _index: int) -> torch.Tensor | None:
        """The loss for Lightning to differentiate; with manual optimization nothing, as it is done here."""
        loss = self(*batch)["loss"]
        # Computed from private data, without noise.
        self.log("unprotected_loss", loss)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()
        self.optimizers().zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        """The optimizer that `make_private` was given, and a schedule that advances once a release."""
        schedule = torch.optim.lr_scheduler.LinearLR(self.private.optimizer, 1.0, 0.1, self.private.total_steps)
        return {"optimizer": self.private.optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Step counts and spent budget; never a key."""
        checkpoint["privacy"] = self.private.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What is spent becomes the larger of the checkpoint's and the ledger's."""
        self.private.load_state_dict(checkpoint["privacy"])


def main() -> None:
    """Train privately and save the card beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/lightning")
    parser.add_argument("--manual", action="store_true", help="manual optimization")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1024)
    chosen = parser.parse_args()

    features = torch.randn(chosen.rows, 20)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    module = Classifier(chosen.manual)
    private = fastdp.make_private(
        module,
        fastdp.optim.AdamW(module.parameters(), lr=1e-2),
        DataLoader(data, batch_size=128),
        target_epsilon=3.0,
        target_delta=1e-4,
        epochs=chosen.epochs,
        max_physical_batch_size=64,
        output_dir=chosen.output,
    )
    module.private = private
    trainer = lightning.Trainer(
        max_epochs=chosen.epochs,
        default_root_dir=chosen.output,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, Batches(private))
    trainer.save_checkpoint(Path(chosen.output) / "last.ckpt")
    private.card().save(Path(chosen.output) / "card.json")
    print(f"epsilon {private.epsilon():.3g} after {private.steps_done} of {private.total_steps} releases")
    private.detach()


if __name__ == "__main__":
    main()
