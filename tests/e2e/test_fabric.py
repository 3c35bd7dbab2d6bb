#!/usr/bin/python3
"""The switch as a fabric: two Soft-RoCE guests use each other through it, as behind any leaf, by Debian's own RDMA
programs. After each run the switch's capture and counters must show that it forwarded every frame as it came, and that
nothing of it was its own business. Prints a table of all runs at the end."""

import os
import re
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import e2e
from check_capture import CaptureFollower, icrc, read_frames, roce_packet
from e2e import KIB, MIB, Lab, binary, logs_directory
from lab import RXE_GUEST

BUDGET_S = 150

CM, TCP = "rdma_cm", "TCP"  # how the two sides of a client meet
_LISTENS = {CM: "rdma res show cm_id | grep -q LISTEN", TCP: "ss -Hltn | grep -q ."}
_INTERFACE_MTU = {1024: 1500, 4096: 4200}  # by the path MTU that comes of it
_VLAN = 42
# Enough for an emulated processor that is shared with others: a program that takes longer hangs.
_LISTEN_S, _CLIENT_S, _SERVER_S = 30, 45, 15

_SWITCH_MAC = "02:4d:52:00:00:01"
# What may change in the switch's counters when it forwards, and in its first seconds announces its addresses. A drop of
# any kind is not among it.
_FORWARDING = re.compile(r"pipeline\.(received|emitted|forwarded|flooded|l2_learned|from_router|flood_copies)|"
                         r"router_frames\.flooded|ports\.p[12]\.[rt]x_(frames|bytes)|capture\.(captured|file_bytes)")

# ibv_rc_pingpong listens on the first address that getaddrinfo() has for "any": let that be IPv6's, which takes IPv4 as
# well.
_GAI_CONF = r"label ::/0 0\nlabel ::ffff:0:0/96 4\nprecedence ::/0 40\nprecedence ::ffff:0:0/96 10\n"

# With -R, perftest 4.5 makes two connections, and its server listens for the second one only after it has told the
# client to make it. A client that is faster is refused (8: nobody listens) and crashes, and the server waits on.
_PERFTEST_RACE = re.compile(r"RDMA_CM_EVENT_REJECTED; error: 8\.")
_RACE_TRIES = 3


@dataclass
class Client:
    """A program that two sides run. words: what the client's side must print. tell: what the table shall say, from the
    match of words. server_words: what the server's side must print, where it is something else."""
    name: str
    command: list
    meets_by: str
    words: re.Pattern
    tell: Callable[[re.Match], str]
    server_words: re.Pattern | None = None


def rping(name="rping", count=5, size=9000):
    # -V: each side has to find the other's bytes in what it reads.
    return Client(name, ["rping", "-v", "-V", "-C", count, "-S", size], CM,
                  re.compile(rf"(?:^ping data: rdma-ping-\d+: .*\n){{{count}}}", re.MULTILINE),
                  lambda words: f"{count} × {size} B, validated by both sides",
                  re.compile(rf"^server ping data: rdma-ping-{count - 1}: ", re.MULTILINE))


def cmatose(program, count, size):
    """ucmatose, and udaddy, which is the same with datagrams."""
    return Client(program, [program, "-C", count, "-S", size], CM,
                  re.compile(r"^data transfers complete\n(?:.*\n)*test complete\nreturn status 0$", re.MULTILINE),
                  lambda words: f"{count} × {size} B each way: test complete, return status 0")


def rstream():
    # -T v: verify. Of all clients, this one writes with immediate.
    return Client("rstream", ["rstream", "-C", 10, "-S", 64 * KIB, "-T", "v"], CM,
                  re.compile(r"^custom +64k +10 +1 +\S+ +\S+ +(\S+) +\S+$", re.MULTILINE),
                  lambda words: f"10 × 65536 B each way, verified, {words[1]} Gb/s")


def pingpong(mtu):
    return Client("ibv_rc_pingpong", ["ibv_rc_pingpong", "-d", "rxe0", "-m", mtu, "-s", 9000, "-n", 20, "-c"], TCP,
                  re.compile(r"^360000 bytes in .*\n20 iters in .* = (.*)$", re.MULTILINE),
                  lambda words: f"20 × 9000 B each way, checked, {words[1]}")  # -c: check


def perftest(program, *options, size=MIB, count=5):
    by = CM if "-R" in options else TCP
    return Client(" ".join([program, *options]), [program, "-d", "rxe0", "-F", "-s", size, "-n", count, *options], by,
                  re.compile(rf"^ *{size} +{count} +[\d.]+ +([\d.]+)[ \t]+([\d.]+) *$", re.MULTILINE),
                  lambda words: f"{count} × {size} B, " + (f"{words[1]} MiB/s" if size > KIB else
                                                           f"{1e6 * float(words[2]):.0f} per second"))


def mac_bytes(text):
    return bytes.fromhex(text.replace(":", ""))


def vlan_of(frame):
    """A frame's VLAN, or None."""
    return int.from_bytes(frame[14:16], "big") & 0xfff if frame[12:14] == b"\x81\x00" else None


def payload_of_a_full_packet(packet):
    """How much of a message a packet carries that is not its last: the path MTU. None for other packets."""
    if packet.opcode not in (0, 1, 6, 7, 13, 14):  # RC: FIRST and MIDDLE of SEND, WRITE and READ RESPONSE
        return None
    extended = {6: 16, 13: 4}.get(packet.opcode, 0)  # RETH, AETH
    return len(packet.ip) - packet.udp - 8 - 12 - extended - 4


class Row(NamedTuple):
    client: str
    ip: str
    meets_by: str
    mtu: str
    frames: str
    result: str


class Fabric(e2e.LabTest):
    @classmethod
    def setUpClass(cls):
        cls.rows, cls.gids, cls.failed, cls.runs, cls.mtu = [], {}, False, 0, 4096
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        capture = os.path.join(cls.folder, "all.pcapng")
        cls.lab = Lab(hosts=[RXE_GUEST, RXE_GUEST], capture=capture, name="Fabric",
                      logs=os.path.join(logs_directory(), "e2e"),
                      overrides={"mac": _SWITCH_MAC,
                                 "addresses": [Lab.switch_address(), Lab.switch_address(ipv6=True),
                                               cls.vlan_address(100), cls.vlan_address(100, ipv6=True)]})
        cls.addClassCleanup(lambda: cls.lab.close(failed=cls.failed))
        cls.lab.__enter__()
        cls.follower, cls.followed = CaptureFollower(capture), 0
        for guest in cls.lab.guests.values():
            cls.must(guest, f"printf '{_GAI_CONF}' >/etc/gai.conf")

    @classmethod
    def tearDownClass(cls):
        rows = sorted(set(cls.rows), key=lambda row: (row.client, row.mtu, row.ip))
        table = [Row("client", "IP", "meets by", "path MTU", "RoCE frames", "result"), *rows]
        widths = [max(map(len, column)) for column in zip(*table)]
        print("\n" + "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table), flush=True)

    def run(self, result):
        def bad():
            return len(result.failures) + len(result.errors)
        before = bad()
        super().run(result)
        type(self).failed |= bad() > before

    # Guests.

    @staticmethod
    def must(guest, command):
        code, said = guest.sh(command)
        if code != 0:
            raise RuntimeError(f"guest {guest.name}: {command}: {said}")
        return said

    @staticmethod
    def vlan_address(host, ipv6=False):
        return f"fd{_VLAN}::{host}" if ipv6 else f"10.{_VLAN}.0.{host}"

    def use_mtu(self, path_mtu):
        """The path MTU of connections for which nobody asks for one, and the largest of all."""
        if self.mtu != path_mtu:
            for guest in self.lab.guests.values():
                self.must(guest, f"ip link set eth0 mtu {_INTERFACE_MTU[path_mtu]}")
            type(self).mtu = path_mtu

    def use_vlan(self):
        self.use_mtu(4096)
        device = f"eth0.{_VLAN}"
        for host, guest in self.lab.guests.items():
            self.must(guest, f"ip link add link eth0 name {device} type vlan id {_VLAN} && "
                             f"ip addr add {self.vlan_address(host)}/24 dev {device} && "
                             f"ip addr add {self.vlan_address(host, ipv6=True)}/64 dev {device} nodad && "
                             f"ip link set {device} up")
            self.addCleanup(self.must, guest, f"ip link del {device}")

    def gid_index(self, host, version):
        """Where the host's address is in its device's table."""
        if (host, version) in self.gids:
            return self.gids[host, version]
        wanted = f"ffff:0a4d:{host:04x}" if version == 4 else f"fd77:(?:0000:){{6}}{host:04x}"
        table = self.must(self.lab.guests[host], "cd /sys/class/infiniband/rxe0/ports/1/gids && grep . [0-9]")
        found = re.search(rf"^(\d):.*{wanted}$", table, re.MULTILINE)
        self.assertTrue(found, f"no {wanted} in\n{table}")
        self.gids[host, version] = found[1]
        return found[1]

    def gid_indices(self, version):
        """The client's and the server's."""
        host = self.client_host(version)
        return self.gid_index(host, version), self.gid_index(3 - host, version)

    # The switch.

    def what_crossed(self):
        """The frames captured since the last call, and the switch's counters, both of the same moment."""
        deadline = time.monotonic() + 10
        frames = []
        while True:
            counters = self.lab.counters()
            frames += self.follower.frames(counters["capture.file_bytes"])
            if self.followed + len(frames) == counters["capture.captured"]:
                type(self).followed += len(frames)
                return frames, counters
            self.assertLess(time.monotonic(), deadline, "the capture does not come to its end")
            time.sleep(0.02)

    def assert_forwarded(self, frames, before, after):
        """Each of these frames left by the other port as it had come, in the same order, and the switch did nothing
        else."""
        changed = [f"{name} was {before.get(name)}, is {value}" for name, value in after.items()
                   if value != before.get(name) and not _FORWARDING.fullmatch(name)]
        if changed:
            self.fail("the switch did more than forward: " + "; ".join(changed))
        own = mac_bytes(_SWITCH_MAC)
        self.assertFalse([f for f in frames if f.data[6:12] == own and (f.direction == 1 or roce_packet(f.data))])
        for host, other in ((1, 2), (2, 1)):
            self.assert_same([f.data for f in frames if (f.interface, f.direction) == (host - 1, 1)],
                             [f.data for f in frames if (f.interface, f.direction) == (other - 1, 2)
                              and f.data[6:12] != own], host, other)

    def assert_same(self, came, left, host, other):
        for n, (one, two) in enumerate(zip(came, left)):
            if one != two:
                self.fail(f"frame {n} from host {host} to host {other} came as\n{one.hex()} and left as\n{two.hex()}")
        self.assertEqual(len(came), len(left), f"frames from host {host}, and those of them that left to host {other}")

    def assert_roce(self, frames, version, mtu=None, vlan=None):
        """RoCE among these frames is of that IP version and VLAN, its ICRCs are right, and its full packets carry `mtu`
        bytes (None: there are none). How many RoCE frames these are."""
        count, full = 0, set()
        for frame in frames:
            packet = roce_packet(frame)
            if packet is None:
                continue
            count += 1
            if icrc(packet) != packet.ip[-4:]:
                self.fail(f"ICRC {packet.ip[-4:].hex()}, not {icrc(packet).hex()}: {frame.hex()}")
            self.assertEqual((packet.version, vlan_of(frame)), (version, vlan))
            full.add(payload_of_a_full_packet(packet))
        self.assertGreater(count, 0, "no RoCE at all")
        self.assertEqual(full - {None}, {mtu} - {None}, "the path MTU on the wire")
        return count

    # Runs.

    def exchange(self, client, version, to_client=(), to_server=(), *, mtu=None, vlan=None):
        """A run of a client with everything that is to be true of it, and its row in the table. to_client, to_server:
        arguments for one side."""
        for attempt in range(1, _RACE_TRIES + 1):
            before = self.what_crossed()[1]
            words = self.run_pair(client, [*client.command, *to_client], [*client.command, *to_server],
                                  self.client_host(version), attempt < _RACE_TRIES)
            if words:
                break
            print(f"{client.name}: perftest was refused by its own server that did not yet listen; again", flush=True)
        frames, after = self.what_crossed()
        self.assert_forwarded(frames, before, after)
        count = self.assert_roce([f.data for f in frames if f.direction == 1], version, mtu, vlan)
        again = f" (at try {attempt})" if attempt > 1 else ""
        self.add_row(client.name, version, client.meets_by, mtu or "-", count, client.tell(words) + again)

    @staticmethod
    def client_host(version):
        return 1 if version == 4 else 2  # so that each guest is each side

    def server_address(self, version, ipv6=None):
        return self.lab.address(3 - self.client_host(version), ipv6=version == 6 if ipv6 is None else ipv6)

    def run_pair(self, client, client_command, server_command, client_host, race_allowed):
        """The client's words. None when perftest lost its race and may."""
        type(self).runs += 1
        server_host = 3 - client_host
        sides = [self.lab.start(f"run{self.runs}-server", server_command, host=server_host)]
        try:
            until = ["timeout", _LISTEN_S, "sh", "-c", f"until {_LISTENS[client.meets_by]}; do sleep 0.05; done"]
            if self.lab.guests[server_host].run(until, timeout=2 * _LISTEN_S)[0] != 0:
                self.fail("the server does not listen:\n" + _words_of(sides))
            sides.append(self.lab.start(f"run{self.runs}-client", client_command, host=client_host))
            server, ours = sides
            ours.wait(_CLIENT_S)
            server.wait(_SERVER_S if ours.poll() == 0 else 0)
            words = client.words.search(ours.stdout())
            if ours.poll() == server.poll() == 0 and words \
                    and (client.server_words or client.words).search(server.stdout()):
                return words
            if race_allowed and "-R" in client_command and _PERFTEST_RACE.search(ours.stderr()):
                return None
            self.fail(f"{client.name} did not succeed:\n" + _words_of(sides))
        finally:
            for side in sides:
                if side.poll() is None:
                    side.kill()

    def add_row(self, *cells):
        self.rows.append(Row(*map(str, cells)))
        print("  ".join(map(str, cells)), flush=True)

    # Clients that meet by the RDMA connection manager.

    def each_connected(self):
        """(path MTU, IP version), with the interfaces' MTU set."""
        for mtu in (4096, 1024):
            self.use_mtu(mtu)
            for version in (4, 6):
                yield mtu, version

    def rping(self, version, server, **options):
        client = rping(f"rping, VLAN {_VLAN}" if options.get("vlan") else "rping")
        self.exchange(client, version, ["-c", "-a", server], ["-s", "-a", server], mtu=self.mtu, **options)

    def cmatose(self, client, version, mtu):
        family = ["-f", "ipv6"] if version == 6 else []
        server = self.server_address(version)
        self.exchange(client, version, [*family, "-s", server], [*family, "-b", server], mtu=mtu)

    def test_rping(self):
        for _, version in self.each_connected():
            self.rping(version, self.server_address(version))

    def test_ucmatose(self):
        for mtu, version in self.each_connected():
            self.cmatose(cmatose("ucmatose", 10, 9000), version, mtu)

    def test_rstream(self):
        for mtu, version in self.each_connected():
            self.cmatose(rstream(), version, mtu)

    # Clients that meet over TCP; the queue pairs then use what addresses and MTU they were told.

    def test_ibv_rc_pingpong(self):
        self.use_mtu(4096)
        for mtu in (4096, 1024):
            for version in (4, 6):
                own, other = self.gid_indices(version)
                self.exchange(pingpong(mtu), version, ["-g", own, self.server_address(version)], ["-g", other], mtu=mtu)

    def perftest(self, client, version, mtu=None):
        """The TCP connection is over IPv4 in any case: perftest 4.5 knows no other."""
        own, other = self.gid_indices(version)
        both = [*(["-m", mtu] if mtu else []), *(["--ipv6"] if version == 6 else [])]
        self.exchange(client, version, [*both, "-x", own, self.server_address(version, ipv6=False)],
                      [*both, "-x", other], mtu=mtu)

    def both_perftests(self, program):
        self.use_mtu(4096)
        for mtu in (4096, 1024):
            for version in (4, 6):
                self.perftest(perftest(program), version, mtu)
        # A large message also keeps the client busy with its buffer while the server goes to listen.
        connected = perftest(program, "-R")
        for mtu, version in self.each_connected():
            if version == 4:
                self.exchange(connected, version, [self.server_address(version)], mtu=mtu)
        code, _, error = self.lab.guests[1].run([*connected.command, "--ipv6", self.lab.address(2, ipv6=True)])
        self.assertIn("Address family for hostname not supported", error, "perftest knows IPv6 with -R now: test it")
        self.add_row(connected.name, 6, CM, "-", 0, f"perftest cannot (exit status {code}): "
                     + next(line for line in error.splitlines() if "Address family" in line).strip())

    def test_ib_write_bw(self):
        self.both_perftests("ib_write_bw")

    def test_ib_read_bw(self):
        self.both_perftests("ib_read_bw")

    def test_ib_send_bw(self):
        self.both_perftests("ib_send_bw")

    # What else is on the wire.

    def test_nothing_is_changed(self):
        # Here the kernel judges, at the far side of the switch's ports, and not what the switch says that it sent.
        files = {host: os.path.join(self.folder, f"sw{host}.pcap") for host in (1, 2)}
        dumps = [self.lab.start(f"tcpdump{host}", ["tcpdump", "-i", f"sw{host}", "-U", "-w", file, "-B", 64 * KIB,
                                                   "-Z", "root", "udp port 4791"], host=0)
                 for host, file in files.items()]
        for dump in dumps:
            self.addCleanup(dump.stop)
            self.wait_for(lambda: "listening on" in dump.stderr(), 20, "tcpdump")
        self.use_mtu(4096)
        for version in (4, 6):
            for kind in ("FETCH_AND_ADD", "CMP_AND_SWAP"):
                self.perftest(perftest("ib_atomic_bw", "-A", kind, size=8, count=20), version)
            self.cmatose(cmatose("udaddy", 10, 1000), version, None)
            self.cmatose(cmatose("ucmatose", 10, 9000), version, 4096)
            self.rping(version, self.server_address(version))
        # What tcpdump has not read when it is told to end is in no file.
        sizes = [None] * 100
        self.wait_for(lambda: sizes.append([os.path.getsize(file) for file in files.values()])
                      or all(size == sizes[-1] for size in sizes[-100:]), 60, "the end of tcpdump's files")
        for dump in dumps:
            dump.signal(2)
            self.assertEqual(dump.wait(20), 0, dump.stderr())
            self.assertIn("\n0 packets dropped by kernel", dump.stderr())
        seen = {host: [frame for frame, _ in read_frames(file)] for host, file in files.items()}
        opcodes = Counter()
        for host, other in ((1, 2), (2, 1)):
            mac = mac_bytes(self.lab.mac(host))
            came, left = ([frame for frame in seen[at] if frame[6:12] == mac] for at in (host, other))
            self.assert_same(came, left, host, other)
            for frame in came:
                packet = roce_packet(frame)
                self.assertEqual(icrc(packet), packet.ip[-4:], f"the ICRC of {frame.hex()}")
                opcodes[packet.opcode] += 1
        self.assertEqual(2 * sum(opcodes.values()), sum(map(len, seen.values())))
        # SEND, WRITE, READ and its RESPONSE, ACK, atomics and datagrams.
        for opcode in (0, 1, 2, 4, 6, 7, 8, 12, 13, 14, 15, 17, 18, 19, 20, 100):
            self.assertGreater(opcodes[opcode], 0, f"no packet of opcode {opcode}")
        print(f"tcpdump: {sum(opcodes.values())} RoCE frames, each the same at both ports")

    def test_vlan(self):
        self.use_vlan()
        for version in (4, 6):
            self.rping(version, self.vlan_address(3 - self.client_host(version), ipv6=version == 6), vlan=_VLAN)

    def test_a_group_in_a_vlan(self):
        self.use_vlan()
        for version in (4, 6):
            switch = self.vlan_address(100, ipv6=version == 6)
            self.assertIn(" 2 received", self.lab.run(1, "ping", "-c", 2, "-W", 10, switch))
            before = self.what_crossed()[1]
            group = secrets.token_hex(16)
            ranks = [self.lab.start(f"vlan-ipv{version}-r{rank}", [
                binary("millrace-perf"), "--rank", rank, "--size", 2, "--group", group, "--switch", switch, "--device",
                f"eth0.{_VLAN}", "--transport", "verbs", "-b", 8, "-e", "256K", "-f", 32, "-n", 2, "-w", 1, "-c", 1],
                host=rank + 1) for rank in (0, 1)]
            try:
                for rank in ranks:
                    self.assertEqual(rank.wait(60), 0, _words_of(ranks))
            finally:
                for rank in ranks:
                    rank.kill()
            table = ranks[0].stdout()
            self.assertIn("# Out of bounds values : 0 OK", table)
            self.assertIn(f"transport verbs on rxe0 port 1 (eth0.{_VLAN}", table)
            frames, after = self.what_crossed()
            self.assertEqual(after["aggregation.groups_formed"] - before["aggregation.groups_formed"], 1)
            count = self.assert_roce([frame.data for frame in frames], version, 4096, _VLAN)
            self.add_row(f"millrace-perf, VLAN {_VLAN}", version, CM, 4096, count,
                         f"2 ranks over verbs, reduced by the switch: {table.count(' sum ')} sizes, 0 wrong")


def _words_of(processes):
    """What has become of programs, for a failure's text."""
    texts = []
    for process in processes:
        how = "still running" if process.poll() is None else f"exit status {process.poll()}"
        texts.append(f"{process.name}: {' '.join(process.command)}: {how} after {process.seconds:.1f} s\n"
                     + process.stdout()[-800:] + process.stderr()[-800:])
    return "\n".join(texts)


if __name__ == "__main__":
    e2e.main()
