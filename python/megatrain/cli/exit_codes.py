"""Exit codes of `megatrain`, for schedulers and scripts that decide by them whether to start again."""

DONE = 0
BUG = 1
"""A bug of ours; the traceback is kept in a file."""
REFUSED = 2
"""The request is wrong, or does not fit. The same command would be refused again."""
STOPPED = 3
"""Stopped on request with the last finished step on disk. The same command goes on."""
BROKEN = 4
"""The run stopped itself: its numbers, its disk, its memory or its engine failed. The last good checkpoint is named."""

TEXT = """exit codes: 0 done; 2 wrong request or does not fit; 3 stopped on request, last finished step on disk;
4 the run stopped itself, last good checkpoint named; 130/143 stopped at once by a second signal; 1 a bug of ours"""
