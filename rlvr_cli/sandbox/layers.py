"""The layers of the sandbox: what the kernel lets a process do no more, from now on and for good.

Enters: limits, and the paths that may be read. Leaves: the calling process, bound; `apply` says by which layers. Pure Python on the
kernel's own interfaces, for any user, root in a container included. Standard library only: the child imports this file by itself.

`rlimits`: CPU time, memory, open files, no bytes in any file, no core. They hold for root, too, because `seccomp` lets nobody raise them.
`parent_death`: SIGKILL when the parent dies, which `seccomp` keeps from being taken back.
`no_new_privs`: nothing executed could gain privileges. The next two require it.
`landlock`: no file but those below the given paths can be opened, and these only to read. Files' names and sizes can still be asked for.
`seccomp`: no process, no other program, no signal to another process, no socket but a pair of streams, no file opened to write, created,
moved, deleted, or changed in its mode, owner, times and attributes (Landlock leaves these out), no shared memory, queue or semaphore, no
change of user or limits, and no system call that is newer than this list.
"""

import ctypes
import errno
import os
import resource
import stat
import struct
import sys
from collections.abc import Iterable, Sequence
from functools import cache

LAYERS = ("rlimits", "parent_death", "no_new_privs", "landlock", "seccomp")

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_SIGKILL = 9
_OPEN_FILES = 256

# System calls by their numbers on x86-64 and ARM64; None: there is no such call.
Numbers = tuple[int | None, int | None]
MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
DENIED: dict[str, Numbers] = {
    # processes and other programs
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "unshare": (272, 97), "setns": (308, 268),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "personality": (135, 92),
    "setsid": (112, 157), "setpgid": (109, 154), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    # files: Landlock denies most of these, too
    "creat": (85, None), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "mkdir": (83, None), "mkdirat": (258, 34),
    "mknod": (133, None), "mknodat": (259, 33), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "memfd_create": (319, 279),
    # the network, and what outlives the process: also that of others, which has numbers and no names
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    # who it is, and what it may use
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147),
    "setresgid": (119, 149), "setgroups": (116, 159), "setfsuid": (122, 151), "setfsgid": (123, 152), "capset": (126, 91),
    "setrlimit": (160, 164), "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
    # the machine
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116),
    "acct": (163, 89), "quotactl": (179, 60), "vhangup": (153, 58), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "lookup_dcookie": (212, 18), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
}  # fmt: skip
# Allowed or denied by an argument.
CONDITIONAL: dict[str, Numbers] = {
    "open": (2, None), "openat": (257, 56), "clone": (56, 220), "kill": (62, 129), "tgkill": (234, 131), "prctl": (157, 167),
    "prlimit64": (302, 261), "socketpair": (53, 199), "fcntl": (72, 25), "ioctl": (16, 29),
}  # fmt: skip
FIRST_NEW = 424  # from here on the numbers are the same on all machines, and only these calls are allowed
ALLOWED_NEW = {
    "close_range": 436, "faccessat2": 439, "epoll_pwait2": 441, "futex_waitv": 449, "futex_wake": 454, "futex_wait": 455,
    "futex_requeue": 456,
}  # fmt: skip

# What a program may ask of a file. Other commands choose a process that signals go to, take leases, or change a file or its file system.
_FCNTL = *range(8), *range(1030, 1033)  # duplicate, flags, locks; duplicate, size of a pipe
_IOCTL = 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
_AF_UNIX, _NO_STREAM = 1, 0b1110  # of a socket's type, which is 1 for a stream
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # Landlock's version -> how many rights on files it knows
_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS = 0b11, 0b11


@cache
def available_layers() -> tuple[str, ...]:
    """The layers that this machine can apply, found without applying any."""
    found = {"rlimits"}
    if sys.platform == "linux":
        found |= {"parent_death", "no_new_privs"}
        if landlock_version() >= 1:
            found.add("landlock")
        # Without a filter to read, a kernel with seccomp says EFAULT, any other EINVAL.
        if _machine() is not None and _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, 0) == errno.EFAULT:
            found.add("seccomp")
    return tuple(layer for layer in LAYERS if layer in found)


def apply(*, cpu_seconds: int, memory_bytes: int, readable: Iterable[str], parent: int) -> tuple[str, ...]:
    """Bind this process, which must have one thread only, and return the layers that are active now.

    Args:
        readable: files, and directories with all that is below them; those that do not exist are passed over.
        parent: the process ID of the parent. Exits at once if it has died already.
    """
    available = available_layers()
    active = []
    if _limit(cpu_seconds=cpu_seconds, memory_bytes=memory_bytes):
        active.append("rlimits")
    if "parent_death" in available:
        if _prctl(_PR_SET_PDEATHSIG, _SIGKILL) == 0:
            active.append("parent_death")
        if os.getppid() != parent:
            os._exit(0)
    if "no_new_privs" in available and _prctl(_PR_SET_NO_NEW_PRIVS, 1) == 0:
        active.append("no_new_privs")
        if "landlock" in available and _restrict_files(readable):
            active.append("landlock")
        if "seccomp" in available and _filter_system_calls():
            active.append("seccomp")
    return tuple(active)


def _limit(*, cpu_seconds: int, memory_bytes: int) -> bool:
    wanted = {
        resource.RLIMIT_CPU: (cpu_seconds, cpu_seconds + 1),  # SIGXCPU, then SIGKILL
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_NOFILE: (_OPEN_FILES, _OPEN_FILES),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    complete = True
    for kind, (soft, hard) in wanted.items():
        highest = resource.getrlimit(kind)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        try:
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):  # macOS has no limit on the address space
            complete = False
    return complete


def landlock_version() -> int:
    """The version of Landlock's interface, 0 where the kernel has none."""
    return max(0, _syscall(_LANDLOCK_CREATE, None, 0, 1)) if sys.platform == "linux" else 0


def _restrict_files(readable: Iterable[str]) -> bool:
    version = landlock_version()
    rights = (1 << _FILE_RIGHTS[max(v for v in _FILE_RIGHTS if v <= version)]) - 1
    handled = struct.pack("=Q", rights)
    if version >= 4:
        handled += struct.pack("=Q", _BIND_AND_CONNECT)
    if version >= 6:
        handled += struct.pack("=Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = _syscall(_LANDLOCK_CREATE, handled, len(handled), 0)
    if ruleset < 0:
        return False
    try:
        for path in readable:
            try:
                file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            allowed = _READ_FILE | (_READ_DIR if stat.S_ISDIR(os.fstat(file).st_mode) else 0)
            added = _syscall(_LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, file), 0)
            os.close(file)
            if added < 0:
                return False
        return _syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    finally:
        os.close(ruleset)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter_system_calls() -> bool:
    machine = _machine()
    assert machine is not None
    instructions = b"".join(struct.pack("=HBBI", *i) for i in system_call_filter(machine, pid=os.getpid()))
    program = _Program(len(instructions) // 8, instructions)
    return _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program)) == 0


def _machine() -> int | None:
    """The index of this machine in `MACHINES`; None if it is another one, or runs 32-bit programs."""
    name = os.uname().machine
    return MACHINES.index(name) if name in MACHINES and struct.calcsize("P") == 8 else None


Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def system_call_filter(machine: int, *, pid: int) -> list[Instruction]:
    """The filter as BPF instructions.

    Args:
        machine: index in `MACHINES`.
        pid: of the process itself, the only one that it may send signals.
    """
    numbers = {name: n for name, pair in (DENIED | CONDITIONAL).items() if (n := pair[machine]) is not None}
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    unknown = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)  # a C library then tries an older call
    allow = (_RETURN, 0, 0, _ALLOW)

    def argument(index: int, *, high: bool = False) -> Instruction:
        return _LOAD, 0, 0, 16 + 8 * index + 4 * high

    def when(name: str, *body: Instruction) -> list[Instruction]:
        """`body`, which must return, for this system call."""
        return [(_EQUAL, 0, len(body), numbers[name]), *body] if name in numbers else []

    def allowed(values: Iterable[int]) -> list[Instruction]:
        return [instruction for value in values for instruction in ((_EQUAL, 0, 1, value), allow)]

    made: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        unknown,
    ]
    for name in DENIED:
        made += when(name, refuse)
    made += when("open", argument(1), (_ANY_BIT, 0, 1, _WRITING), refuse, allow)
    made += when("openat", argument(2), (_ANY_BIT, 0, 1, _WRITING), refuse, allow)
    made += when("clone", argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse)
    made += when("kill", argument(0), (_EQUAL, 0, 1, pid), allow, refuse)
    made += when("tgkill", argument(0), (_EQUAL, 0, 1, pid), allow, refuse)
    made += when("prctl", argument(0), (_EQUAL, 0, 1, _PR_SET_PDEATHSIG), refuse, allow)
    made += when(  # may be asked for, not set
        "prlimit64", argument(2), (_EQUAL, 0, 3, 0), argument(2, high=True), (_EQUAL, 0, 1, 0), allow, refuse
    )
    # A datagram socket sends to whom it likes, also as one of a pair; a stream only to its other end.
    made += when(
        "socketpair", argument(0), (_EQUAL, 0, 3, _AF_UNIX), argument(1), (_ANY_BIT, 1, 0, _NO_STREAM), allow, refuse
    )
    made += when("fcntl", argument(1), *allowed(_FCNTL), refuse)
    made += when("ioctl", argument(1), *allowed(_IOCTL), refuse)
    return [*made, *allowed(ALLOWED_NEW.values()), (_AT_LEAST, 0, 1, FIRST_NEW), unknown, allow]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: int) -> int:
    """Return 0, or the number of the error."""
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    ctypes.set_errno(0)
    return 0 if _libc().prctl(option, *padded) == 0 else ctypes.get_errno()


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    """Return what the system call returns, -1 after an error."""
    call = _libc().syscall
    call.restype = ctypes.c_long
    return call(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))


def missing(active: Sequence[str]) -> list[str]:
    """The layers that are not among these."""
    return [layer for layer in LAYERS if layer not in active]
