"""What is known of a Hugging Face model: its units, layers, head, positions and documents of packed rows."""
