"""The driver's calls for shared device memory, on a stand-in for the driver with files of the
host as device memory.

What only a GPU can show: that torch takes the memory in, and that the driver does what its manual
says.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from engine.kv.tensors import cuda_memory as module
from engine.kv.tensors.cuda_memory import GRAIN_BYTES, HANDLE_BYTES, CudaDriver, CudaMemory

DEVICE = torch.device("cuda:0")

#: An area is a file; its handle is the file's name in a folder. CUresult 1: invalid value, 2: out
#: of memory.
_DRIVER = r"""
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { char reserved[64]; } handle_t;
static struct { uint64_t address; size_t size; char name[64]; int is_own; } areas[16];

static int find(uint64_t address) {
    for (int i = 0; i < 16; i++) if (areas[i].address == address) return i;
    return -1;
}
static int in_folder(char* path, const char* name) {
    return snprintf(path, 512, "%s/%s", getenv("FAKE_DEVICE"), name);
}
static int add(const char* name, uint64_t* address, size_t size, int is_own) {
    char path[512];
    in_folder(path, name);
    int fd = open(path, O_RDWR | (is_own ? O_CREAT | O_EXCL : 0), 0600), i = find(0);
    struct stat about;
    if (fd < 0 || i < 0 || (is_own && ftruncate(fd, size)) || fstat(fd, &about)) return 1;
    areas[i].address = *address =
        (uint64_t)mmap(0, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    areas[i].size = about.st_size;
    areas[i].is_own = is_own;
    snprintf(areas[i].name, 64, "%s", name);
    return close(fd);
}
static int drop(uint64_t address, int is_own) {
    int i = find(address);
    if (i < 0 || areas[i].is_own != is_own) return 1;
    munmap((void*)address, areas[i].size);
    char path[512];
    in_folder(path, areas[i].name);
    if (is_own) unlink(path);
    areas[i].address = 0;
    return 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t size) {
    static int number;
    char name[64];
    if (size > (size_t)1 << 30) return 2;
    snprintf(name, sizeof name, "%d.%d", getpid(), number++);
    return add(name, address, size, 1);
}
int cuMemFree_v2(uint64_t address) { return drop(address, 1); }
int cuIpcCloseMemHandle(uint64_t address) { return drop(address, 0); }
int cuIpcGetMemHandle(handle_t* handle, uint64_t address) {
    int i = find(address);
    if (i < 0) return 1;
    memcpy(handle->reserved, areas[i].name, 64);
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, handle_t handle, unsigned flags) {
    return flags == 1 ? add(handle.reserved, address, 0, 0) : 1;
}
"""

_OTHER = """
import sys, ctypes
from engine.kv.tensors.cuda_memory import CudaDriver
driver = CudaDriver(sys.argv[1])
address = driver.open(bytes.fromhex(sys.argv[2]))
ctypes.memmove(address + 5, b"from there", 10)
driver.close(address)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("driver")
    source, built = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(_DRIVER)
    try:
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(built), str(source)], check=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return str(built)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in has its areas; torch takes its addresses for the host's."""
    monkeypatch.setenv("FAKE_DEVICE", str(tmp_path))

    def taken_in(foreign: module._Foreign) -> torch.Tensor:
        (count,), (address, _) = (
            foreign.__cuda_array_interface__[key] for key in ("shape", "data")
        )
        return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(module.torch, "as_tensor", taken_in)
    monkeypatch.setattr(module.torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(module.torch.cuda, "mem_get_info", lambda _: (0, 0))
    return tmp_path


@pytest.mark.slow
def test_another_process_writes_into_an_area(library: str, device: Path) -> None:
    memory = CudaMemory(DEVICE, CudaDriver(library))
    area = memory.allocate(100)
    assert len(area.handle) == HANDLE_BYTES
    assert [path.stat().st_size for path in device.iterdir()] == [GRAIN_BYTES]
    command = [sys.executable, "-c", _OTHER, library, area.handle.hex()]
    subprocess.run(command, check=True, timeout=120)
    part = area.part(5, 10)
    assert bytes(part.tolist()) == b"from there"
    area.close()
    assert not list(device.iterdir())


def test_what_is_opened_is_unmapped_and_not_freed(library: str, device: Path) -> None:
    memory = CudaMemory(DEVICE, CudaDriver(library))
    ours = memory.allocate(100)
    theirs = memory.open(ours.handle, 100)
    theirs.part(0, 1)[0] = 7
    assert ours.part(0, 1).item() == 7
    theirs.close()
    assert len(list(device.iterdir())) == 1
    ours.close()


@pytest.mark.parametrize(
    "handle", [b"", b"\0" * HANDLE_BYTES, b"nowhere".ljust(HANDLE_BYTES)], ids=len
)
@pytest.mark.usefixtures("device")
def test_a_handle_of_nothing_is_an_oserror(library: str, handle: bytes) -> None:
    with pytest.raises(OSError, match=r"handle|cuIpcOpenMemHandle_v2 failed with CUresult 1"):
        CudaMemory(DEVICE, CudaDriver(library)).open(handle, 1)


@pytest.mark.usefixtures("device")
def test_no_memory_is_an_oserror(library: str) -> None:
    with pytest.raises(OSError, match="cuMemAlloc_v2 failed with CUresult 2"):
        CudaMemory(DEVICE, CudaDriver(library)).allocate(2 << 30)


def test_memory_that_torch_does_not_take_is_given_back(
    library: str, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> torch.Tensor:
        raise RuntimeError("no such device")

    monkeypatch.setattr(module.torch, "as_tensor", refuse)
    with pytest.raises(OSError, match="no such device"):
        CudaMemory(DEVICE, CudaDriver(library)).allocate(100)
    assert not list(device.iterdir())


def test_without_the_driver_nothing_is_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CudaDriver", lambda: CudaDriver("libnowhere.so.1"))
    assert module.cuda_memory(DEVICE) is None
    assert "can be shared" in caplog.text


@pytest.mark.usefixtures("device")
def test_an_end_that_fails_is_told_and_no_more(
    library: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = CudaMemory(DEVICE, CudaDriver(library))
    area = memory.allocate(1)
    area.close()
    area.close()
    assert "cuMemFree_v2 failed" in caplog.text
