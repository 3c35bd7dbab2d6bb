#!/usr/bin/python3
"""A burst that no transport holds back: so many bytes as UDP datagrams, in the transfers' class, at about a rate.
Arguments: address, bytes, Mb/s, DSCP."""

import socket
import sys
import time

DATAGRAM = 4000


def main():
    address, count, mbps, dscp = sys.argv[1], *map(int, sys.argv[2:5])
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
    began, sent = time.monotonic(), 0
    while sent < count:
        sender.sendto(bytes(DATAGRAM), (address, 9))
        sent += DATAGRAM
        time.sleep(max(0, began + 8 * sent / (mbps * 1e6) - time.monotonic()))
    print(sent)


if __name__ == "__main__":
    main()
