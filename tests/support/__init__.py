"""What tests share: reference training in plain PyTorch, tiny models, a core in memory, faults to inject."""
