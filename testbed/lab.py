"""A lab: one millrace-switch between hosts in network namespaces, for the demo, the end-to-end tests and benches.

    with Lab(hosts=4) as lab:
        outcomes = lab.perf("-b", "8", "-e", "1M")

The switch runs in the middle namespace on af_packet ports; each host, a namespace or a guest, is one millrace-perf
rank."""

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass, field

from network import NAMESPACE, RXE_GUEST, LabError, Network

__all__ = ["NAMESPACE", "RXE_GUEST", "Lab", "LabError", "Outcome", "PerfRun", "Row", "binary", "build_directory",
           "flatten", "logs_directory", "merge", "perf_rows"]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_READY = "millrace-switch: ready"
_PATH_MTUS = (4096, 2048, 1024, 512, 256)


def build_directory():
    return os.environ.get("MILLRACE_BUILD") or os.path.join(ROOT, "build")


def logs_directory():
    return os.path.join(build_directory(), "logs")


def binary(name):
    """The path of a built program, e.g. "millrace-perf"."""
    for room in ("switch", "tools", "tests", "host"):
        path = os.path.join(build_directory(), room, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise LabError(f"{name} has not been built in {build_directory()} (testbed/build.sh builds it)")


@dataclass
class Outcome:
    """How one rank ended. code: exit status, negative a signal; None: still running when its time was over, and
    killed. seconds: from its start to its end. result: what it wrote with --json, or None."""
    rank: int
    code: int | None
    out: str
    err: str
    seconds: float
    result: dict | None = field(default=None, repr=False)


class PerfRun:
    """A group of ranks on their way."""

    def __init__(self, processes, json_paths):
        self.processes, self._json_paths = processes, json_paths
        self._told = 0

    def wait(self, timeout, listen=None):
        """The outcomes by rank, after at most `timeout` seconds; those that run on are killed. listen: called with
        what rank 0 prints, as it comes. The others are not killed when one fails: that they end by themselves is
        something to test."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and [p for p in self.processes if p.poll() is None]:
            time.sleep(0.02)
            self._tell(listen)
        codes = [process.poll() for process in self.processes]
        for process in self.processes:
            process.kill()
        self._tell(listen)
        return [Outcome(rank, code, process.stdout(), process.stderr(), process.seconds, self._result(rank))
                for rank, (process, code) in enumerate(zip(self.processes, codes))]

    def running(self):
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def kill(self, rank):
        """SIGKILL: no goodbye to anybody."""
        self.processes[rank].kill()

    def _tell(self, listen):
        if listen:
            text = self.processes[0].stdout()
            if len(text) > self._told:
                listen(text[self._told:])
                self._told = len(text)

    def _result(self, rank):
        try:
            with open(self._json_paths[rank]) as file:
                return json.load(file)
        except (FileNotFoundError, json.JSONDecodeError):
            return None


class Lab(Network):
    """hosts (with their types), mtu, rate, name, logs: see Network. ipv6: ranks reach the switch over IPv6. impair: a
    dict for every port, either {"rx": {...}, "tx": {...}} or what shall hold for both directions; seeds differ by port
    and direction. capture, capture_limit: a pcapng file of all ports. overrides: merged into the switch's
    configuration, key by key. switch: False leaves the middle without one."""

    def __init__(self, hosts=4, mtu=4200, ipv6=False, rate=None, impair=None, capture=None, capture_limit="1GiB",
                 overrides=None, switch=True, name="lab", logs=None):
        super().__init__(hosts=hosts, mtu=mtu, rate=rate, name=name, logs=logs or logs_directory())
        self.ipv6, self.impair, self.overrides = ipv6, impair, overrides or {}
        self.capture = os.path.abspath(capture) if capture else None
        self.capture_limit = capture_limit
        self.switches = {}  # their processes
        self._with_switch = switch
        self._perf_runs = 0

    # The switch.

    def _make(self):
        super()._make()
        if self._with_switch:
            self.start_switch()

    def guest_folders(self):
        return [ROOT, build_directory()]

    @property
    def switch(self):
        """The one switch's process."""
        return self.switches.get("switch")

    @property
    def config_path(self):
        return self._config_path("switch")

    def _config_path(self, switch):
        return os.path.join(self.directory, switch + ".yaml")

    @property
    def read_socket(self):
        return os.path.join(self.directory, "read.sock")

    @property
    def change_socket(self):
        return os.path.join(self.directory, "change.sock")

    def config(self):
        """The switch's configuration as a dict."""
        path_mtu = next(m for m in _PATH_MTUS if m + 100 <= self.mtu)
        # Frames in flight grow with the hosts; groups (some 2 MiB each) may reserve five eighths of all.
        frames = 16384 * -(-self.hosts // 8)
        megabytes = frames * 4608 >> 20
        config = {
            "name": "leaf1",
            "addresses": [self.switch_address(), self.switch_address(ipv6=True)],
            "aggregation": {"port": 18600, "mtu": path_mtu, "memory_limit": f"{megabytes * 5 // 8}MiB"},
            "frames": {"count": frames},
            "ports": [self._port(f"p{host}", host - 1, f"sw{host}") for host in range(1, self.hosts + 1)],
            "idle": {"spin_us": 20, "sleep_us_max": 100},
            "eal": ["--no-huge", "-m", str(256 + 2 * megabytes)],
            "control": {"read": self.read_socket, "change": self.change_socket},
            "log": {"level": "info"},
        }
        if self.capture:
            config["capture"] = {"file": self.capture, "limit": self.capture_limit}
        return merge(config, self.overrides)

    def _port(self, name, index, interface, seed=0):
        """The port that is the switch's number `index`. seed: of the switch, for its ports' impairment."""
        # The ring's frames hold MTU + 14 and must divide the block, a multiple of the page; a longer frame would
        # be cut without a word. qdisc_bypass=0 lets tc shape what the switch sends.
        assert self.mtu + 14 <= 4352 - 64, "frames of this MTU do not fit the ring"
        port = {"name": name, "device": f"net_af_packet{index},iface={interface},qdisc_bypass=0,framesz=4352,"
                                        "blocksz=69632,framecnt=512"}
        if self.impair:
            both = {k: v for k, v in self.impair.items() if k not in ("rx", "tx")}
            port["impair"] = {direction: {"seed": seed + 2 * (index + 1) + n, **both, **self.impair.get(direction, {})}
                              for n, direction in enumerate(("rx", "tx"))}
        return port

    def start_switch(self, timeout=30):
        """Writes the configuration, starts the switch and waits until it says that it is ready."""
        self._launch("switch", self.switch_namespace, self.config())
        self._wait_until_ready("switch", timeout)

    def _launch(self, name, namespace, config):
        import yaml  # here: a command's --help needs no package
        path = self._config_path(name)
        with open(path, "w") as file:
            yaml.safe_dump(config, file, sort_keys=False)
        # EAL makes a folder for itself, and leaves it: in the lab's rather than in /run, and each in its own, as
        # all have the same name.
        runtime = os.path.join(self.directory, name)
        os.makedirs(runtime, exist_ok=True)
        command = ["ip", "netns", "exec", namespace, binary("millrace-switch"), "--config", path]
        self.switches[name] = self.start(name, command, environment={"RUNTIME_DIRECTORY": runtime})

    def _wait_until_ready(self, name, timeout=30):
        switch, deadline = self.switches[name], time.monotonic() + timeout
        what = "millrace-switch" + (f" ({name})" if len(self.switches) > 1 else "")
        while _READY not in switch.stdout():
            if switch.wait(0.02) is not None:
                raise LabError(f"{what} ended with {switch.poll()} before it was ready:\n"
                               + _tail(switch.stderr() or switch.stdout()))
            if time.monotonic() > deadline:
                raise LabError(f"{what} was not ready after {timeout} s:\n" + _tail(switch.stderr()))

    def stop_switch(self, timeout=15):
        """SIGTERM and wait; (exit status, what it printed). LabError when it does not end in time."""
        return self.stop_switches(timeout)["switch"]

    def stop_switches(self, timeout=15):
        """The same of all switches, by name."""
        ends = {}
        for switch in self.switches.values():
            switch.signal(15)
        for name, switch in self.switches.items():
            code = switch.wait(timeout)
            if code is None:
                switch.kill()
                raise LabError(f"millrace-switch did not end within {timeout} s after SIGTERM")
            ends[name] = code, switch.stdout()
        return ends

    def _stop_processes(self):
        # Ranks first, so that the switches' end is not an event for them; then all switches at once.
        for process in self.processes:
            if process not in self.switches.values():
                process.stop(grace=2)
        for switch in self.switches.values():
            switch.signal(15)
        for switch in self.switches.values():
            switch.stop(grace=10)

    # Its control sockets: one JSON request per line, one JSON reply per line.

    def ask(self, command, **fields):
        return self._request(self.read_socket, {"cmd": command, **fields})

    def change(self, command, **fields):
        return self._request(self.change_socket, {"cmd": command, **fields})

    def _request(self, path, request, timeout=10):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = b""
            while not reply.endswith(b"\n"):
                part = connection.recv(1 << 16)
                if not part:
                    break
                reply += part
        answer = json.loads(reply)
        if not answer.get("ok"):
            raise LabError(f"the switch refused {request}: {answer.get('error')}")
        return answer

    def counters(self):
        """All counters of the switch by dotted name, e.g. "aggregation.contributions", "ports.p1.rx_frames"."""
        return flatten(self.ask("counters")["counters"])

    def counters_by_switch(self):
        return {"switch": self.counters()}

    # Ranks.

    def switch_of(self, host, ipv6=False):
        """The address that a host's ranks join."""
        return self.switch_address(ipv6)

    def transport_of(self, host):
        """How a host's ranks reach the switch unless told otherwise: a namespace has no RDMA device."""
        return "verbs" if self.is_guest(host) else "soft"

    def start_perf(self, *arguments, hosts=None, per_rank=None, group=None, ipv6=None, size=None, transport=None):
        """One millrace-perf per host in `hosts` (default: all; rank k is hosts[k]). per_rank: {rank: arguments
        instead of the others'}. group: 32 hex digits, a fresh one by default. size: what the ranks believe their
        number to be. transport: soft, verbs or auto for every rank (default: transport_of its host)."""
        hosts = list(hosts or range(1, self.hosts + 1))
        group = group or secrets.token_hex(16)
        ipv6 = self.ipv6 if ipv6 is None else ipv6
        program = binary("millrace-perf")
        self._perf_runs += 1
        processes, paths = [], []
        for rank, host in enumerate(hosts):
            name = f"perf{self._perf_runs}-r{rank}"
            paths.append(os.path.join(self.directory, name + ".json"))
            processes.append(self.start(name, [
                program, "--rank", rank, "--size", size or len(hosts), "--group", group, "--switch",
                self.switch_of(host, ipv6), "--device", "eth0", "--json", paths[-1], *(per_rank or {}).get(rank, arguments)],
                host=host, environment={"MILLRACE_TRANSPORT": transport or self.transport_of(host)}))
        return PerfRun(processes, paths)

    def perf(self, *arguments, timeout=120, listen=None, **options):
        """start_perf() and wait for the end: the outcomes by rank."""
        return self.start_perf(*arguments, **options).wait(timeout, listen)


def flatten(value, prefix=""):
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            flat.update(flatten(inner, f"{prefix}{key}."))
        else:
            flat[prefix + key] = inner
    return flat


def merge(base, more):
    merged = dict(base)
    for key, value in more.items():
        merged[key] = merge(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) \
            else value
    return merged


def _tail(text, lines=30):
    return "\n".join(text.strip().splitlines()[-lines:])


@dataclass
class Row:
    """One line of millrace-perf's table: a size, type and operator. seconds of one call; calls: how many there were
    in all, warm-ups and checking rounds included; wrong: elements, None where nothing was checked."""
    bytes: int
    type: str
    op: str
    seconds: float
    seconds_in_place: float | None
    calls: int
    wrong: int | None


def perf_rows(outcome):
    """The lines that rank 0 measured; none when it did not get to its end."""
    report = outcome.result
    if not report:
        return []
    rounds = report["warmups"] + report["iterations"]
    rows = []
    for line in report["results"]:
        runs = [line[kind] for kind in ("out_of_place", "in_place") if kind in line]
        wrong = [run["wrong"] for run in runs if run["wrong"] is not None]
        calls = rounds * len(runs)
        if report["check"] and len(runs) == 2:
            calls += min(report["iterations"], report["inflight"])  # in place, once more on fresh numbers
        rows.append(Row(line["size"], line["type"], line["op"], runs[0]["time_us"] / 1e6,
                        runs[1]["time_us"] / 1e6 if len(runs) == 2 else None, calls, sum(wrong) if wrong else None))
    return rows
