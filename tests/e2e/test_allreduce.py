#!/usr/bin/python3
"""All-reduces through the switch: what a user runs, on a good network and on a bad one."""

import json
import re
import subprocess

import e2e
from e2e import LabError, binary

BUDGET_S = 150


class GoodNetwork(e2e.LabTest):
    def test_the_switch_answers_ping(self):
        with self.lab(hosts=2) as lab:
            for address in (lab.switch_address(), lab.switch_address(ipv6=True)):
                for size in (56, 1400, 4000):
                    text = lab.run(1, "ping", "-c", "3", "-i", "0.05", "-W", "2", "-s", size, address)
                    self.assertIn("3 received", text)

    def test_hosts_reach_each_other_through_the_switch(self):
        with self.lab(hosts=3) as lab:
            for address in (lab.address(2), lab.address(3, ipv6=True)):
                text = lab.run(1, "ping", "-c", "3", "-i", "0.05", "-W", "2", "-s", "4000", address)
                self.assertIn("3 received", text)

    def test_four_hosts_over_ipv4(self):
        with self.lab(hosts=4) as lab:
            rows = self.assert_exact(lab.perf("-b", "8", "-e", "4M", "-f", "2", "-n", "3", "-w", "1", "-c", "1"), 4)
            self.assertEqual([row.bytes for row in rows], [8 << n for n in range(20)])

    def test_every_type_and_operator_over_ipv6(self):
        with self.lab(hosts=3, ipv6=True) as lab:
            rows = self.assert_exact(lab.perf("-b", "8", "-e", "64K", "-f", "4", "-d", "all", "-o", "all", "-n", "2",
                                              "-w", "0", "-c", "1", "--inflight", "2"), 3)
            integers = ("u8", "i8", "i32", "u32", "i64", "u64")
            floats = ("f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2")
            arithmetic, bits = ("sum", "prod", "min", "max", "avg"), ("band", "bor", "bxor", "land", "lor")
            self.assertEqual({(row.type, row.op) for row in rows},
                             {(kind, op) for kind in (*integers, *floats) for op in (*arithmetic, *bits)
                              if kind in integers or op in arithmetic})

    def test_odd_sizes_around_packets_and_segments(self):
        with self.lab(hosts=2) as lab:
            sizes = [0, 4, 12, 4028, 4032, 4036, 8124, 8128, 8132, 65468, 65472, 65476, 130948, 1000004]
            rows = self.assert_exact(lab.perf("--sizes", ",".join(map(str, sizes)), "-n", "2", "-w", "0", "-c", "1"), 2)
            self.assertEqual([row.bytes for row in rows], sizes)

    def test_barrier(self):
        with self.lab(hosts=4) as lab:
            self.assert_exact(lab.perf("-p", "barrier", "-n", "50"), 4)

    def test_stripes_and_operations_in_flight(self):
        with self.lab(hosts=2) as lab:
            self.assert_exact(lab.perf("-b", "1K", "-e", "1M", "-f", "8", "-n", "8", "--stripes", "4",
                                       "--inflight", "4", "-c", "1"), 2)

    def test_one_host_alone(self):
        with self.lab(hosts=1) as lab:
            self.assert_exact(lab.perf("-b", "8", "-e", "64K", "-f", "8", "-n", "2", "-c", "1"), 1)

    def test_a_small_mtu(self):
        with self.lab(hosts=2, mtu=1500) as lab:
            self.assert_exact(lab.perf("-b", "8", "-e", "256K", "-f", "8", "-n", "2", "-c", "1"), 2)

    def test_two_groups_at_once(self):
        # One pair of groups shares all its hosts, the other none; operators differ so that a mix-up would show.
        with self.lab(hosts=4) as lab:
            arguments = ("-b", "64", "-e", "1M", "-f", "4", "-n", "10", "-c", "1")
            runs = [lab.start_perf(*arguments, "-o", op, hosts=hosts)
                    for op, hosts in (("sum", (1, 2, 3, 4)), ("max", (1, 2, 3, 4)), ("sum", (1, 2)), ("min", (3, 4)))]
            for run in runs:
                self.assert_exact(run.wait(60))

    def test_kernels_of_hosts_stay_silent(self):
        # RoCE comes to UDP port 4791, on which the kernel has nobody: it must not say so to the switch.
        with self.lab(hosts=2) as lab:
            for ipv6 in (False, True):
                self.assert_exact(lab.perf("-b", "8", "-e", "1M", "-f", "8", "-n", "5", "-c", "1", ipv6=ipv6), 2)
            for host in (1, 2):
                self.assertEqual(lab.icmp_unreachable_sent(host), 0)

    def test_packet_numbers_wrap(self):
        # 2^24 is 16 packets away when the first result leaves.
        with self.lab(hosts=2, overrides={"aggregation": {"first_psn": 0xfffff0}}) as lab:
            self.assert_exact(lab.perf("-b", "4", "-e", "1M", "-f", "2", "-n", "2", "-c", "1"), 2)
            self.assertGreater(lab.counters()["aggregation.results_sent"], 16)

    def test_groups_come_and_go_and_leave_nothing(self):
        with self.lab(hosts=2) as lab:
            self.assert_exact(lab.perf("-b", "64K", "-e", "64K", "-n", "1", "-c", "1"), 2)
            self.wait_for(lambda: not lab.ask("status")["queue_pairs"], 10, "queue pairs gone")
            before = lab.ask("status")
            for _ in range(10):
                self.assert_exact(lab.perf("-b", "64K", "-e", "64K", "-n", "1", "-c", "1"), 2)
            self.assert_frames_return(lab, before)
            self.wait_for(lambda: not lab.ask("groups")["groups"], 10, "no group left")

    def test_millracectl_reads_the_switch(self):
        with self.lab(hosts=1) as lab:
            for what, key in (("status", "frames"), ("groups", "groups"), ("counters", "counters")):
                text = subprocess.run([binary("millracectl"), "--socket", lab.read_socket, what, "--json"], check=True,
                                      capture_output=True, text=True).stdout
                self.assertIn(key, json.loads(text))


class BadNetwork(e2e.LabTest):
    def assert_exact_with(self, counter, impair, ipv6=False, **options):
        """Exact in spite of `impair`, of which `counter` shows that it happened."""
        with self.lab(hosts=3, impair=impair, ipv6=ipv6, **options) as lab:
            self.assert_exact(lab.perf("-b", "8", "-e", "1M", "-f", "4", "-n", "5", "-w", "1", "-c", "1"), 3)
            counters = lab.counters()
            for direction in ("rx", "tx"):
                self.assertGreater(sum(counters[f"ports.p{host}.impair_{direction}.{counter}"] for host in (1, 2, 3)),
                                   0, f"nothing was {counter} in direction {direction}")
            return counters

    def test_loss(self):
        counters = self.assert_exact_with("lost", {"loss": 0.02})
        self.assertGreater(counters["aggregation.retransmitted_packets"], 0)

    def test_duplicates(self):
        counters = self.assert_exact_with("duplicated", {"duplicate": 0.05})
        self.assertGreater(counters["aggregation.duplicate_request"], 0)

    def test_reordering(self):
        self.assert_exact_with("reordered", {"reorder": 0.02})

    def test_corruption_is_caught_by_the_icrc(self):
        counters = self.assert_exact_with("corrupted", {"corrupt": 0.02})
        self.assertGreater(counters["roce.bad_icrc"], 0)

    def test_all_of_it_over_ipv6(self):
        self.assert_exact_with("lost", {"loss": 0.005, "duplicate": 0.01, "reorder": 0.01, "corrupt": 0.005,
                                        "delay_us": 100}, ipv6=True)

    def test_loss_while_packet_numbers_wrap(self):
        self.assert_exact_with("lost", {"loss": 0.02}, overrides={"aggregation": {"first_psn": 0xfffff0}})


class WrongConfiguration(e2e.LabTest):
    def refusal(self, overrides):
        """What the switch says about a configuration that it refuses."""
        with self.lab(hosts=1, switch=False, overrides=overrides) as lab:
            with self.assertRaises(LabError):
                lab.start_switch()
            self.assertIn(lab.switch.poll(), (1, 2))
            text = lab.switch.stderr()
            with open(lab.config_path) as file:
                lines = file.read().splitlines()
            return text, lines, lab.config_path

    def assert_names(self, overrides, key):
        text, lines, path = self.refusal(overrides)
        number = next(n for n, line in enumerate(lines, 1) if re.match(rf"\s*(- )?{key}:", line))
        self.assertIn(f"{path}:{number}:", text)
        self.assertIn(key, text)

    def test_an_unknown_key_is_named_with_file_and_line(self):
        self.assert_names({"aggregation": {"windwo": 8}}, "windwo")
        self.assert_names({"colour": "blue"}, "colour")

    def test_a_wrong_value_is_named_with_file_and_line(self):
        self.assert_names({"aggregation": {"window": "many"}}, "window")


if __name__ == "__main__":
    e2e.main()
