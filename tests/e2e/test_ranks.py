#!/usr/bin/python3
"""Several ranks on one host, which combine through shared memory before the network: exact, one contribution per
host on its link, and ends that name who is gone."""

import os
import signal
import time

import e2e
from e2e import MIB
from lab import RXE_GUEST

BUDGET_S = 200

FOUR_AND_FOUR = (1, 1, 1, 1, 2, 2, 2, 2)
COMBINE = ("--combine", "on")
LONG = (*COMBINE, "-b", "4M", "-e", "4M", "-n", "100000", "-w", "0", "-c", "0")
# Around packets and segments, and some that divide into shards of nothing even.
SIZES = ("--sizes", "0,4,1000,65472,65480,200008,1M")


def listening(lab, host):
    """Names at which ranks of a host meet."""
    return [line for line in lab.run(host, "cat", "/proc/net/unix").splitlines() if "@millrace-" in line]


class Combined(e2e.LabTest):
    def all_collectives(self, lab, hosts, *more, types="f32,bf16,i32,f64", ops="sum,avg,max"):
        rows = self.assert_exact(lab.perf(*COMBINE, "-p", "all", *SIZES, "-d", types, "-o", ops, "-n", "2", "-w", "0",
                                          "-c", "1", *more, hosts=hosts), len(hosts))
        self.assertGreater(len(rows), 50)

    def test_every_collective_of_four_and_four(self):
        with self.lab(hosts=2) as lab:
            self.all_collectives(lab, FOUR_AND_FOUR)

    def test_every_collective_of_three_and_one(self):
        with self.lab(hosts=2) as lab:
            self.all_collectives(lab, (1, 1, 1, 2), "-r", "all")

    def test_ranks_that_are_dealt_out_in_turn(self):
        with self.lab(hosts=3, ipv6=True) as lab:
            self.all_collectives(lab, (1, 2, 3, 1, 2, 1, 1), "--inflight", "3", "--stripes", "2")

    def test_sums_are_the_same_bits_wherever_ranks_are(self):
        # Verified against the one order of ranks; 3 + 1 and turns cut it into several subtrees.
        with self.lab(hosts=2) as lab:
            for hosts in (FOUR_AND_FOUR, (1, 1, 1, 2), (1, 2, 1, 2, 1)):
                self.assert_exact(lab.perf(*COMBINE, "--deterministic", "-p", "all-reduce,reduce-scatter", "--sizes",
                                           "1000,200008", "-d", "f32,f16,f8e4m3,f64", "-o", "sum,prod,avg", "-n", "2",
                                           "-w", "0", "-c", "1", hosts=hosts), len(hosts))

    def test_block_floating_point(self):
        with self.lab(hosts=2) as lab:
            self.assert_exact(lab.perf(*COMBINE, "--wire", "bfp8", "-p", "all-reduce,reduce-scatter", *SIZES, "-d",
                                       "f32,bf16", "-n", "2", "-w", "0", "-c", "1", hosts=(1, 1, 1, 2)), 4)

    def test_some_combine_and_some_do_not(self):
        with self.lab(hosts=3) as lab:
            alone = ("--combine", "off", "-b", "1K", "-e", "1M", "-f", "32", "-n", "2", "-c", "1")
            together = (*COMBINE, *alone[2:])
            outcomes = lab.perf(*together, hosts=(1, 1, 2, 3, 3), per_rank={2: alone})
            self.assert_exact(outcomes, 5)

    def test_all_ranks_on_one_host_need_no_switch(self):
        with self.lab(hosts=1) as lab:
            before = lab.counters()
            outcomes = lab.perf(*COMBINE, "-b", "1K", "-e", "4M", "-f", "8", "-n", "2", "-c", "1", hosts=(1, 1, 1))
            self.assert_exact(outcomes, 3)
            self.assertEqual(outcomes[0].result["path"], "shared memory")
            self.assertEqual(lab.counters()["aggregation.contributions"], before["aggregation.contributions"])

    def test_a_launcher_decides_and_it_is_told(self):
        with self.lab(hosts=2) as lab:
            arguments = ("-b", "1K", "-e", "1K", "-n", "1", "-c", "1")
            self.addCleanup(os.environ.pop, "LOCAL_WORLD_SIZE", None)
            for ranks, combined in ((2, 2), (1, 0)):
                os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
                outcome = lab.perf(*arguments, hosts=(1,) * ranks + (2,) * ranks)[0]
                self.assertEqual(outcome.code, 0, e2e.describe(outcome))
                self.assertEqual(outcome.result["combined_ranks"], combined)
                self.assertIn(f"LOCAL_WORLD_SIZE is {ranks}", outcome.result["combining"])

    def test_over_rdma_queue_pairs(self):
        with self.lab(hosts=[RXE_GUEST, RXE_GUEST]) as lab:
            outcomes = lab.perf(*COMBINE, "-p", "all", "-b", "8", "-e", "256K", "-f", "32", "-d", "f32,bf16", "-n", "2",
                                "-w", "0", "-c", "1", hosts=(1, 1, 1, 2, 2))
            self.assert_exact(outcomes, 5)
            self.assertIn("verbs", outcomes[0].result["transport"])

    def test_on_a_bad_network(self):
        bad = {"loss": 0.005, "duplicate": 0.01, "reorder": 0.01, "corrupt": 0.005}
        with self.lab(hosts=2, impair=bad) as lab:
            self.assert_exact(lab.perf(*COMBINE, "-b", "8", "-e", "1M", "-f", "8", "-d", "f32,bf16", "-n", "3", "-c",
                                       "1", hosts=FOUR_AND_FOUR), 8)


class Links(e2e.LabTest):
    def carried(self, lab, hosts, *arguments):
        """Bytes that each host's link carries, sent and received, for each byte of the vectors."""
        size = 16 * MIB
        before = [lab.link_bytes(host) for host in (1, 2)]
        row, = self.assert_exact(lab.perf("-b", size, "-e", size, "-n", "1", "-w", "0", "-c", "0", *arguments,
                                          hosts=hosts), len(hosts))
        return [[(now - then) / (row.calls * size) for now, then in zip(lab.link_bytes(host), before[host - 1])]
                for host in (1, 2)]

    def compare(self, *arguments, sent=1.1, received=1.1):
        with self.lab(hosts=2) as lab:
            one = self.carried(lab, (1, 2), "--combine", "off", *arguments)
            eight = self.carried(lab, FOUR_AND_FOUR, *COMBINE, *arguments)
        for host in (1, 2):
            for what, most, of_one, of_four in zip(("sent", "received"), (sent, received), one[host - 1],
                                                   eight[host - 1]):
                print(f"{' '.join(arguments) or 'f32'}: host {host} {what} {of_four:.4f} × the vector with four "
                      f"ranks, {of_one:.4f} × with one")
                self.assertLessEqual(of_four, most * of_one)

    def test_four_ranks_of_a_host_send_and_receive_what_one_does(self):
        self.compare()
        self.compare("-d", "i32", "-o", "max")
        self.compare("-p", "reduce-scatter")

    def test_narrow_types_go_up_as_f32(self):
        # Half as much as four ranks' own would be; a partial sum in bf16 would be rounded twice.
        self.compare("-d", "bf16", sent=2.2)
        # The greatest of numbers of a type is one of them.
        self.compare("-d", "bf16", "-o", "max")


class Ends(e2e.LabTest):
    def assert_named(self, outcomes, processes, killed, *words, but=(), within):
        for outcome, process in zip(outcomes, processes):
            if outcome.rank in but:
                continue
            self.assertEqual(outcome.code, 1, f"rank {outcome.rank}: {e2e.describe(outcome)}")
            for word in words:
                self.assertIn(word, outcome.err, f"rank {outcome.rank}")
            self.assertLess(process.ended - killed, within, f"rank {outcome.rank}: {outcome.err}")

    def running(self, lab):
        self.wait_for(lambda: any(g["state"] == "running" and g["operation"] >= 3 for g in lab.ask("groups")["groups"]),
                      30, "a group at work")

    def kill(self, choose, number=signal.SIGKILL):
        with self.lab(hosts=2) as lab:
            arguments = (*COMBINE, "-b", "64K", "-e", "64K", "-n", "1", "-c", "1")
            self.assert_exact(lab.perf(*arguments, hosts=FOUR_AND_FOUR), 8)
            self.wait_for(lambda: not lab.ask("status")["queue_pairs"], 10, "queue pairs gone")
            before = lab.ask("status")
            group = "ab" * 16
            run = lab.start_perf(*LONG, hosts=FOUR_AND_FOUR, group=group)
            self.running(lab)
            leader = self.leader(lab, run)
            rank = choose(leader)
            at = time.monotonic()
            run.processes[rank].signal(number)
            outcomes = run.wait(20)
            yield outcomes, run.processes, at, rank
            # The same ranks with the same key, at once, and no trace of the others.
            self.assert_exact(lab.perf(*arguments, hosts=FOUR_AND_FOUR, group=group), 8)
            self.assert_frames_return(lab, before)
            for host in (1, 2):
                self.assertEqual(listening(lab, host), [])

    def leader(self, lab, run):
        """The rank of host 1 that is connected to the switch: the one with a packet socket."""
        packets = {line.split()[-1] for line in lab.run(1, "cat", "/proc/net/packet").splitlines()[1:]}
        self.assertEqual(len(packets), 1, "all of host 1's ranks look at its packets")
        for rank in range(4):
            descriptors = f"/proc/{run.processes[rank].pid}/fd"
            for fd in os.listdir(descriptors):
                target = os.readlink(f"{descriptors}/{fd}")
                if target.startswith("socket:[") and target[8:-1] in packets:
                    return rank
        self.fail("no rank of host 1 has a packet socket")

    def test_a_killed_rank_is_named_by_all_others_at_once(self):
        for outcomes, processes, at, rank in self.kill(lambda leader: (leader + 1) % 4):
            self.assert_named(outcomes, processes, at, f"rank {rank} (process {processes[rank].pid}", but=(rank,),
                              within=2)

    def test_a_killed_leader_is_named_here_and_its_ranks_everywhere(self):
        for outcomes, processes, at, rank in self.kill(lambda leader: leader):
            self.assert_named(outcomes[:4], processes[:4], at, f"rank {rank}, which combines", but=(rank,), within=2)
            self.assert_named(outcomes[4:], processes[4:], at, "ranks 0-3", within=8)

    def test_a_stopped_leader_is_named(self):
        for outcomes, processes, at, rank in self.kill(lambda leader: leader, signal.SIGSTOP):
            self.assert_named(outcomes[:4], processes[:4], at, f"rank {rank}, which combines", but=(rank,), within=9)
            self.assert_named(outcomes[4:], processes[4:], at, "ranks 0-3", within=9)

    def test_a_rank_that_disagrees_is_named_everywhere(self):
        with self.lab(hosts=2) as lab:
            arguments = (*COMBINE, "-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "-c", "1")
            for rank in (1, 6):
                outcomes = lab.perf(*arguments, hosts=FOUR_AND_FOUR, per_rank={rank: (*arguments, "-o", "max")},
                                    timeout=20)
                for outcome in outcomes:
                    self.assertEqual(outcome.code, 1, e2e.describe(outcome))
                    self.assertIn(f"rank {rank} operator max, the others sum", outcome.err)

    def test_a_killed_switch_is_noticed_by_all(self):
        with self.lab(hosts=2) as lab:
            run = lab.start_perf(*LONG, hosts=FOUR_AND_FOUR)
            self.running(lab)
            lab.switch.kill()
            outcomes = run.wait(20)
            self.assert_named(outcomes, run.processes, lab.switch.ended, lab.switch_address(), within=10)

    def test_missing_ranks_are_named(self):
        with self.lab(hosts=2, overrides={"aggregation": {"join_timeout_ms": 1500}}) as lab:
            outcomes = lab.perf(*COMBINE, "-b", "8", "-e", "8", "-n", "1", size=6, hosts=(1, 1, 1, 2), timeout=20)
            for outcome in outcomes:
                self.assertEqual(outcome.code, 1, e2e.describe(outcome))
                self.assertIn("4, 5", outcome.err)


if __name__ == "__main__":
    e2e.main()
