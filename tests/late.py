"""What a rank runs that is late; a module of its own, since the process that runs it imports no more than this."""

from __future__ import annotations

import time

from specbench.hardware.ranks import Group


def follow(group: Group) -> None:
    """Takes a long command and drops it; a short one keeps the others waiting."""

    def act(command) -> None:
        if len(command) > 1:
            assert command.tolist() == [0, *range(1000)]
        else:
            time.sleep(60)

    group.follow(act)
