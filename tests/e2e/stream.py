#!/usr/bin/python3
"""A stream of RoCEv2-like datagrams from one host to another, through a switch that only looks at them: what is behind
the BTH is a sequence number and zeros, and the ICRC is none. It is started in a host's namespace.

  stream.py send ADDRESS --count N --dscp D [--bytes B]   at a pace, so that no kernel on the way drops
  stream.py receive --idle SECONDS                        until nothing has come for so long since the first; prints one
                                                          JSON object: received, out_of_order, marked (CE)"""

import argparse
import json
import socket
import struct
import time

ROCE_PORT = 4791
_SEND_MIDDLE, _ECT0, _CE = 1, 2, 3
_SO_RCVBUFFORCE = 33  # which Python does not name


def send(options):
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, options.dscp << 2 | _ECT0)
    udp.connect((options.address, ROCE_PORT))
    padding = bytes(options.bytes - 14 - 20 - 8 - 12 - 4 - 4)
    for number in range(options.count):
        bth = struct.pack(">BBHII", _SEND_MIDDLE, 0x40, 0xFFFF, 0x77, number & 0xFFFFFF)
        udp.send(bth + struct.pack(">I", number) + padding + bytes(4))
        if number % 16 == 15:
            time.sleep(0.001)
    print(json.dumps({"sent": options.count}))


def receive(options):
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    udp.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
    udp.bind(("", ROCE_PORT))
    print("listening", flush=True)
    received = out_of_order = marked = 0
    newest = -1
    try:
        while True:
            data, extra, _, _ = udp.recvmsg(2048, 64)
            udp.settimeout(options.idle)
            number, = struct.unpack_from(">I", data, 12)
            received += 1
            out_of_order += number <= newest
            newest = max(newest, number)
            marked += any(value[0] & 3 == _CE for _, kind, value in extra if kind == socket.IP_TOS)
    except TimeoutError:
        print(json.dumps({"received": received, "out_of_order": out_of_order, "marked": marked}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    sender = modes.add_parser("send")
    sender.add_argument("address")
    sender.add_argument("--count", type=int, required=True)
    sender.add_argument("--dscp", type=int, required=True)
    sender.add_argument("--bytes", type=int, default=1400, help="of a frame")
    receiver = modes.add_parser("receive")
    receiver.add_argument("--idle", type=float, required=True)
    options = parser.parse_args()
    {"send": send, "receive": receive}[options.mode](options)


if __name__ == "__main__":
    main()
