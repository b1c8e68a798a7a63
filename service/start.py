"""The command `valence`. Hears signals from its first moment, before anything heavy is imported.

The first process of a container is not ended by a signal that it has no handler for: one that came while
modules load, for a second or more under a CPU limit, would be lost. Knows nothing of what the commands do.
"""

import os
import signal
import sys

SERVE = "serve"

_STANDARD_ERROR = 2


def main() -> int:
    """Run the command of the process's arguments; see `service.cli.main` for the exit code."""
    if SERVE in sys.argv[1:2]:
        # Until the server has its own. What `nohup` ignores stays ignored.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _ended)
    else:
        signal.signal(signal.SIGINT, _interrupted)
        if os.getpid() == 1:
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, _interrupted)
    from service.cli import main as run  # noqa: PLC0415 - it imports the rest

    return run()


def _ended(_number: int, _frame: object) -> None:
    """Nothing has been accepted yet: there is nothing to finish."""
    os._exit(0)


def _interrupted(number: int, _frame: object) -> None:
    """End at once: a model file that never comes back from loading would hold every other end.

    Nothing is lost: each line of output was sent as it was made.
    """
    os.write(_STANDARD_ERROR, b"valence: interrupted\n")
    os._exit(128 + number)  # as a shell says it
