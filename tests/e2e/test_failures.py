#!/usr/bin/python3
"""What ranks, and the switch, do when something goes wrong: an error that says what, in time, and no trace left."""

import secrets
import signal
import time

import e2e

BUDGET_S = 150


class Failures(e2e.LabTest):
    LONG = ("-b", "4M", "-e", "4M", "-n", "100000", "-w", "0", "-c", "0")

    def assert_failed(self, outcomes, *words, within=None):
        """Every rank ended with status 1 and a sentence that holds all the words."""
        for outcome in outcomes:
            self.assertEqual(outcome.code, 1, f"rank {outcome.rank}: {e2e.describe(outcome)}")
            for word in words:
                self.assertIn(word, outcome.err, f"rank {outcome.rank}")
            if within is not None:
                self.assertLess(outcome.seconds, within, f"rank {outcome.rank}: {outcome.err}")

    def wait_until_running(self, lab, operations=3):
        def running():
            groups = lab.ask("groups")["groups"]
            return groups and groups[0]["state"] == "running" and groups[0]["operation"] >= operations
        self.wait_for(running, 30, "a group at work")

    def kill_one_of_four(self, ipv6):
        with self.lab(hosts=4, ipv6=ipv6) as lab:
            # One whole life first: what the switch keeps for good after its first group is not a leak.
            self.assert_exact(lab.perf("-b", "64K", "-e", "64K", "-n", "1", "-c", "1"), 4)
            self.wait_for(lambda: not lab.ask("status")["queue_pairs"], 10, "queue pairs gone")
            before = lab.ask("status")
            group = secrets.token_hex(16)
            run = lab.start_perf(*self.LONG, group=group)
            self.wait_until_running(lab)
            self.assertGreater(lab.ask("status")["group_memory"]["reserved"], before["group_memory"]["reserved"])
            killed = time.monotonic()
            run.kill(2)
            outcomes = run.wait(20)
            for outcome, process in zip(outcomes, run.processes):
                if outcome.rank != 2:
                    self.assert_failed([outcome], "rank 2")
                    self.assertLess(process.ended - killed, 8, f"rank {outcome.rank}: {outcome.err}")
            # The same hosts with the same key, at once.
            self.assert_exact(lab.perf("-b", "1M", "-e", "1M", "-n", "2", "-c", "1", group=group), 4)
            self.assert_frames_return(lab, before)

    def test_a_killed_host_is_named_and_leaves_nothing(self):
        self.kill_one_of_four(ipv6=False)

    def test_a_killed_host_is_named_and_leaves_nothing_over_ipv6(self):
        self.kill_one_of_four(ipv6=True)

    def test_a_host_behind_a_cut_wire_is_named(self):
        with self.lab(hosts=3) as lab:
            run = lab.start_perf(*self.LONG)
            self.wait_until_running(lab)
            cut = time.monotonic()
            lab.change("impair", port="p2", rx={"loss": 1.0}, tx={"loss": 1.0})
            outcomes = run.wait(20)
            self.assert_failed([outcomes[0], outcomes[2]], "rank 1")
            self.assert_failed([outcomes[1]])  # cannot know more than that the switch is silent
            for process in run.processes:
                self.assertLess(process.ended - cut, 9)

    def disagree(self, *words, size="64K", type_name="f32", op="sum", hosts=4):
        """Rank 1 does something else than the others: everybody says who and what, at once."""
        def arguments(size="64K", type_name="f32", op="sum"):
            return ["-b", size, "-e", size, "-d", type_name, "-o", op, "-n", "1", "-w", "0", "-c", "1"]
        with self.lab(hosts=hosts) as lab:
            before = lab.ask("status")
            outcomes = lab.perf(*arguments(), per_rank={1: arguments(size, type_name, op)}, timeout=20)
            # From the start of the processes, so the join is within the time too.
            self.assert_failed(outcomes, "rank 1", *words, within=2)
            self.assert_frames_return(lab, before)

    def test_disagreement_about_the_type(self):
        self.disagree("type", "i32", "f32", type_name="i32")

    def test_disagreement_about_the_operator(self):
        self.disagree("operator", "max", "sum", op="max")

    def test_disagreement_about_the_size(self):
        self.disagree("131072", "65536", size="128K")

    def test_disagreement_of_two_equal_camps_names_both(self):
        self.disagree("rank 0", "operator", op="min", hosts=2)

    def test_an_abort_by_the_administrator_is_told(self):
        with self.lab(hosts=2) as lab:
            run = lab.start_perf(*self.LONG)
            self.wait_until_running(lab)
            group = lab.ask("groups")["groups"][0]["id"]
            lab.change("abort", group=group, why="the cleaners need this socket")
            self.assert_failed(run.wait(10), "the cleaners need this socket")

    def test_missing_ranks_are_named(self):
        with self.lab(hosts=2, overrides={"aggregation": {"join_timeout_ms": 1500}}) as lab:
            outcomes = lab.perf("-b", "8", "-e", "8", "-n", "1", size=3, timeout=20)
            self.assert_failed(outcomes, "2", within=5)

    def test_a_late_rank_is_named(self):
        # Rank 1 computes for ever between two calls: alive, but not there.
        with self.lab(hosts=2, overrides={"aggregation": {"operation_timeout_ms": 2000, "peer_dead_ms": 60000}}) as lab:
            run = lab.start_perf(*self.LONG)
            self.wait_until_running(lab)
            run.processes[1].signal(signal.SIGSTOP)
            self.wait_for(lambda: run.processes[0].poll() is not None, 15, "rank 0's end")
            run.processes[1].signal(signal.SIGCONT)
            outcomes = run.wait(15)
            self.assert_failed([outcomes[0]], "rank 1")

    def test_joins_that_wait_for_memory_have_their_turn(self):
        small = ("-b", "64K", "-e", "64K", "-n", "1", "-c", "1")
        with self.lab(hosts=4) as lab:
            lab.start_perf(*self.LONG, hosts=(1, 2))
            self.wait_until_running(lab)
            memory = lab.ask("status")["group_memory"]["reserved"]
            lab.stop_switch()
            lab.overrides = {"aggregation": {"memory_limit": f"{3 * memory // 2048}KiB"}}  # for one group and a half
            lab.start_switch()
            first = lab.start_perf(*self.LONG, hosts=(1, 2))
            self.wait_until_running(lab)
            self.assert_failed(lab.perf(*small, hosts=(3, 4), timeout=20), "this group needs")
            waiting, told = [], lab.counters()["cm.mra_sent"]
            for ranks in (2, 4):  # each is told to be patient
                waiting.append(lab.start_perf(*small, "--wait", hosts=(3, 4)))
                self.wait_for(lambda: lab.counters()["cm.mra_sent"] >= told + ranks, 10, f"{ranks} joins that wait")
            self.assertEqual([run.running() for run in waiting], [[0, 1]] * 2)
            self.assertEqual(len(lab.ask("groups")["groups"]), 1)
            lab.change("abort", group=lab.ask("groups")["groups"][0]["id"], why="others wait")
            self.assert_failed(first.wait(10), "others wait")
            for run in waiting:
                self.assert_exact(run.wait(20), 2)
            # There was never memory for two: who came first was served first.
            self.assertLess(max(p.ended for p in waiting[0].processes), min(p.ended for p in waiting[1].processes))

    def test_without_a_switch_the_join_fails_in_time(self):
        with self.lab(hosts=2, switch=False) as lab:
            outcomes = lab.perf("-b", "8", "-e", "8", "-n", "1", timeout=30)
            self.assert_failed(outcomes, lab.switch_address(), within=12)

    def test_the_switch_says_goodbye_on_sigterm(self):
        with self.lab(hosts=2) as lab:
            run = lab.start_perf(*self.LONG)
            self.wait_until_running(lab)
            code, summary = lab.stop_switch()
            self.assertEqual(code, 0, lab.switch.stderr())
            self.assertIn("contributions", summary)
            self.assert_failed(run.wait(10), "shut", within=None)
            self.assertLess(max(p.ended for p in run.processes) - lab.switch.ended, 3)

    def test_a_killed_switch_is_noticed(self):
        with self.lab(hosts=2) as lab:
            run = lab.start_perf(*self.LONG)
            self.wait_until_running(lab)
            lab.switch.kill()
            outcomes = run.wait(20)
            self.assert_failed(outcomes, lab.switch_address())
            for process in run.processes:
                self.assertLess(process.ended - lab.switch.ended, 10)


if __name__ == "__main__":
    e2e.main()
