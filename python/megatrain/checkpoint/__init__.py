"""What is written to disk and read back: checkpoints, and the Hugging Face folder of an export."""
