"""The ranks find each other, in a thread of its own: a rank that never comes holds up nobody.

Every rank counts itself in the store. When all have, each connects, says which layers it has,
and they agree on the first step to be pooled. Until then a rank records for itself.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from stability_probe.ranks.channel import Channel
from stability_probe.ranks.layout import Hello, Layout, unite

POLL_SECONDS = 0.1  # up to 100 ranks; more ask the store less often, 1000 times a second in all
MARGIN = 2  # steps between agreeing and the first pooled step
_NUMBERS = itertools.count()  # of the meetings of this process
_FREE: list[int] = []  # numbers of those that nobody came to: the next meetings take them


@dataclass(frozen=True, slots=True, eq=False)
class Met:
    """What the ranks agreed on."""

    channel: Channel
    layout: Layout
    first: int  # step from which on they pool
    world: int
    rank: int


def is_one_of_many() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Meeting:
    """Waits for all ranks of the default process group.

    Attributes:
        world: number of ranks.
        step: the last step that this rank has ended; keep it up to date.
        here: how many ranks have come, as last seen.
        met: the outcome, once there is one.
        error: why there will be none.
    """

    def __init__(self, hello: Hello, step: int) -> None:
        self.world, self._rank = dist.get_world_size(), dist.get_rank()
        self.step, self.here = step, 0
        self.met: Met | None = None
        self.error: Exception | None = None
        self.began = time.monotonic()
        self._hello, self._stop, self._left = hello, threading.Event(), False
        store = dist.distributed_c10d._get_default_store()
        self._number = _FREE.pop(0) if _FREE else next(_NUMBERS)
        prefix = f"stability_probe/{self._number}"
        self._thread = threading.Thread(
            target=self._run, args=(store, prefix), name="stability_probe ranks", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops waiting. A connection that was made and not taken is closed."""
        self._stop.set()
        self._thread.join(timeout=2.0)
        if self._left:
            bisect.insort(_FREE, self._number)

    def _run(self, store: Any, prefix: str) -> None:
        try:
            own = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
            self.here = own.add("here", 1)
            pause = POLL_SECONDS * max(1.0, self.world / 100)
            while self.here < self.world:
                if self._stop.wait(pause):
                    own.add("here", -1)
                    self._left = True
                    return
                self.here = own.add("here", 0)
            self.met = self._meet(Channel(own, self._rank, self.world))
        except Exception as error:
            self.error = error

    def _meet(self, channel: Channel) -> Met:
        hellos = [Hello.decode(data) for data in channel.exchange(self._hello.encode())]
        layout = unite(hellos)
        first = channel.largest(self.step) + MARGIN
        return Met(channel, layout, first, self.world, dist.get_rank())
