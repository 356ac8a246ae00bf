"""A virtual machine with a kernel that has netem: boots in seconds, runs one command, tells its status.

QEMU's own emulation (no KVM), unprivileged. The root file system holds this Python, the packages that
the guest needs and the kernel's modules; it is built once per set of versions and cached. The project's
code comes as a tar file on a second disk.

The guest's clock counts its instructions, 2 ns each, and jumps to the next timer when there are none to
execute: times in the guest do not depend on what else the host does, and waiting takes no time at all.
"""

from __future__ import annotations

import compileall
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "vm"
DEBIAN_PACKAGES = "qemu-system-x86 linux-image-cloud-amd64 e2fsprogs busybox-static"
DISTRIBUTIONS = ("testbed", "pytest")
"""What the guest has installed, with all that these need."""
LEFT_OUT = ("testbed", "highspy", "matplotlib")
"""Not copied: the code comes separately; large packages that no command in the guest imports."""
MODULES = ("veth", "tun", "sch_htb", "sch_netem", "cls_u32", "cls_bpf", "sch_ingress")
CODE = ("netem", "nodes", "policies", "scenarios", "testbed", "tests/contract", "tests/support", "tests/vm")
_MARK = "@@status"

_INIT = """#!/bin/busybox sh
export PATH=/bin:{bin} HOME=/root PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH={lib} PYTHONHASHSEED=0
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # each part would import them
export PYTHONPATH=/tmp/code:{packages}
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
mkdir -p /dev/shm /run; mount -t tmpfs shm /dev/shm
chmod 1777 /tmp; ip link set lo up 2>/dev/null || ifconfig lo 127.0.0.1 up
for module in {modules}; do modprobe $module || echo "no module $module"; done
# The guest reads slowly: what arrives in the meantime must find room.
echo 8388608 > /proc/sys/net/core/rmem_max
mkdir -p /dev/net; [ -e /dev/net/tun ] || mknod /dev/net/tun c 10 200; chmod 666 /dev/net/tun
mkdir -p /tmp/code; tar -x -f /dev/nvme1n1 -C /tmp/code; chmod -R a+rX /tmp/code; cd /tmp/code
export TESTBED_TESTS_ROOM=$(head -c 65536 /dev/zero | tr '\\0' x) # of tests.support.forked
sh ./command.sh </dev/null 2>&1
echo "{mark} $?"
sync; poweroff -f
"""


class LaneMissing(Exception):
    """The lane cannot run on this machine; the message says what to install."""


@dataclass(frozen=True)
class GuestResult:
    """Exit status of the command and everything that the guest printed."""

    status: int
    output: str


def missing() -> str | None:
    """What this machine lacks, or ``None``."""
    lacking = [tool for tool in ("qemu-system-x86_64", "mke2fs", "busybox") if _which(tool) is None]
    if _kernel() is None:
        lacking.append("/boot/vmlinuz-*-cloud-amd64")
    if lacking:
        return f"{', '.join(lacking)} not found: apt install {DEBIAN_PACKAGES}"
    return None


def run_in_vm(command: str, timeout_s: float) -> GuestResult:
    """Boot, run a shell command in the project's root, power off.

    Raises ``LaneMissing``, or ``AssertionError`` with the end of the console when the guest does not
    finish in time.
    """
    lacking = missing()
    if lacking is not None:
        raise LaneMissing(lacking)
    image, kernel = _image(), _kernel()
    CACHE.mkdir(parents=True, exist_ok=True)
    disk = CACHE / f"code-{os.getpid()}.tar"
    _write_code(disk, command)
    arguments = [
        "qemu-system-x86_64", "-accel", "tcg", "-cpu", "Nehalem", "-smp", "1", "-m", "1024",
        "-icount", "shift=1,sleep=off", "-rtc", "clock=vm", "-display", "none", "-serial", "stdio", "-monitor", "none", "-no-reboot", "-nic", "none",
        "-kernel", str(kernel), "-append",
        "console=ttyS0 root=/dev/nvme0n1 ro rootfstype=ext4 init=/init quiet panic=-1 mitigations=off nokaslr",
        "-drive", f"file={image},format=raw,if=none,id=root,readonly=on", "-device", "nvme,drive=root,serial=root",
        "-drive", f"file={disk},format=raw,if=none,id=code,readonly=on", "-device", "nvme,drive=code,serial=code",
    ]  # fmt: skip
    try:
        process = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        output = process.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        tail = (error.stdout or b"").decode(errors="replace")[-3000:]
        raise AssertionError(
            f"the guest did not finish in {timeout_s:g} s; its console ends with:\n{tail}"
        ) from None
    finally:
        disk.unlink(missing_ok=True)
    found = re.search(rf"{_MARK} (\d+)", output)
    assert found, f"the guest ended without a status; its console ends with:\n{output[-3000:]}"
    return GuestResult(int(found.group(1)), output)


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _kernel() -> Path | None:
    kernels = sorted(Path("/boot").glob("vmlinuz-*-cloud-amd64"))
    return kernels[-1] if kernels else None


def _image() -> Path:
    """The cached root file system, built if there is none for these versions."""
    kernel = _kernel()
    assert kernel is not None
    versions = [f"{name} {metadata.version(name)}" for name in _distributions()]
    text = "\n".join([Path(__file__).read_text(encoding="utf-8"), kernel.name, sys.version, *versions])
    image = CACHE / f"root-{hashlib.sha256(text.encode()).hexdigest()[:16]}.ext4"
    if image.exists():
        return image
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob("root-*"):
        old.unlink()
    tree = CACHE / f"tree-{os.getpid()}"
    try:
        _build_tree(tree, kernel.name.removeprefix("vmlinuz-"))
        partial = image.with_suffix(".part")
        tool = _which("mke2fs")
        assert tool is not None
        subprocess.run(
            [tool, "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(tree), str(partial), "800M"],
            check=True, capture_output=True,
        )  # fmt: skip
        partial.replace(image)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    return image


def _build_tree(tree: Path, version: str) -> None:
    for folder in ("bin", "proc", "sys", "dev", "tmp", "run", "root", "etc"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    busybox = _which("busybox")
    assert busybox is not None
    shutil.copy(busybox, tree / "bin" / "busybox")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout
    for applet in applets.split():
        if applet != "busybox":
            (tree / "bin" / applet).symlink_to("busybox")
    base = Path(sys.base_prefix)
    library = base / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    skip = shutil.ignore_patterns(
        "test", "tests", "site-packages", "idlelib", "tkinter", "ensurepip", "config-*"
    )
    shutil.copytree(library, _inside(tree, library), ignore=skip)
    packages = _inside(tree, library) / "site-packages"
    packages.mkdir()
    _compile_packages()
    for name in _distributions():
        _copy_distribution(name, packages)
    python = Path(sys.executable).resolve()
    _inside(tree, python).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(python, _inside(tree, python))
    (tree / "bin" / "python3").symlink_to(python)
    _copy_libraries(tree, python, _inside(tree, library))
    _copy_modules(tree, version)
    init = tree / "init"
    init.write_text(
        _INIT.format(
            bin=python.parent,
            lib=base / "lib",
            packages=library / "site-packages",
            modules=" ".join(MODULES),
            mark=_MARK,
        ),
        encoding="ascii",
    )
    init.chmod(0o755)
    for folder in [tree, *tree.rglob("*")]:
        if folder.is_dir() and not folder.is_symlink():
            folder.chmod(0o755)


def _distributions() -> list[str]:
    """``DISTRIBUTIONS`` and what they need here, without ``LEFT_OUT``."""
    found: set[str] = set()
    pending = list(DISTRIBUTIONS)
    while pending:
        name = pending.pop()
        if name in found or name in LEFT_OUT[1:]:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(canonicalize_name(requirement.name))
    return sorted(found - set(LEFT_OUT))


def _copy_distribution(name: str, packages: Path) -> None:
    """All installed files of a distribution with the compiled code that there is, but its tests and its programs."""
    for file in metadata.files(name) or ():
        if file.suffix == ".pyc" or file.parts[0] == ".." or {"tests", "include"} & set(file.parts):
            continue
        source, target = Path(file.locate()), packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        if file.suffix == ".py" and (compiled := Path(cache_from_source(str(source)))).exists():
            target = Path(cache_from_source(str(target)))
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(compiled, target)


def _compile_packages() -> None:
    """Leave what the guest imports compiled, which the guest itself would do much more slowly."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    what = "from tests.vm.guest import import_all; import_all()"
    subprocess.run([sys.executable, "-c", what], cwd=ROOT, env=env, check=True)


def _inside(tree: Path, path: Path) -> Path:
    return tree / path.relative_to("/")


def _copy_libraries(tree: Path, python: Path, library: Path) -> None:
    """Every shared library that Python and its extension modules need."""
    wanted: set[str] = set()
    for binary in [python, *library.rglob("*.so")]:
        text = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
        wanted.update(re.findall(r"(/\S+) \(0x", text))
    for name in sorted(name for name in wanted if not Path(name).is_relative_to(tree)):
        target = _inside(tree, Path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(Path(name).resolve(), target)


def _copy_modules(tree: Path, version: str) -> None:
    """The modules that the guest loads and all that these depend on."""
    source = Path("/lib/modules") / version
    needs: dict[str, list[str]] = {}
    for line in (source / "modules.dep").read_text(encoding="ascii").splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    by_name = {Path(path).name.split(".")[0]: path for path in needs}
    chosen: set[str] = set()
    pending = [by_name[name] for name in MODULES]
    while pending:
        path = pending.pop()
        if path not in chosen:
            chosen.add(path)
            pending += needs[path]
    target = _inside(tree, source)
    for path in chosen:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, target / path)
    lines = [f"{path}: {' '.join(needs[path])}" for path in sorted(chosen)]
    (target / "modules.dep").write_text("\n".join(lines) + "\n", encoding="ascii")
    for name in ("modules.alias", "modules.symbols", "modules.builtin"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)


def _write_code(path: Path, command: str) -> None:
    """The project's code and ``command.sh`` as one tar file, padded to whole sectors.

    Compiled here: the guest would take a minute for it.
    """
    with tarfile.open(path, "w") as tar:
        for folder in CODE:
            compileall.compile_dir(ROOT / folder, quiet=1)
            tar.add(ROOT / folder, folder)
        for name in ("pyproject.toml", "tests/__init__.py"):
            tar.add(ROOT / name, name)
        data = command.encode()
        info = tarfile.TarInfo("command.sh")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    with open(path, "ab") as file:
        file.truncate(-(-path.stat().st_size // 4096) * 4096)
