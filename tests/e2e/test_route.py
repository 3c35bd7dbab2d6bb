#!/usr/bin/python3
"""Leaves and spines: four switches that route between hosts in two subnets, and one that reduces across them."""

import ipaddress
import os
import re
import sys

import e2e
from e2e import binary
from fabric import LINK4, LINK6, Fabric
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


class Routing(e2e.LabTest):
    """One lab for all, as four switches take their time on a small machine; a spine dies in the last test."""

    @classmethod
    def setUpClass(cls):
        cls.fabric = Fabric(name="Routing", logs=os.path.join(e2e.logs_directory(), "e2e"))
        cls.fabric.__enter__()
        cls.addClassCleanup(cls.fabric.close)

    def setUp(self):
        self.wait_for(lambda: all(way["state"] in ("reachable", "probing")
                                  for name in self.fabric.switch_names for way in self.fabric.next_hops(name).values()),
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
