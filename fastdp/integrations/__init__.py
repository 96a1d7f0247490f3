"""Where fastdp meets the libraries people already use: peft's adapters and transformers' Trainer."""
