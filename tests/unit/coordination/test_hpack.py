"""Headers as HTTP/2 packs them, against the examples of RFC 7541 and what etcd sends."""

from __future__ import annotations

import pytest

from taskgraph.coordination.etcd.hpack import HeadersError, pack, unpack


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", {"custom-key": "custom-header"}),  # C.2.1
        ("040c2f73616d706c652f70617468", {":path": "/sample/path"}),  # C.2.2
        ("100870617373776f726406736563726574", {"password": "secret"}),  # C.2.3
        ("82", {":method": "GET"}),  # C.2.4
        (  # C.4.1, with Huffman codes
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            {":method": "GET", ":scheme": "http", ":path": "/", ":authority": "www.example.com"},
        ),
        # What etcd sends: an answer, its end, and an end with a message.
        ("20885f8b1d75d0620d263d4c4d6564", {":status": "200", "content-type": "application/grpc"}),
        ("", {}),
    ],
)
def test_blocks_are_read(block: str, headers: dict[str, str]) -> None:
    assert unpack(bytes.fromhex(block)) == headers


@pytest.mark.parametrize(
    "headers",
    [
        ((":method", "POST"), (":path", "/etcdserverpb.KV/Txn"), ("te", "trailers")),
        (("token", "x" * 126), ("long", "y" * 127), ("longer", "z" * 5000), ("empty", "")),
    ],
)
def test_what_is_packed_is_read_as_it_was(headers: tuple[tuple[str, str], ...]) -> None:
    assert unpack(pack(*headers)) == dict(headers)


@pytest.mark.parametrize(
    "block",
    [
        "80",  # entry 0
        "be",  # entry 62: the first of a table that we forbid
        "3fe11f",  # a table of 4096 bytes
        "ff",  # a number that is not complete
        "ffffffffffffffffff7f",  # one that does not end
        "00",  # a name that does not come
        "000161",  # a value that does not come
        "00056162",  # a name that is cut off
    ],
)
def test_what_is_no_block_is_refused(block: str) -> None:
    with pytest.raises(HeadersError):
        unpack(bytes.fromhex(block))


def test_symbols_that_grpc_does_not_send_make_their_value_unreadable_and_no_other() -> None:
    # "\xff" is 26 bits, ones but for the last four: 0x3ffffee.
    assert unpack(bytes.fromhex("000161" + "84" + "fffffbbf" + "88")) == {
        "a": "\N{REPLACEMENT CHARACTER}",
        ":status": "200",
    }
