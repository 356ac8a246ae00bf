"""Commands as forks of one process that has imported everything: a command's own imports take longer than most commands.

Each is a process like any other: with its own pid, signals, exit code, files, folder and environment. It differs from
one that is begun anew in what only an interpreter's start decides: the seed of hashes, and variables such as
``PYTHONHASHSEED`` or a ``sitecustomize`` on ``PYTHONPATH``; and in its end, which does not take apart what is imported.
A test that is about those begins its command anew. One that a wrapper begins (``asking``) takes the wrapper's namespaces
and privileges on after its imports, not before them.

The interpreters that a forked command begins for code of the testbed (``python -P -m testbed...``, ``python -P -c``: its
launcher, its page, its workers) are forks of the command in turn. A command that is begun anew begins interpreters, as a
user's does. Launchers and workers that a test itself begins are forks of the one process (``fork_python``).

The workers of one pytest share the process (``share``): each has a fork of it, which forks its commands.

Processes that keep CPUs awake sleep in forked commands: the tests keep them awake.

With the first command that computes real blocks, the process imports torch and transformers too, once for the command,
its launcher and the whole model that it compares tokens with. They are imported as a launcher does it (without threads,
and without a question to a GPU). A benchmark that computes real blocks can be forked as a command is; what it begins of
itself and of the testbed's commands is forked in turn.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import runpy
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from netem.syscalls import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUSER, setns
from testbed.runtime.real.handle import SINGLE_THREADED
from tests.support.children import ending
from tests.support.sketches import sketch

COMMAND = str(Path(sys.executable).with_name("testbed"))

_PACKAGES = ("testbed", "policies", "netem", "nodes")
_LAZY = (
    "pyarrow.parquet",
    "pyarrow.dataset",
    "matplotlib.pyplot",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "pydantic.type_adapter",
    "rich._emoji_codes",
    "scipy.optimize",
    "highspy",
    "networkx",
)
_EXTRAS = ("nodes.blocks", "testbed.cluster", "testbed.runtime.hosts", "testbed.studies.sweep.on_ray")
"""What imports torch or ray: they may not be installed, and have threads."""

_BEGIN = """
import select, sys
sys.path[0], begin, number = sys.argv[1:]
select.select([0, int(number)], [], [])
from tests.support import forked
getattr(forked, begin)(int(number))
"""
"""What is shared imports nothing before it is needed."""

_ASK = """
import json, os, signal, socket, sys
asked = socket.socket(fileno=int(sys.argv[1]))
ended, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
renders, program, *arguments = sys.argv[2:]
how = {"program": program, "arguments": arguments, "folder": os.getcwd(), "env": dict(os.environ)}
how |= {"asker": os.getpid(), "renders": bool(renders)}
socket.send_fds(asked, [json.dumps(how).encode()], [0, 1, 2, theirs.fileno()])
theirs.close()
pid = int(ended.recv(16))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
os._exit(int(ended.recv(16)))
"""
"""As ``_Forker.fork``, in an interpreter that has imported nothing else. It passes signals on."""

_MOST_FILES = 16
_HUGE = 2 << 20
_MADV_COLLAPSE = 25
_NAMESPACES = {"user": CLONE_NEWUSER, "mnt": CLONE_NEWNS, "net": CLONE_NEWNET}
_PRIVILEGES = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_DUMPABLE, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 23, 24, 38

_SHARED = "TESTBED_TESTS_FORKER"
"""The address of what is shared."""

_ROOM = "TESTBED_TESTS_ROOM"
"""A variable that is there for its size: the environment that a forked process shows in ``/proc`` is written over it."""


class Forked:
    """A command that was forked; what tests use of ``subprocess.Popen``."""

    def __init__(self, args: Sequence[str], pid: int, ended: socket.socket) -> None:
        self.args, self.pid, self.returncode = list(args), pid, None
        self._ended = ended
        self.returncode: int | None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._ended.recv(16))
            self._ended.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(function: str, asked: socket.socket, stdin: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _BEGIN, str(Path(__file__).parents[2]), function, str(asked.fileno())],
        pass_fds=[asked.fileno()],
        stdin=stdin,
        # Threads are not forked.
        env={**os.environ, **SINGLE_THREADED, _ROOM: "x" * (1 << 16)},
    )


def share() -> None:
    """Have the workers that this process will begin share what imports everything. It ends with this process."""
    folder = tempfile.mkdtemp()
    os.environ[_SHARED] = f"{folder}/forker"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.environ[_SHARED])
        listener.listen()
        process = _begin("serve_all", listener, subprocess.PIPE)

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder)

    atexit.register(end)


class _Forker:
    """The process that forks; begun with the first command, and ended with this one."""

    def __init__(self) -> None:
        if shared := os.environ.get(_SHARED):
            self._here = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._here.connect(shared)
        else:
            self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with there:
                process = _begin("serve", there, subprocess.DEVNULL)
            atexit.register(process.wait)
        atexit.register(self._here.close)
        self.pid = int(self._here.recv(16))

    @property
    def descriptor(self) -> int:
        """Where it is asked."""
        return self._here.fileno()

    def fork(self, files: Sequence[int], arguments: Sequence[str], **how: Any) -> Forked:
        """Begins a command. ``files``: its standard input, output and errors; ``how``: as ``_become`` has it.

        Or an interpreter, if ``how`` is as ``_become_interpreter`` has it.
        """
        ended, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = json.dumps({"arguments": list(arguments), **how}).encode()
        with theirs:
            socket.send_fds(self._here, [asked], [*files, theirs.fileno()])
        pid = ended.recv(16)
        assert pid, "the process that forks commands has ended"
        return Forked([COMMAND, *arguments], int(pid), ended)


_forker: _Forker | None = None


def fork_command(
    arguments: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    files: Sequence[BinaryIO],
    *,
    renders: bool = False,
    program: str = COMMAND,
    imports: Sequence[str] = (),
) -> Forked:
    """Begin ``testbed`` with these arguments in ``folder``. ``files``: its standard input, output and errors.

    Its figures are blank unless it ``renders`` them (``tests.support.sketches``). ``program``: in place of ``testbed``
    the path of a Python program that computes real blocks, or that needs ``imports``.
    """
    how = {"folder": str(folder), "env": dict(env), "renders": renders, "program": program}
    how |= {"computes": program != COMMAND and not imports, "imports": list(imports)}
    return _the_forker().fork([file.fileno() for file in files], arguments, **how)


def fork_python(
    args: Sequence[str],
    *,
    pass_fds: Sequence[int],
    stdin: int,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
    env: Mapping[str, str] | None = None,
    process_group: int | None = None,
    start_new_session: bool = False,
) -> Forked:
    """Begin ``python -P ...`` of the testbed, from a process that may have threads; what it needs of ``subprocess.Popen``.

    Its parent, with which it ends, is the process that forks. So this is the one that its arguments name.
    """
    assert list(args[:2]) == [sys.executable, "-P"] and stdin == subprocess.DEVNULL
    forker, here = _the_forker(), str(os.getpid())
    arguments = [str(forker.pid) if argument == here else argument for argument in args[2:]]
    how = {
        "folder": str(Path.cwd()),
        "env": dict(os.environ if env is None else env),
        "passed": list(pass_fds),
        "has_group": process_group == 0,
        "has_session": start_new_session,
    }
    with open(os.devnull, "rb") as nothing:
        out, err = (
            standard if file is None else file.fileno() for standard, file in ((1, stdout), (2, stderr))
        )
        return forker.fork([nothing.fileno(), out, err, *pass_fds], arguments, **how)


def _the_forker() -> _Forker:
    global _forker
    if _forker is None:
        _forker = _Forker()
    return _forker


def forker_pid() -> int:
    """The process that forks for this one, or 0 if none does yet."""
    return 0 if _forker is None else _forker.pid


def as_shell_functions(*, renders: bool = False) -> tuple[str, int]:
    """``testbed`` and ``python`` as functions of a shell that inherits the descriptor: each call forks, and waits for the fork.

    ``python`` runs a program, or with ``-`` what it reads. Figures are blank unless it ``renders`` them.
    """
    call, number = asking(renders=renders)
    asks = shlex.join(call)
    return f'testbed() {{ {asks} {COMMAND} "$@"; }}; python() {{ {asks} "$@"; }}', number


def asking(number: int | None = None, *, renders: bool = False) -> tuple[list[str], int]:
    """The beginning of a command line that forks what follows it and waits for the fork, and the descriptor that it inherits.

    The fork has its namespaces, its user and its privileges, and ends with it. ``number``: the descriptor of another
    process that forks, in other namespaces of processes.
    """
    number = _the_forker().descriptor if number is None else number
    return [sys.executable, "-I", "-S", "-c", _ASK, str(number), "renders" if renders else ""], number


def serve(descriptor: int) -> None:
    """Import everything, and fork a command for each message on the socket ``descriptor``, until that is closed."""
    _get_ready()
    _serve(socket.socket(fileno=descriptor))


def serve_all(descriptor: int) -> None:
    """As ``serve``, in a fork for each connection to the socket ``descriptor``, until standard input is closed."""
    _get_ready()
    listener = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            _serve(connection)
        connection.close()


def _get_ready() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a test may be about signals
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    _import_everything()
    _prepare()
    gc.collect()


def _serve(asked: socket.socket) -> NoReturn:
    """Fork a command for each message. In a command, runs it."""
    freeze()
    asked.send(str(os.getpid()).encode())
    ends: dict[int, tuple[int, socket.socket]] = {}
    askers: dict[int, int] = {}
    watches: dict[int, int] = {}
    waiting = select.poll()
    waiting.register(asked, select.POLLIN)
    while True:
        for number, _ in waiting.poll():
            if number in ends:
                waiting.unregister(number)
                pid, theirs = ends.pop(number)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if watched := watches.pop(number, 0):
                    with contextlib.suppress(KeyError):  # the asker has ended
                        waiting.unregister(watched)
                    del askers[watched]
                    os.close(watched)
                with theirs, contextlib.suppress(OSError):  # nobody waits for it
                    theirs.send(str(status).encode())
                os.close(number)
                continue
            if number in askers:
                waiting.unregister(number)
                os.kill(askers[number], signal.SIGKILL)
                continue
            message, descriptors, _, _ = socket.recv_fds(asked, 1 << 20, _MOST_FILES)
            if not message:
                os._exit(0)
            *files, answer = descriptors
            how = json.loads(message)
            if how.pop("computes", False) or _has_blocks(how["arguments"]):
                _import_blocks()
            _import(*how.pop("imports", ()))
            pid = os.fork()
            if pid == 0:
                tempfile.tempdir = None  # torch asks for it; a command's environment may name another
                if "passed" in how:
                    _become_interpreter(files, **how)
                _become(files, **how)
                _run()
            for file in files:
                os.close(file)
            theirs = socket.socket(fileno=answer)
            theirs.send(str(pid).encode())
            number = os.pidfd_open(pid)
            ends[number] = (pid, theirs)
            waiting.register(number, select.POLLIN)
            with contextlib.suppress(KeyError, ProcessLookupError):
                askers[watched := os.pidfd_open(how["asker"])] = pid
                waiting.register(watched, select.POLLIN)
                watches[number] = watched


def _prepare() -> None:
    """Make what every command makes first, and all make alike: its options, what its code and packages are, the catalogue."""
    import typer.main

    from testbed.cli.main import app
    from testbed.experiments import load_experiment
    from testbed.experiments.provenance import provenance
    from testbed.runtime.real import awake

    awake.spin = _rest  # before the launcher imports it
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)
    provenance()
    load_experiment("clustered")


def _rest(cpu: int) -> NoReturn:
    """In the place of ``awake.spin``."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {cpu})
    while True:
        signal.pause()


def freeze() -> None:
    """Keep what is imported as it is in memory, so that a forked process copies little of it."""
    gc.collect()
    gc.freeze()
    _collapse()


def _collapse() -> None:
    """Have the kernel keep what is imported in huge pages, where it can: forks copy their table, which is the smaller."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            start = -(-start // _HUGE) * _HUGE
            if start + _HUGE <= end:
                libc.madvise(start, end // _HUGE * _HUGE - start, _MADV_COLLAPSE)


def _import_everything() -> None:
    def walk(name: str) -> None:
        module = importlib.import_module(name)
        for found in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
            if not found.name.startswith(_EXTRAS) and not found.name.endswith("__main__"):
                walk(found.name)

    for name in (*_PACKAGES, *_LAZY):
        walk(name) if name in _PACKAGES else importlib.import_module(name)


def _has_blocks(arguments: Sequence[str]) -> bool:
    return bool({"blocks", "generate", "chat", "make-tiny"} & set(arguments)) and _can_import(
        "torch", "transformers"
    )


def _can_import(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


@functools.cache
def _import_blocks() -> None:
    """Import what computes blocks, in the environment in which a launcher imports it."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    from testbed.runtime.real.launcher import _preload, _without

    _preload(blocks=True)
    with _without("sklearn"):
        _import("nodes.blocks.whole", "nodes.blocks.tiny", "nodes.blocks.text")


@functools.cache
def _import(*names: str) -> None:
    for name in names:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads are not forked"
    gc.collect()
    gc.freeze()


def _become(
    files: Sequence[int],
    arguments: list[str],
    folder: str,
    env: dict[str, str],
    renders: bool = False,
    program: str = COMMAND,
    asker: int | None = None,
) -> None:
    """Be what a new process would be. ``asker``: the process whose namespaces and privileges it has."""
    if asker is not None:
        _join(asker)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, standard in zip(files, (0, 1, 2), strict=True):
        os.dup2(file, standard)
    os.closerange(3, 1 << 16)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({"TOKENIZERS_PARALLELISM": "false"} | env)  # with its threads nothing could be forked
    time.tzset()
    path = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:1] = ["" if program == "-" else str(Path(program).parent), *path]
    sys.argv[:] = [program, *arguments]
    sys.modules["__main__"].__file__ = program  # what processes that it spawns begin with
    fork_interpreters()
    if not renders:
        sketch(setattr)


def _join(pid: int) -> None:
    """Have the namespaces, the user and the privileges of another process, as if it had begun this one."""
    theirs, own = _namespaces(pid), _namespaces(os.getpid())
    for name, kind in _NAMESPACES.items():
        if theirs[name] != own[name]:
            with open(f"/proc/{pid}/ns/{name}", "rb") as namespace:
                setns(namespace.fileno(), kind)
    its = _privileges(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        if not int(its["CapBnd"], 16) >> number & 1 and libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    uid, gid = (int(its[name].split()[0]) for name in ("Uid", "Gid"))
    if (uid, gid) != (os.getuid(), os.getgid()):
        os.setgroups([int(group) for group in its["Groups"].split()])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    sets = [int(its[f"Cap{name}"], 16) for name in ("Eff", "Prm", "Inh")]
    words = [capabilities >> shift & 0xFFFFFFFF for shift in (0, 32) for capabilities in sets]
    libc.capset(struct.pack("=II", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", *words))
    if int(its["NoNewPrivs"]):
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    assert _privileges(os.getpid()) == its
    assert _namespaces(os.getpid()) == theirs


def _privileges(pid: int) -> dict[str, str]:
    """What ``/proc`` says of a process's user and capabilities."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    said = dict(line.split(":\t", 1) for line in lines if line.startswith(_PRIVILEGES))
    assert len(said) == len(_PRIVILEGES)
    return said


def _namespaces(pid: int) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in Path(f"/proc/{pid}/ns").iterdir()}


def _become_interpreter(
    files: Sequence[int],
    arguments: list[str],
    folder: str,
    env: dict[str, str],
    passed: list[int],
    has_group: bool,
    has_session: bool,
) -> NoReturn:
    """Be ``python -P ARGUMENTS``. ``passed``: the numbers that ``files`` after the standard ones have there."""
    with ending():
        for file, standard in zip(files, (0, 1, 2), strict=False):
            os.dup2(file, standard)
        beyond = max(*files, *passed) + 1
        kept = [fcntl.fcntl(file, fcntl.F_DUPFD, beyond) for file in files[3:]]
        os.closerange(3, beyond)
        for file, number in zip(kept, passed, strict=True):
            os.dup2(file, number)
        os.closerange(beyond, 1 << 16)
        os.chdir(folder)
        _set_environment(env)
        time.tzset()
        name, code, rest = _asked_for(arguments)
        _interpret(code, [name, *rest], has_session, 0 if has_group else -1)


def _run() -> NoReturn:
    """Run the command, and end without taking apart all that is imported, which takes longer than most commands."""
    with ending():
        try:
            if sys.argv[0] == COMMAND:
                from testbed.__main__ import main

                main()
            elif sys.argv[0] == "-":
                exec(compile(sys.stdin.read(), "<stdin>", "exec"), sys.modules["__main__"].__dict__)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()


def fork_interpreters() -> None:
    """From here on the interpreters that this process begins for code of the testbed are forks of it.

    Where the variable ``_ROOM`` was set when this process' own interpreter began.
    """
    subprocess.Popen = _Popen  # type: ignore[misc]


class _Popen(subprocess.Popen[Any]):
    """Forks instead of ``python -P -m a.module ...`` of the testbed's and ``python -P -c ...``, and instead of ``python -m
    testbed ...`` and ``python PROGRAM ...`` where this program is asked for again; begins all else as ever.
    """

    def _execute_child(self, *arguments: Any) -> None:
        how = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        match how["args"]:
            case [sys.executable, "-P", "-c" | "-m" as option, str(what), *_] if (
                option == "-c" or what.startswith(("testbed.", "nodes."))
            ):
                name, code, rest = _asked_for(how["args"][2:])
            case [sys.executable, "-m", "testbed", *rest]:
                name, code = _code_of("testbed.__main__")
            case [sys.executable, str(path), *rest] if path == sys.argv[0]:
                name, code = path, compile(Path(path).read_bytes(), path, "exec")
            case _:
                return super()._execute_child(*arguments)  # type: ignore[misc,no-any-return]
        env = dict(os.environ if how["env"] is None else how["env"])
        start, end = _where_the_environment_is()
        has_threads = len(os.listdir("/proc/self/task")) > 1
        if (
            has_threads
            or len(_block(env)) > end - start
            or how["preexec_fn"] is not None
            or how["cwd"] is not None
        ):
            return super()._execute_child(*arguments)  # type: ignore[misc,no-any-return]
        sys.stdout.flush()
        sys.stderr.flush()
        before = _descriptors()
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # what is garbage by now may not close descriptors: their numbers are others' from here on
            _set_environment(env)
            _become_python(code, [name, *rest], how, before)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(how[name] for name in ends))  # type: ignore[attr-defined]
        return None


def _code_of(module: str) -> tuple[str, types.CodeType]:
    """The file of a module and its code."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    return found.origin, found.loader.get_code(module)  # type: ignore[union-attr]


def _asked_for(arguments: Sequence[str]) -> tuple[str, types.CodeType, Sequence[str]]:
    """The name and the code of what ``python -P ARGUMENTS`` runs, and the code's own arguments."""
    option, what, *rest = arguments
    if option == "-c":
        return "-c", compile(what, "<string>", "exec"), rest
    assert option == "-m"
    return *_code_of(what), rest


def _block(env: dict[str, str]) -> bytes:
    """An environment as the kernel shows it."""
    env.pop(_ROOM, None)
    return b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in env.items())


def _set_environment(env: dict[str, str]) -> None:
    """Have this environment, in ``/proc``, too. It must fit there."""
    block = _block(env)
    start, end = _where_the_environment_is()
    assert len(block) <= end - start
    os.environ.clear()  # of what is about to be overwritten
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)
    os.environ.update(env)


def _where_the_environment_is() -> tuple[int, int]:
    """The addresses at which the kernel finds what it shows as ``/proc/self/environ``."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    return int(fields[47]), int(fields[48])


def _descriptors() -> dict[int, str]:
    """The open descriptors of this process, and what they are."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the folder that was listed
            found[int(number)] = str(Path(f"/proc/self/fd/{number}").readlink())
    return found


def _become_python(
    code: types.CodeType, argv: list[str], how: Mapping[str, Any], before: Mapping[int, str]
) -> NoReturn:
    """Be an interpreter that runs ``code``.

    ``how``: as ``Popen`` was told to begin it; ``before``: the descriptors of the process that was forked. Where that
    has had an event loop, libuv made new ones with the fork, which it needs.
    """
    with ending():
        for given, standard in ((how["p2cread"], 0), (how["c2pwrite"], 1), (how["errwrite"], 2)):
            if given != -1:
                os.dup2(given, standard)
        for number, _ in before.items() & _descriptors().items():
            if number > 2 and number not in how["pass_fds"]:
                os.close(number)
        _interpret(code, argv, how["start_new_session"], how["process_group"])


def _interpret(code: types.CodeType, argv: list[str], has_session: bool, process_group: int) -> None:
    """Run ``code`` as an interpreter's main program."""
    if has_session:
        os.setsid()
    if process_group >= 0:
        os.setpgid(0, process_group)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = argv
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if argv[0] != "-c":
        main.__file__ = argv[0]
    exec(code, main.__dict__)
