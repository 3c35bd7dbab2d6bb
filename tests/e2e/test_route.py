#!/usr/bin/python3
"""Leaves and spines: four switches that route between hosts in two subnets, and one that reduces across them."""

import ipaddress
import os
import re
import sys
import time

import yaml

import e2e
from e2e import LabError, Lab, binary
from lab import flatten
from process import run

BUDGET_S = 60

# Asks who has argv[2], from argv[1], in a tag of 0x6005; prints the answer's operation and tag.
_TAGGED_ARP = """
import socket, struct, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.bind(("eth0", 0))
s.setsockopt(263, 8, 1)  # SOL_PACKET, PACKET_AUXDATA
s.settimeout(5)
mac, own, asked = s.getsockname()[4], *map(socket.inet_aton, sys.argv[1:])
s.send(b"\\xff" * 6 + mac + struct.pack("!HHHHHBBH", 0x8100, 0x6005, 0x0806, 1, 0x0800, 6, 4, 1) + mac + own
       + bytes(6) + asked + bytes(18))
while True:
    frame, aux, _, source = s.recvmsg(2048, 256)
    if source[2] != 4 and frame[12:14] == b"\\x08\\x06" and frame[28:32] == asked:  # not our own
        status, tci = struct.unpack_from("I", aux[0][2])[0], struct.unpack_from("H", aux[0][2], 16)[0]
        print("reply" if frame[20:22] == b"\\0\\2" else "?", tci if status & 16 else "untagged")
        break
"""
# By leaf and spine: the ends of their wire, leaf's first.
LINK4, LINK6 = "10.255.{}{}.{}", "fd00:{}{}::{}"
NEXT_HOP_PROBE_MS = 200  # twice the default: four switches share a small machine's cores


class LeafSpine(Lab):
    """Hosts 1 and 2 behind leaf1, 3 and 4 behind leaf2, two spines between them, each switch in a namespace
    of its own. Ranks join on leaf1's address."""

    SWITCHES = ("leaf1", "leaf2", "spine1", "spine2")

    def __init__(self, **options):
        super().__init__(hosts=4, switch=False, **options)
        self.switches = {}

    @staticmethod
    def leaf_of(host):
        return 1 if host <= 2 else 2

    @classmethod
    def address(cls, host, ipv6=False):
        return f"fd77:{cls.leaf_of(host)}::{host}" if ipv6 else f"10.77.{cls.leaf_of(host)}.{host}"

    @staticmethod
    def gateway(leaf, ipv6=False):
        return f"fd77:{leaf}::100" if ipv6 else f"10.77.{leaf}.100"

    @classmethod
    def switch_address(cls, ipv6=False):
        return cls.gateway(1, ipv6)

    # Making.

    def _make(self):
        super()._make()
        # A namespace for each: af_packet's fan-out groups, by process and interface, may collide within one.
        for name in self.SWITCHES[1:]:
            self._add_namespace(self.namespace_of(name))
            self._sysctl(self.namespace_of(name), "net/ipv6/conf/default/disable_ipv6", 1)
        for host in (3, 4):
            self._move(f"sw{host}", self.namespace_of("leaf2"))
        for leaf in (1, 2):
            for spine in (1, 2):
                self._wire(f"l{leaf}s{spine}", f"leaf{leaf}", f"s{spine}l{leaf}", f"spine{spine}")
        for host in range(1, 5):
            for ipv6 in (False, True):
                run("ip", "-n", self.namespace(host), "-6" if ipv6 else "-4", "route", "add", "default", "via",
                    self.gateway(self.leaf_of(host), ipv6), "dev", "eth0")
        for name in self.SWITCHES:
            self._start(name)
        for name in self.SWITCHES:
            self._wait_until_ready(name)

    def namespace_of(self, switch):
        index = self.SWITCHES.index(switch)
        return f"{self.prefix}-h{self.hosts + index}" if index else self.switch_namespace

    def _move(self, device, namespace):
        run("ip", "-n", self.switch_namespace, "link", "set", device, "netns", namespace)
        run("ip", "-n", namespace, "link", "set", device, "up")

    def _wire(self, one, switch, other, neighbour):
        ends = (one, self.namespace_of(switch)), (other, self.namespace_of(neighbour))
        run("ip", "link", "add", one, "netns", ends[0][1], "mtu", self.mtu, "type", "veth", "peer", "name", other,
            "netns", ends[1][1], "mtu", self.mtu)
        for end, namespace in ends:
            run("ethtool", "-K", end, "tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off",
                namespace=namespace)
            run("ip", "-n", namespace, "link", "set", end, "up")

    # The switches.

    def _ports(self, name):
        """(name of the port and interface, addresses or None)."""
        number = int(name[-1])
        if name.startswith("leaf"):
            hosts = [(f"sw{host}", None) for host in range(2 * number - 1, 2 * number + 1)]
            return hosts + [(f"l{number}s{spine}", [LINK4.format(number, spine, 0) + "/31",
                                                   LINK6.format(number, spine, 0) + "/127"]) for spine in (1, 2)]
        return [(f"s{number}l{leaf}", [LINK4.format(leaf, number, 1) + "/31", LINK6.format(leaf, number, 1) + "/127"])
                for leaf in (1, 2)]

    def _routes(self, name):
        number = int(name[-1])
        if name.startswith("leaf"):
            other = 3 - number
            return [{"prefix": f"10.77.{other}.0/24", "via": [LINK4.format(number, s, 1) for s in (1, 2)]},
                    {"prefix": f"fd77:{other}::/64", "via": [LINK6.format(number, s, 1) for s in (1, 2)]}]
        return [route for leaf in (1, 2) for route in (
            {"prefix": f"10.77.{leaf}.0/24", "via": [LINK4.format(leaf, number, 0)]},
            {"prefix": f"fd77:{leaf}::/64", "via": [LINK6.format(leaf, number, 0)]})]

    def switch_config(self, name):
        number, leaf = int(name[-1]), name.startswith("leaf")
        addresses = [f"{self.gateway(number)}/24", f"{self.gateway(number, True)}/64"]
        ports = []
        for index, (interface, own) in enumerate(self._ports(name)):
            ports.append({"name": interface,
                          "device": f"net_af_packet{index},iface={interface},qdisc_bypass=0,framesz=4352,"
                                    "blocksz=69632,framecnt=512"})
            if own:
                ports[-1]["addresses"] = own
        return {"name": name, "mac": f"02:4d:52:00:0{1 if leaf else 2}:0{number}",
                **({"addresses": addresses} if leaf else {}), "aggregation": {"mtu": 4096, "memory_limit": "24MiB"}, "ports": ports, "routes": self._routes(name),
                "routing": {"next_hop_probe_ms": NEXT_HOP_PROBE_MS}, "frames": {"count": 8192},
                "idle": {"spin_us": 0, "sleep_us_max": 200}, "eal": ["--no-huge", "-m", "128"],
                "control": {"read": self.socket(name)}, "log": {"level": "info"}}

    def socket(self, name):
        return os.path.join(self.directory, name + ".sock")

    def _start(self, name):
        path = os.path.join(self.directory, name + ".yaml")
        with open(path, "w") as file:
            yaml.safe_dump(self.switch_config(name), file, sort_keys=False)
        runtime = os.path.join(self.directory, name)
        os.mkdir(runtime)
        command = ["ip", "netns", "exec", self.namespace_of(name), binary("millrace-switch"), "--config", path]
        self.switches[name] = self.start(name, command, environment={"RUNTIME_DIRECTORY": runtime})

    def _wait_until_ready(self, name, timeout=30):
        process, deadline = self.switches[name], time.monotonic() + timeout
        while "millrace-switch: ready" not in process.stdout():
            if process.wait(0.02) is not None or time.monotonic() > deadline:
                raise LabError(f"{name} is not ready ({process.poll()}): {process.stderr() or process.stdout()}")

    def _stop_processes(self):
        # Ranks first, so that the switches' end is not an event for them; then all switches at once.
        for process in self.processes:
            if process not in self.switches.values():
                process.stop(grace=2)
        for process in self.switches.values():
            process.signal(15)
        for process in self.switches.values():
            process.stop(grace=5)

    # Use.

    def switch_ask(self, name, command):
        return self._request(self.socket(name), {"cmd": command})

    def switch_counters(self, name):
        return flatten(self.switch_ask(name, "counters")["counters"])

    def next_hops(self, name):
        return {way["address"]: way for route in self.switch_ask(name, "routes")["routes"] for way in route["via"]}

    def ping(self, host, address, *options):
        return self.run(host, "ping", "-n", "-i", "0.05", "-W", "2", *options, address, check=False)


class Routing(e2e.LabTest):
    """One lab for all, as four switches take their time on a small machine; a spine dies in the last test."""

    @classmethod
    def setUpClass(cls):
        cls.fabric = LeafSpine(name="Routing", logs=os.path.join(e2e.logs_directory(), "e2e"))
        cls.fabric.__enter__()
        cls.addClassCleanup(cls.fabric.close)

    def setUp(self):
        self.wait_for(lambda: all(way["state"] in ("reachable", "probing")
                                  for name in LeafSpine.SWITCHES for way in self.fabric.next_hops(name).values()),
                      5, "next hops that answer")

    def spines(self, counter="pipeline.routed"):
        return [self.fabric.switch_counters(name)[counter] for name in ("spine1", "spine2")]

    def test_1_ping_crosses_three_routers(self):
        # What comes while interfaces and switches start, before next hops answer, is not these pings'.
        not_bridged = lambda: [self.fabric.switch_counters(name)["pipeline.not_bridged"] for name in ("leaf1", "leaf2")]
        before = not_bridged()
        for ipv6 in (False, True):
            for size in (56, 4000):
                text = self.fabric.ping(1, self.fabric.address(4, ipv6), "-c", "3", "-s", size)
                self.assertIn("3 received", text)
                self.assertEqual(re.findall(r"ttl=(\d+)", text), ["61"] * 3)
            # A leaf answers on the address of the other leaf's hosts' gateway, too.
            self.assertIn("1 received", self.fabric.ping(1, self.fabric.gateway(2, ipv6), "-c", "1"))
        self.assertEqual(not_bridged(), before)

    def test_2_traceroute_names_each_router(self):
        for ipv6 in (False, True):
            link = LINK6 if ipv6 else LINK4
            expected = [{self.fabric.gateway(1, ipv6)}, {link.format(1, s, 1) for s in (1, 2)},
                        {link.format(2, s, 0) for s in (1, 2)}]
            for hops, routers in enumerate(expected, 1):
                text = self.fabric.ping(1, self.fabric.address(3, ipv6), "-c", "1", "-t", hops)
                heard = re.search(r"From (\S+) icmp_seq=1 (Time to live exceeded|Time exceeded: Hop limit)", text)
                self.assertTrue(heard, text)
                self.assertIn(_canonical(heard.group(1)), {_canonical(r) for r in routers})

    def test_3_an_unknown_network_and_a_silent_host_are_told(self):
        self.assertIn("Destination Net Unreachable", self.fabric.ping(1, "10.99.0.1", "-c", "1"))
        self.assertIn("Destination unreachable: No route", self.fabric.ping(1, "fd99::1", "-c", "1"))
        self.assertIn("Destination Host Unreachable", self.fabric.ping(1, "10.77.2.77", "-c", "1", "-W", "5"))
        self.assertIn("Destination unreachable: Address unreachable",
                      self.fabric.ping(1, "fd77:2::77", "-c", "1", "-W", "5"))

    def test_4_all_reduce_across_both_spines(self):
        for ipv6 in (False, True):
            before = self.spines()
            ways = {name: self.fabric.next_hops(name) for name in ("leaf1", "leaf2")}
            self.assert_exact(self.fabric.perf("-b", "8", "-e", "1M", "-f", "8", "-n", "2", "-w", "1", "-c", "1",
                                               "--stripes", "8", ipv6=ipv6), 4)
            for spine, then in zip(self.spines(), before):
                self.assertGreater(spine - then, 50)
            # Each leaf used both, too: contributions one way, results and acknowledgements the other.
            link = LINK6 if ipv6 else LINK4
            for number, name in ((1, "leaf1"), (2, "leaf2")):
                for s in (1, 2):
                    way = link.format(number, s, 1)
                    self.assertGreater(self.fabric.next_hops(name)[way]["packets"] - ways[name][way]["packets"], 20)
        counters = self.fabric.switch_counters("leaf1")
        self.assertEqual(counters["roce.bad_icrc"], 0)
        self.assertEqual(counters["engine_frames.flooded"], 0)

    def test_5_a_tag_survives_the_ports(self):
        # Not by the kernel's VLAN devices, which not every kernel has. The kernels take the tag off and keep it
        # beside the frame; the port puts it back.
        text = self.fabric.run(1, sys.executable, "-c", _TAGGED_ARP, self.fabric.address(1), self.fabric.gateway(1))
        self.assertEqual(text.split(), ["reply", "24581"])  # 0x6005: priority 3, VLAN 5
        entries = self.fabric.switch_ask("leaf1", "l2")["entries"]
        self.assertIn((self.fabric.mac(1), 5), {(e["mac"], e["vlan"]) for e in entries})
        tool = run(binary("millracectl"), "--socket", self.fabric.socket("leaf1"), "neighbours")
        self.assertRegex(tool, r"10\.255\.11\.1 .*yes")

    def test_6_a_spine_dies_during_an_all_reduce(self):
        perf = self.fabric.start_perf("-b", "1M", "-e", "1M", "-n", "60", "-w", "0", "-c", "1", "--stripes", "8")
        before = self.spines()
        self.wait_for(lambda: all(now > then + 200 for now, then in zip(self.spines(), before)), 20, "traffic")
        self.fabric.switches["spine1"].kill()
        self.assert_exact(perf.wait(40), 4)
        ways = self.fabric.next_hops("leaf1")
        self.assertEqual([ways[LINK4.format(1, s, 1)]["state"] == "failed" for s in (1, 2)], [True, False])
        self.assertGreater(self.fabric.switch_counters("leaf1")["router.next_hops_avoided"], 0)
        self.assertIn("3 received", self.fabric.ping(2, self.fabric.address(3), "-c", "3"))
        tool = run(binary("millracectl"), "--socket", self.fabric.socket("leaf1"), "routes")
        self.assertRegex(tool, r"10\.255\.11\.1 +l1s1 +failed")


def _canonical(address):
    return str(ipaddress.ip_address(address))


if __name__ == "__main__":
    e2e.main()
