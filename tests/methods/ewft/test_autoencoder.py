"""The stacked autoencoder and its training on public text."""

import pytest
import torch

from fastdp.methods.ewft import StackedAutoencoder, train_autoencoder
from fastdp.ops import NoiseStream


@pytest.mark.parametrize("std", [0.0, 0.05])
def test_training_reconstructs_low_rank_states(std):
    torch.manual_seed(0)
    basis = torch.randn(2, 32)
    batches = [torch.randn(8, 4, 2) @ basis for _ in range(120)]
    autoencoder = StackedAutoencoder(32, (4,))
    losses = train_autoencoder(
        autoencoder, batches, learning_rate=2e-2, max_norm=1.0, std=std, stream=NoiseStream.unsafe_reproducible(0)
    )
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert autoencoder.trained_on == "public"


def test_provenance_is_kept_with_the_weights():
    trained, fresh = StackedAutoencoder(8, (4,)), StackedAutoencoder(8, (4,))
    trained.trained_on = "public"
    fresh.load_state_dict(trained.state_dict())
    assert fresh.trained_on == "public"


def test_bad_input():
    with pytest.raises(ValueError, match="autoencoder=None for none"):
        StackedAutoencoder(8, ())
    for width, sizes in ((8, (0,)), (0, (4,))):
        with pytest.raises(ValueError, match="at least 1"):
            StackedAutoencoder(width, sizes)
    with pytest.raises(ValueError, match="9 wide"):
        train_autoencoder(StackedAutoencoder(8, (4,)), [torch.randn(2, 3, 9)])
    with pytest.raises(ValueError, match="no public text"):
        train_autoencoder(StackedAutoencoder(8, (4,)), [])
