#!/usr/bin/python3
"""Ranks on real RDMA queue pairs: the kernel's Soft-RoCE in guests, through rdma-core, against our switch."""

import os
import secrets
import signal
import time

import e2e
from lab import NAMESPACE, RXE_GUEST

BUDGET_S = 420
SMALL = ("-b", "8", "-e", "64K", "-f", "8", "-n", "2", "-w", "1")
LONG = ("-b", "1M", "-e", "1M", "-n", "100000", "-w", "0", "-c", "0")


def nonzero(counters):
    return {name: value for name, value in counters.items() if value}


class RdmaTest(e2e.LabTest):
    """One lab for all tests of a class: two guests and two namespaces unless HOSTS says otherwise."""
    HOSTS = [RXE_GUEST, RXE_GUEST, NAMESPACE, NAMESPACE]
    OPTIONS = {}

    @classmethod
    def setUpClass(cls):
        cls.lab = cls.enterClassContext(e2e.Lab(
            hosts=cls.HOSTS, name=cls.__name__, logs=os.path.join(e2e.logs_directory(), "e2e"), **cls.OPTIONS))

    def setUp(self):
        if self.lab.switch.poll() is not None:  # a test before has failed
            self.restart()

    def restart(self, **overrides):
        """The switch again, with other settings."""
        if self.lab.switch.poll() is None:
            self.lab.stop_switch()
        self.lab.overrides = overrides
        self.lab.start_switch()

    def probe(self, name, host, command, *arguments, rank=0, group, size=2, ipv6=False, **options):
        arguments = [e2e.binary("probe"), command, "--rank", rank, "--size", size, "--group", group, "--switch",
                     self.lab.switch_address(ipv6), "--device", "eth0", *arguments]
        return self.lab.start(name, arguments, host=host, **options)

    def assert_ended(self, process, seconds, code=0):
        self.assertEqual(process.wait(seconds), code, process.stderr() + process.stdout())
        return process.stdout()

    def assert_nothing_left(self):
        self.wait_for(lambda: not self.lab.ask("status")["queue_pairs"], 20, "queue pairs gone")
        self.assertEqual(self.lab.ask("status")["group_memory"]["reserved"], 0)

    def wait_until_running(self, operations=3):
        def running():
            groups = [g for g in self.lab.ask("groups")["groups"] if g["state"] == "running"]
            return groups and groups[0]["operation"] >= operations
        self.wait_for(running, 60, "a group at work")


class Verbs(RdmaTest):
    def test_guests_and_namespaces_in_one_group_are_exact(self):
        # Bar 1's mixed run; the demo does the one with guests alone.
        for kind in ("f32", "bf16", "i32"):
            outcomes = self.lab.perf("-b", "8", "-e", "16M", "-f", "8", "-n", "1", "-w", "0", "-d", kind, timeout=120)
            rows = self.assert_exact(outcomes, 4)
            self.assertEqual(rows[-1].bytes, 16 * e2e.MIB)
        self.assert_nothing_left()

    def test_ipv6_and_several_stripes(self):
        outcomes = self.lab.perf("-b", "8", "-e", "1M", "-f", "16", "-n", "2", "-w", "0", "--stripes", "3",
                                 "--inflight", "2", ipv6=True)
        self.assert_exact(outcomes, 4)

    def test_it_says_what_it_took_and_why(self):
        def first_of(hosts, transport, timeout=60):
            return self.lab.start_perf("-b", "8", "-e", "8", "-n", "1", "-w", "0", hosts=hosts,
                                       transport=transport).wait(timeout)[0]
        for hosts, text in (((1, 3), r"^verbs on rxe0 port 1 \(eth0, RoCE path MTU up to 4096\): there is a usable "
                                     r"device \(asked for auto\)$"),
                            ((3, 1), r"^soft on eth0 .*no RDMA device .*\(asked for auto\)$")):
            outcome = first_of(hosts, "auto")
            self.assertEqual(outcome.code, 0, outcome.err)
            self.assertRegex(outcome.result["transport"], text)
        # One that was named never falls back. And the kernel's own Soft-RoCE holds the port that the soft transport
        # needs.
        for hosts, transport, text in (((3, 1), "verbs", "no RDMA device"), ((1, 3), "soft", "rdma_rxe")):
            outcome = first_of(hosts, transport, timeout=10)
            self.assertEqual(outcome.code, 1)
            self.assertIn(text, outcome.err)

    def test_nobody_touches_the_buffers(self):
        # Bar 4. Registered beforehand, then by the library.
        for registered in (1, 0):
            group = secrets.token_hex(16)
            ranks = [self.probe(f"zero{registered}-{rank}", rank + 1, "zero-copy", "--register", registered, rank=rank,
                                group=group) for rank in range(2)]
            for rank in ranks:
                out = self.assert_ended(rank, 60)
                self.assertIn("transport verbs on rxe0", out)
                self.assertIn("0 wrong", out)
        # The check can fail: the soft transport's own instructions do touch them.
        group = secrets.token_hex(16)
        ranks = [self.probe(f"touch-{rank}", rank + 3, "zero-copy", "--transport", "soft", rank=rank, group=group)
                 for rank in range(2)]
        self.assertIn(-signal.SIGSEGV, [rank.wait(30) for rank in ranks])

    def test_the_kernel_obeys_rnr_naks(self):
        group = secrets.token_hex(16)
        before = self.lab.counters()
        late = self.probe("late", 2, "late", group=group)
        early = self.probe("early", 1, "breach", rank=1, group=group)
        for process in (early, late):
            self.assert_ended(process, 60)
        after = self.lab.counters()
        for name in ("aggregation.rnr_naks_sent", "aggregation.window_breaches"):
            self.assertGreater(after[name], before[name])
        self.assertGreater(self.lab.rdma_counters(1)["rcvd_rnr_err"], 0)
        self.assert_nothing_left()

    def test_refusals_are_printed_as_the_switch_says_them(self):
        # Bar 7.
        secret = os.path.join(self.lab.directory, "secret")
        with open(secret, "w") as file:
            file.write("the right one\n")
        self.restart(aggregation={"memory_limit": "1MiB"})
        for outcome in self.lab.perf(*SMALL, hosts=[1, 2], timeout=60):
            self.assertEqual(outcome.code, 1)
            self.assertRegex(outcome.err, r"the switch: 0 KiB of 1 MiB used, this group needs \d+ MiB")
        self.restart(aggregation={"tenants": {7: {"name": "blue", "secret_file": secret}}})
        for arguments in ((), ("--tenant", "7")):
            for outcome in self.lab.perf(*SMALL, *arguments, hosts=[1, 2], timeout=60):
                self.assertEqual(outcome.code, 1)
                self.assertRegex(outcome.err, r"tenant \d is not known here, or the tag was made with another secret")
        for ipv6 in (False, True):
            self.assert_exact(self.lab.perf(*SMALL, "--tenant", "7", "--secret-file", secret, hosts=[1, 3], ipv6=ipv6), 2)
        self.restart(aggregation={"port": 18601})
        for outcome in self.lab.perf(*SMALL, hosts=[1, 2], timeout=60):
            self.assertEqual(outcome.code, 1)
            self.assertIn("CM reason 8", outcome.err)
            self.assertIn("is a Millrace switch listening there?", outcome.err)
        self.restart()

    def test_every_path_mtu(self):
        for mtu in (256, 512, 1024, 2048):
            self.restart(aggregation={"mtu": mtu, "segment_bytes": 16 * mtu - 64})
            outcomes = self.lab.perf("-b", "8", "-e", "256K", "-f", "32", "-n", "1", "-w", "0", hosts=[1, 2, 3])
            self.assert_exact(outcomes, 3)
            self.assertEqual(outcomes[0].result["path_mtu"], mtu)
        # An interface too small for the switch's MTU: said at once.
        self.restart()
        self.lab.run(2, "ip", "link", "set", "eth0", "mtu", 1500)
        outcome = self.lab.perf(*SMALL, hosts=[2], size=2, timeout=60)[0]
        self.assertEqual(outcome.code, 1)
        self.assertRegex(outcome.err, "path MTU of 4096.*carries at most 1024.*raise its MTU")
        self.lab.run(2, "ip", "link", "set", "eth0", "mtu", 4200)


class Impaired(RdmaTest):
    OPTIONS = {"impair": {"loss": 0.01, "duplicate": 0.01, "reorder": 0.01}}
    HOSTS = [RXE_GUEST, RXE_GUEST]

    def test_loss_duplication_and_reordering_change_no_sum(self):
        # Bar 3. A lost REQ costs librdmacm 4.3 s, so the join may take its time.
        for ipv6 in (False, True):
            outcomes = self.lab.perf("-b", "8", "-e", "1M", "-f", "8", "-n", "2", "-w", "0", "-d", "i32", timeout=150,
                                     ipv6=ipv6)
            self.assert_exact(outcomes, 2)
        ours = self.lab.counters()
        for name in ("duplicate_request", "out_of_sequence", "naks_sent", "retransmitted_packets"):
            self.assertGreater(ours["aggregation." + name], 0, name)
        for port in ("p1", "p2"):
            for what in ("lost", "duplicated", "reordered"):
                for direction in ("rx", "tx"):
                    self.assertGreater(ours[f"ports.{port}.impair_{direction}.{what}"], 0)
        print("the switch:", {k.partition(".")[2]: v for k, v in nonzero(ours).items() if k.startswith("aggregation.")})
        for host in (1, 2):
            print(f"guest {host}'s kernel:", nonzero(self.lab.rdma_counters(host)))


class Ends(RdmaTest):
    def assert_failed(self, outcomes, *words):
        for outcome in outcomes:
            self.assertEqual(outcome.code, 1, f"rank {outcome.rank}: {e2e.describe(outcome)}")
            for word in words:
                self.assertIn(word, outcome.err, f"rank {outcome.rank}")

    def survivors(self, run, gone, since, seconds=8):
        """The outcomes of the others, all within that time."""
        outcomes = run.wait(30)
        for rank, process in enumerate(run.processes):
            if rank not in gone:
                self.assertLess(process.ended - since, seconds, f"rank {rank}: {outcomes[rank].err}")
        return [outcome for outcome in outcomes if outcome.rank not in gone]

    def test_a_killed_process_is_named_and_the_group_forms_again_at_once(self):
        # Bar 6, first part. The guest's kernel closes the connection for it, so the others know at once.
        group = secrets.token_hex(16)
        run = self.lab.start_perf(*LONG, group=group)
        self.wait_until_running()
        killed = time.monotonic()
        run.kill(1)
        self.assert_failed(self.survivors(run, {1}, killed), "rank 1")
        self.assert_exact(self.lab.perf(*SMALL, group=group), 4)
        self.assert_nothing_left()

    def test_a_killed_switch_is_noticed_and_a_new_one_at_its_address_serves_at_once(self):
        group = secrets.token_hex(16)
        for ipv6 in (False, True):
            run = self.lab.start_perf(*LONG, group=group, ipv6=ipv6)
            self.wait_until_running()
            killed = time.monotonic()
            self.lab.switch.kill()
            self.assert_failed(self.survivors(run, set(), killed), self.lab.switch_address(ipv6))
            self.lab.start_switch()
            self.assert_exact(self.lab.perf(*SMALL, group=group, ipv6=ipv6), 4)

    def test_without_a_switch_the_join_fails_in_time_and_says_what_to_check(self):
        self.lab.switch.kill()
        try:
            for outcome in self.lab.perf(*SMALL, hosts=[1, 2], timeout=60):
                self.assertEqual(outcome.code, 1)
                self.assertRegex(outcome.err, r"no answer .* within 10000 ms: is ")
                self.assertLess(outcome.seconds, 14)
        finally:
            self.lab.start_switch()

    def test_a_switch_that_says_goodbye(self):
        run = self.lab.start_perf(*LONG)
        self.wait_until_running()
        ended = time.monotonic()
        self.assertEqual(self.lab.stop_switch()[0], 0)
        self.assert_failed(self.survivors(run, set(), ended), "shut")
        self.lab.start_switch()

    def test_memberships_by_the_thousand_leave_nothing(self):
        # Bar 5: two ranks on one guest, one group in ten left with the wire cut, so that no DREQ arrives.
        # A group whose members vanish is there for peer_dead, 5 s: on a fast machine, more at a time than usually fit.
        self.restart(frames={"count": 32768}, aggregation={"memory_limit": "100MiB"}, eal=["--no-huge", "-m", "512"])
        self.addCleanup(self.restart)
        cycles = 1000
        before = self.lab.counters()
        process = self.probe("cycles", 1, "cycles", "--cycles", cycles, "--cut-every", 10, "--directory",
                             self.lab.directory, group=secrets.token_hex(16))
        cut = {"rx": {"loss": 1.0}, "tx": {"loss": 1.0}}
        mended = {"rx": {"loss": 0.0}, "tx": {"loss": 0.0}}
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            for request, impairment in (("cut", cut), ("mend", mended)):
                path = os.path.join(self.lab.directory, request)
                if os.path.exists(path):
                    self.lab.change("impair", port="p1", **impairment)
                    os.unlink(path)
            time.sleep(0.005)
        self.assertIn(f"{cycles} cycles done", self.assert_ended(process, 1))
        after = self.lab.counters()
        # Each of the others said its goodbye, and may have had to repeat it.
        self.assertGreaterEqual(after["cm.dreq_received"] - before.get("cm.dreq_received", 0), 2 * (cycles - cycles // 10))
        self.assertGreater(after["ports.p1.impair_rx.lost"], cycles // 10)
        self.assert_nothing_left()
        self.assert_exact(self.lab.perf(*SMALL), 4)
        print(f"{cycles} groups of two in {process.seconds:.1f} s")

    def test_zz_a_killed_guest_is_named(self):
        # Last in its class: the guest is gone afterwards.
        group = secrets.token_hex(16)
        run = self.lab.start_perf(*LONG, group=group)
        self.wait_until_running()
        killed = time.monotonic()
        self.lab.guests[2].kill()
        self.assert_failed(self.survivors(run, {1}, killed), "rank 1", self.lab.address(2))
        self.assert_exact(self.lab.perf(*SMALL, group=group, hosts=[1, 3, 4]), 3)
        self.assert_nothing_left()


if __name__ == "__main__":
    e2e.main()
