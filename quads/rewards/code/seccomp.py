"""A seccomp filter for programs under test: the system calls that reach past namespaces and limits fail.

    refused with EPERM   new namespaces, mounts, ptrace and reading other processes, keyrings, bpf, perf, userfaultfd,
                         io_uring, kernel modules, clock and host administration; sockets other than unix, IPv4, IPv6
                         (vsock would reach the hypervisor past the empty network namespace)
    refused with ENOSYS  clone3, whose flags a filter cannot see (libc then uses clone, whose flags it can)
    kills                calls of another architecture (32-bit entry points)

Classic BPF, eight bytes an instruction: code u16, jump-if-true u8, jump-if-false u8, operand u32.
Known machines: x86_64 and aarch64; elsewhere `program()` is None and the sandbox says so in its report. Differs from an
allow-list: a list of what is dangerous can miss something new, an allow-list breaks numpy or a newer Python silently.
"""

from __future__ import annotations

import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000
_UNIX, _INET, _INET6 = 1, 2, 10

# io_uring_setup/enter/register, open_tree .. fspick, pidfd_getfd, mount_setattr: one number on every machine.
_COMMON = [*range(425, 434), 438, 442]
# ptrace syslog pivot_root chroot settimeofday mount umount2 swapon swapoff reboot sethostname setdomainname init_module
# delete_module quotactl kexec_load add_key request_key keyctl unshare perf_event_open open_by_handle_at setns
# process_vm_readv process_vm_writev finit_module kexec_file_load bpf userfaultfd acct
_X86_64 = [101, 103, 155, 161, 164, 165, 166, 167, 168, 169, 170, 171, 175, 176, 179, 246, 248, 249, 250, 272, 298, 304]
_X86_64 += [308, 310, 311, 313, 320, 321, 323, 163]
_AARCH64 = [117, 116, 41, 51, 170, 40, 39, 224, 225, 142, 161, 162, 105, 106, 60, 104, 217, 218, 219, 97, 241, 265]
_AARCH64 += [268, 270, 271, 273, 294, 280, 282, 89]
# machine: (audit architecture, clone, socket, refused)
_MACHINES = {
    "x86_64": (0xC000003E, 56, 41, _X86_64),
    "aarch64": (0xC00000B7, 220, 198, _AARCH64),
}
_CLONE3 = 435


def program(machine: str | None = None) -> bytes | None:
    """The filter for this machine in the kernel's layout, None where its call numbers are not known here."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, clone, socket, refused = known
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ENOSYS)]
    for number in (*refused, *_COMMON):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    code += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _ARGUMENT), (_ANY_BIT, 0, 1, _NEW_NAMESPACES)]
    code += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    code += [(_EQUAL, 0, 5, socket), (_LOAD, 0, 0, _ARGUMENT)]
    code += [(_EQUAL, 3, 0, _UNIX), (_EQUAL, 2, 0, _INET), (_EQUAL, 1, 0, _INET6), (_RETURN, 0, 0, _EPERM)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
