"""A box on the way that has lost its state: it answers each packet of a connection with forged resets.

    python middlebox.py INTERFACE BRIDGE [near|far|both]

It looks at what passes INTERFACE, a port of the switch BRIDGE, and sends a reset to the host at that port (near), to
the other one, or to both. Attempts to connect pass. It prints a line when it has begun, and runs until it is killed.
"""

import socket
import struct
import sys
from dataclasses import dataclass

IPV4, IPV6, TCP = 0x0800, 0x86DD, 6
FIN, SYN, RST, ACK = 1, 2, 4, 16
OUTGOING = 4  # of AF_PACKET: it goes to the host at that port


@dataclass
class Segment:
    """What of a TCP segment a reset needs."""

    kind: int
    macs: tuple[bytes, bytes]  # destination, source
    addresses: tuple[bytes, bytes]  # source, destination, as all that follows
    ports: tuple[int, int]
    seq: int
    ack: int
    flags: int
    length: int


def read(frame: bytes) -> Segment | None:
    """None if it is no TCP."""
    (kind,) = struct.unpack("!H", frame[12:14])
    packet = frame[14:]
    if kind == IPV4 and packet[9] == TCP:
        begin, end = (packet[0] & 15) * 4, struct.unpack("!H", packet[2:4])[0]
        addresses = (packet[12:16], packet[16:20])
    elif kind == IPV6 and packet[6] == TCP:
        begin, end = 40, 40 + struct.unpack("!H", packet[4:6])[0]
        addresses = (packet[8:24], packet[24:40])
    else:
        return None
    source, destination, seq, ack, offset, flags = struct.unpack("!HHIIBB", packet[begin : begin + 14])
    length = end - begin - (offset >> 4) * 4
    return Segment(kind, (frame[:6], frame[6:12]), addresses, (source, destination), seq, ack, flags, length)


def checksum(data: bytes) -> int:
    """RFC 1071."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def reset(segment: Segment, to_source: bool) -> bytes:
    """A frame that the destination, or the source, takes for the other one's reset."""
    turn = -1 if to_source else 1
    macs, (source, destination), ports = segment.macs[::turn], segment.addresses[::turn], segment.ports[::turn]
    following = (segment.seq + segment.length) & 0xFFFFFFFF
    seq, ack = (segment.ack, following) if to_source else (following, segment.ack)
    tcp = bytearray(struct.pack("!HHIIBBHHH", *ports, seq, ack, 5 << 4, RST | ACK, 0, 0, 0))
    if segment.kind == IPV4:
        pseudo = source + destination + struct.pack("!BBH", 0, TCP, len(tcp))
        ip = bytearray(struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 1, 0, 64, TCP, 0, source, destination))
        ip[10:12] = struct.pack("!H", checksum(bytes(ip)))
    else:
        pseudo = source + destination + struct.pack("!IHBB", len(tcp), 0, 0, TCP)
        ip = bytearray(struct.pack("!IHBB16s16s", 6 << 28, len(tcp), TCP, 64, source, destination))
    tcp[16:18] = struct.pack("!H", checksum(pseudo + bytes(tcp)))
    return b"".join((*macs, struct.pack("!H", segment.kind), bytes(ip), bytes(tcp)))


def main(interface: str, bridge: str, towards: str) -> None:
    looks = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # ETH_P_ALL
    looks.bind((interface, 0))
    sends = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sends.bind((bridge, 0))
    print("it has begun", flush=True)
    while True:
        frame, (_, _, kind, *_) = looks.recvfrom(65535)
        segment = read(frame)
        if segment is None or segment.flags & (FIN | SYN | RST):
            continue
        near = kind != OUTGOING  # the host at the port is the source
        for to_source in (False, True):
            if towards == "both" or (towards == "near") == (to_source == near):
                sends.send(reset(segment, to_source))


if __name__ == "__main__":
    main(*sys.argv[1:])
