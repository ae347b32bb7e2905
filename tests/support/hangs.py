"""The one limit of time in tests: after it, something that ends by itself counts as hung."""

HANG_SECONDS = 900
"""Long enough for a machine that does four times as much as it has cores for; pytest's own limit is longer."""
