"""A run from its configuration to its export: set-up, the loop, resuming, saving, metrics, the run folder."""
