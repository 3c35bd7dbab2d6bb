#!/usr/bin/python3
"""Sends garbage to a switch: random and mutated RoCEv2 frames, and well-made ones that must not be believed (a right
ICRC, a live queue pair, a PSN within its window, from a foreign address). Prints one JSON object: frames sent by
kind.

It is started in the flooding host's namespace. --watch names a member's namespace, whose outgoing packets tell which
PSNs are within the windows just now."""

import argparse
import ctypes
import json
import os
import random
import socket
import struct
import sys
import time

from check_capture import ROCE_PORT, RocePacket, icrc, roce_packet

_ETH_P_ALL = 3
_CLONE_NEWNET = 0x40000000
_RC_OPCODES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 17, 19, 20)


def packet_socket(device, namespace=None):
    """An AF_PACKET socket; it stays in the namespace in which it was made, the caller comes back."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    if namespace:
        there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        os.close(there)
    try:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        made.bind((device, 0))
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(home)
    return made


class Watcher:
    """The newest PSN of the queue pair of the switch that a member is sending to."""

    def __init__(self, namespace):
        self._socket = packet_socket("eth0", namespace)
        self._socket.settimeout(0.005)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self.psn = {}

    def look(self):
        # What has queued up is old: drain it, then take what comes within a few milliseconds.
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(1)
        except BlockingIOError:
            pass
        self._socket.settimeout(0.005)
        end = time.monotonic() + 0.01
        try:
            while time.monotonic() < end:
                frame, address = self._socket.recvfrom(9000)
                packet = roce_packet(frame)
                if packet and address[2] == socket.PACKET_OUTGOING and packet.opcode < 0x20:
                    self.psn = {packet.destination_qpn: packet.psn}  # an older queue pair may be gone
                    return
        except TimeoutError:
            pass


def internet_checksum(header):
    total = sum(struct.unpack(f"!{len(header) // 2}H", header))
    total = (total & 0xffff) + (total >> 16)
    return ~((total & 0xffff) + (total >> 16)) & 0xffff


class Flood:
    def __init__(self, options):
        self.options = options
        self.random = random.Random(options.seed)
        self.to_switch = bytes.fromhex(options.switch_mac.replace(":", ""))
        self.own_mac = bytes.fromhex(options.own_mac.replace(":", ""))
        self.switch = {4: socket.inet_pton(socket.AF_INET, options.switch_ipv4),
                       6: socket.inet_pton(socket.AF_INET6, options.switch_ipv6)}
        self.qpns = [int(q, 0) for q in options.qpn]
        self.psn = {}

    # Well-made parts.

    def source(self, version):
        r = self.random
        if version == 4:
            return bytes((10, 77, 0 if r.random() < .5 else r.randrange(1, 250), r.randrange(101, 250)))
        return b"\xfd\x77" + bytes(12) + bytes((r.randrange(1, 250), r.randrange(101, 250)))

    def frame(self, version, bth_and_more, source=None, to=None, port=ROCE_PORT):
        """A whole frame around BTH and what follows it, with a right ICRC."""
        r = self.random
        udp = struct.pack("!HHHH", r.randrange(0xc000, 0x10000), port, 8 + len(bth_and_more) + 4, 0)
        source, to = source or self.source(version), to or self.switch[version]
        if version == 4:
            header = struct.pack("!BBHHHBBH", 0x45, r.choice((0, 2, 104, 106)), 20 + len(udp) + len(bth_and_more) + 4,
                                 r.randrange(65536), 0x4000, 64, 17, 0) + source + to
            header = header[:10] + struct.pack("!H", internet_checksum(header)) + header[12:]
        else:
            header = struct.pack("!IHBB", 6 << 28, len(udp) + len(bth_and_more) + 4, 17, 64) + source + to
        packet = RocePacket(version, header + udp + bth_and_more + bytes(4), len(header))
        ethertype = b"\x08\x00" if version == 4 else b"\x86\xdd"
        return self.to_switch + self.own_mac + ethertype + packet.ip[:-4] + icrc(packet)

    def bth(self, opcode, qpn, psn, ack_request=None):
        ack = self.random.random() < .3 if ack_request is None else ack_request
        return struct.pack("!BBHII", opcode, self.random.choice((0x00, 0x40)), 0xffff, qpn,
                           (0x80000000 if ack else 0) | (psn & 0xffffff))

    def body(self, opcode):
        """Extended headers and payload that fit the opcode: SENDs that look like segments, WRITEs, ACKs, NAKs."""
        r = self.random
        if opcode == 17:
            syndrome = r.choice((0x1f, 0x00, 0x20 | 12, 0x60, 0x61, 0x62, 0x63, 0x64, 0x7f))
            return struct.pack("!II", syndrome << 24 | r.randrange(1 << 24), 0)[:4]
        if opcode in (0, 1, 6, 7):
            payload = 4096
        else:
            payload = r.choice((0, 4, 60, 64, 72, 128, 1024)) if r.random() < .9 else 4096
        extended = r.randbytes(16) if opcode in (6, 10, 11, 12) else b""
        if opcode == 11:
            extended += r.randbytes(4)
        data = bytearray(r.randbytes(min(payload, 96)).ljust(payload, b"\0"))
        if payload >= 64:
            data[:16] = struct.pack("!HBBBBBBIHH", 0x4d52, 1, 1, 1, 9, 9, 0, r.randrange(4), r.randrange(4), 0)
        return extended + bytes(data)

    def version(self):
        return 4 if self.random.random() < .6 else 6

    def unknown_qpn(self):
        while True:
            qpn = self.random.randrange(2, 1 << 24)
            if qpn not in self.qpns:
                return qpn

    # Kinds.

    def foreign(self):
        """All right, and a live queue pair's next PSNs; only the address is not the member's."""
        r = self.random
        qpn = r.choice(self.qpns) if self.qpns else self.unknown_qpn()
        known = self.psn.get(qpn)
        if known is None and self.psn:
            qpn, known = next(iter(self.psn.items()))
        psn = known + r.randrange(64) if known is not None else r.randrange(1 << 24)
        opcode = r.choice((0, 1, 2, 4, 4, 10, 17))
        return self.frame(self.version(), self.bth(opcode, qpn, psn) + self.body(opcode))

    def unknown(self):
        """A right ICRC and nobody's queue pair."""
        opcode = self.random.choice(_RC_OPCODES)
        return self.frame(self.version(), self.bth(opcode, self.unknown_qpn(), self.random.randrange(1 << 24))
                          + self.body(opcode))

    def random_bth(self):
        """A right ICRC around random bytes (never the CM's queue pair: an odd request is answered there)."""
        data = bytearray(self.random.randbytes(self.random.randrange(12, 200)))
        data[4:8] = struct.pack("!I", self.unknown_qpn())
        return self.frame(self.version(), bytes(data))

    def management(self):
        """UD SENDs to queue pair 1 that hold no message of the CM."""
        r = self.random
        mad = bytearray(r.randbytes(256))
        mad[:4] = r.choice((bytes((1, 7, 2, 0x80 | r.randrange(128))), bytes((0, 7, 2, 3)), bytes((1, 3, 1, 1))))
        mad[16:18] = struct.pack("!H", r.choice((0, 1, 0x20, 0xffff)))
        cut = r.choice((256, 256, 24, 128, 0))
        deth = struct.pack("!II", r.choice((0x80010000, 0x80010000, r.randrange(1 << 31))), 1)
        return self.frame(self.version(), self.bth(100, 1, r.randrange(1 << 24), False) + deth + bytes(mad[:cut]))

    def noise(self):
        """UDP to RoCE's port with random contents, some of it as long as a frame can be."""
        r = self.random
        version = self.version()
        data = r.randbytes(r.randrange(0, 200) if r.random() < .95 else r.randrange(200, 4130))
        header = 20 if version == 4 else 40
        frame = bytearray(self.frame(version, data.ljust(12, b"\0")))
        frame[14 + header + 8:] = data
        return bytes(frame)

    def random_packet(self):
        r = self.random
        return self.to_switch + self.own_mac + r.choice((b"\x08\x00", b"\x86\xdd", b"\x81\x00", b"\x89\x15")) \
            + r.choice((b"", b"\x45\x00", b"\x60")) + r.randbytes(r.randrange(0, 120))

    def mutated(self):
        """A well-made frame with some bytes changed behind the Ethernet header."""
        r = self.random
        frame = bytearray(r.choice((self.foreign, self.unknown, self.management))())
        for _ in range(r.choice((1, 1, 2, 3, 8))):
            at = r.randrange(14, min(len(frame), 140) if r.random() < .8 else len(frame))
            frame[at] ^= r.randrange(1, 256)
        return bytes(frame)

    def cut(self):
        """A well-made frame of which the end is missing, or with more behind it than its lengths say."""
        r = self.random
        frame = r.choice((self.foreign, self.unknown))()
        if r.random() < .7:
            return frame[:r.randrange(14, len(frame))]
        return frame[:-4] + r.randbytes(r.randrange(1, 16))

    KINDS = (("noise", 20), ("random_packet", 10), ("mutated", 20), ("cut", 10), ("unknown", 10), ("random_bth", 5),
             ("management", 5), ("foreign", 20))

    def run(self):
        options = self.options
        sender = packet_socket(options.device)
        watcher = Watcher(options.watch) if options.watch else None
        names, weights = zip(*self.KINDS)
        makers = [getattr(self, name) for name in names]
        sent = dict.fromkeys(names, 0)
        in_window = refused = size = 0
        start = time.monotonic()
        for number in range(options.count):
            if number % 256 == 0:
                if watcher:
                    watcher.look()
                    self.psn = dict(watcher.psn)
                ahead = number / options.rate - (time.monotonic() - start)
                if ahead > 0:
                    time.sleep(ahead)
            which = self.random.choices(range(len(names)), weights)[0]
            frame = makers[which]()
            while True:
                try:
                    size += sender.send(frame.ljust(15, b"\0"))
                    break
                except OSError as error:  # the device's queue is full: it is the wire that is slow
                    if error.errno not in (11, 105):
                        raise
                    refused += 1
                    time.sleep(0.0005)
            sent[names[which]] += 1
            in_window += names[which] == "foreign" and bool(self.psn)
        print(json.dumps({"sent": sum(sent.values()), "bytes": size, "kinds": sent, "foreign_in_window": in_window,
                          "retried": refused, "seconds": round(time.monotonic() - start, 3)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=25_000, help="at most this many frames a second")
    parser.add_argument("--device", default="eth0")
    parser.add_argument("--own-mac", required=True)
    parser.add_argument("--switch-mac", required=True)
    parser.add_argument("--switch-ipv4", default="10.77.0.100")
    parser.add_argument("--switch-ipv6", default="fd77::100")
    parser.add_argument("--qpn", action="append", default=[], help="a live queue pair of the switch (repeatable)")
    parser.add_argument("--watch", help="a member's namespace")
    parser.add_argument("--seed", type=int, default=1)
    Flood(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
