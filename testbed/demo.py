#!/usr/bin/python3
"""The demo behind testbed/demo, once everything is installed and built."""

import argparse
import json
import os
import re
import sys
from dataclasses import dataclass

from fabric import LEAVES_MAX, Fabric
from lab import NAMESPACE, RXE_GUEST, Lab, LabError, perf_rows

# The matrix that is shown unasked, and what else there is.
MATRIX_TYPES = ("f32", "f64", "f16", "bf16", "u8", "i8", "i32", "u32", "i64", "u64")
MATRIX_OPERATORS = ("sum", "prod", "min", "max")
TYPES = (*MATRIX_TYPES, "f8e4m3", "f8e5m2")
INTEGER_OPERATORS = ("band", "bor", "bxor", "land", "lor")
OPERATORS = (*MATRIX_OPERATORS, "avg", *INTEGER_OPERATORS)
NARROW_TYPES = ("f16", "bf16", "f8e4m3", "f8e5m2")  # reduced in f32
IMPAIRMENTS = (("loss", "loss", "lost"), ("dup", "duplicate", "sent twice"), ("reorder", "reorder", "out of order"))
GUEST_MEMORY_MIB = 400  # what a guest takes of the host, QEMU's own included
RUN_TIMEOUT_S = 900
HOSTS_MAX = 64
# A leaf sends up one contribution for all of its hosts: its uplink carries what a host's link does, but for what is
# sent again, and for what is only seen where little else is: the questions to next hops.
UPLINK_MAX, UPLINK_JUDGED_BYTES = 1.1, 1 << 20


def makes_sense(kind, op):
    return op not in INTEGER_OPERATORS or kind[0] in "iu"


@dataclass
class Part:
    """Runs of millrace-perf, one per element of `types`, on a lab of their own. types, op: as millrace-perf takes
    them."""
    title: str
    smallest: str
    largest: str
    types: tuple = ("f32",)
    op: str = "sum"
    ipv6: bool = False
    inflight: int = 1
    iterations: int = 5
    warmups: int = 1

    @property
    def is_matrix(self):
        """Of many types and operators: too long a table to print whole."""
        return any(text == "all" or "," in text for text in (*self.types, self.op))

    def cases(self):
        """How many lines millrace-perf will print."""
        smallest, largest = (number(size) for size in (self.smallest, self.largest))
        sizes = 1
        while smallest << sizes <= largest:
            sizes += 1
        def listed(text, every):
            return every if text == "all" else text.split(",")
        return sizes * sum(makes_sense(kind, op) for types in self.types for kind in listed(types, TYPES)
                           for op in listed(self.op, OPERATORS))

    def arguments(self, kind):
        operators = ",".join(OPERATORS) if self.op == "all" else self.op
        return ["-b", self.smallest, "-e", self.largest, "-f", "2", "-d", kind, "-o", operators, "-n", self.iterations,
                "-w", self.warmups, "-c", "1", "--inflight", self.inflight, "--stats"]


def number(size):
    digits = size.rstrip("KMG")
    return int(digits) << {"": 0, "K": 10, "M": 20, "G": 30}[size[len(digits):]]


def size_range(text):
    match = re.fullmatch(r"(\d+[KMG]?)(?::(\d+[KMG]?))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: write bytes, or MIN:MAX, as 64M or 8:64M")
    smallest, largest = match.group(1), match.group(2) or match.group(1)
    if number(smallest) < 1 or number(largest) < number(smallest):
        raise argparse.ArgumentTypeError(f"'{text}': the first size must be at least 1 and at most the second")
    return smallest, largest


def probability(text):
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no share: write a number in 0 … 1, as 0.01")
    return value


def rate(text):
    if not re.fullmatch(r"\d+(\.\d+)?[kmgt]?(bit|bps)", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"'{text}' is no rate: write it as tc does, e.g. 1gbit or 200mbit")
    return text


def at_least_one(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}': must be at least 1")
    return value


def tree(text):
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not 1 <= int(match.group(1)) <= LEAVES_MAX or int(match.group(2)) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no tree: write leaves (at most {LEAVES_MAX}) x hosts of each, as "
                                         "2x4")
    return int(match.group(1)), int(match.group(2))


def memory_available_mib():
    with open("/proc/meminfo") as file:
        return int(re.search(r"^MemAvailable: +(\d+) kB", file.read(), re.MULTILINE).group(1)) >> 10


def parse_options():
    parser = argparse.ArgumentParser(prog="demo", usage="demo [options] (--help lists them)", add_help=False)
    parser.add_argument("--hosts", type=at_least_one)
    parser.add_argument("--hosts-rxe", type=at_least_one)
    parser.add_argument("--tree", type=tree)
    parser.add_argument("--size", type=size_range)
    parser.add_argument("--type", choices=(*TYPES, "all"))
    parser.add_argument("--op", choices=(*OPERATORS, "all"))
    parser.add_argument("--ipv6", action="store_true")
    parser.add_argument("--inflight", type=at_least_one)
    parser.add_argument("--iterations", type=at_least_one)
    parser.add_argument("--loss", type=probability)
    parser.add_argument("--dup", type=probability)
    parser.add_argument("--reorder", type=probability)
    parser.add_argument("--rate", type=rate)
    parser.add_argument("--capture")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-check-options", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (kind := options.type or "f32") != "all" and not makes_sense(kind, options.op):
        parser.error(f"argument --op: {options.op} does not go with {kind}: bitwise and logical operators are for "
                     "integers")
    if options.tree:
        leaves, each = options.tree
        if options.hosts is not None:
            parser.error("argument --hosts: --tree says how many there are")
        options.hosts_rxe = options.hosts_rxe or 0
        options.hosts = leaves * each - options.hosts_rxe
        if options.hosts < 0:
            parser.error(f"argument --hosts-rxe: the tree has {leaves * each} hosts")
    if options.hosts is None:
        options.hosts = 0 if options.hosts_rxe else 4
    options.hosts_rxe = options.hosts_rxe or 0
    if options.hosts + options.hosts_rxe > HOSTS_MAX:
        parser.error(f"argument --{'tree' if options.tree else 'hosts'}: at most {HOSTS_MAX} hosts on one machine")
    guests = options.hosts_rxe * GUEST_MEMORY_MIB
    if guests > (available := memory_available_mib()):
        parser.error(f"argument --hosts-rxe: {options.hosts_rxe} guests take {guests} MiB of memory; {available} MiB "
                     "are available")
    if options.capture:
        folder = os.path.dirname(os.path.abspath(options.capture))
        if not os.path.isdir(folder):
            parser.error(f"argument --capture: there is no folder {folder}")
    return options


def parts(options):
    # A minute or two on two cores; many hosts, emulated ones, and waiting for lost packets, take their time.
    impaired = options.loss or options.dup or options.reorder
    slow = options.hosts + options.hosts_rxe > 4 or impaired or options.hosts_rxe
    iterations = options.iterations or (1 if options.capture else 2 if slow else 5)
    warmups = 0 if options.capture or options.hosts_rxe else 1
    largest = "16M" if options.hosts_rxe or options.tree else "64M"
    if options.size or options.type or options.op or options.ipv6 or options.inflight:
        smallest, largest = options.size or ("8", largest)
        return [Part("all-reduce over " + ("IPv6" if options.ipv6 else "IPv4"), smallest, largest,
                     (options.type or "f32",), options.op or "sum", options.ipv6, options.inflight or 1, iterations,
                     warmups)]
    if options.hosts_rxe:
        return [Part("sums over IPv4", "8", largest, ("f32", "bf16", "i32"), iterations=iterations, warmups=warmups)]
    return [Part("f32 sum over IPv4", "8", largest, iterations=iterations, warmups=warmups),
            Part("ten types and four operators over IPv6, two operations in flight", "8", "1M",
                 (",".join(MATRIX_TYPES),), ",".join(MATRIX_OPERATORS), True, 2, min(iterations, 2), 0)]


def parted_name(path, number, count):
    """Each part has a switch of its own and so a file of its own: f.pcapng, then f-2.pcapng."""
    if path is None or count == 1 or number == 0:
        return path
    stem, extension = os.path.splitext(path)
    return f"{stem}-{number + 1}{extension}"


class Demo:
    def __init__(self, options):
        self.options = options
        self.say_to = sys.stderr if options.json else sys.stdout
        self.lab = None

    def say(self, text=""):
        print(text, file=self.say_to, flush=True)

    def run(self):
        options = self.options
        results, wrong = [], []
        todo = parts(options)
        for number, part in enumerate(todo):
            capture = parted_name(options.capture, number, len(todo))
            self.say(f"# {self.hosts()}{self.shape()}, {part.title}"
                     + "".join(f", {share:g} of all frames {what}" for option, _, what in IMPAIRMENTS
                               if (share := getattr(options, option)))
                     + (f", wires of {options.rate}" if options.rate else ""))
            result, complaints = self.run_part(part, capture, f"demo-{number + 1}")
            results.append(result)
            wrong += complaints
            self.say()
        lines = sum(len(result["rows"]) for result in results)
        verdict = "FAILED: " + "; ".join(wrong) if wrong else \
            f"OK: {lines} case{'s' * (lines != 1)} (size, type, operator) reduced in the network, 0 wrong"
        if options.json:
            print(json.dumps({"ok": not wrong, "verdict": verdict, "hosts": options.hosts, "hosts_rxe": options.hosts_rxe,
                              "tree": options.tree, "parts": results}))
        else:
            self.say(verdict)
        return 1 if wrong else 0

    def hosts(self):
        """In words."""
        soft, rxe = self.options.hosts, self.options.hosts_rxe
        plural = "s" if rxe != 1 else ""
        if not rxe:
            return f"{soft} host{'s' * (soft != 1)}"
        if not soft:
            return f"{rxe} Soft-RoCE guest{plural}"
        return f"{soft + rxe} hosts ({soft} in namespaces, {rxe} Soft-RoCE guest{plural})"

    def shape(self):
        if not self.options.tree:
            return ""
        leaves, each = self.options.tree
        return f", {each} behind each of {leaves} lea{'ves' if leaves > 1 else 'f'} under a spine"

    def make_lab(self, part, capture, name):
        options = self.options
        types = [NAMESPACE] * options.hosts + [RXE_GUEST] * options.hosts_rxe
        impair = {key: getattr(options, option) for option, key, _ in IMPAIRMENTS if getattr(options, option)}
        general = {"ipv6": part.ipv6, "rate": options.rate, "capture": capture, "capture_limit": "4GiB",
                   "impair": impair or None, "name": name}
        if not options.tree:
            return Lab(hosts=types, **general)
        leaves, each = options.tree
        return Fabric(leaves=leaves, hosts_per_leaf=each, spines=1, tree=True, types=types, **general)

    def run_part(self, part, capture, name):
        """(what to report, what was wrong)."""
        options = self.options
        wrong = []
        lab = self.lab = self.make_lab(part, capture, name)
        hosts = range(1, lab.hosts + 1)
        leaves = range(1, lab.leaves + 1) if options.tree else ()
        with lab:
            self.show_hosts(lab)
            before = {host: lab.link_bytes(host) for host in hosts}
            before_up = {leaf: lab.uplink_bytes(leaf) for leaf in leaves}
            rows, transport, listen = [], {}, self.listener(part)
            for kind in part.types:
                outcomes = lab.perf(*part.arguments(kind), timeout=RUN_TIMEOUT_S, listen=listen)
                for outcome in outcomes:
                    if outcome.code != 0:
                        how = "did not end" if outcome.code is None else f"ended with {outcome.code}"
                        wrong.append(f"rank {outcome.rank} {how}: {last_line(outcome.err or outcome.out)}")
                measured = perf_rows(outcomes[0])
                if not measured and not wrong:
                    wrong.append("nothing was measured")
                wrong += [f"{row.wrong} wrong elements at {row}" for row in measured if row.wrong]
                rows += measured
                for key, value in (outcomes[0].result or {}).get("stats", {}).items():
                    transport[key] = transport.get(key, 0) + value
                if wrong:
                    break
            links = [[now - then for now, then in zip(lab.link_bytes(host), before[host])] for host in hosts]
            uplinks = [[now - then for now, then in zip(lab.uplink_bytes(leaf), before_up[leaf])] for leaf in leaves]
            kernels = {host: {name: value for name, value in lab.rdma_counters(host).items() if value}
                       for host in lab.guests if lab.guests[host].alive()}
            wrong += [f"host {host}'s RDMA device has sent nothing" for host, counted in kernels.items()
                      if not wrong and not counted.get("sent_pkts")]
            counters = lab.counters_by_switch()
            roots = lab.roots() if options.tree else []
            wrong += self.complaints_about_tree(part, roots, links, uplinks) if options.tree and not wrong else []
            for switch, (code, _) in lab.stop_switches().items():
                if code != 0:
                    wrong.append(f"{switch} ended with {code}: {last_line(lab.switches[switch].stderr())}")
            if wrong:
                # Leaving the block by an exception keeps the logs; it is reported like any other failure.
                raise PartFailed(wrong)
        reduced = sum(row.bytes * row.calls for row in rows)
        if part.is_matrix:
            self.show_matrix(rows)
        for switch in counters:
            self.show_switch(switch, counters[switch], lab.capture_of(switch) if capture and options.tree else capture)
        self.show_links(links, reduced)
        if options.tree:
            self.show_tree(lab, roots, uplinks, reduced, {row.type for row in rows})
        for host, counted in kernels.items():
            self.say(f"# kernel of host {host}: " + ", ".join(f"{name} {value}" for name, value in counted.items()))
        told = {"title": part.title, "ipv6": part.ipv6, "rows": [vars(row) for row in rows],
                "hosts_transport": transport or None, "kernels": kernels, "links": as_dicts(links),
                "reduced_bytes": reduced, "capture": capture}
        if options.tree:
            told |= {"switches": counters, "roots": roots, "uplinks": as_dicts(uplinks)}
        else:
            told["counters"] = counters["switch"]
        return told, wrong

    def complaints_about_tree(self, part, roots, links, uplinks):
        """What a tree must do: one root, and f32 goes up once for all hosts of a leaf."""
        wrong = [] if len(roots) == 1 else [f"the root is {' and '.join(roots) or 'nowhere'}"]
        impaired = any(getattr(self.options, option) for option, _, _ in IMPAIRMENTS)
        if part.types == ("f32",) and not impaired:
            busiest = [max(link[way] for link in links) for way in (0, 1)]
            wrong += [f"the uplink of leaf{leaf} {what} {uplink[way]} bytes, the busiest host {busiest[way]}"
                      for leaf, uplink in enumerate(uplinks, 1) for way, what in enumerate(("sent", "received"))
                      if uplink[way] > max(UPLINK_MAX * busiest[way], UPLINK_JUDGED_BYTES)]
        return wrong

    def show_hosts(self, lab):
        """Which host reaches the switch by which transport, where not all do by the same."""
        soft = [host for host in range(1, lab.hosts + 1) if host not in lab.guests]
        if not lab.guests:
            return
        if soft:
            self.say(f"# transport {lab.transport_of(soft[0])}: {numbered(soft)}, in namespaces, packet sockets on "
                     "eth0")
        host, guest = next(iter(lab.guests.items()))
        self.say(f"# transport {lab.transport_of(host)}: {numbered(lab.guests)}, QEMU guests, "
                 f"{lab.run(host, 'uname', '-sr').strip()}'s rdma_rxe on eth0, booted in {guest.boot_seconds:.1f} s")

    def listener(self, part):
        """What to do with rank 0's output: the table as it comes, or, where that is too long, how far it is."""
        if not part.is_matrix and not self.options.json:
            return lambda text: (self.say_to.write(text), self.say_to.flush())
        total, state = part.cases(), {"lines": 0, "tenth": -1}
        terminal = self.say_to.isatty()

        def count(text):
            state["lines"] += sum(1 for line in text.splitlines() if re.match(r" +\d", line))
            tenth = 10 * state["lines"] // total
            if terminal:
                print(f"\r# {state['lines']} of {total} reduced and verified", end="", file=self.say_to, flush=True)
                if state["lines"] == total:
                    self.say()
            elif tenth // 2 != state["tenth"] // 2:  # a plain line per fifth
                self.say(f"# {state['lines']} of {total} reduced and verified")
            state["tenth"] = tenth
        return count

    def show_matrix(self, rows):
        types, operators = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("type", "op"))
        largest = max(row.bytes for row in rows)
        self.say(f"# sizes, wrong elements, and algbw in GB/s of {largest} B")
        self.say("  " + f"{'type':>8}" + "".join(f"{op:>24}" for op in operators))
        for kind in types:
            cells = []
            for op in operators:
                mine = [row for row in rows if (row.type, row.op) == (kind, op)]
                if not mine:  # bits of a float
                    cells.append("-")
                    continue
                last = mine[-1]
                cells.append(f"{len(mine):3d} {sum(row.wrong for row in mine):3d} wrong  "
                             f"{last.bytes / last.seconds / 1e9:6.3f}")
            self.say("  " + f"{kind:>8}" + "".join(f"{cell:>24}" for cell in cells))

    def show_switch(self, name, counters, capture):
        def total(suffix):
            return sum(value for name, value in counters.items()
                       if name.startswith("ports.") and name.endswith(suffix))
        get = counters.get
        partials, from_above = get("aggregation.partials_sent", 0), get("aggregation.results_received", 0)
        tree = f"{partials} partial sums sent up, {from_above} results from above, " if partials else ""
        self.say(f"# {name}: {get('aggregation.contributions', 0)} packets added up, {tree}"
                 f"{get('aggregation.results_sent', 0)} results sent, {total('.lost')} frames lost on purpose, "
                 f"{get('aggregation.retransmitted_packets', 0)} packets sent again, "
                 f"{get('aggregation.naks_sent', 0)} NAKs and {get('aggregation.rnr_naks_sent', 0)} RNR NAKs sent, "
                 f"{get('aggregation.naks_received', 0)} NAKs received, "
                 f"{get('aggregation.duplicate_request', 0)} duplicates absorbed")
        if capture:
            beyond = get("capture.beyond_limit", 0) + get("capture.missed", 0)
            self.say(f"# capture: {get('capture.captured', 0)} frames in {capture}"
                     + (f"; {beyond} MORE DID NOT FIT" if beyond else ""))

    def show_links(self, links, reduced):
        sent, received = max(s for s, _ in links), max(r for _, r in links)
        hosts = len(links)
        ring = 2 * (hosts - 1) / hosts
        self.say(f"# links: of {reduced} bytes reduced, the busiest host sent {sent / reduced:.3f} × and received "
                 f"{received / reduced:.3f} × (a ring of {hosts} carries {ring:.2f} ×)")

    def show_tree(self, lab, roots, uplinks, reduced, types):
        root = " and ".join(f"{name} ({lab.address_of(name)})" for name in roots)
        each = lab.hosts_per_leaf
        narrow = types & set(NARROW_TYPES)
        self.say(f"# tree: the root is {root}; the {each} host{'s' * (each > 1)} of a leaf together have one uplink"
                 + (f", where {' and '.join(sorted(narrow))} go up in f32" if narrow else ""))
        for leaf, (sent, received) in enumerate(uplinks, 1):
            self.say(f"# uplink of leaf{leaf}: sent {sent / reduced:.3f} × and received {received / reduced:.3f} ×")


def as_dicts(links):
    return [{"sent": sent, "received": received} for sent, received in links]


class PartFailed(LabError):
    def __init__(self, wrong):
        super().__init__("; ".join(wrong))


def numbered(hosts):
    hosts = list(hosts)
    if len(hosts) > 2:
        return f"hosts {hosts[0]} to {hosts[-1]}"
    return f"host{'s' * (len(hosts) > 1)} {' and '.join(map(str, hosts))}"


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no word"


def main():
    options = parse_options()
    if options.only_check_options:
        return 0
    demo = Demo(options)
    try:
        return demo.run()
    except (LabError, RuntimeError) as error:
        text = f"FAILED: {error}"
        print(json.dumps({"ok": False, "verdict": text}) if options.json else text, flush=True)
        if demo.lab and demo.lab.kept_logs:
            print(f"demo: what the switch and every rank said is in {demo.lab.kept_logs}/", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything is cleaned up", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
