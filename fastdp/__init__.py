"""Fine-tuning language models on private data, fast, with a privacy figure that holds."""

from fastdp.integrations.adapters import BottleneckConfig

__all__ = ["BottleneckConfig"]
