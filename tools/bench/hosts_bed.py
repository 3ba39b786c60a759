"""Two hosts on one machine: network namespaces joined by a link of a chosen rate."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from types import TracebackType

from tools.bench.link_rate import UNLIMITED, bits_per_second

NUM_HOSTS = 2
INTERFACE = "eth0"  # in each namespace, which has no other but loopback
_IPV4_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_IPV6_ADDRESSES = ("fd00:77::1", "fd00:77::2")
# Below the range from which the kernel takes source ports. The namespaces are new,
# so nobody but us listens in them.
_FIRST_PORT = 20000
# Packets leave TCP in pieces of up to 64 KB, which the card of a host would cut. A
# bucket that does not hold them would have the kernel cut each, on our cores.
_MIN_BURST_BYTES = 128 * 1024
_LATENCY = "50ms"  # what waits at the limit: TCP itself keeps the queue shorter
# Ends what runs in the namespaces and removes them, when its standard input closes:
# when we say so, and also when we are killed.
_KEEPER = """
trap '' INT TERM HUP
cat > /dev/null
for host; do
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        pids=$(ip netns pids "$host" 2> /dev/null)
        [ -z "$pids" ] && break
        kill -KILL $pids 2> /dev/null
        sleep 0.05
    done
    ip netns delete "$host" 2> /dev/null
done
"""


class BedError(RuntimeError):
    """The two hosts cannot be made on this machine."""


def missing() -> str:
    """Sentence about what this process lacks to make two hosts, or `""`."""
    lacks = [name for name in ("ip", "tc") if shutil.which(name) is None]
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    if not lacks and user == "root":
        return ""
    return (
        "Two hosts on one machine need root and iproute2 (the commands ip and tc). "
        f"Received: {user}, {' and '.join(lacks) or 'nothing'} missing"
    )


class TwoHosts:
    """Two namespaces and the link between them, for as long as the context lasts.

    Leaving the context kills what still runs in the namespaces and removes them;
    so does the end of this process, whatever ends it.

    Args:
        rate: String, of the link in each direction, as `tc` writes it, or
            `"unlimited"`. Defaults to `"200mbit"`.
        is_ipv6: Bool, whether the hosts have IPv6 addresses only, loopback included.
            Defaults to `False`.

    Raises:
        BedError: On entering, if this is not root, or iproute2 or the kernel lack
            something.

    Example:

    ```python
    with TwoHosts("1gbit") as bed:
        subprocess.run([*bed.enter(0), "ping", "-c1", bed.addresses[1]], check=True)
        print(bed.bytes_sent())
    ```
    """

    _numbers = itertools.count()

    def __init__(self, rate: str = "200mbit", *, is_ipv6: bool = False) -> None:
        bits_per_second(rate)
        self.rate = rate
        self.addresses = _IPV6_ADDRESSES if is_ipv6 else _IPV4_ADDRESSES
        self._is_ipv6 = is_ipv6
        prefix = f"tfdp-{os.getpid()}-{next(self._numbers)}"
        self.names = tuple(f"{prefix}-{host}" for host in range(NUM_HOSTS))
        self._ports = itertools.count(_FIRST_PORT)

    def __enter__(self) -> TwoHosts:
        if lacks := missing():
            raise BedError(lacks)
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "keeper", *self.names],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        self._keeper.wait()

    def enter(self, host: int) -> list[str]:
        """Return what to put before a command to run it on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def worker_addresses(self, workers_per_host: int) -> list[str]:
        """Return an unused `host:port` for each worker, host by host."""
        return [
            f"[{address}]:{next(self._ports)}"
            if self._is_ipv6
            else f"{address}:{next(self._ports)}"
            for address in self.addresses
            for _ in range(workers_per_host)
        ]

    def set_rate(self, rate: str) -> None:
        """Change the rate of the link in both directions."""
        queue = "noqueue"
        if rate != UNLIMITED:
            burst = max(_MIN_BURST_BYTES, round(bits_per_second(rate) / 8 / 1000))
            queue = f"tbf rate {rate} burst {burst} latency {_LATENCY}"
        replace = f"qdisc replace dev {INTERFACE} root".split()
        for name in self.names:
            _call("tc", "-n", name, *replace, *queue.split())
        self.rate = rate

    def bytes_sent(self) -> tuple[int, int]:
        """Return the bytes that have left each host, as its interface counts them."""
        show = f"-s -j link show dev {INTERFACE}".split()
        counted = [json.loads(_call("ip", "-n", name, *show)) for name in self.names]
        first, second = (found[0]["stats64"]["tx"]["bytes"] for found in counted)
        return first, second

    def _make(self) -> None:
        for name in self.names:
            _call("ip", "netns", "add", name)
        ends = [f"{INTERFACE} netns {name}".split() for name in self.names]
        _call("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for name, address in zip(self.names, self.addresses, strict=True):
            _call("ip", "-n", name, "link", "set", "lo", "up")
            # Without a test whether others have it, which takes a second.
            how = ["/64", "nodad"] if self._is_ipv6 else ["/24"]
            add = f"address add {address}{how[0]} dev {INTERFACE}".split() + how[1:]
            _call("ip", "-n", name, *add)
            _call("ip", "-n", name, "link", "set", INTERFACE, "up")
            if self._is_ipv6:
                _call("ip", "-n", name, *["address", "del", "127.0.0.1/8", "dev", "lo"])
        self.set_rate(self.rate)


def _call(*command: str) -> str:
    """Run a command of iproute2 and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedError(
            "The two hosts could not be made: "
            f"`{' '.join(command)}` said: {done.stderr.strip()}"
        )
    return done.stdout
