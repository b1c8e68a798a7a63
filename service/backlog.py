"""What has come on a connection and is not parsed yet.

One piece can hold thousands of small requests, each of which takes a hundred times its own bytes once it is
parsed. To parse them all at once would hold the loop for seconds, and to go on while they wait for their turn
would take memory without end. Knows nothing of HTTP.
"""

from uvicorn.protocols.http.flow_control import FlowControl

HEAD_SLICE_BYTES = 1024
"""How much is parsed at a time where requests may begin."""
BODY_SLICE_BYTES = 8192
"""How much within a body, of which nothing is made but a longer body."""


class Backlog(FlowControl):
    """The flow control of a connection: as long as something waits here, nothing more is read."""

    _waiting = b""
    _begin = 0
    _is_to_resume = False

    def __len__(self) -> int:
        """How many bytes wait."""
        return len(self._waiting) - self._begin

    def put(self, data: bytes) -> None:
        """It waits behind what waits already."""
        self._waiting = self._waiting[self._begin :] + data if self._waiting else data
        self._begin = 0

    def take(self, most: int) -> bytes:
        """The next bytes, so many at most."""
        taken = self._waiting[self._begin : self._begin + most]
        self._begin += len(taken)
        if self._begin == len(self._waiting):
            self.drop()
        return taken

    def drop(self) -> None:
        """Nothing waits any more."""
        self._waiting, self._begin = b"", 0
        if self._is_to_resume:
            self.resume_reading()

    def hold(self) -> None:
        """Read nothing more until what waits now is taken."""
        if self._waiting and not self.read_paused:
            self.pause_reading()
            self._is_to_resume = True

    def pause_reading(self) -> None:
        """Not to be undone by what is taken."""
        self._is_to_resume = False
        super().pause_reading()

    def resume_reading(self) -> None:
        """Now, or when all that waits is taken."""
        self._is_to_resume = bool(self._waiting)
        if not self._waiting and not self._transport.is_closing():
            super().resume_reading()
