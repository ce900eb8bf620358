"""A small language model is fine-tuned: what comes of it, and the same by transformers' Trainer."""
