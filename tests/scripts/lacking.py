"""Runs a command on a system that lacks something: ``lacking.py CALL=ERRNO ... -- COMMAND ...``.

A seccomp filter makes each named system call fail with the named error, as a container's profile or an old kernel
does. Further names: ``thread`` is `clone` for a new thread, ``ipv4`` is `socket` for AF_INET.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

NUMBERS = {
    "x86_64": {
        "socket": 41, "bind": 49, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "flock": 73, "pipe": 22,
        "prctl": 157, "setrlimit": 160, "eventfd2": 290, "epoll_create1": 291, "pipe2": 293, "prlimit64": 302,
        "sendmsg": 46, "memfd_create": 319, "pidfd_open": 434, "clone3": 435, "ftruncate": 77, "mmap": 9,
        "setsid": 112, "fcntl": 72, "mkdir": 83, "fsync": 74, "sched_setscheduler": 144, "setpriority": 141,
        "accept4": 288, "listen": 50, "close_range": 436, "rename": 82, "waitid": 247, "unshare": 272,
    },
    "aarch64": {
        "socket": 198, "bind": 200, "socketpair": 199, "clone": 220, "flock": 32, "prctl": 167, "setrlimit": 164,
        "eventfd2": 19, "epoll_create1": 20, "pipe2": 59, "prlimit64": 261, "sendmsg": 211, "memfd_create": 279,
        "pidfd_open": 434, "clone3": 435, "ftruncate": 46, "mmap": 222, "setsid": 157, "fcntl": 25, "fsync": 82,
        "sched_setscheduler": 119, "setpriority": 140, "accept4": 242, "listen": 201, "close_range": 436, "waitid": 95,
    },
}  # fmt: skip
"""Machine -> system call -> its number."""
LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x45, 0x06
"""BPF: ld [k]; jeq #k; jset #k; ret #k. From <linux/bpf_common.h>."""
ALLOW, FAIL = 0x7FFF0000, 0x00050000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
ARGUMENT = 16
"""Offset of a call's first argument in struct seccomp_data."""
CLONE_THREAD = 0x10000


def instructions(name: str, error: int) -> list[tuple[int, int, int, int]]:
    """What makes one call fail: (code, jump if true, jump if false, k) each."""
    numbers = NUMBERS[platform.machine()]
    match name:
        case "thread":  # glibc tries clone3 first, whose flags a filter cannot read
            test = [(LOAD, 0, 0, ARGUMENT), (AND, 0, 1, CLONE_THREAD)]
            return [*instructions("clone3", errno.ENOSYS), *only(numbers["clone"], test, error)]
        case "ipv4":
            return only(numbers["socket"], [(LOAD, 0, 0, ARGUMENT), (EQUAL, 0, 1, socket.AF_INET)], error)
        case _:
            return only(numbers[name], [], error)


def only(number: int, test: list[tuple[int, int, int, int]], error: int) -> list[tuple[int, int, int, int]]:
    """Fails a call of this number that passes the test."""
    body = [*test, (RETURN, 0, 0, FAIL | error)]
    return [(LOAD, 0, 0, 0), (EQUAL, 0, len(body), number), *body]


def install(refused: list[str]) -> None:
    """Installs the filter for this process and its children."""
    program = []
    for each in refused:
        name, _, error = each.partition("=")
        program += instructions(name, getattr(errno, error))
    program.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, MODE_FILTER, header, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    """Runs the command."""
    at = sys.argv.index("--")
    install(sys.argv[1:at])
    os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])


if __name__ == "__main__":
    main()
