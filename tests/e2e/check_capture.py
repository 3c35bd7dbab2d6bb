#!/usr/bin/python3
"""Judges a capture of RoCEv2 traffic with nothing of Millrace's own: every ICRC by zlib's CRC-32 (IPv4 and IPv6),
a sample of the IPv4 ones by scapy as well, and every packet by tshark's InfiniBand dissector.

    check_capture.py FILE [--min-packets N] [--no-tshark]

Exit status 0 when all is right, 1 when something is not, 2 for a usage error."""

import argparse
import collections
import io
import struct
import subprocess
import sys
import zlib
from dataclasses import dataclass, field

ROCE_PORT = 4791
# These two guess at payloads of RDMA SENDs, and guess wrong at ours.
TSHARK_OPTIONS = ("--disable-heuristic", "rpcrdma_infiniband", "--disable-protocol", "rpcordma")
OPCODES = {0: "SEND FIRST", 1: "SEND MIDDLE", 2: "SEND LAST", 3: "SEND LAST IMM", 4: "SEND ONLY", 5: "SEND ONLY IMM",
           6: "WRITE FIRST", 7: "WRITE MIDDLE", 8: "WRITE LAST", 9: "WRITE LAST IMM", 10: "WRITE ONLY",
           11: "WRITE ONLY IMM", 12: "READ REQUEST", 13: "READ RESPONSE FIRST", 14: "READ RESPONSE MIDDLE",
           15: "READ RESPONSE LAST", 16: "READ RESPONSE ONLY", 17: "ACK", 18: "ATOMIC ACK", 19: "CMP SWAP",
           20: "FETCH ADD", 100: "UD SEND ONLY", 129: "CNP"}


class CaptureError(Exception):
    """The file is no capture, or ends in the middle of something."""


def read_frames(path):
    """(frame bytes, length on the wire) of each packet in a pcapng or pcap file, which must be whole."""
    with open(path, "rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic == b"\x0a\x0d\x0d\x0a":
            for captured in PcapngReader().frames(file):
                yield captured.data, captured.original
        elif magic in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1", b"\xa1\xb2\xc3\xd4", b"\xa1\xb2\x3c\x4d"):
            yield from _read_pcap(file, "<" if magic[3] == 0xa1 else ">")
        else:
            raise CaptureError(f"{path} is neither pcapng nor pcap")


def _exactly(file, count, what):
    data = file.read(count)
    if len(data) != count:
        raise CaptureError(f"the file ends within {what}")
    return data


@dataclass
class CapturedFrame:
    """original: its length on the wire. interface: counted from 0. direction: 1 in, 2 out, 0 not told."""
    data: bytes
    original: int
    interface: int
    direction: int


class PcapngReader:
    """Reads a pcapng file in one piece or in several, each of whole blocks."""

    def __init__(self):
        self._order = "<"
        self._interfaces = 0

    def frames(self, file):
        while head := file.read(8):
            if len(head) != 8:
                raise CaptureError("the file ends within a block's head")
            if head[:4] == b"\x0a\x0d\x0d\x0a":
                mark = _exactly(file, 4, "a section header")
                self._order = "<" if mark == b"\x4d\x3c\x2b\x1a" else ">"
                file.seek(-4, 1)
                self._interfaces = 0
            kind, length = struct.unpack(self._order + "II", head)
            if length < 12 or length % 4:
                raise CaptureError(f"a block of {length} bytes")
            body = _exactly(file, length - 12, "a block")
            if struct.unpack(self._order + "I", _exactly(file, 4, "a block"))[0] != length:
                raise CaptureError("a block's two lengths differ")
            if kind == 1:
                link_type = struct.unpack_from(self._order + "H", body)[0]
                if link_type != 1:
                    raise CaptureError(f"an interface of link type {link_type}, not Ethernet")
                self._interfaces += 1
            elif kind == 6:
                interface, _, _, captured, original = struct.unpack_from(self._order + "IIIII", body)
                if interface >= self._interfaces:
                    raise CaptureError(f"a packet of interface {interface}, which has no description")
                options = body[20 + captured + -captured % 4:]
                yield CapturedFrame(body[20:20 + captured], original, interface, self._direction(options))

    def _direction(self, options):
        at = 0
        while at + 4 <= len(options):
            code, length = struct.unpack_from(self._order + "HH", options, at)
            if code == 2 and length == 4:  # epb_flags
                return struct.unpack_from(self._order + "I", options, at + 4)[0] & 3
            at += 4 + length + -length % 4
        return 0


class CaptureFollower:
    """Reads a pcapng file while it is being written."""

    def __init__(self, path):
        self._path, self._at, self._reader = path, 0, PcapngReader()

    def frames(self, end):
        """The frames that have come since the last call, up to the byte `end` of the file, where a block ends."""
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = _exactly(file, end - self._at, "what was written")
        self._at = end
        return list(self._reader.frames(io.BytesIO(data)))


def _read_pcap(file, order):
    _exactly(file, 24, "the file header")
    while head := file.read(16):
        if len(head) != 16:
            raise CaptureError("the file ends within a packet's head")
        _, _, captured, original = struct.unpack(order + "IIII", head)
        yield _exactly(file, captured, "a packet"), original


@dataclass
class RocePacket:
    """ip: from the IP header to the ICRC's end. udp: where the UDP header starts in it."""
    version: int
    ip: bytes
    udp: int

    @property
    def opcode(self):
        return self.ip[self.udp + 8]

    @property
    def destination_qpn(self):
        return int.from_bytes(self.ip[self.udp + 13:self.udp + 16], "big")

    @property
    def psn(self):
        return int.from_bytes(self.ip[self.udp + 17:self.udp + 20], "big")

    @property
    def source(self):
        return self.ip[12:16] if self.version == 4 else self.ip[8:24]


def roce_packet(frame):
    """The RoCEv2 packet in an Ethernet frame, or None."""
    at = 12
    while frame[at:at + 2] in (b"\x81\x00", b"\x88\xa8"):
        at += 4
    ethertype, at = frame[at:at + 2], at + 2
    if ethertype == b"\x08\x00" and len(frame) >= at + 20:
        header = (frame[at] & 15) * 4
        length = int.from_bytes(frame[at + 2:at + 4], "big")
        version, protocol = 4, frame[at + 9]
    elif ethertype == b"\x86\xdd" and len(frame) >= at + 40:
        header = 40
        length = 40 + int.from_bytes(frame[at + 4:at + 6], "big")
        version, protocol = 6, frame[at + 6]
    else:
        return None
    ip = frame[at:at + length]
    if protocol != 17 or len(ip) != length or length < header + 24:
        return None
    if int.from_bytes(ip[header + 2:header + 4], "big") != ROCE_PORT:
        return None
    return RocePacket(version, ip, header)


def icrc(packet):
    """What the packet's last four bytes must be (IBA annex A17: what routers may change counts as ones)."""
    masked = bytearray(packet.ip[:-4])
    if packet.version == 4:
        masked[1] = masked[8] = 0xff  # TOS, TTL
        masked[10:12] = b"\xff\xff"  # header checksum
    else:
        masked[0] |= 0x0f  # traffic class, flow label
        masked[1:4] = b"\xff\xff\xff"
        masked[7] = 0xff  # hop limit
    masked[packet.udp + 6:packet.udp + 8] = b"\xff\xff"  # UDP checksum
    masked[packet.udp + 12] = 0xff  # BTH: FECN, BECN, reserved
    return struct.pack("<I", zlib.crc32(masked, zlib.crc32(b"\xff" * 8)))


def icrc_by_scapy(packet):
    """The same by scapy, which is right for IPv4 only (2.5)."""
    from scapy.contrib.roce import BTH
    from scapy.layers.inet import IP
    rebuilt = IP(packet.ip)
    rebuilt[BTH].icrc = None
    return bytes(rebuilt)[-4:]


@dataclass
class Report:
    frames: int = 0
    roce: int = 0
    by_version: collections.Counter = field(default_factory=collections.Counter)
    by_opcode: collections.Counter = field(default_factory=collections.Counter)
    by_scapy: int = 0
    dissected: int | None = None
    errors: list = field(default_factory=list)

    def error(self, text):
        self.errors.append(text)

    def __str__(self):
        lines = [f"{self.frames} frames, {self.roce} RoCEv2 (IPv4 {self.by_version[4]}, IPv6 {self.by_version[6]})"]
        lines += [f"  {count:9d} {OPCODES.get(opcode, hex(opcode))}"
                  for opcode, count in sorted(self.by_opcode.items())]
        lines.append(f"ICRC: {self.roce} by zlib, {self.by_scapy} by scapy")
        if self.dissected is not None:
            lines.append(f"tshark: {self.dissected} RoCE packets dissected")
        return "\n".join(lines + ["wrong: " + text for text in self.errors[:20]])


def check(path, min_packets=0, tshark=True, scapy_samples=100):
    """A Report; its errors say all that is wrong."""
    report = Report()
    wrong = 0
    samples = []
    try:
        for number, (frame, original) in enumerate(read_frames(path), 1):
            report.frames += 1
            if original != len(frame):
                report.error(f"packet {number} is cut: {len(frame)} of {original} bytes")
            packet = roce_packet(frame)
            if packet is None:
                continue
            report.roce += 1
            report.by_version[packet.version] += 1
            report.by_opcode[packet.opcode] += 1
            if icrc(packet) != packet.ip[-4:]:
                wrong += 1
                if wrong <= 5:
                    report.error(f"packet {number}: ICRC {packet.ip[-4:].hex()}, not {icrc(packet).hex()}")
            if packet.version == 4 and (report.by_version[4] - 1) % 997 == 0 and len(samples) < scapy_samples:
                samples.append((number, packet))
    except CaptureError as error:
        report.error(f"{path}: {error}")
    if wrong:
        report.error(f"{wrong} of {report.roce} ICRCs are wrong")
    for number, packet in samples:
        report.by_scapy += 1
        if icrc_by_scapy(packet) != packet.ip[-4:]:
            report.error(f"packet {number}: scapy computes another ICRC, {icrc_by_scapy(packet).hex()}")
    if report.roce < min_packets:
        report.error(f"{report.roce} RoCEv2 packets, at least {min_packets} were expected")
    if tshark:
        _check_by_tshark(path, report)
    return report


def _check_by_tshark(path, report):
    command = ["tshark", "-r", path, *TSHARK_OPTIONS, "-Y", f"udp.dstport == {ROCE_PORT}", "-T", "fields",
               "-e", "frame.number", "-e", "infiniband.bth.opcode", "-e", "_ws.malformed", "-e", "frame.protocols"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        report.error(f"tshark ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    report.dissected = 0
    for line in done.stdout.splitlines():
        number, opcode, malformed, protocols = (line.split("\t") + [""] * 4)[:4]
        if malformed or "_ws.malformed" in protocols:
            report.error(f"packet {number}: tshark calls it malformed")
        elif opcode:
            report.dissected += 1
        else:
            report.error(f"packet {number}: tshark sees no InfiniBand in it")
    if report.dissected != report.roce:
        report.error(f"tshark dissected {report.dissected} of {report.roce} RoCEv2 packets")


def packets_per_member(total_bytes, mtu=4096, segment_bytes=65472, header=64):
    """How many packets one member's contribution to an all-reduce of total_bytes takes without any loss; its
    result takes as many."""
    whole, rest = divmod(total_bytes, segment_bytes)
    count = whole * -(-(header + segment_bytes) // mtu)
    return count + (-(-(header + rest) // mtu) if rest or not whole else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--min-packets", type=int, default=0)
    parser.add_argument("--no-tshark", action="store_true")
    arguments = parser.parse_args()
    report = check(arguments.file, arguments.min_packets, not arguments.no_tshark)
    print(report)
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
