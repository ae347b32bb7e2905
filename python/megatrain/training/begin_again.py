"""Why a process goes on with its run from the newest checkpoint, under another plan."""


class BeginAgain(Exception):
    """Every finished step is on the disk, and this part of the run ends."""

    def __init__(self, explanation: str, micro_batch: tuple[int, int]) -> None:
        super().__init__(explanation)
        self.micro_batch = micro_batch
        """The split of a step, which has to stay for the numbers to."""
        self.plan_changed = False
        """Whether the plan has changed by what steps took, which happens once in a run."""
