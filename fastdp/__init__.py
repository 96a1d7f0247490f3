"""Fine-tuning language models on private data, fast, with a privacy figure that holds."""
