"""One fine-tuning run from a config: files in; weights, privacy card, metrics and plots out."""

from fastdp.finetune.config import ConfigError, FinetuneConfig, load_config
from fastdp.finetune.run import Reporter, Result, finetune

__all__ = ["ConfigError", "FinetuneConfig", "Reporter", "Result", "finetune", "load_config"]
