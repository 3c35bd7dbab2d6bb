#!/usr/bin/python3
"""What is on the wire: how much of it, and whether others can read it."""

import os
import signal
import tempfile

import e2e
from check_capture import check, packets_per_member
from e2e import MIB

BUDGET_S = 120


class Links(e2e.LabTest):
    def test_each_link_carries_the_buffer_once_in_each_direction(self):
        # A ring of four would carry 1.5 times the buffer.
        with self.lab(hosts=4) as lab:
            size = 64 * MIB
            before = [lab.link_bytes(host) for host in range(1, 5)]
            row, = self.assert_exact(lab.perf("-b", size, "-e", size, "-d", "f32", "-o", "sum", "-n", "1", "-w", "0",
                                              "-c", "0"), 4)
            for host in range(1, 5):
                for what, now, then in zip(("sent", "received"), lab.link_bytes(host), before[host - 1]):
                    ratio = (now - then) / (row.calls * size)
                    print(f"host {host} {what} {ratio:.4f} × the buffer")
                    self.assertGreater(ratio, 1.0)
                    self.assertLessEqual(ratio, 1.04)


class Captures(e2e.LabTest):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.file = os.path.join(self.folder.name, "f.pcapng")

    def judge(self, minimum):
        report = check(self.file, min_packets=minimum)
        print(report)
        self.assertEqual(report.errors, [])
        return report

    def capture(self, ipv6):
        size, hosts = 4 * MIB, 4
        with self.lab(hosts=hosts, ipv6=ipv6, capture=self.file) as lab:
            row, = self.assert_exact(lab.perf("-b", size, "-e", size, "-n", "2", "-w", "0", "-c", "1"), hosts)
            code, _ = lab.stop_switch()
            self.assertEqual(code, 0)
        # Every host sends its packets and gets as many; acknowledgements and the CM come on top.
        report = self.judge(2 * hosts * row.calls * packets_per_member(size))
        self.assertEqual(report.roce, report.by_version[6 if ipv6 else 4])
        for opcode in (0, 1, 2, 10, 11, 17, 100):  # SEND FIRST/MIDDLE/LAST, WRITE ONLY (IMM), ACK, the CM's
            self.assertGreater(report.by_opcode[opcode], 0, f"no opcode {opcode}")

    def test_others_can_read_a_capture_over_ipv4(self):
        self.capture(ipv6=False)

    def test_others_can_read_a_capture_over_ipv6(self):
        self.capture(ipv6=True)

    def test_sigterm_in_the_middle_leaves_a_whole_file(self):
        with self.lab(hosts=2, capture=self.file) as lab:
            run = lab.start_perf("-b", "1M", "-e", "1M", "-n", "100000", "-c", "0")
            self.wait_for(lambda: os.path.exists(self.file) and os.path.getsize(self.file) > 20 * MIB, 30, "traffic")
            lab.switch.signal(signal.SIGTERM)
            self.assertEqual(lab.switch.wait(15), 0)
            run.wait(10)
        self.judge(1000)

    def test_the_limit_holds_and_is_told(self):
        with self.lab(hosts=2, capture=self.file, capture_limit="1MiB") as lab:
            self.assert_exact(lab.perf("-b", "4M", "-e", "4M", "-n", "1", "-c", "1"), 2)
            self.assertGreater(lab.counters()["capture.beyond_limit"], 0)
            lab.stop_switch()
        self.assertLessEqual(os.path.getsize(self.file), MIB)
        self.judge(100)


if __name__ == "__main__":
    e2e.main()
