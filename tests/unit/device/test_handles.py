"""Descriptors are handed to other processes of this host: to whom, until when, and whatever clients do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from taskgraph.device import handles
from taskgraph.device.api import HANDLE_BYTES
from taskgraph.device.handles import close_withdrawn, fetch, offer, withdraw

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="for Linux alone")

KIT = """
import os, sys, time
from taskgraph.device.handles import *

def memory(content):
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd

def say(text):
    print(text, flush=True)

def hear():
    return sys.stdin.readline().strip()
"""


def memory(content: bytes = b"content") -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def file_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def is_open(fd: int, file: tuple[int, int]) -> bool:
    """Whether that number is still that file."""
    try:
        return file_of(fd) == file
    except OSError as error:
        assert error.errno == errno.EBADF
        return False


def files() -> set[tuple[str, str]]:
    """Number and file. What other tests left here, as threads of gRPC, may open and close some meanwhile."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def memories() -> int:
    return sum("memfd:" in file for _, file in files())


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def address(handle: bytes) -> str:
    return f"\0taskgraph-{handle[:16].hex()}"


def client(handle: bytes) -> socket.socket:
    """Connected to who offered it, and has said nothing."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(30)
    try:
        made.connect(address(handle))
    except BaseException:
        made.close()
        raise
    return made


@contextlib.contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-c", KIT + script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


def say(process: subprocess.Popen[str], text: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def stop(process: subprocess.Popen[str]) -> None:
    """All its threads."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    offer_and_withdraw()  # so the server listens
    gc.collect()  # of other tests
    before = files()
    yield
    close_withdrawn()
    until(lambda: files() <= before)  # the server may just be closing its side of a connection


def offer_and_withdraw() -> bytes:
    handle = offer(memory())
    withdraw(handle)
    close_withdrawn()
    return handle


@pytest.fixture
def offered() -> Iterator[bytes]:
    handle = offer(memory())
    yield handle
    withdraw(handle)


def test_fetched_descriptor_is_same_memory() -> None:
    fd = memory()
    handle = offer(fd)
    assert len(handle) == HANDLE_BYTES and handle[24:] == bytes(HANDLE_BYTES - 24)

    fetched = fetch(handle)

    assert fetched != fd
    assert file_of(fetched) == file_of(fd)
    os.pwrite(fetched, b"C", 0)
    assert os.pread(fd, 100, 0) == b"Content"
    withdraw(handle)
    close_withdrawn()
    assert os.pread(fetched, 100, 0) == b"Content"  # that one is ours
    os.close(fetched)


def test_descriptors_are_not_inherited() -> None:
    fd = memory()
    os.set_inheritable(fd, True)
    handle = offer(fd)
    fetched = fetch(handle)
    for one in (fd, fetched):
        assert fcntl.fcntl(one, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fetched)
    withdraw(handle)


def test_another_process_fetches() -> None:
    fd = memory()
    handle = offer(fd)
    script = """
fd = fetch(bytes.fromhex(sys.argv[1]))
os.pwrite(fd, b"C", 0)
say(os.pread(fd, 100, 0).decode())
"""
    with process(script, handle.hex()) as other:
        assert hear(other) == "Content"
    assert os.pread(fd, 100, 0) == b"Content"
    withdraw(handle)


def test_withdrawn_is_not_fetched(offered: bytes) -> None:
    handle = offer(memory())
    withdraw(handle)
    with pytest.raises(OSError, match="withdrawn"):
        fetch(handle)
    close_withdrawn()
    with pytest.raises(OSError, match="withdrawn"):
        fetch(handle)
    os.close(fetch(offered))  # others can


def test_withdrawn_is_closed_later() -> None:
    fd = memory()
    file = file_of(fd)
    handle = offer(fd)
    close_withdrawn()
    assert is_open(fd, file)
    withdraw(handle)
    assert is_open(fd, file)
    close_withdrawn()
    assert not is_open(fd, file)


def test_withdrawn_twice() -> None:
    made = memory()
    fd = fcntl.fcntl(made, fcntl.F_DUPFD, 500)  # a number that nothing else takes
    handle = offer(fd)
    withdraw(handle)
    close_withdrawn()
    assert fcntl.fcntl(made, fcntl.F_DUPFD, 500) == fd
    withdraw(handle)
    close_withdrawn()
    assert os.pread(fd, 100, 0) == b"content"
    os.close(fd)
    os.close(made)


def test_withdraw_in_another_process(offered: bytes) -> None:
    for handle in (os.urandom(16) + offered[16:], b"", offered[:-1], offered + b"\0"):
        withdraw(handle)
    close_withdrawn()
    os.close(fetch(offered))


def test_finalizer_withdraws_without_locks() -> None:
    class Owner:
        def __init__(self) -> None:
            self.handle = offer(memory())
            self.itself = self  # garbage for the collector

        def __del__(self) -> None:
            withdraw(self.handle)

    owner = Owner()
    handle = owner.handle
    server = handles._server
    done = threading.Event()

    def collect() -> None:
        with server._sending, server._starting:
            gc.collect()
        done.set()

    del owner
    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(30)
    with pytest.raises(OSError, match="withdrawn"):
        fetch(handle)


def test_not_closed_while_sent() -> None:
    fd = memory()
    file = file_of(fd)
    withdraw(offer(fd))
    closing = threading.Thread(target=close_withdrawn)
    with handles._server._sending:
        closing.start()
        closing.join(0.05)
        assert is_open(fd, file)
    closing.join()
    assert not is_open(fd, file)


def test_many_offers_leave_nothing_open() -> None:
    before = memories()
    made = [offer(memory()) for _ in range(200)]
    fetched = [fetch(handle) for handle in made]
    until(lambda: memories() == before + 400)
    for fd in fetched:
        os.close(fd)
    for handle in made:
        withdraw(handle)
    until(lambda: memories() == before + 200)
    close_withdrawn()
    until(lambda: memories() == before)


def test_fetch_while_others_withdraw() -> None:
    """Each gets the memory that it asked for, or is told that it was withdrawn."""
    made = [offer(memory(b"%d" % at)) for at in range(100)]
    wrong: list[object] = []

    def work() -> None:
        for at, handle in enumerate(made):
            try:
                fd = fetch(handle)
            except OSError as error:
                if "withdrawn" not in str(error):
                    wrong.append(error)
                continue
            if os.pread(fd, 100, 0) != b"%d" % at:
                wrong.append((at, os.pread(fd, 100, 0)))
            os.close(fd)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for handle in made:
        withdraw(handle)
        close_withdrawn()
        os.close(memory())  # takes the number
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_silent_client_is_given_up(offered: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "_CLIENT_S", 3.0)
    with client(offered) as silent:
        began = time.monotonic()
        os.close(fetch(offered))
        assert 2.5 < time.monotonic() - began < 30
        assert silent.recv(1) == b""
    began = time.monotonic()
    os.close(fetch(offered))
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize("said", [b"", b"abc", b"\xff" * 8, bytes(8), b"x" * 100_000])
def test_wrong_request(offered: bytes, said: bytes) -> None:
    with client(offered) as bad, contextlib.suppress(ConnectionError):
        bad.sendall(said)
        bad.shutdown(socket.SHUT_WR)
        answer, passed, _, _ = bad.recvmsg(100, 100)
        assert not passed
        assert answer in (b"", b"\0")
    os.close(fetch(offered))


@pytest.mark.parametrize("handle", [b"", b"\0" * (HANDLE_BYTES - 1), b"\0" * (HANDLE_BYTES + 1)])
def test_wrong_handle(handle: bytes) -> None:
    with pytest.raises(OSError, match=f"{len(handle)} bytes"):
        fetch(handle)


def test_fetch_from_ended_process() -> None:
    with process("say(offer(memory(b'1')).hex()); hear()") as other:
        handle = bytes.fromhex(hear(other))
        os.close(fetch(handle))
        other.kill()
        other.wait()
        with pytest.raises(ConnectionRefusedError, match="ended"):
            fetch(handle)


def test_server_ends_during_fetch() -> None:
    with process("say(offer(memory(b'1')).hex()); hear()") as other:
        handle = bytes.fromhex(hear(other))
        with client(handle):  # the server waits for this one
            kill = threading.Timer(0.05, other.kill)
            kill.start()
            with pytest.raises(OSError, match="ending"):
                fetch(handle)
            kill.join()


def test_stopped_server_times_out() -> None:
    with process("say(offer(memory(b'1')).hex()); hear()") as other:
        handle = bytes.fromhex(hear(other))
        stop(other)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"0\.1 s"):
            fetch(handle, 0.1)
        assert time.monotonic() - began < 30
        with pytest.raises(TimeoutError):
            fetch(handle, 0)


def test_more_clients_than_backlog() -> None:
    with process("say(offer(memory(b'1')).hex()); hear()") as other, contextlib.ExitStack() as waiting:
        handle = bytes.fromhex(hear(other))
        stop(other)
        with pytest.raises(BlockingIOError):
            for _ in range(5000):
                waiting.enter_context(client(handle))
        with pytest.raises(TimeoutError):
            fetch(handle, 0.1)
        waiting.close()  # it finds that they left
        continued = threading.Timer(0.05, other.send_signal, [signal.SIGCONT])
        continued.start()
        os.close(fetch(handle))
        continued.join()


def test_server_with_too_many_files() -> None:
    script = """
import resource
say(offer(memory(b"1")).hex())
hear()
most, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit))
before = time.process_time()
say("full")
hear()
used = time.process_time() - before
resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit))
say(used)
hear()
"""
    with process(script) as other:
        handle = bytes.fromhex(hear(other))
        os.close(fetch(handle))
        say(other)
        assert hear(other) == "full"
        with contextlib.suppress(TimeoutError):  # Linux may have taken a number for this one before it came
            os.close(fetch(handle, 0.2))
        with pytest.raises(TimeoutError):
            fetch(handle, 0.3)
        say(other)
        assert float(hear(other)) < 0.1
        os.close(fetch(handle))


def test_client_with_too_many_files() -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
more = []
try:
    while True:
        more.append(os.dup(0))
except OSError:
    os.close(more.pop())  # for the socket
try:
    fetch(bytes.fromhex(sys.argv[1]))
except OSError as error:
    say(error)
"""
    handle = offer(memory())
    with process(script, handle.hex()) as other:
        assert "too many files open" in hear(other)
    withdraw(handle)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user(offered: bytes) -> None:
    script = """
import socket, struct
os.setuid(65534)
handle = bytes.fromhex(sys.argv[1])
try:
    fetch(handle)
except OSError as error:
    say(error)
with socket.socket(socket.AF_UNIX) as client:
    client.connect("\\0taskgraph-" + handle[:16].hex())
    try:
        client.send(handle[16:24])
        say(client.recv(100))
    except ConnectionError:
        say(b"")
"""
    with process(script, offered.hex()) as other:
        assert "another user" in hear(other)
        assert hear(other) == "b''"
    os.close(fetch(offered))


FORKING = """
parents = memory(b"parent's")
by_parent = offer(parents)
withdrawn = memory(b"withdrawn")
withdraw(offer(withdrawn))
if not os.fork():
    for fd in (parents, withdrawn):
        try:
            os.fstat(fd)
        except OSError:
            say("closed")
    withdraw(by_parent)
    say(os.read(os.open(f"/proc/self/fd/{fetch(by_parent)}", os.O_RDONLY), 100).decode())
    say(by_parent.hex())
    say(offer(memory(b"child's")).hex())
    hear()
    os._exit(0)
"""


def test_forked_child_has_own_server() -> None:
    with process(FORKING + "os.wait()") as other:
        assert [hear(other) for _ in range(3)] == ["closed", "closed", "parent's"]
        by_parent, by_child = (bytes.fromhex(hear(other)) for _ in range(2))
        assert by_parent[:16] != by_child[:16]
        for handle, content in ((by_parent, b"parent's"), (by_child, b"child's")):
            fd = fetch(handle)
            assert os.pread(fd, 100, 0) == content
            os.close(fd)
        say(other)
        assert other.wait(30) == 0


def test_parent_ended_child_lives() -> None:
    with process(FORKING + "time.sleep(60)") as other:
        by_parent, by_child = [bytes.fromhex(line) for line in [hear(other) for _ in range(5)][3:]]
        other.kill()
        other.wait()
        with pytest.raises(ConnectionRefusedError, match="ended"):
            fetch(by_parent)
        os.close(fetch(by_child))
        say(other)
        assert hear(other) == ""  # the child ended, too
