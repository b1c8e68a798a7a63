"""`valence serve` with a store that does not answer once the version is loaded, as when a network goes.

A test starts it as a process.
"""

import sys
import threading

from service.environment import read_settings
from service.listing import LISTING
from service.logs import configure
from service.server import serve


def hang(event: str, _arguments: tuple[object, ...]) -> None:
    """Python tells of each folder that it is about to read, in the thread that does."""
    if event == "os.listdir" and threading.current_thread().name.startswith(LISTING):
        threading.Event().wait()


if __name__ == "__main__":
    settings = read_settings()
    configure(settings.log_format, settings.log_level)
    sys.addaudithook(hang)
    sys.exit(serve(settings))
