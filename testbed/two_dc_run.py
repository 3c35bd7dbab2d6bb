"""One run of the two-datacenter lab: the transfer and the all-reduce, then the burst, and the accounts of both."""

import json
import os
import time

from lab import LabError, binary, perf_rows
from two_dc_lab import DSCP, LOCAL, QUEUE, RECEIVER, SENDER, Occupancy, TwoDc, port_of

WAIT_S = 240  # for anything that is under way; nothing here depends on how long it takes


def qpn(host, peer):
    """Of a host's queue pair to another."""
    return 0x1000 + 16 * host + peer


class Flows:
    """millrace-flow on hosts: {host: [(peer, bytes to send, bytes to receive)]}. Sending begins with go()."""

    def __init__(self, lab, name, by_host):
        self.lab, self.begin = lab, os.path.join(lab.directory, name + ".go")
        plan = lab.plan
        self.processes = {}
        for host, connections in by_host.items():
            command = [binary("millrace-flow"), "--begin", self.begin, "--mtu", plan.mtu, "--window", plan.window,
                       "--dscp", DSCP, "--line-rate-mbps", plan.port_mbps, "--seconds", WAIT_S]
            for peer, send, receive in connections:
                command += ["--connect", f"{qpn(host, peer)},{lab.roce_address(peer)},{qpn(peer, host)},{send},{receive}"]
            self.processes[host] = lab.start(f"{name}-h{host}", command, host=host)

    def events(self, host):
        lines = self.processes[host].stdout().splitlines(keepends=True)
        return {(event := json.loads(line))["event"]: event for line in lines if line.endswith("\n")}

    def wait_for(self, event):
        """Of all hosts; the first that ends instead says why."""
        deadline = time.monotonic() + WAIT_S
        while waiting := [host for host in self.processes if event not in self.events(host)]:
            for host, process in self.processes.items():
                if process.poll() is not None:
                    raise LabError(f"host {host}'s millrace-flow ended with {process.poll()}: {process.stderr().strip()}")
            if time.monotonic() > deadline:
                raise LabError(f"host {waiting[0]}'s millrace-flow never said {event}")
            time.sleep(0.02)

    def go(self):
        open(self.begin, "w").close()

    def end(self):
        """What each host counted, by (host, peer)."""
        for process in self.processes.values():
            process.signal(15)
        reports, self.kernel_drops = {}, 0
        for host, process in self.processes.items():
            if process.wait(10) != 0:
                raise LabError(f"host {host}'s millrace-flow ended with {process.poll()}: {process.stderr().strip()}")
            end = self.events(host)["end"]
            self.kernel_drops += end["kernel_drops"]
            for connection in end["connections"]:
                reports[host, connection["peer_qpn"] // 16 % 256] = connection
        return reports


def account(reports, pairs):
    """Of the directions `pairs` (sender, receiver) together. lost: packets that were sent and never came."""
    sent = [reports[a, b]["sent"] for a, b in pairs]
    received = [reports[b, a]["received"] for a, b in pairs]
    total = {"seconds": max(s["seconds"] for s in sent),
             "bytes": sum(s["bytes"] for s in sent),
             "packets": sum(s["packets"] for s in sent),
             "retransmitted": sum(s["retransmitted"] for s in sent),
             "timeouts": sum(s["timeouts"] for s in sent),
             "naks": sum(r["naks_sent"] for r in received),
             "duplicates": sum(r["duplicates"] for r in received),
             "wrong": sum(r["wrong_packets"] for r in received)}
    total["lost"] = total["packets"] - sum(r["packets"] for r in received)
    return total


def drops_of(lab):
    """Packets that leaf2 dropped from the transfers' queues: (for want of room, by the spillway)."""
    hosts = {f"sw{host}" for host in LOCAL}
    queues = sum(port["queues"][QUEUE]["dropped"]["packets"] for port in lab.buffers()["ports"]
                 if port["name"] in hosts)
    spillway = lab.spillway()
    if not spillway["enabled"]:
        return queues, 0
    return queues, spillway["all"]["refused"]["packets"] + spillway["all"]["lost"]["packets"]


def wait_until(condition, what):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"not within {WAIT_S} s: {what}")
        time.sleep(0.02)


def settle(lab):
    """Until nothing is under way: what was sent has been counted by who received it."""
    def state():
        """(whether something waits in a switch, how much the transfers have brought there so far)"""
        ports = [port["queues"] for name in ("leaf1", "leaf2") for port in lab.buffers(name)["ports"]]
        spillway = lab.spillway()
        resident = spillway["enabled"] and spillway["all"]["resident"]["packets"]
        return (bool(resident or sum(queue["bytes"] for queues in ports for queue in queues)),
                sum(queues[QUEUE]["arrived"]["packets"] for queues in ports))

    def quiet():
        before = state()
        time.sleep(4 * lab.plan.delay_us / 1e6 + 0.2)
        return state() == before == (False, before[1])
    wait_until(quiet, "empty queues")


def wait_for_progress(lab, share):
    """Until so much of the transfer has reached its port."""
    def arrived():
        return port_of(lab.buffers(), lab.receiver_port())["queues"][QUEUE]["arrived"]["bytes"]
    wait_until(lambda: arrived() >= share * lab.plan.cross_bytes, "the transfer has begun")


def begin_all_reduce(lab):
    plan = lab.plan
    perf = lab.start_perf("-b", plan.all_reduce_bytes, "-e", plan.all_reduce_bytes, "-n", plan.all_reduces, "-w", 0,
                          "-c", 1, hosts=plan.all_reduce_hosts)
    def running():
        ended = [p for p in perf.processes if p.poll() not in (None, 0)]
        if ended:
            raise LabError("millrace-perf: " + (ended[0].stderr().strip() or "ended without a word"))
        return not perf.running() or any(g["state"] == "running" for g in lab.switch_ask("leaf2", "groups")["groups"])
    wait_until(running, "a group at work")
    return perf


def end_all_reduce(perf):
    outcomes = perf.wait(WAIT_S)
    for outcome in outcomes:
        if outcome.code != 0:
            raise LabError(f"rank {outcome.rank} of the all-reduce ended with {outcome.code}: {outcome.err.strip()}")
    row = perf_rows(outcomes[0])[0]
    return {"seconds": row.seconds, "bytes": row.bytes, "wrong": row.wrong}


def run_mode(mode, plan, name, logs, capture=None):
    """One mode in a lab of its own, by millrace-flow between namespaces: its figures."""
    with TwoDc(mode, plan, name=name, logs=logs, capture=capture) as lab:
        if mode == "remote":
            lab.start_lender()
        burst_pairs = [(a, b) for a in LOCAL for b in LOCAL if a != b]
        # One process per begin: host 5 receives the transfer and is one of the burst's.
        cross = Flows(lab, "cross", {SENDER: [(RECEIVER, plan.cross_bytes, 0)],
                                     RECEIVER: [(SENDER, 0, plan.cross_bytes)]})
        burst = Flows(lab, "burst", {a: [(b, plan.burst_bytes, plan.burst_bytes) for b in LOCAL if a != b]
                                     for a in LOCAL})
        for flows in (cross, burst):
            flows.wait_for("ready")
        perf = begin_all_reduce(lab)
        occupancy = Occupancy(lab)
        occupancy.start()
        cross.go()
        wait_for_progress(lab, plan.burst_after)
        burst.go()
        for flows in (cross, burst):
            flows.wait_for("done")
        all_reduce = end_all_reduce(perf)
        settle(lab)
        occupancy.stop()
        reports = cross.end() | burst.end()
        told = {"mode": mode, "cross": account(reports, [(SENDER, RECEIVER)]), "burst": account(reports, burst_pairs),
                "all_reduce": all_reduce, "kernel_drops": cross.kernel_drops + burst.kernel_drops}
        told["seconds"] = told["cross"]["seconds"]
        told["naks"] = told["cross"]["naks"] + told["burst"]["naks"]
        return told | figures_of_switch(lab, told, occupancy)


def figures_of_switch(lab, told, occupancy):
    queue_drops, spill_drops = drops_of(lab)
    port = port_of(lab.buffers(), lab.receiver_port())["queues"][QUEUE]
    spillway = lab.spillway()
    spill = port_of(spillway, lab.receiver_port()) if spillway["enabled"] else None
    if lab.plan.eligible == "all":
        eligible = queue_drops + spill_drops
    else:  # with spilling off, only the ends tell one flow's drops from another's
        eligible = spill_drops if spill else told["cross"]["lost"]
    return {"drops": queue_drops + spill_drops, "eligible_drops": eligible,
            "queue_bytes_max": port["bytes_max"],
            "resident_bytes_max": spill["resident_bytes_max"] if spill else 0,
            "spilled": spill["spilled"] if spill else {"packets": 0, "bytes": 0},
            "drained": spill["drained"] if spill else {"packets": 0, "bytes": 0},
            "store": spillway.get("store"), "lenders": spillway.get("lenders", []),
            "mbps_while_spilled": occupancy.mbps_while_spilled(), "occupancy": occupancy.samples}


def introduction(plan):
    return [f"host 1 sends {plan.cross_bytes} B to host 5 in the other datacenter, {plan.delay_us / 1000:g} ms away by "
            f"a link of {plan.link_mbps} Mb/s; ports of {plan.port_mbps} Mb/s there",
            f"the burst: hosts 5, 6 and 7 send {plan.burst_bytes} B to each other; meanwhile "
            f"{len(plan.all_reduce_hosts)} hosts sum {plan.all_reduce_bytes} B in the network"]


def complaints(run, plan):
    """What must hold of a run, whatever time it took."""
    mode, cross, burst = run["mode"], run["cross"], run["burst"]
    eligible = [cross, burst] if plan.eligible == "all" else [cross]
    wrong = []
    if bad := cross["wrong"] + burst["wrong"]:
        wrong.append(f"{bad} packets with wrong bytes")
    if run["all_reduce"]["wrong"]:
        wrong.append(f"{run['all_reduce']['wrong']} wrong sums")
    naks = sum(flows["naks"] for flows in eligible)
    if mode == "off":
        if not run["drops"] or not naks:
            wrong.append("nothing collided: without spilling, nothing was dropped")
    else:
        if run["eligible_drops"]:
            wrong.append(f"{run['eligible_drops']} eligible packets were dropped")
        if naks:
            wrong.append(f"{naks} sequence NAKs for eligible flows")
        if not run["spilled"]["packets"]:
            wrong.append("nothing was spilled")
        if run["spilled"] != run["drained"]:
            wrong.append(f"{run['spilled']} were spilled and {run['drained']} drained")
    # The switch's word against the ends': whatever was sent and did not come, it says to have dropped.
    if (lost := cross["lost"] + burst["lost"]) != run["drops"]:
        wrong.append(f"{lost} packets were lost, of which leaf2 knows {run['drops']}")
    return wrong


def table_line(run):
    cross, burst = run["cross"], run["burst"]
    return (run["mode"], f"{cross['seconds']:.2f}", f"{burst['seconds']:.2f}",
            f"{1000 * run['all_reduce']['seconds']:.1f}", run["drops"], run["eligible_drops"],
            run["naks"], f"{cross['retransmitted']} + {burst['retransmitted']}",
            f"{run['queue_bytes_max'] / 1000:.0f}", f"{run['resident_bytes_max'] / 1000:.0f}",
            run["mbps_while_spilled"] or "-",
            cross["wrong"] + burst["wrong"] + run["all_reduce"]["wrong"])
