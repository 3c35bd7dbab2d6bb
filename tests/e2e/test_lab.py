#!/usr/bin/python3
"""The lab itself: it leaves nothing behind, however it ends, and its checkers notice what they are for."""

import argparse
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import e2e
from check_capture import check, packets_per_member
from flood import Flood

sys.path.insert(0, os.path.join(e2e.ROOT, "testbed"))
import network  # noqa: E402

BUDGET_S = 30

_SLEEPER = """
import sys, time
sys.path.insert(0, {path!r})
from network import Network
with Network(hosts=2) as network:
    network.start("sleeper", ["sleep", "1000"], host=1)
    print(network.prefix, network.processes[0].pid, network.directory, flush=True)
    time.sleep(1000)
"""


def exists(pid):
    # A zombie is an orphan that nobody has collected yet, not a process that runs.
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class LabLeavesNothing(unittest.TestCase):
    def end_by(self, number):
        """Starts a lab in another process, ends that by a signal; (prefix, sleeper's pid, folder, exit status)."""
        # A shell starts background jobs with SIGINT ignored, which is inherited: the lab is to be ended by it.
        owner = subprocess.Popen([sys.executable, "-c", _SLEEPER.format(path=os.path.join(e2e.ROOT, "testbed"))],
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                 preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        prefix, pid, folder = owner.stdout.readline().split()
        self.assertTrue(exists(pid))
        owner.send_signal(number)
        code = owner.wait(20)
        owner.stdout.close()
        return prefix, pid, folder, code

    def assert_gone(self, prefix, pid, folder):
        self.assertFalse([n for n in network.namespaces() if n.startswith(prefix + "-")])
        self.assertFalse(exists(pid))
        self.assertFalse(os.path.exists(folder))

    def test_ctrl_c_and_sigterm(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            prefix, pid, folder, code = self.end_by(number)
            self.assertNotEqual(code, 0)
            self.assert_gone(prefix, pid, folder)

    def test_sigkill_is_swept_by_the_next_lab(self):
        prefix, pid, folder, _ = self.end_by(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while exists(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(exists(pid), "a child outlived its lab")
        with network.Network(hosts=1):
            self.assert_gone(prefix, pid, folder)

    def test_two_labs_at_once_and_an_exception(self):
        with self.assertRaises(ZeroDivisionError):
            with network.Network(hosts=1) as one, network.Network(hosts=1) as two:
                self.assertNotEqual(one.prefix, two.prefix)
                names = [one.prefix, two.prefix]
                1 / 0
        self.assertFalse([n for n in network.namespaces() if n.split("-")[0] in names])

    def test_a_shaped_wire_is_slow_and_a_bridge_connects(self):
        with network.Network(hosts=2, rate="100mbit", bridge=True) as lab:
            self.assertIn("tbf", lab.run(1, "tc", "qdisc", "show", "dev", "eth0"))
            lab.run(1, "ping", "-c", "1", "-W", "2", lab.address(2))
            lab.run(1, "ping", "-c", "1", "-W", "2", lab.address(2, ipv6=True))


class CheckerNotices(unittest.TestCase):
    SAMPLE = os.path.join(e2e.ROOT, "tests", "vectors", "rping-cm-ipv6.pcap")

    def spoil(self, change):
        """The report on the sample after `change` has worked on its bytes."""
        with open(self.SAMPLE, "rb") as file:
            data = bytearray(file.read())
        with tempfile.NamedTemporaryFile(suffix=".pcap") as file:
            file.write(change(data) or data)
            file.flush()
            return check(file.name)

    def test_the_kernels_own_capture_is_right(self):
        report = check(self.SAMPLE)
        self.assertEqual(report.errors, [])
        self.assertGreater(report.by_version[6], 20)

    def test_a_changed_byte_is_a_wrong_icrc(self):
        def change(data):
            data[-1] ^= 1
        self.assertTrue(any("ICRC" in e for e in self.spoil(change).errors))

    def test_a_cut_file_and_a_cut_packet(self):
        self.assertTrue(any("ends within" in e for e in self.spoil(lambda data: data[:-3]).errors))

        def cut(data):  # the first packet says that it was longer on the wire
            struct.pack_into("<I", data, 24 + 12, struct.unpack_from("<I", data, 24 + 12)[0] + 1)
        self.assertTrue(any("is cut" in e for e in self.spoil(cut).errors))

    def test_a_malformed_packet_is_seen_by_tshark(self):
        # An RDMA WRITE ONLY that ends where its RETH should begin; the ICRC is right.
        flood = Flood(argparse.Namespace(seed=1, switch_mac="02:00:00:00:00:01", own_mac="02:00:00:00:00:02",
                                         switch_ipv4="10.77.0.100", switch_ipv6="fd77::100", qpn=[]))
        frame = flood.frame(4, flood.bth(10, 17, 0))

        def change(data):
            return data[:24] + struct.pack("<IIII", 0, 0, len(frame), len(frame)) + frame
        report = self.spoil(change)
        self.assertEqual(report.roce, 1)
        self.assertTrue(any("malformed" in e for e in report.errors), report)
        self.assertFalse(any("ICRC" in e for e in report.errors), report)

    def test_too_few_packets(self):
        self.assertTrue(any("expected" in e for e in check(self.SAMPLE, min_packets=10_000).errors))

    def test_packets_of_a_message(self):
        # 64-byte header and 4032 bytes fill the first packet; a whole segment is 16 packets.
        for size, packets in ((8, 1), (4032, 1), (4033, 2), (65472, 16), (65473, 17), (64 << 20, 16401)):
            self.assertEqual(packets_per_member(size), packets, size)


if __name__ == "__main__":
    e2e.main()
