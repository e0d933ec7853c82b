"""The filter of system calls, run instruction by instruction as the kernel would, for both machines; the numbers, against the kernel's headers."""

import errno
import re
from pathlib import Path

import pytest

from rlvr_cli.sandbox.layers import ALLOWED_NEW, CONDITIONAL, DENIED, FIRST_NEW, MACHINES, missing, system_call_filter

X86, ARM = 0xC000003E, 0xC00000B7
ALLOWED, REFUSED, UNKNOWN, KILLED = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
PID = 4711
HEADERS = [
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm-generic/unistd.h"),
]


def verdict(machine: int, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter returns for a call: an interpreter of the four instructions that it uses."""
    program = system_call_filter(machine, pid=PID)
    data = {0: number, 4: (X86, ARM)[machine] if architecture is None else architecture}
    for index, argument in enumerate(arguments + (0,) * (6 - len(arguments))):
        data[16 + 8 * index], data[20 + 8 * index] = argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF
    register, place = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        match code:
            case 0x20:
                register = data[operand]
            case 0x06:
                return operand
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: register == operand, 0x35: register >= operand, 0x45: bool(register & operand)}[code]
                place += if_true if holds else if_false


@pytest.mark.parametrize("machine", [0, 1], ids=MACHINES)
def test_every_call_of_the_list_is_refused_and_all_jumps_stay_inside(machine):
    for name, numbers in DENIED.items():
        if numbers[machine] is not None:
            assert verdict(machine, numbers[machine]) == REFUSED, name
    program = system_call_filter(machine, pid=PID)
    assert len(program) < 4096  # the kernel's limit
    assert all(place + 1 + max(i[1], i[2]) < len(program) for place, i in enumerate(program) if i[0] & 7 == 5)
    assert all(0 <= i[1] < 256 and 0 <= i[2] < 256 for i in program)


@pytest.mark.parametrize("machine", [0, 1], ids=MACHINES)
def test_calls_are_judged_by_their_arguments(machine):
    def call(name: str, *arguments: int) -> int:
        number = CONDITIONAL[name][machine]
        assert number is not None
        return verdict(machine, number, *arguments)

    for flags in (0, 0o2000000, 1, 2, 0o100, 0o1000, 0o20200002):
        expected = ALLOWED if flags in (0, 0o2000000) else REFUSED
        assert call("openat", 0xFFFFFF9C, 7, flags) == expected, flags
        if machine == 0:
            assert call("open", 7, flags) == expected, flags
    assert call("clone", 0x3D0F00) == ALLOWED  # a thread, as the C library starts it
    assert call("clone", 0x01200011) == REFUSED  # fork
    assert call("clone", 0x4111) == REFUSED  # vfork
    assert call("kill", PID, 9) == ALLOWED
    assert {call("kill", pid & 0xFFFFFFFFFFFFFFFF, 9) for pid in (0, -1, 1, PID + 1)} == {REFUSED}
    assert call("tgkill", PID, PID + 1, 9) == ALLOWED
    assert call("tgkill", PID + 1, PID, 9) == REFUSED
    assert call("prctl", 15) == ALLOWED
    assert call("prctl", 1, 0) == REFUSED
    assert call("socketpair", 1, 0o2000001) == ALLOWED  # AF_UNIX, SOCK_STREAM: as asyncio's event loop wants it
    assert {call("socketpair", 1, kind) for kind in (2, 3, 4, 5, 0o2000002)} == {REFUSED}
    assert {call("socketpair", family, 1) for family in (0, 2, 30)} == {REFUSED}
    assert {call("fcntl", 1, command) for command in (0, 1, 2, 3, 4, 1030, 1032)} == {ALLOWED}
    # owner, owner's signal, owner of another kind, lease, notification
    assert {call("fcntl", 1, command) for command in (8, 10, 15, 1024, 1026)} == {REFUSED}
    assert {call("ioctl", 1, request) for request in (0x5401, 0x541B, 0x5450, 0x5451)} == {ALLOWED}
    # terminal input, owners of sockets, attributes of files, freezing a file system
    assert {call("ioctl", 1, request) for request in (0x5412, 0x8901, 0x8902, 0x40086602, 0xC0045877)} == {REFUSED}
    assert call("prlimit64", 0, 9, 0, 7) == ALLOWED
    assert call("prlimit64", 0, 9, 0xFFFF00000000, 7) == REFUSED
    assert call("prlimit64", 0, 9, 8, 7) == REFUSED


@pytest.mark.parametrize("machine", [0, 1], ids=MACHINES)
def test_new_calls_are_unknown_and_ordinary_ones_allowed(machine):
    assert {n for n in range(FIRST_NEW, 700) if verdict(machine, n) == ALLOWED} == set(ALLOWED_NEW.values())
    assert {verdict(machine, n) for n in range(FIRST_NEW, 700) if n not in ALLOWED_NEW.values()} == {UNKNOWN}
    denied = {n[machine] for n in (DENIED | CONDITIONAL).values()}
    assert all(verdict(machine, n) == ALLOWED for n in range(FIRST_NEW) if n not in denied)


def test_another_architecture_ends_the_process_and_x32_is_unknown():
    assert verdict(0, 1, architecture=0x40000003) == KILLED  # 32-bit
    assert verdict(0, 1, architecture=ARM) == KILLED
    assert verdict(1, 64, architecture=X86) == KILLED
    assert verdict(0, 0x40000000 + 57) == UNKNOWN


@pytest.mark.parametrize("machine", [0, 1], ids=MACHINES)
def test_the_numbers_are_those_of_the_kernel(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]}")
    text = HEADERS[machine].read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    for name, numbers in (DENIED | CONDITIONAL).items():
        assert numbers[machine] == known.get(name), name
    assert all(known.get(name, number) == number for name, number in ALLOWED_NEW.items())
    assert all(number >= FIRST_NEW for number in ALLOWED_NEW.values())


def test_missing_layers_are_named_in_their_order():
    assert missing(("seccomp", "rlimits")) == ["parent_death", "no_new_privs", "landlock"]
