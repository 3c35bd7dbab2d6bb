#!/usr/bin/python3
"""RoCE data without a queue pair behind it, to see what a switch does with it: `send` writes numbered RDMA WRITEs to
the wire at some 44 Mb/s, `receive` says which of them came, and in which order. Each prints one JSON object; the
receiver's first line, "{}", says that it listens."""

import argparse
import json
import socket
import struct
import time
import zlib

_ETH_P_ALL, _ETH_P_IP, _ROCE_PORT = 3, 0x0800, 4791
_WRITE_ONLY, _QPN = 0x0A, 0x77
_HEADERS = 14 + 20 + 8 + 12 + 16


def checksum(header):
    total = sum(struct.unpack("!10H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(arguments, psn):
    payload = struct.pack("!I", psn) * (arguments.bytes // 4)
    bth = struct.pack("!BBHII", _WRITE_ONLY, 0x40, 0xFFFF, _QPN, psn & 0xFFFFFF)
    body = bth + struct.pack("!QII", 0, 7, len(payload)) + payload
    udp = struct.pack("!4H", 0xC001, _ROCE_PORT, 8 + len(body) + 4, 0)
    fields = [0x45, arguments.dscp << 2, 20 + len(udp) + len(body) + 4, 0, 0x4000, 64, 17, 0,
              socket.inet_aton(arguments.source), socket.inet_aton(arguments.destination)]
    header = struct.pack("!BBHHHBBH4s4s", *fields)
    masked = bytearray(header + udp + body)
    masked[1] = masked[8] = masked[10] = masked[11] = masked[26] = masked[27] = masked[32] = 0xFF
    icrc = struct.pack("<I", zlib.crc32(bytes(masked), zlib.crc32(b"\xff" * 8)))
    fields[7] = checksum(header)
    return struct.pack("!BBHHHBBH4s4s", *fields) + udp + body + icrc


def send(arguments):
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    wire.bind((arguments.device, 0))
    to = bytes.fromhex(arguments.destination_mac.replace(":", ""))
    ethernet = to + wire.getsockname()[4] + struct.pack("!H", _ETH_P_IP)
    frames = [ethernet + packet(arguments, psn) for psn in range(arguments.count)]
    for n, frame in enumerate(frames):
        wire.send(frame)
        if n % 10 == 9:
            time.sleep(0.002)  # a switch that shares its processor has a ring of 512 to fall behind by
    print(json.dumps({"sent": len(frames)}))


def receive(arguments):
    # Or the kernel answers each packet with ICMP.
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    held.bind(("", _ROCE_PORT))
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    wire.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    wire.bind((arguments.device, 0))
    print("{}", flush=True)
    psns, wrong = [], 0
    deadline = time.monotonic() + arguments.seconds
    wire.settimeout(0.2)
    while len(psns) < arguments.count and time.monotonic() < deadline:
        try:
            frame, address = wire.recvfrom(8192)
        except TimeoutError:
            continue
        if address[2] != 0 or frame[12:14] != b"\x08\x00" or frame[23] != 17 or frame[42] != _WRITE_ONLY:
            continue
        psn = int.from_bytes(frame[51:54], "big")
        wrong += frame[_HEADERS:_HEADERS + 4] != struct.pack("!I", psn)
        psns.append(psn)
    print(json.dumps({"received": len(psns), "distinct": len(set(psns)), "wrong": wrong,
                      "disordered": sum(b <= a for a, b in zip(psns, psns[1:]))}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("send", "receive"))
    parser.add_argument("--device", default="eth0")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--dscp", type=int, default=10)
    parser.add_argument("--source")
    parser.add_argument("--destination")
    parser.add_argument("--destination-mac")
    parser.add_argument("--seconds", type=float, default=30)
    arguments = parser.parse_args()
    send(arguments) if arguments.what == "send" else receive(arguments)


if __name__ == "__main__":
    main()
