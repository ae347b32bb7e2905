"""A model in training: one optimizer step computed by PyTorch over weights that the core streams."""
