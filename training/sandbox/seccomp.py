"""A filter of system calls (seccomp(2), classic BPF): no programs, no sockets, no harm to other processes.

Refused calls fail with EPERM, which libraries take for an ordinary error. Threads may be made: `clone` as a thread
passes, `clone3` seems not to exist, since its flags lie in memory that a filter cannot read, and the C library then
takes `clone`. A list of what is refused, not of what is allowed: a driver of a GPU makes calls that nobody listed.
Binding a thread to cores by its id seems to work and is not done: no filter knows whose thread it is, and where that
fails OpenMP ends the process (OMP_PROC_BIND). A thread may bind itself, as torch does as it looks at the processor.

CUDA fails where it cannot listen on a local socket, by SOCK_SEQPACKET, at which others ask for its memory. Where it is
to be used that is permitted. The process can take any free name so, and nobody is heard or answered: it accepts none,
and connects to none, as if nobody were there. Ranks accept and connect, and so they could by these sockets too.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from swarmnode.training.sandbox.system import PR_SET_PDEATHSIG, prctl

_PR_SET_SECCOMP, _FILTER = 22, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ|K, JGE, JSET, RET|K
_AND = 0x54  # ALU|AND|K
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments have 8 bytes, low half first
_CLONE_THREAD = 0x10000
_X32 = 0x40000000  # calls of x86-64 with this bit are the same ones under other numbers
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into the owner's terminal
# F_SETOWN, F_SETOWN_EX, and FIOSETOWN, SIOCSPGRP: having the kernel signal another process when a file is ready
_OWNERS, _SOCKET_OWNERS = (8, 15), (0x8901, 0x8902)
_LEASES = (1024, 1026, 1037)  # F_SETLEASE, F_NOTIFY, F_SETDELEG: having others wait for a file, and seeing them open it

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers on x86_64 and on aarch64; None where there is no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other programs
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    # sockets of any kind: those of the machine's services are a way out as well
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "setsid": (112, 157),  # its group is what the daemon stops
    "setpgid": (109, 154),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # memory, semaphores and queues of System V and POSIX, which all programs of a user share
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # what Landlock leaves open: owner, mode, times and attributes of files, and their size before Linux 6.2
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),
    "umask": (95, 166),  # nor the owner's rights to a new directory, see _OWNERS_MODE
    # the machine
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    # parts of the kernel where most of its holes were
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_OF_RANKS = ("connect", "accept", "accept4")
_OF_TCP = (2, 16)  # AF_INET, and AF_NETLINK, which says what interfaces there are
_LOCAL, _SEQPACKET, _TYPE = 1, 5, 0xF  # AF_UNIX, SOCK_SEQPACKET, and the bits that are the type
_CLONE, _CLONE3 = (56, 220), (435, 435)
_TO_ITSELF_ONLY = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_PRLIMIT, _SETPRIORITY, _SETAFFINITY, _PRCTL = (302, 261), (141, 140), (203, 122), (157, 167)
_MKDIR, _MKDIRAT = 83, (258, 34)
_OWNERS_MODE = 0o700  # of each directory: one without could be neither weighed nor emptied by the daemon
_BY_REQUEST = ((16, 29), _TERMINAL_INPUT + _SOCKET_OWNERS), ((72, 25), _OWNERS + _LEASES)  # ioctl, fcntl


def refuse(pid: int, *, tcp: bool = False, cuda: bool = False) -> None:
    """Refuse what stands above, or all but TCP, or but what CUDA needs, for good, in this process `pid`.

    Needs no_new_privs. Raises OSError.
    """
    machine = platform.machine()
    if machine not in _AUDIT:
        raise OSError(errno.ENOSYS, f"the numbers of system calls on {machine} are not known here")
    filter = program(machine, pid, tcp=tcp, cuda=cuda)
    held = ctypes.create_string_buffer(filter, len(filter))
    prctl(_PR_SET_SECCOMP, _FILTER, struct.pack("HP", len(filter) // 8, ctypes.addressof(held)))


def program(machine: str, pid: int, *, tcp: bool = False, cuda: bool = False) -> bytes:
    """The filter for one architecture and the process `pid`, in instructions of 8 bytes."""
    column = 0 if machine == "x86_64" else 1
    code = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, _AUDIT[machine], 1, 0), _step(_RETURN, _KILL)]
    code.append(_step(_LOAD, _NUMBER))
    if column == 0:
        code += [_step(_AT_LEAST, _X32, 0, 1), _refusal(errno.EPERM)]
    for name, numbers in _REFUSED.items():
        number = numbers[column]
        if number is None or (tcp and name in _OF_RANKS) or ((tcp or cuda) and name in ("bind", "listen")):
            continue
        if name == "socket":
            code += _where(number, _sockets(_OF_TCP if tcp else (), cuda))
        else:
            code += _where(number, [_refusal(errno.ENOENT if name == "connect" and cuda else errno.EPERM)])
    code += _where(_CLONE3[column], [_refusal(errno.ENOSYS)])
    code += _where(_CLONE[column], [_argument(0), _step(_ANY_BIT, _CLONE_THREAD, 0, 1), _PASS, _refusal(errno.EPERM)])
    for numbers in _TO_ITSELF_ONLY.values():
        code += _where(numbers[column], _only(pid))
    code += _where(_PRLIMIT[column], _only(0, pid))
    code += _where(_SETAFFINITY[column], _only(0, pid, otherwise=0))
    outlives = [_argument(0), _step(_EQUAL, PR_SET_PDEATHSIG, 0, 1), _refusal(errno.EPERM)]  # the daemon
    code += _where(_PRCTL[column], [*outlives, _PASS])
    of_processes = [_argument(0), _step(_EQUAL, 0, 1, 0), _refusal(errno.EPERM)]  # not of groups or users
    code += _where(_SETPRIORITY[column], [*of_processes, *_only(0, place=1)])
    code += _where(_MKDIRAT[column], _only(_OWNERS_MODE, place=2, mask=_OWNERS_MODE))
    if column == 0:
        code += _where(_MKDIR, _only(_OWNERS_MODE, place=1, mask=_OWNERS_MODE))
    for numbers, requests in _BY_REQUEST:
        refused = [step for request in requests for step in (_step(_EQUAL, request, 0, 1), _refusal(errno.EPERM))]
        code += _where(numbers[column], [_argument(1), *refused, _PASS])
    return b"".join([*code, _PASS])


def _step(operation: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, when_true, when_false, value)


def _where(number: int, then: list[bytes]) -> list[bytes]:
    """Run `then`, which ends with a return, for the call with this number."""
    return [_step(_EQUAL, number, 0, len(then)), *then]


def _sockets(families: tuple[int, ...], cuda: bool) -> list[bytes]:
    """Pass those of these families, and with `cuda` local ones by SOCK_SEQPACKET."""
    tests = [step for family in families for step in (_step(_EQUAL, family, 0, 1), _PASS)]
    local = [_argument(1), _step(_AND, _TYPE), _step(_EQUAL, _SEQPACKET, 0, 1), _PASS]
    tests += [_step(_EQUAL, _LOCAL, 0, len(local)), *local] if cuda else []
    return [_argument(0), *tests, _refusal(errno.EPERM)]


def _only(*permitted: int, place: int = 0, mask: int = 0xFFFFFFFF, otherwise: int = errno.EPERM) -> list[bytes]:
    """Pass where these bits of an argument, the first, are one of these; `otherwise`: the error, 0 for none."""
    tests = [step for value in permitted for step in (_step(_EQUAL, value, 0, 1), _PASS)]
    return [_argument(place), _step(_AND, mask), *tests, _refusal(otherwise)]


def _argument(place: int) -> bytes:
    """Load the lower half of an argument; all that are looked at have 32 bits."""
    return _step(_LOAD, _ARGUMENTS + 8 * place)


def _refusal(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)


_PASS = _step(_RETURN, _ALLOW)
