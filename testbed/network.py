"""Hosts, each with one wire to a namespace in the middle: the network of a lab. A host is a network namespace, or a
QEMU guest whose kernel has an RDMA device (guest.py).

A network's names carry its owner's pid, so labs never meet, and what a SIGKILLed owner has left behind can be told
from what is in use: the next network to start sweeps it away."""

import atexit
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading

from guest import Guest
from process import LabError, Process, run

IPV4, IPV6 = "10.77.0.{}", "fd77::{}"
SWITCH_HOST_NUMBER = 100
NAMESPACE, RXE_GUEST = "namespace", "rxe-guest"
_NAME = re.compile(r"^mr(\d+)(?:x\d+)?-(?:sw|h\d+|leaf\d+|spine\d+|core\d+)$")
_OFFLOADS = ("tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off")
_open_networks = 0


class Network:
    """The namespace mrPID-sw with interfaces sw1 … swN, and hosts 1 … N, each with an eth0: namespaces mrPID-h1 …, or
    guests, which have an rxe0 on it.

    hosts: how many namespaces, or the type of each host: ["namespace", "rxe-guest", …]. mtu: of every interface, in
    bytes. rate: e.g. "1gbit", shapes both ends of each wire by tbf.
    bridge: a kernel bridge joins sw1 … swN (the lab of a baseline that needs no switch of ours). logs: where the
    working folder goes, under `name`, when the block ends by an exception; None: nowhere.

    A context manager; everything is gone after the block, however it ends."""

    def __init__(self, hosts=4, mtu=4200, rate=None, bridge=False, name="lab", logs=None):
        self.host_types = [NAMESPACE] * hosts if isinstance(hosts, int) else list(hosts)
        if unknown := set(self.host_types) - {NAMESPACE, RXE_GUEST}:
            raise LabError(f"a host is {NAMESPACE} or {RXE_GUEST}, not {', '.join(map(str, unknown))}")
        self.hosts, self.mtu, self.rate, self.bridge = len(self.host_types), mtu, rate, bridge
        self.name, self.logs = name, logs
        self.kept_logs = None
        self.directory = None
        self.processes = []
        self.guests = {}  # by host
        self.prefix = None
        self._namespaces = []

    # Names and addresses. Hosts are numbered from 1.

    @property
    def switch_namespace(self):
        return f"{self.prefix}-sw"

    def switch_namespaces(self):
        return [self.switch_namespace]

    def port_namespace(self, host):
        """Where a host's wire ends, at a switch's interface swN."""
        return self.switch_namespace

    def gateway_of(self, host, ipv6=False):
        """The host's default gateway, or None."""
        return None

    def namespace(self, host):
        assert not self.is_guest(host), f"host {host} is a guest"
        return f"{self.prefix}-h{host}"

    def is_guest(self, host):
        return self.host_types[host - 1] == RXE_GUEST

    @staticmethod
    def address(host, ipv6=False):
        return (IPV6 if ipv6 else IPV4).format(host)

    @staticmethod
    def switch_address(ipv6=False):
        return (IPV6 if ipv6 else IPV4).format(SWITCH_HOST_NUMBER)

    # Life.

    def __enter__(self):
        if os.geteuid() != 0:
            raise LabError("a lab makes network namespaces and packet sockets: run it as root (sudo)")
        _terminate_by_exception()
        sweep()
        global _open_networks
        suffix = f"x{_open_networks}" if _open_networks else ""
        _open_networks += 1
        self.prefix = f"mr{os.getpid()}{suffix}"
        self.directory = tempfile.mkdtemp(prefix=self.prefix + "-")
        atexit.register(self.close)
        try:
            with open(os.path.join(self.directory, "owner"), "w") as file:
                file.write(_start_time(os.getpid()) or "")
            self._make()
            for guest in self.guests.values():
                guest.wait_ready()
        except BaseException as error:
            self.close(failed=isinstance(error, Exception))
            raise
        return self

    def __exit__(self, kind, value, traceback):
        self.close(failed=kind is not None and issubclass(kind, Exception))

    def close(self, failed=False):
        """Stops what was started and removes what was made. Again is harmless."""
        if self.directory is None:
            return
        # A second Ctrl-C must not leave half of it behind.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            try:
                self._stop_processes()
            finally:
                for guest in self.guests.values():
                    guest.kill()
            for namespace in self._namespaces:
                run("ip", "netns", "del", namespace, check=False)
            if failed and self.logs:
                self.kept_logs = _keep(self.directory, self.logs, self.name)
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None
            global _open_networks
            _open_networks -= 1
            atexit.unregister(self.close)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _stop_processes(self):
        for process in reversed(self.processes):
            process.stop(grace=3)

    # Making.

    def _make(self):
        for namespace in self.switch_namespaces():
            self._add_namespace(namespace)
            # The kernel must stay silent on the switch's side: no neighbour discovery of its own there.
            self._sysctl(namespace, "net/ipv6/conf/default/disable_ipv6", 1)
        if self.bridge:
            run("ip", "-n", self.switch_namespace, "link", "add", "br0", "mtu", self.mtu, "type", "bridge")
            run("ip", "-n", self.switch_namespace, "link", "set", "br0", "up")
        for host in range(1, self.hosts + 1):
            if self.is_guest(host):
                self._make_guest(host)
            else:
                self._make_host(host)

    def _make_host(self, host):
        ours, port = self.namespace(host), f"sw{host}"
        self._add_namespace(ours)
        for kind in ("all", "default"):
            # Addresses are usable at once, and no router is looked for.
            self._sysctl(ours, f"net/ipv6/conf/{kind}/accept_dad", 0)
            self._sysctl(ours, f"net/ipv6/conf/{kind}/router_solicitations", 0)
        self._add_wire(self.port_namespace(host), port, ours, "eth0")
        self._connect(host)
        run("ip", "-n", ours, "link", "set", "lo", "up")
        run("ip", "-n", ours, "link", "set", "eth0", "up")
        run("ip", "-n", ours, "addr", "add", self.address(host) + "/24", "dev", "eth0")
        run("ip", "-n", ours, "addr", "add", self.address(host, ipv6=True) + "/64", "dev", "eth0", "nodad")
        for route in self._default_routes(host):
            run("ip", "-n", ours, *route)

    def _add_wire(self, one, device, other, peer):
        """A wire between two namespaces' interfaces, which are still down."""
        run("ip", "link", "add", device, "netns", one, "mtu", self.mtu, "type", "veth",
            "peer", "name", peer, "netns", other, "mtu", self.mtu)
        for namespace, end in ((one, device), (other, peer)):
            # A frame that leaves with its checksum still to be filled in, or longer than the MTU, is none.
            run("ethtool", "-K", end, *_OFFLOADS, namespace=namespace)
            if self.rate:
                run(*self._shaping(end), namespace=namespace)

    def _default_routes(self, host):
        return [["-6" if ipv6 else "-4", "route", "add", "default", "via", gateway, "dev", "eth0"]
                for ipv6 in (False, True) if (gateway := self.gateway_of(host, ipv6))]

    def _make_guest(self, host):
        """Starts a guest; it is ready when wait_ready() says so."""
        port, namespace = f"sw{host}", self.port_namespace(host)
        run("ip", "tuntap", "add", port, "mode", "tap", namespace=namespace)
        run("ip", "-n", namespace, "link", "set", port, "mtu", self.mtu)
        setup = [["sh", "-c", f"echo 0 >/proc/sys/net/ipv6/conf/{kind}/{key}"]
                 for kind in ("all", "default", "eth0") for key in ("accept_dad", "router_solicitations")]
        setup += [["ip", "link", "set", "lo", "up"],
                  ["ip", "link", "set", "eth0", "mtu", self.mtu, "up"],
                  ["ip", "addr", "add", self.address(host) + "/24", "dev", "eth0"],
                  ["ip", "addr", "add", self.address(host, ipv6=True) + "/64", "dev", "eth0", "nodad"],
                  *(["ip", *route] for route in self._default_routes(host)),
                  ["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"]]
        if self.rate:
            run(*self._shaping(port), namespace=namespace)
            setup.append(self._shaping("eth0"))
        self._connect(host)
        guest = Guest(f"h{host}", self.directory, namespace, port, f"02:77:00:00:00:{host:02x}",
                      self.guest_folders(), setup)
        self.guests[host] = guest
        guest.boot()

    def guest_folders(self):
        """What guests see, besides /usr and the working folder."""
        return []

    def _shaping(self, device):
        return ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", self.rate, "burst", "256kb",
                "latency", "50ms"]

    def _connect(self, host):
        port, namespace = f"sw{host}", self.port_namespace(host)
        if self.bridge:
            run("ip", "-n", namespace, "link", "set", port, "master", "br0")
        run("ip", "-n", namespace, "link", "set", port, "up")

    def _add_namespace(self, name):
        self._namespaces.append(name)
        run("ip", "netns", "add", name)

    @staticmethod
    def _sysctl(namespace, key, value):
        run("sh", "-c", f"echo {value} > /proc/sys/{key}", namespace=namespace)

    # Use.

    def start(self, name, command, host=None, environment=None):
        """A process that runs beside: on a host, host 0 for the middle namespace, None for ours."""
        if host in self.guests:
            process = self.guests[host].start(name, command, environment)
        else:
            process = Process(name, command, self.directory, self._namespace_of(host), environment)
        self.processes.append(process)
        return process

    def run(self, host, *command, check=True, timeout=60):
        """A command to its end on a host (0: the middle namespace); what it printed."""
        if host not in self.guests:
            return run(*command, namespace=self._namespace_of(host), check=check, timeout=timeout)
        code, out, error = self.guests[host].run(command, timeout)
        if check and code != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}: {(error or out).strip() or code}")
        return out

    def _namespace_of(self, host):
        if host is None:
            return None
        return self.namespace(host) if host else self.switch_namespace

    def link_bytes(self, host):
        """(sent, received) of a host's eth0: bytes with their Ethernet headers."""
        if host in self.guests:
            # The other end of a guest's only wire is here, and counts without disturbing it.
            stats = self._link(self.port_namespace(host), f"sw{host}")["stats64"]
            return stats["rx"]["bytes"], stats["tx"]["bytes"]
        stats = self._link(self.namespace(host), "eth0")["stats64"]
        return stats["tx"]["bytes"], stats["rx"]["bytes"]

    def mac(self, host):
        if host in self.guests:
            return self.guests[host].mac
        return self._link(self.namespace(host), "eth0")["address"]

    @staticmethod
    def _link(namespace, device):
        return json.loads(run("ip", "-n", namespace, "-j", "-s", "link", "show", "dev", device))[0]

    def rdma_counters(self, host):
        """What a guest's kernel counts on rxe0, e.g. {"sent_pkts": 12, "duplicate_request": 0, …}."""
        shown = json.loads(self.run(host, "rdma", "-j", "statistic", "show", "link", "rxe0/1"))[0]
        return {name: value for name, value in shown.items() if name not in ("ifname", "port")}

    def icmp_unreachable_sent(self, host):
        """Destination-unreachable messages that a host's kernel has sent, IPv4 and IPv6 together."""
        total = 0
        lines = self.run(host, "cat", "/proc/net/snmp").splitlines()
        rows = [line.split() for line in lines if line.startswith("Icmp:")]
        total += int(rows[1][rows[0].index("OutDestUnreachs")])
        for line in self.run(host, "cat", "/proc/net/snmp6").splitlines():
            name, value = line.split()
            if name == "Icmp6OutDestUnreachs":
                total += int(value)
        return total


def namespaces():
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line]


def sweep():
    """Removes what labs have left whose owner is gone: their processes (those in their namespaces), namespaces
    and working folders."""
    for name in namespaces():
        match = _NAME.match(name)
        if not match or _alive(int(match.group(1))):
            continue
        for pid in run("ip", "netns", "pids", name, check=False).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        run("ip", "netns", "del", name, check=False)
    for entry in os.scandir(tempfile.gettempdir()):
        match = re.match(r"^mr(\d+)(?:x\d+)?-", entry.name)
        if match and entry.is_dir(follow_symlinks=False) and not _alive(int(match.group(1))) \
                and os.path.exists(os.path.join(entry.path, "owner")):
            shutil.rmtree(entry.path, ignore_errors=True)


def _start_time(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _alive(pid):
    # A pid may have been given to somebody else meanwhile: its start time tells. Without the owner's note (a lab
    # that has only begun) a living pid counts as the owner.
    start = _start_time(pid)
    if start is None:
        return False
    for entry in os.scandir(tempfile.gettempdir()):
        if re.match(rf"^mr{pid}(?:x\d+)?-", entry.name):
            try:
                with open(os.path.join(entry.path, "owner")) as file:
                    noted = file.read()
                if noted and noted != start:
                    return False
            except OSError:
                pass
    return True


def _keep(directory, logs, name):
    """Copies the files of a lab's working folder to logs/name; the path. Where nobody may write there, elsewhere."""
    target = os.path.join(logs, name)
    try:
        shutil.rmtree(target, ignore_errors=True)
        os.makedirs(target, exist_ok=True)
    except OSError:
        target = tempfile.mkdtemp(prefix="millrace-logs-")
    for entry in os.scandir(directory):
        if entry.is_file(follow_symlinks=False) and entry.name != "owner":
            shutil.copy(entry.path, target)
    return target


def _terminate_by_exception():
    # SIGTERM unwinds like Ctrl-C, so that `with` blocks clean up.
    if threading.current_thread() is threading.main_thread() and \
            signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
