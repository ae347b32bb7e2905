"""Interrupts, as tests raise them."""


class Interrupted(Exception):
    """What the signal handler of the fixture `interrupt_after` raises."""
