"""Checkpoints: configuration, memory-mapped weights and tokenizer of one model, read from its own files."""
